// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/vishvananda/netlink"
)

var ips = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}

// lan has a client, a router and nodes, in one network or in two. The client is in the
// first network. The first nodes have no pods.
type lan struct {
	client, router *netnstest.Namespace
	nodes          []*netnstest.Namespace
	pods           map[int]*netnstest.Namespace // by node
	networks       int
}

const entries, hosts = 2, 4

// address returns the address with a number in the network of a node. The argument format
// has places for the network and for the number.
func (l *lan) address(format string, node, number int) string {
	return fmt.Sprintf(format, node%l.networks, number)
}

// newLAN makes one network, or two. With two networks, nodes with odd numbers are in the
// second one. Packets to pods of the other network go through a VXLAN device, as with
// flannel's setting DirectRouting.
func newLAN(t testing.TB, networks int) *lan {
	l := &lan{client: netnstest.New(t), router: netnstest.New(t), pods: map[int]*netnstest.Namespace{}, networks: networks}
	l.router.Set(t, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1", "ipv4/conf/all/rp_filter=0", "ipv4/conf/all/send_redirects=0")
	join := func(n *netnstest.Namespace, network, number int) {
		port, bridge := fmt.Sprintf("port%d", number), fmt.Sprintf("br%d", network)
		l.router.Join(t, port, n, "eth0")
		l.router.Run(t, "ip", "link", "set", port, "master", bridge)
		n.Add(t, "eth0", l.address("10.0.%d.%d/24", network, number))
		n.Add(t, "eth0", l.address("fd00:%d::%d/64", network, number))
		n.Route(t, "default", l.address("10.0.%d.%d", network, 254), "eth0")
		n.Route(t, "default", l.address("fd00:%d::%d", network, 254), "eth0")
	}
	for network := range networks {
		name := fmt.Sprintf("br%d", network)
		l.router.Run(t, "ip", "link", "add", name, "type", "bridge")
		l.router.Up(t, name)
		l.router.Add(t, name, l.address("10.0.%d.%d/24", network, 254))
		l.router.Add(t, name, l.address("fd00:%d::%d/64", network, 254))
	}
	join(l.client, 0, 100)
	for i := range entries + hosts {
		n := netnstest.New(t)
		join(n, i%networks, i+1)
		n.Set(t, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1", "ipv4/conf/all/rp_filter=0", "ipv4/conf/all/send_redirects=0")
		if networks > 1 {
			n.Run(t, "ip", "link", "add", "vxlan", "address", tunnelMAC(i), "type", "vxlan", "id", "1", "dstport", "8472",
				"nolearning", "dev", "eth0", "local", l.address("10.0.%d.%d", i, i+1))
			n.Up(t, "vxlan")
			n.Add(t, "vxlan", fmt.Sprintf("10.1.%d.0/32", i))
			n.Add(t, "vxlan", fmt.Sprintf("fd01:%d::/128", i))
		}
		l.nodes = append(l.nodes, n)
	}
	for i, n := range l.nodes {
		for j := range l.nodes[entries:] {
			number := entries + j
			net4, net6 := fmt.Sprintf("10.1.%d", number), fmt.Sprintf("fd01:%d:", number)
			switch {
			case number == i:
				l.addPod(t, n, number, net4, net6)
			case number%networks == i%networks:
				n.Route(t, net4+".0/24", l.address("10.0.%d.%d", number, number+1), "eth0")
				n.Route(t, net6+":/64", l.address("fd00:%d::%d", number, number+1), "eth0")
			default:
				for _, behind := range [][2]string{{net4 + ".0", "/24"}, {net6 + ":", "/64"}} {
					n.Run(t, "ip", "route", "add", behind[0]+behind[1], "via", behind[0], "dev", "vxlan", "onlink")
					n.Run(t, "ip", "neigh", "add", behind[0], "lladdr", tunnelMAC(number), "dev", "vxlan", "nud", "permanent")
				}
				n.Run(t, "bridge", "fdb", "add", tunnelMAC(number), "dev", "vxlan", "dst", l.address("10.0.%d.%d", number, number+1))
			}
		}
	}
	return l
}

func tunnelMAC(node int) string { return fmt.Sprintf("02:00:00:00:00:%02x", node) }

// addPod adds a pod to a node. For each connection, the pod writes its number and the client's
// address. Then it writes the bytes that it reads.
func (l *lan) addPod(t testing.TB, n *netnstest.Namespace, number int, net4, net6 string) {
	pod := netnstest.New(t)
	l.pods[number] = pod
	n.Join(t, "pod", pod, "eth0")
	n.Add(t, "pod", net4+".1/24")
	n.Add(t, "pod", net6+":1/64")
	pod.Add(t, "eth0", net4+".2/24")
	pod.Add(t, "eth0", net6+":2/64")
	pod.Route(t, "default", net4+".1", "eth0")
	pod.Route(t, "default", net6+":1", "eth0")
	if l.networks > 1 {
		pod.Run(t, "ip", "link", "set", "eth0", "mtu", "1450") // flannel leaves room for the header of VXLAN
	}
	netnstest.Listen(t, pod.Do, ":8080", func(c net.Conn) {
		host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		fmt.Fprintf(c, "%d %s\n", number, host)
		io.Copy(c, c)
	})
}

// enter makes nodes the next hops of the router. The router chooses one by the addresses and
// ports of a packet (ECMP).
func (l *lan) enter(t testing.TB, nodes ...int) {
	l.router.Set(t, "ipv4/fib_multipath_hash_policy=1", "ipv6/fib_multipath_hash_policy=1")
	for ip, format := range map[string]string{"192.0.2.1": "10.0.%d.%d", "2001:db8::1": "fd00:%d::%d"} {
		args := []string{"ip", "route", "replace", ip}
		for _, node := range nodes {
			args = append(args, "nexthop", "via", l.address(format, node, node+1))
		}
		l.router.Run(t, args...)
	}
}

// sync programs all nodes with the pods of some nodes as endpoints.
func (l *lan) sync(t testing.TB, pods map[int]bool) {
	t.Helper()
	for i, n := range l.nodes {
		view := &api.View{Service: &api.Service{
			Name: "example", Type: api.ClusterIP,
			IPs: api.ServiceIPs{Headless: true, ExternalIPs: api.NewIPSet(ips...)},
			Ports: []api.PortMapping{
				{Name: "echo", Protocol: api.TCP, Port: 80, TargetPort: 8080},
				{Name: "transfer", Protocol: api.TCP, Port: transferPort, TargetPort: transferPort},
			},
		}}
		for _, format := range []string{"10.1.%d.2", "fd01:%d::2"} {
			for number := range l.nodes {
				if pods[number] {
					view.Endpoints = append(view.Endpoints, api.Endpoint{
						Addr: netip.MustParseAddr(fmt.Sprintf(format, number)), Local: number == i,
						Scopes:        api.Scopes{Internal: true, External: true},
						PortOverrides: []api.PortName{{Name: "echo", Port: 8080}, {Name: "transfer", Port: transferPort}},
					})
				}
			}
		}
		b := &balancer{table: "test", devices: []string{"eth0", "vxlan"}[:l.networks]}
		if err := n.Do(func() error { return b.SyncState(t.Context(), nil, []*api.View{view}) }); err != nil {
			t.Fatal(err)
		}
	}
}

type connection struct {
	net.Conn
	*bufio.Reader
	pod int
}

func (c *connection) Read(b []byte) (int, error) { return c.Reader.Read(b) }

// connect connects to an IP from a namespace. The pod must see one of the addresses in
// clients.
func connect(t testing.TB, from *netnstest.Namespace, ip netip.Addr, clients ...string) *connection {
	t.Helper()
	var conn net.Conn
	if err := from.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(ip, 80).String(), 10*time.Second)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	c := &connection{Conn: conn, Reader: bufio.NewReader(conn)}
	line, err := c.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var client string
	fmt.Sscan(line, &c.pod, &client)
	if !slices.Contains(clients, client) {
		t.Fatalf("the pod sees the client %q, want one of %q", client, clients)
	}
	return c
}

// connect connects to an IP from the client.
func (l *lan) connect(t testing.TB, ip netip.Addr) *connection {
	t.Helper()
	return connect(t, l.client, ip, "10.0.0.100", "fd00::100")
}

func TestConnectionsSurviveChanges(t *testing.T) {
	t.Run("shared network", func(t *testing.T) { testChanges(t, newLAN(t, 1), 2000) })
	t.Run("tunnel", func(t *testing.T) { testChanges(t, newLAN(t, 2), 1000) })
}

// testChanges begins half of the connections over IPv4, and half over IPv6.
func testChanges(t *testing.T, l *lan, connections int) {
	const changes = 100
	pods := map[int]bool{entries: true, entries + 1: true}
	l.sync(t, pods)
	l.enter(t, 0)
	var open []*connection
	shares := map[int]int{}
	for i := range connections {
		c := l.connect(t, ips[i%2])
		shares[c.pod]++
		open = append(open, c)
	}
	if len(shares) != 2 {
		t.Errorf("the pods have %v connections, want two pods", shares)
	}
	// Every pod is added while connections are open, and two are removed and added again.
	steps := map[int]int{10: 4, 20: 5, 40: 3, 50: 3, 60: 4, 70: 4}
	ended := 0
	for round := range changes {
		if pod, ok := steps[round]; ok {
			pods[pod] = !pods[pod]
			l.sync(t, pods)
			if !pods[pod] {
				kept := open[:0]
				for _, c := range open {
					if c.pod != pod {
						kept = append(kept, c)
					}
				}
				ended += len(open) - len(kept)
				open = kept
			}
			for i := range 100 {
				open = append(open, l.connect(t, ips[i%2]))
			}
		}
		l.enter(t, round*7%len(l.nodes))
		word := fmt.Sprintf("%04d", round)
		for _, c := range open {
			c.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := io.WriteString(c, word); err != nil {
				t.Fatalf("round %d: a connection to pod %d broke: %v", round, c.pod, err)
			}
		}
		for _, c := range open {
			got := make([]byte, len(word))
			if _, err := io.ReadFull(c, got); err != nil || string(got) != word {
				t.Fatalf("round %d: a connection to pod %d of %v broke: %q, %v", round, c.pod, pods, got, err)
			}
		}
	}
	t.Logf("%d connections stayed open over %d changes of the entry node; %d were to removed pods", len(open), changes, ended)
	if ended == 0 || len(open) < connections/2 {
		t.Error("want some connections to removed pods, and most to others")
	}
	for _, c := range open[:20] { // checks that large packets fit into the tunnel
		c.SetDeadline(time.Now().Add(10 * time.Second))
		go io.WriteString(c, strings.Repeat("x", 1<<20))
		if n, err := io.CopyN(io.Discard, c, 1<<20); err != nil {
			t.Fatalf("a connection to pod %d broke after %d bytes of a long answer: %v", c.pod, n, err)
		}
	}
	out := l.nodes[entries].Run(t, "nft", "list", "table", "ip", "test")
	if !strings.Contains(out, " : 10.") {
		t.Errorf("no slot has a second endpoint:\n%.2000s", out)
	}
	if l.networks > 1 {
		if link := l.link(t, entries, "vxlan"); link.RxPackets == 0 || link.TxPackets == 0 {
			t.Errorf("the tunnel device of a node has the counters %+v, want packets in both directions", link)
		}
	}
}

// TestConnectionsSurviveDeadEntryNodes sets the link of entry nodes down while connections are open
// and have packets on the way. The router stops using the node 300 ms later, like BFD.
func TestConnectionsSurviveDeadEntryNodes(t *testing.T) {
	for name, networks := range map[string]int{"shared network": 1, "tunnel": 2} {
		t.Run(name, func(t *testing.T) {
			const connections = 500
			l := newLAN(t, networks)
			pods := map[int]bool{}
			var alive []int
			for number := range l.nodes {
				pods[number] = number >= entries
				alive = append(alive, number)
			}
			l.sync(t, pods)
			l.enter(t, alive...)
			var open []*connection
			for i := range connections {
				open = append(open, l.connect(t, ips[i%2]))
			}
			for dead := range entries {
				if forwarded := l.link(t, dead, "eth0").TxPackets; forwarded < connections/10 {
					t.Errorf("entry node %d sent %d packets, want a share of those of %d connections", dead, forwarded, connections)
				}
				l.nodes[dead].Run(t, "ip", "link", "set", "eth0", "down")
				word := fmt.Sprintf("dead %d", dead)
				for _, c := range open {
					c.SetDeadline(time.Now().Add(20 * time.Second))
					if _, err := io.WriteString(c, word); err != nil {
						t.Fatalf("a connection to pod %d broke: %v", c.pod, err)
					}
				}
				time.Sleep(300 * time.Millisecond) // packets to the dead node are lost
				alive = alive[1:]
				l.enter(t, alive...)
				for _, c := range open {
					got := make([]byte, len(word))
					if _, err := io.ReadFull(c, got); err != nil || string(got) != word {
						t.Fatalf("a connection to pod %d broke: %q, %v", c.pod, got, err)
					}
				}
				for i := range 100 {
					open = append(open, l.connect(t, ips[i%2]))
				}
			}
		})
	}
}

// TestNodesAndPodsAreClients connects from nodes and pods. Their packets do not arrive on
// the devices of an entry node. Clients with an endpoint on their own node reach this
// endpoint. Other clients reach all endpoints.
func TestNodesAndPodsAreClients(t *testing.T) {
	l := newLAN(t, 1)
	const own, other, last = entries, entries + 1, entries + hosts - 1
	l.sync(t, map[int]bool{own: true, other: true})
	l.enter(t, 0, 1, 2, 3, 4, 5)
	beside := netnstest.New(t) // a client on the node of an endpoint
	l.nodes[own].Join(t, "beside", beside, "eth0")
	for _, format := range []string{"10.2.0.%s", "fd02::%s"} {
		l.nodes[own].Add(t, "beside", fmt.Sprintf(format, "1/24"))
		beside.Add(t, "eth0", fmt.Sprintf(format, "2/24"))
		beside.Route(t, "default", fmt.Sprintf(format, "1"), "eth0")
	}
	l.nodes[other].Route(t, "10.2.0.0/24", fmt.Sprintf("10.0.0.%d", own+1), "eth0")
	l.nodes[other].Route(t, "fd02::/24", fmt.Sprintf("fd00::%d", own+1), "eth0")

	for _, client := range []struct {
		name  string
		place *netnstest.Namespace
		addrs []string
		local bool
	}{
		{"the node of an endpoint", l.nodes[own], []string{fmt.Sprintf("10.0.0.%d", own+1), fmt.Sprintf("fd00::%d", own+1)}, true},
		{"a pod beside an endpoint", beside, []string{"10.2.0.2", "fd02::2"}, true},
		{"a node without endpoints", l.nodes[last], []string{fmt.Sprintf("10.0.0.%d", last+1), fmt.Sprintf("fd00::%d", last+1)}, false},
		{"a pod on such a node", l.pods[last], []string{fmt.Sprintf("10.1.%d.2", last), fmt.Sprintf("fd01:%d::2", last)}, false},
	} {
		t.Run(client.name, func(t *testing.T) {
			shares := map[int]int{}
			for i := range 200 {
				c := connect(t, client.place, ips[i%2], client.addrs...)
				shares[c.pod]++
				c.Close()
			}
			if shares[own] == 0 || (shares[other] == 0) != client.local {
				t.Errorf("the endpoints have %v connections", shares)
			}
		})
	}
}

// link returns the counters of a device of a node.
func (l *lan) link(t testing.TB, node int, name string) *netlink.LinkStatistics {
	t.Helper()
	link, err := l.nodes[node].Links.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().Statistics
}
