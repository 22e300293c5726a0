// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/traffic"
)

// manifests describe a service with two ports and two endpoints in both IP families.
const manifests = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: NodePort
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10, "fd96::10"]
  ipFamilies: [IPv4, IPv6]
  ports:
  - {name: tcp, protocol: TCP, port: 80, nodePort: 30080}
  - {name: udp, protocol: UDP, port: 80, nodePort: 30080}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-4, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: tcp, protocol: TCP, port: 5353}, {name: udp, protocol: UDP, port: 5353}]
endpoints:
- {addresses: [10.1.0.1], nodeName: nodeproxy, conditions: {ready: true}}
- {addresses: [10.1.0.2], nodeName: nodeproxy, conditions: {ready: true}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-6, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv6
ports: [{name: tcp, protocol: TCP, port: 5353}, {name: udp, protocol: UDP, port: 5353}]
endpoints:
- {addresses: ["fd01::1"], nodeName: nodeproxy, conditions: {ready: true}}
- {addresses: ["fd01::2"], nodeName: nodeproxy, conditions: {ready: true}}
---
apiVersion: v1
kind: Node
metadata: {name: nodeproxy}
status: {addresses: [{type: InternalIP, address: 10.2.0.1}, {type: InternalIP, address: "fd02::1"}]}
`

// TestBackendsReplaceEachOther moves a node from one backend to another while clients use
// a service. The test stops and cleans up a backend only after the next backend is ready.
// Connections that began with the first backend must continue until the end.
func TestBackendsReplaceEachOther(t *testing.T) {
	w, caller := newDualStackNetwork(t)
	backends := []string{"nftables", "iptables", "ipvs", "nftables"}
	hasIPVS := kernelHasIPVS()
	if !hasIPVS {
		backends = []string{"nftables", "iptables", "nftables"}
	}
	address := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", 10256+i) }
	before := w.configuration()
	end := w.run(backends[0], address(0))
	withFirst := w.configuration()

	requests := traffic.New(t)
	var clients []*client
	for _, c := range []*client{
		{name: "client to a node port, IPv4", from: w.client, to: "10.2.0.1:30080"},
		{name: "client to a node port, IPv6", from: w.client, to: "[fd02::1]:30080"},
		{name: "pod to a cluster IP, IPv4", from: caller, to: "10.96.0.10:80"},
		{name: "pod to a cluster IP, IPv6", from: caller, to: "[fd96::10]:80"},
		{name: "node to a cluster IP, IPv4", from: w.node, to: "10.96.0.10:80"},
		{name: "node to a cluster IP, IPv6", from: w.node, to: "[fd96::10]:80"},
	} {
		clients = append(clients, c)
		c.connect(t)
		requests.Start(c.name, c.from.Namespace, c.request)
	}
	moreRequests := func() {
		t.Helper()
		made := requests.Made()
		await(t, "100 more requests", true, func() bool { return requests.Made() >= made+100 })
	}
	for i, backend := range backends[1:] {
		old := backends[i]
		// The first change of the backend leaves the clean-up to the new backend.
		var flags []string
		if i == 0 {
			flags = []string{"--remove-other-backends"}
		}
		endNext := w.run(backend, address(i+1), flags...)
		if err := end(os.Interrupt); err != nil {
			t.Errorf("kpng with %s returned %v", old, err)
		}
		moreRequests()
		switch {
		case i == 0:
			await(t, "the new backend removes the rules of the old one", false, func() bool {
				return strings.Contains(sh(t, w.node.Command("nft", "list", "tables")...), "table inet kpng\n")
			})
		case old == "ipvs":
			w.drainIPVS(clients, moreRequests)
		default:
			w.cleanUp(old)
		}
		for _, c := range clients {
			c.connect(t)
		}
		moreRequests()
		// With IPVS, the test probably runs in QEMU, where requests are slow without a loss.
		if failed, slow := requests.Report(t, backend+" in place of "+old); failed > 0 || slow > 0 && !hasIPVS {
			t.Errorf("%d requests failed, %d may have lost a packet", failed, slow)
		}
		end = endNext
	}
	if now := w.configuration(); now != withFirst {
		t.Errorf("configuration with only the first backend:\n%s\nand with only the last backend, which is the same:\n%s", withFirst, now)
	}
	requests.End()
	if err := end(os.Interrupt); err != nil {
		t.Error(err)
	}
	w.cleanUp(backends[len(backends)-1])
	if after := w.configuration(); after != before {
		t.Errorf("configuration of the node before:\n%s\nand after cleanup:\n%s", before, after)
	}
}

// newDualStackNetwork returns a network with IPv6. Its node gets the services of the
// constant manifests. It also returns the network namespace of another pod on the node.
func newDualStackNetwork(t *testing.T) (w *network, caller namespace) {
	t.Helper()
	w, caller = newNetwork(t), newNamespace(t)
	join(t, w.node, "caller", "10.1.1.254/24", caller, "10.1.1.1/24")
	w.node.Set(t, "ipv6/conf/all/forwarding=1")
	w.addIPv6("client", "fd02::1/64", w.client, "fd02::2/64")
	w.addIPv6("pods", "fd01::fe/64", w.pods, "fd01::1/64", "fd01::2/64")
	w.addIPv6("caller", "fd01:1::fe/64", caller, "fd01:1::1/64")
	// Without default routes, the node cannot send to cluster IPs.
	w.node.Route(t, "default", "10.2.0.2", "client")
	w.node.Route(t, "default", "fd02::2", "client")
	for _, pod := range []string{pod1, pod2, "fd01::1", "fd01::2"} {
		at := net.JoinHostPort(pod, fmt.Sprint(udpPort))
		netnstest.Listen(t, w.pods.Do, at, func(c net.Conn) { io.Copy(c, c) })
		if strings.Contains(pod, ":") {
			netnstest.Answer(t, w.pods.Do, at, "pod")
		}
	}
	file := filepath.Join(t.TempDir(), "services.yaml")
	w.check(os.WriteFile(file, []byte(manifests), 0o600))
	w.source = []string{"file", "-i", file}
	return w, caller
}

func kernelHasIPVS() bool { return exec.Command("modprobe", "--dry-run", "ip_vs").Run() == nil }

// TestMoveFromIPVSWithoutDrainBreaksConnections shows why "kpng cleanup ipvs" has the flag
// --drain, and that TestBackendsReplaceEachOther can fail.
func TestMoveFromIPVSWithoutDrainBreaksConnections(t *testing.T) {
	if !kernelHasIPVS() {
		t.Skip("the kernel has no IPVS; run this test with test/kernel")
	}
	w, _ := newDualStackNetwork(t)
	endIPVS := w.run("ipvs", "127.0.0.1:10256")
	c := &client{name: "client to a node port", from: w.client, to: "10.2.0.1:30080"}
	c.connect(t)
	if err := exchange(c.tcp[0]); err != nil {
		t.Fatalf("connection through IPVS: %v", err)
	}
	end := w.run("nftables", "127.0.0.1:10257")
	if err := endIPVS(os.Interrupt); err != nil {
		t.Error(err)
	}
	if err := exchange(c.tcp[0]); err != nil {
		t.Errorf("the connection ended before clean-up: %v", err)
	}
	w.cleanUp("ipvs")
	if err := exchange(c.tcp[0]); err == nil {
		t.Error("the connection through IPVS works after clean-up without --drain")
	}
	c.connect(t)
	if err := exchange(c.tcp[1]); err != nil {
		t.Errorf("new connection through nftables: %v", err)
	}
	if err := end(os.Interrupt); err != nil {
		t.Error(err)
	}
	w.cleanUp("nftables")
}

// addIPv6 adds IPv6 addresses to interfaces that join has made.
func (w *network) addIPv6(name, nodeAddr string, other namespace, addrs ...string) {
	w.node.Add(w.t, name, nodeAddr)
	for _, a := range addrs {
		other.Add(w.t, "eth0", a)
	}
	other.Route(w.t, "default", strings.Split(nodeAddr, "/")[0], "eth0")
}

func (w *network) cleanUp(backend string) {
	w.t.Helper()
	sh(w.t, w.node.Command(append(least, w.kpng, "cleanup", backend)...)...)
}

// drainIPVS checks that "kpng cleanup ipvs --drain" waits for the connections through
// IPVS.
func (w *network) drainIPVS(clients []*client, moreRequests func()) {
	w.t.Helper()
	command := w.node.Command(append(least, w.kpng, "cleanup", "ipvs", "--drain=10m")...)
	var out []byte
	ended := make(chan error, 1)
	go func() {
		var err error
		out, err = exec.Command(command[0], command[1:]...).CombinedOutput()
		ended <- err
	}()
	await(w.t, "a chain ignores new connections", false, func() bool {
		return strings.Contains(sh(w.t, w.node.Command("nft", "list", "chain", "inet", "kpng-ipvs", "services")...), "goto")
	})
	moreRequests()
	for _, c := range clients {
		select {
		case err := <-ended:
			w.t.Fatalf("clean-up did not wait for the connection of %s (%v)\n%s", c.name, err, out)
		default:
		}
		c.reconnect(w.t, c.from == w.node)
	}
	if err := <-ended; err != nil || strings.Contains(string(out), "Not all connections") {
		w.t.Errorf("clean-up returned %v\n%s", err, out)
	}
}

// configuration returns the parts of the node's network configuration that backends may
// change: rules, IP sets, addresses and routes. It omits IPv6's link-local addresses and
// multicast routes, which the kernel adds after a delay.
func (w *network) configuration() string {
	var all strings.Builder
	for _, command := range []string{
		"iptables-save", "ip6tables-save", "nft list ruleset", "ipset list", "ip -oneline address", "ip route show table all", "ip rule",
	} {
		fmt.Fprintf(&all, "$ %s\n", command)
		for line := range strings.Lines(sh(w.t, w.node.Command(strings.Fields(command)...)...)) {
			if !strings.Contains(line, "fe80:") && !strings.Contains(line, "ff00::/8") && !strings.HasPrefix(line, "#") {
				all.WriteString(seeds.ReplaceAllString(line, ""))
			}
		}
	}
	return all.String()
}

// client makes requests at a frontend that has a port for TCP and the same port for UDP.
type client struct {
	name string
	from namespace
	to   string

	mu       sync.Mutex // guards the fields below
	tcp, udp []net.Conn // established connections
}

// connect adds a TCP connection and a UDP socket.
func (c *client) connect(t *testing.T) {
	t.Helper()
	for network, connections := range map[string]*[]net.Conn{"tcp": &c.tcp, "udp": &c.udp} {
		var conn net.Conn
		if err := c.from.Do(func() (err error) { conn, err = net.DialTimeout(network, c.to, time.Minute); return err }); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		t.Cleanup(func() { conn.Close() })
		c.mu.Lock()
		*connections = append(*connections, conn)
		c.mu.Unlock()
	}
}

// reconnect replaces the newest TCP connection and, if the argument udp is true, also the
// newest UDP socket.
func (c *client) reconnect(t *testing.T, udp bool) {
	t.Helper()
	closeLast := func(connections *[]net.Conn) {
		last := len(*connections) - 1
		(*connections)[last].Close()
		*connections = (*connections)[:last]
	}
	c.mu.Lock()
	closeLast(&c.tcp)
	if udp {
		closeLast(&c.udp)
	}
	c.mu.Unlock()
	c.connect(t)
}

// request uses all established connections, a new TCP connection and a new UDP socket.
func (c *client) request() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, conn := range c.tcp {
		if err := exchange(conn); err != nil {
			return fmt.Errorf("TCP connection %d: %w", i, err)
		}
	}
	for i, conn := range c.udp {
		if err := exchangeUDP(conn); err != nil {
			return fmt.Errorf("UDP socket %d: %w", i, err)
		}
	}
	for network, f := range map[string]func(net.Conn) error{"tcp": exchange, "udp": exchangeUDP} {
		conn, err := net.DialTimeout(network, c.to, time.Minute)
		if err != nil {
			return fmt.Errorf("new connection: %w", err)
		}
		err = f(conn)
		conn.Close()
		if err != nil {
			return fmt.Errorf("new %s connection: %w", network, err)
		}
	}
	return nil
}

// exchange sends a line to an echo server and waits until the server has sent it back.
func exchange(c net.Conn) error {
	const line = "hello\n"
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, line); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, len(line)))
	return err
}

// exchangeUDP sends datagrams until an answer arrives.
func exchangeUDP(c net.Conn) error {
	for begin := time.Now(); time.Since(begin) < time.Minute; {
		if ask(c) != "" {
			return nil
		}
	}
	return errors.New("no answer")
}
