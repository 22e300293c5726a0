// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
)

var ips = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}

// lan is a network of a client and nodes. The first nodes have no pods.
type lan struct {
	client *netnstest.Namespace
	nodes  []*netnstest.Namespace
}

const entries, hosts = 2, 4

func newLAN(t *testing.T) *lan {
	l := &lan{client: netnstest.New(t)}
	bridge := netnstest.New(t)
	bridge.Run(t, "ip", "link", "add", "br0", "type", "bridge")
	bridge.Up(t, "br0")
	join := func(n *netnstest.Namespace, number int) {
		name := fmt.Sprintf("port%d", number)
		bridge.Join(t, name, n, "eth0")
		bridge.Run(t, "ip", "link", "set", name, "master", "br0")
		n.Add(t, "eth0", fmt.Sprintf("10.0.0.%d/24", number))
		n.Add(t, "eth0", fmt.Sprintf("fd00::%d/64", number))
	}
	join(l.client, 100)
	for i := range entries + hosts {
		n := netnstest.New(t)
		join(n, i+1)
		n.Set(t, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1", "ipv4/conf/all/rp_filter=0", "ipv4/conf/all/send_redirects=0")
		l.nodes = append(l.nodes, n)
	}
	for i, n := range l.nodes {
		for j := range l.nodes[entries:] {
			number := entries + j
			net4, net6 := fmt.Sprintf("10.1.%d", number), fmt.Sprintf("fd01:%d:", number)
			if number != i {
				n.Route(t, net4+".0/24", fmt.Sprintf("10.0.0.%d", number+1), "eth0")
				n.Route(t, net6+":/64", fmt.Sprintf("fd00::%d", number+1), "eth0")
				continue
			}
			pod := netnstest.New(t)
			n.Join(t, "pod", pod, "eth0")
			n.Add(t, "pod", net4+".1/24")
			n.Add(t, "pod", net6+":1/64")
			pod.Add(t, "eth0", net4+".2/24")
			pod.Add(t, "eth0", net6+":2/64")
			pod.Route(t, "default", net4+".1", "eth0")
			pod.Route(t, "default", net6+":1", "eth0")
			netnstest.Listen(t, pod.Do, ":8080", func(c net.Conn) {
				host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
				fmt.Fprintf(c, "%d %s\n", number, host)
				io.Copy(c, c)
			})
		}
	}
	return l
}

// enter makes a node the next hop of the client.
func (l *lan) enter(t *testing.T, node int) {
	l.client.Route(t, "192.0.2.1/32", fmt.Sprintf("10.0.0.%d", node+1), "eth0")
	l.client.Route(t, "2001:db8::1/128", fmt.Sprintf("fd00::%d", node+1), "eth0")
}

// sync programs all nodes with the pods of some nodes as endpoints.
func (l *lan) sync(t *testing.T, pods map[int]bool) {
	t.Helper()
	for i, n := range l.nodes {
		view := &api.View{Service: &api.Service{
			Name: "example", Type: api.ClusterIP,
			IPs:   api.ServiceIPs{Headless: true, ExternalIPs: api.NewIPSet(ips...)},
			Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 8080}},
		}}
		for _, format := range []string{"10.1.%d.2", "fd01:%d::2"} {
			for number := range l.nodes {
				if pods[number] {
					view.Endpoints = append(view.Endpoints, api.Endpoint{
						Addr: netip.MustParseAddr(fmt.Sprintf(format, number)), Local: number == i,
						Scopes: api.Scopes{Internal: true, External: true},
					})
				}
			}
		}
		b := &balancer{table: "test", devices: []string{"eth0"}}
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

func (l *lan) connect(t *testing.T, ip netip.Addr) *connection {
	t.Helper()
	var conn net.Conn
	if err := l.client.Do(func() (err error) {
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
	if want := []string{"10.0.0.100", "fd00::100"}[map[bool]int{ip.Is6(): 1}[true]]; client != want {
		t.Fatalf("the pod sees the client %q, want %s", client, want)
	}
	return c
}

func TestConnectionsSurviveChanges(t *testing.T) {
	const connections, changes = 1000, 100
	l := newLAN(t)
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
	out := l.nodes[entries].Run(t, "nft", "list", "table", "ip", "test")
	if !strings.Contains(out, "10.0.0.") {
		t.Errorf("no slot has a second endpoint:\n%.2000s", out)
	}
}
