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
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// namespace is a network namespace.
type namespace struct{ *netnstest.Namespace }

func newNamespace(t testing.TB) namespace { return namespace{netnstest.New(t)} }

// The ports on which the pods listen. Over TCP, a pod sends its name and then echoes its
// input. Over UDP, it answers with its name.
var (
	tcpPorts = []int{80, 5000, 6000}
	udpPort  = 5353
)

// serve starts the servers of a pod with this name and the addresses ips.
func (n namespace) serve(t testing.TB, name string, ips ...string) {
	t.Helper()
	for _, port := range tcpPorts {
		netnstest.Listen(t, n.Do, ":"+strconv.Itoa(port), func(c net.Conn) {
			fmt.Fprintf(c, "%s\n", name)
			io.Copy(c, c)
		})
	}
	for _, ip := range ips {
		// Each address needs its own socket, so that an answer has the address as its source.
		netnstest.Answer(t, n.Do, net.JoinHostPort(ip, strconv.Itoa(udpPort)), name)
	}
}

// brief is the time for which a client waits for an answer.
const brief = 300 * time.Millisecond

// dial connects to an address from the namespace.
func (n namespace) dial(network string, ip netip.Addr, port int) (c net.Conn, err error) {
	err = n.Do(func() (err error) {
		c, err = net.DialTimeout(network, netip.AddrPortFrom(ip, uint16(port)).String(), brief)
		return err
	})
	return c, err
}

// ask opens a connection and returns the name of the pod that it reaches.
func (n namespace) ask(network string, ip netip.Addr, port int) (string, error) {
	c, err := n.dial(network, ip, port)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return askOn(c)
}

// askOn returns the name of the pod at the other end of a connection. Over TCP, a pod
// sends its name only once, so call askOn only once for a connection.
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

// ping sends an echo request. It returns an error if there is no answer.
func (n namespace) ping(ip netip.Addr) error {
	return n.Do(func() error {
		if out, err := exec.Command("ping", "-n", "-c", "1", "-W", "0.3", ip.String()).CombinedOutput(); err != nil {
			return fmt.Errorf("ping %s: %w\n%s", ip, err, out)
		}
		return nil
	})
}

// echoRequests returns the number of echo requests that the namespace has received:
// ICMPv6 if ip is an IPv6 address, else ICMP.
func (n namespace) echoRequests(ip netip.Addr) (count int, err error) {
	err = n.Do(func() error {
		// /proc/net would show the namespace of the first thread of the process.
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
			return errors.New("found no count of echo requests")
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
		return errors.New("found no count of echo requests")
	})
	return count, err
}

// gateways are the node's addresses in the network of the pods.
var (
	gateways = []string{"11.0.2.1", "1100::201"}
	podIPs   = map[string][]string{"pod1": {"11.0.2.2", "1100::202"}, "pod2": {"11.0.2.3", "1100::203"}}
)

// network is a node with two pods. The node connects two other machines, client and
// upstream. It routes unknown destinations to upstream. The machine upstream also has the
// external IPs, and answers with the name "beyond".
type network struct {
	node, client namespace
	pods         map[string]namespace
	upstream     namespace
}

func newNetwork(t testing.TB) *network {
	t.Helper()
	n := &network{node: newNamespace(t), client: newNamespace(t), pods: map[string]namespace{}}
	n.upstream = newNamespace(t)
	n.node.Set(t, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1",
		// Switch off the kernel's limit for the rate of ICMP errors.
		"ipv4/icmp_ratelimit=0", "ipv6/icmp/ratelimit=0")
	for i, other := range []namespace{n.client, n.upstream} {
		name := fmt.Sprintf("side%d", i)
		n.node.Join(t, name, other.Namespace, "eth0")
		n.node.Add(t, name, fmt.Sprintf("10.%d.0.1/24", i+1))
		n.node.Add(t, name, fmt.Sprintf("fd0%d::1/64", i+1))
		other.Add(t, "eth0", fmt.Sprintf("10.%d.0.2/24", i+1))
		other.Add(t, "eth0", fmt.Sprintf("fd0%d::2/64", i+1))
	}
	n.client.Route(t, "default", "10.1.0.1", "eth0")
	n.client.Route(t, "default", "fd01::1", "eth0")
	n.node.Route(t, "default", "10.2.0.2", "side1")
	n.node.Route(t, "default", "fd02::2", "side1")
	n.upstream.Route(t, "default", "10.2.0.1", "eth0")
	n.upstream.Route(t, "default", "fd02::1", "eth0")
	var ips []string
	for _, ip := range externalIPs {
		n.upstream.Add(t, "lo", ip.String())
		ips = append(ips, ip.String())
	}
	n.upstream.serve(t, "beyond", ips...)
	for name, ips := range podIPs {
		pod := newNamespace(t)
		n.node.Join(t, name, pod.Namespace, "eth0")
		for i, ip := range ips {
			bits := []string{"/32", "/128"}[i]
			n.node.Add(t, name, gateways[i]+bits)
			n.node.Route(t, ip+bits, "", name)
			pod.Add(t, "eth0", ip+bits)
			pod.Route(t, gateways[i]+bits, "", "eth0")
			pod.Route(t, "default", gateways[i], "eth0")
		}
		pod.serve(t, name, ips...)
		n.pods[name] = pod
	}
	return n
}
