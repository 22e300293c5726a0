// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// addRoutedNamespaces connects n with two new namespaces, client and pods. The namespace
// pods has the given addresses. Packets between client and pods pass through n.
func addRoutedNamespaces(t *testing.T, n *netnstest.Namespace, addresses ...string) (client, pods *netnstest.Namespace) {
	t.Helper()
	client, pods = netnstest.New(t), netnstest.New(t)
	n.Set(t, "ipv4/ip_forward=1")
	pods.Set(t, "ipv4/ip_forward=0")
	n.Join(t, "client", client, "eth0")
	n.Add(t, "client", "10.2.0.1/24")
	client.Add(t, "eth0", "10.2.0.2/24")
	client.Route(t, "default", "10.2.0.1", "eth0")
	n.Join(t, "pods", pods, "eth0")
	n.Add(t, "pods", "10.1.0.254/24")
	for _, address := range addresses {
		pods.Add(t, "eth0", strings.Split(address, ":")[0]+"/24")
	}
	pods.Route(t, "default", "10.1.0.254", "eth0")
	n.Route(t, "10.96.0.10/32", "10.1.0.1", "pods")
	return client, pods
}

// setNATRule replaces the nftables table in the namespace n by a table with this NAT
// rule.
func setNATRule(t *testing.T, n *netnstest.Namespace, rule string) {
	t.Helper()
	n.RunWith(t, fmt.Sprintf(`
		table ip test
		delete table ip test
		table ip test {
			chain prerouting {
				type nat hook prerouting priority dstnat
				ct state new counter
				%s
			}
		}`, rule), "nft", "-f", "-")
}

// TestClientsFollowTheirService uses UDP clients that keep their source port, like some
// DNS resolvers. The dataplane is a single nft rule.
func TestClientsFollowTheirService(t *testing.T) {
	n, opts := newNamespace(t)
	client, pods := addRoutedNamespaces(t, n, pod1, pod2, dns)
	for name, address := range map[string]string{"pod1": pod1, "pod2": pod2, "beyond": dns} {
		serveUDP(t, pods, address, name)
	}
	program := func(endpoint string) {
		t.Helper()
		dnat := ""
		if endpoint != "" {
			dnat = "ip daddr . udp dport { 10.96.0.10 . 53, 10.2.0.1 . 30053 } dnat to " + endpoint
		}
		setNATRule(t, n, dnat)
	}
	const frontends = "ip 10.96.0.10\nport 53:30053\n"
	states := []struct{ answers, endpoint, service string }{
		{"pod1", pod1, frontends + "ready 10.1.0.1"},
		{"pod2", pod2, frontends + "ready 10.1.0.2"},
	}
	r, _ := startReconciler(t, opts)
	program("")
	before := services(t, map[string]string{"dns": frontends})
	syncAndFlush(t, r, wholePass(before))
	clusterIP, nodePort := socket(t, client, dns), socket(t, client, node)
	expectReply(t, clusterIP, "beyond")
	expectReply(t, nodePort, "")

	for _, state := range states {
		program(state.endpoint)
		if got := sendRequest(clusterIP); got == state.answers {
			t.Errorf("a client of a stale flow reaches %s", got)
		}
		now := services(t, map[string]string{"dns": state.service})
		syncAndFlush(t, r, changesBetween(before, now))
		before = now
		expectReply(t, clusterIP, state.answers)
		expectReply(t, nodePort, state.answers)
	}
}

// TestLateReplyDoesNotKeepClientFromService deletes the entry of a flow before the server
// replies. The reply creates a new entry.
func TestLateReplyDoesNotKeepClientFromService(t *testing.T) {
	n, opts := newNamespace(t)
	client, pods := addRoutedNamespaces(t, n, pod1, dns)
	serveUDP(t, pods, pod1, "pod1")
	var beyond net.PacketConn
	if err := pods.Do(func() (err error) { beyond, err = net.ListenPacket("udp", dns); return err }); err != nil {
		t.Fatal(err)
	}
	defer beyond.Close()
	r, _ := startReconciler(t, opts)
	setNATRule(t, n, "")
	before := services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53"})
	syncAndFlush(t, r, wholePass(before))

	c := socket(t, client, dns)
	if _, err := c.Write([]byte("?")); err != nil {
		t.Fatal(err)
	}
	_, from, err := beyond.ReadFrom(make([]byte, 100))
	if err != nil {
		t.Fatal(err)
	}
	setNATRule(t, n, "ip daddr 10.96.0.10 udp dport 53 dnat to "+pod1)
	syncAndFlush(t, r, changesBetween(before, services(t, map[string]string{"dns": "ip 10.96.0.10\nport 53\nready 10.1.0.1"})))
	if _, err := beyond.WriteTo([]byte("late"), from); err != nil {
		t.Fatal(err)
	}
	expectReply(t, c, "late")
	expectReply(t, c, "pod1")
}

// TestTCPConnectionStartedBeforeItsServiceIsEstablished uses a client whose first packets
// pass through the node untranslated and get no reply. While the entry of the first
// packet exists, the kernel does not translate later packets.
func TestTCPConnectionStartedBeforeItsServiceIsEstablished(t *testing.T) {
	const web = "10.96.0.10:80"
	n, opts := newNamespace(t)
	client, pods := addRoutedNamespaces(t, n, pod1)
	var server net.Listener
	if err := pods.Do(func() (err error) { server, err = net.Listen("tcp", pod1); return err }); err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	r, _ := startReconciler(t, opts)
	setNATRule(t, n, "")
	before := services(t, map[string]string{"web": "ip 10.96.0.10\nport 80/TCP"})
	syncAndFlush(t, r, wholePass(before))

	connected := make(chan error, 1)
	go func() {
		connected <- client.Do(func() error {
			c, err := net.DialTimeout("tcp", web, time.Minute)
			if err == nil {
				c.Close()
			}
			return err
		})
	}()
	for deadline := time.Now().Add(time.Minute); len(tableEntries(t, n.FD)) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the client's first packet has not arrived")
		}
	}
	setNATRule(t, n, "ip daddr 10.96.0.10 tcp dport 80 dnat to 10.1.0.1:5053")
	syncAndFlush(t, r, changesBetween(before, services(t, map[string]string{"web": "ip 10.96.0.10\nport 80/TCP\nready 10.1.0.1"})))
	if err := <-connected; err != nil {
		t.Error(err)
	}
}

// serveUDP runs a UDP server in a namespace until the test ends. The server replies with
// name.
func serveUDP(t *testing.T, n *netnstest.Namespace, address, name string) {
	t.Helper()
	var c net.PacketConn
	if err := n.Do(func() (err error) {
		c, err = net.ListenPacket("udp", address)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buffer := make([]byte, 100)
		for {
			_, from, err := c.ReadFrom(buffer)
			if err != nil {
				return
			}
			c.WriteTo([]byte(name), from)
		}
	}()
	t.Cleanup(func() {
		c.Close()
		<-ended
	})
}

func socket(t *testing.T, n *netnstest.Namespace, to string) net.Conn {
	t.Helper()
	var c net.Conn
	if err := n.Do(func() (err error) { c, err = net.Dial("udp", to); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// sendRequest sends a request and returns the name of the server that replies, or ""
// without a reply.
func sendRequest(c net.Conn) string {
	c.SetDeadline(time.Now().Add(200 * time.Millisecond))
	if _, err := c.Write([]byte("?")); err != nil {
		return ""
	}
	buffer := make([]byte, 100)
	read, _ := c.Read(buffer)
	return string(buffer[:read])
}

// expectReply sends requests until the wanted server replies. It ignores replies of other
// servers to earlier requests.
func expectReply(t *testing.T, c net.Conn, want string) {
	t.Helper()
	got := sendRequest(c)
	for deadline := time.Now().Add(time.Minute); got != want && time.Now().Before(deadline); {
		got = sendRequest(c)
	}
	if got != want {
		t.Errorf("reply of %s comes from %q, want %q", c.RemoteAddr(), got, want)
	}
}
