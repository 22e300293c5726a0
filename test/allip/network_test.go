// SPDX-License-Identifier: Apache-2.0

package allip

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/netns"
)

// namespace is a network namespace, by its name.
type namespace string

var namespaces atomic.Int64

// newNamespace makes a namespace that goes with the test.
func newNamespace(t testing.TB, name string) namespace {
	t.Helper()
	n := namespace(fmt.Sprintf("kpng-%d-%d-%s", os.Getpid(), namespaces.Add(1), name))
	sh(t, "", "ip", "netns", "add", string(n))
	t.Cleanup(func() { sh(t, "", "ip", "netns", "del", string(n)) })
	n.ip(t, "link", "set", "lo", "up")
	// Nobody else is there to have the same address, and looking takes a second.
	n.setting(t, "ipv6/conf/default/accept_dad", "0")
	return n
}

// ip runs ip in the namespace.
func (n namespace) ip(t testing.TB, args ...string) {
	t.Helper()
	sh(t, "", append([]string{"ip", "-n", string(n)}, args...)...)
}

// setting sets one of the kernel's settings below net.
func (n namespace) setting(t testing.TB, name, value string) {
	t.Helper()
	if err := n.in(func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) }); err != nil {
		t.Fatal(err)
	}
}

// exec runs a program in the namespace and returns what it prints.
func (n namespace) exec(t testing.TB, stdin string, args ...string) string {
	t.Helper()
	return sh(t, stdin, append([]string{"ip", "netns", "exec", string(n)}, args...)...)
}

// in calls f in the namespace. Sockets that f makes stay in it.
func (n namespace) in(f func() error) error { return netns.Named(string(n))(f) }

// The ports that pods serve: with TCP they say their name and echo what they
// get, with UDP they answer with their name.
var (
	tcpPorts = []int{80, 5000, 6000}
	udpPort  = 5353
)

// serve makes the namespace a pod of this name with these addresses.
func (n namespace) serve(t testing.TB, name string, ips ...string) {
	t.Helper()
	for _, port := range tcpPorts {
		netns.Place(n.in).Listen(t, ":"+strconv.Itoa(port), func(c net.Conn) {
			fmt.Fprintf(c, "%s\n", name)
			io.Copy(c, c)
		})
	}
	for _, ip := range ips {
		// Of its own for each address, to answer from that.
		netns.Place(n.in).Answer(t, net.JoinHostPort(ip, strconv.Itoa(udpPort)), name)
	}
}

// brief is how long a client waits for an answer.
const brief = 300 * time.Millisecond

// dial connects to an address from the namespace.
func (n namespace) dial(network string, ip netip.Addr, port int) (c net.Conn, err error) {
	err = n.in(func() (err error) {
		c, err = net.DialTimeout(network, netip.AddrPortFrom(ip, uint16(port)).String(), brief)
		return err
	})
	return c, err
}

// ask returns the name of the pod that a new connection leads to.
func (n namespace) ask(network string, ip netip.Addr, port int) (string, error) {
	c, err := n.dial(network, ip, port)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return askOn(c)
}

// askOn asks for the name of the pod at the other end. TCP pods say it only once.
func askOn(c net.Conn) (string, error) {
	c.SetDeadline(time.Now().Add(brief))
	if _, err := c.Write([]byte("?")); err != nil {
		return "", err
	}
	buffer := make([]byte, 1500)
	read, err := c.Read(buffer)
	name := string(buffer[:read])
	for i := range name {
		if name[i] == '\n' {
			return name[:i], err
		}
	}
	return name, err
}

// ping returns an error unless an echo request is answered.
func (n namespace) ping(ip netip.Addr) error {
	out, err := exec.Command("ip", "netns", "exec", string(n), "ping", "-n", "-c", "1", "-W", "0.3", ip.String()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ping %s: %w\n%s", ip, err, out)
	}
	return nil
}

// echoRequests returns how many the namespace has been sent, of the family of ip.
func (n namespace) echoRequests(ip netip.Addr) (count int, err error) {
	err = n.in(func() error {
		// Not /proc/net, which is that of the process's first thread.
		if ip.Is6() {
			text, err := os.ReadFile("/proc/thread-self/net/snmp6")
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(text)) {
				if words := strings.Fields(line); words[0] == "Icmp6InEchos" {
					count, err = strconv.Atoi(words[1])
					return err
				}
			}
			return errors.New("no count of echo requests")
		}
		text, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(text)) {
			words := strings.Fields(line)
			if i := slices.Index(names, "InEchos"); words[0] == "Icmp:" && i > 0 {
				count, err = strconv.Atoi(words[i])
				return err
			}
			names = words
		}
		return errors.New("no count of echo requests")
	})
	return count, err
}

// The addresses of the node towards its pods, and of the pods.
var (
	gateways = []string{"11.0.2.1", "1100::201"}
	podIPs   = map[string][]string{"pod1": {"11.0.2.2", "1100::202"}, "pod2": {"11.0.2.3", "1100::203"}}
)

// network is a node with two pods. On one side of it is a client, whose way
// anywhere is by the node. On the other side is another machine, that the node
// sends everything to that it does not know; it has the external IPs, and answers
// as "beyond" to what the node leaves alone.
type network struct {
	node, outside namespace
	pods          map[string]namespace
	beyond        namespace
}

func newNetwork(t testing.TB) *network {
	t.Helper()
	n := &network{node: newNamespace(t, "node"), outside: newNamespace(t, "outside"), pods: map[string]namespace{}}
	n.beyond = newNamespace(t, "beyond")
	n.node.setting(t, "ipv4/ip_forward", "1")
	n.node.setting(t, "ipv6/conf/all/forwarding", "1")
	// Who asks often is refused each time.
	n.node.setting(t, "ipv4/icmp_ratelimit", "0")
	n.node.setting(t, "ipv6/icmp/ratelimit", "0")
	for i, other := range []namespace{n.outside, n.beyond} {
		name := fmt.Sprintf("side%d", i)
		connect(t, n.node, name, other)
		n.node.ip(t, "addr", "add", fmt.Sprintf("10.%d.0.1/24", i+1), "dev", name)
		n.node.ip(t, "addr", "add", fmt.Sprintf("fd0%d::1/64", i+1), "dev", name)
		other.ip(t, "addr", "add", fmt.Sprintf("10.%d.0.2/24", i+1), "dev", "eth0")
		other.ip(t, "addr", "add", fmt.Sprintf("fd0%d::2/64", i+1), "dev", "eth0")
	}
	n.outside.ip(t, "route", "add", "default", "via", "10.1.0.1")
	n.outside.ip(t, "route", "add", "default", "via", "fd01::1")
	n.node.ip(t, "route", "add", "default", "via", "10.2.0.2")
	n.node.ip(t, "route", "add", "default", "via", "fd02::2")
	n.beyond.ip(t, "route", "add", "default", "via", "10.2.0.1")
	n.beyond.ip(t, "route", "add", "default", "via", "fd02::1")
	var ips []string
	for _, ip := range externalIPs {
		n.beyond.ip(t, "addr", "add", ip.String(), "dev", "lo")
		ips = append(ips, ip.String())
	}
	n.beyond.serve(t, "beyond", ips...)
	for name, ips := range podIPs {
		pod := newNamespace(t, name)
		connect(t, n.node, name, pod)
		for i, ip := range ips {
			bits := []string{"/32", "/128"}[i]
			n.node.ip(t, "addr", "add", gateways[i]+bits, "dev", name)
			n.node.ip(t, "route", "add", ip+bits, "dev", name)
			pod.ip(t, "addr", "add", ip+bits, "dev", "eth0")
			pod.ip(t, "route", "add", gateways[i]+bits, "dev", "eth0")
			pod.ip(t, "route", "add", "default", "via", gateways[i])
		}
		pod.serve(t, name, ips...)
		n.pods[name] = pod
	}
	return n
}

// connect makes a link from interface name of a node to eth0 of another
// namespace.
func connect(t testing.TB, node namespace, name string, other namespace) {
	t.Helper()
	sh(t, "", "ip", "link", "add", name, "netns", string(node), "type", "veth", "peer", "name", "eth0", "netns", string(other))
	node.ip(t, "link", "set", name, "up")
	other.ip(t, "link", "set", "eth0", "up")
}
