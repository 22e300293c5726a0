// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// packetWorld is a node with two pods, and a client outside of the cluster.
type packetWorld struct {
	node, client, pod1, pod2 *netnstest.Namespace
}

func newPacketWorld(t testing.TB) *packetWorld {
	w := &packetWorld{netnstest.New(t), netnstest.New(t), netnstest.New(t), netnstest.New(t)}
	w.node.Set(t, "ipv4/ip_forward=1")
	w.node.Set(t, "ipv6/conf/all/forwarding=1")
	for _, peer := range []struct {
		ns                     *netnstest.Namespace
		name, node4, node6     string
		addr4, addr6, gw4, gw6 string
	}{
		{w.client, "outside", "192.0.2.1/24", "2001:db8::1/64", "192.0.2.2/24", "2001:db8::2/64", "192.0.2.1", "2001:db8::1"},
		{w.pod1, "pod1", "10.0.1.1/24", "fd01:1::1/64", "10.0.1.2/24", "fd01:1::2/64", "10.0.1.1", "fd01:1::1"},
		{w.pod2, "pod2", "10.0.2.1/24", "fd01:2::1/64", "10.0.2.2/24", "fd01:2::2/64", "10.0.2.1", "fd01:2::1"},
	} {
		w.node.Join(t, peer.name, peer.ns, "eth0")
		w.node.Add(t, peer.name, peer.node4)
		w.node.Add(t, peer.name, peer.node6)
		peer.ns.Add(t, "eth0", peer.addr4)
		peer.ns.Add(t, "eth0", peer.addr6)
		peer.ns.Route(t, "0.0.0.0/0", peer.gw4, "eth0")
		peer.ns.Route(t, "::/0", peer.gw6, "eth0")
	}
	w.node.Route(t, "0.0.0.0/0", "192.0.2.2", "outside")
	w.node.Route(t, "::/0", "2001:db8::2", "outside")
	serve(t, w.pod1, "pod1")
	serve(t, w.pod2, "pod2")
	return w
}

// serve answers each connection to port 8080 with the given name and the address of the
// client.
func serve(t testing.TB, ns *netnstest.Namespace, name string) {
	var l net.Listener
	if err := ns.Do(func() (err error) { l, err = net.Listen("tcp", ":8080"); return err }); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			io.WriteString(c, name+" "+host)
			c.Close()
		}
	}()
}

// patience is the timeout of requests that succeed, even on a busy machine.
const patience = time.Minute

// ask makes a connection from ns and returns the answer.
func ask(ns *netnstest.Namespace, addr string, timeout time.Duration) (answer string, err error) {
	err = ns.Do(func() error {
		c, err := net.DialTimeout("tcp", addr, timeout)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(timeout))
		b, err := io.ReadAll(c)
		answer = string(b)
		return err
	})
	return answer, err
}

func TestPackets(t *testing.T) {
	w := newPacketWorld(t)
	b := startIn(t, w.node, Options{Options: backends.Options{
		PodInterfaces: []string{"pod*"},
		NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")),
	}})
	external := func(policyLocal bool, v4, v6 string, nodePort int32) func(*api.Service) {
		return func(s *api.Service) {
			s.Type = api.NodePort
			s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr(v4), netip.MustParseAddr(v6))
			s.Ports[0].NodePort = nodePort
			s.ExternalTrafficToLocal = policyLocal
		}
	}
	pod1, both := []string{"!10.0.1.2", "!fd01:1::2"}, []string{"!10.0.1.2", "!fd01:1::2", "!10.0.2.2", "!fd01:2::2"}
	mustSync(t, b, batchOf(true,
		set(view("one", []string{"10.96.0.1", "fd00::1"}, pod1, external(false, "203.0.113.1", "2001:db8:1::1", 30001))),
		set(view("local", []string{"10.96.0.2", "fd00::2"}, pod1, external(true, "203.0.113.2", "2001:db8:1::2", 30002))),
		set(view("none", []string{"10.96.0.3", "fd00::3"}, nil, nil)),
		set(view("away", []string{"10.96.0.4", "fd00::4"}, []string{"198.51.100.1", "2001:db8:2::1"}, external(true, "203.0.113.4", "2001:db8:1::4", 30004))),
		set(view("filtered", []string{"10.96.0.5", "fd00::5"}, both, func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("2001:db8:1::5"))
			s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{
				netip.MustParsePrefix("192.0.2.0/30"), netip.MustParsePrefix("192.0.2.2/32"), netip.MustParsePrefix("2001:db8::/127"),
			}}}
		})),
		set(view("all-ports", nil, pod1, func(s *api.Service) {
			s.IPs.Headless = true
			s.AllPorts = true
			s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.6"), netip.MustParseAddr("2001:db8:1::6"))
		})),
	))
	refused, lost := "refused", "lost"
	for _, test := range []struct {
		name       string
		from       *netnstest.Namespace
		to4, want4 string
		to6, want6 string
	}{
		{"a pod reaches a cluster IP and keeps its address", w.pod2, "10.96.0.1:80", "pod1 10.0.2.2", "[fd00::1]:80", "pod1 fd01:2::2"},
		{"a pod reaches itself through its cluster IP from another address", w.pod1, "10.96.0.1:80", "pod1 10.0.1.1", "[fd00::1]:80", "pod1 fd01:1::1"},
		{"the node reaches a cluster IP", w.node, "10.96.0.1:80", "", "[fd00::1]:80", ""},
		{"a client reaches an external IP with policy Cluster through the node", w.client, "203.0.113.1:80", "pod1 10.0.1.1", "[2001:db8:1::1]:80", "pod1 fd01:1::1"},
		{"a client reaches an external IP with policy Local as itself", w.client, "203.0.113.2:80", "pod1 192.0.2.2", "[2001:db8:1::2]:80", "pod1 2001:db8::2"},
		{"a client reaches a node port with policy Cluster", w.client, "192.0.2.1:30001", "pod1 10.0.1.1", "[2001:db8::1]:30001", "pod1 fd01:1::1"},
		{"a client reaches a node port with policy Local as itself", w.client, "192.0.2.1:30002", "pod1 192.0.2.2", "[2001:db8::1]:30002", "pod1 2001:db8::2"},
		{"a node port at an address without node ports is refused", w.pod2, "10.0.1.1:30001", refused, "[fd01:1::1]:30001", refused},
		{"a service without endpoints refuses a pod", w.pod2, "10.96.0.3:80", refused, "[fd00::3]:80", refused},
		{"a service without endpoints refuses the node", w.node, "10.96.0.3:80", refused, "[fd00::3]:80", refused},
		{"an unknown port of a cluster IP is refused", w.pod2, "10.96.0.1:81", refused, "[fd00::1]:81", refused},
		{"policy Local without a local endpoint drops", w.client, "203.0.113.4:80", lost, "[2001:db8:1::4]:80", lost},
		{"a source in the ranges is admitted", w.client, "203.0.113.5:80", "", "", ""},
		{"a source outside of the ranges is dropped", w.pod1, "203.0.113.5:80", lost, "[2001:db8:1::5]:80", lost},
		{"an all-ports service keeps the port", w.client, "203.0.113.6:8080", "pod1 10.0.1.1", "[2001:db8:1::6]:8080", "pod1 fd01:1::1"},
	} {
		for _, target := range [][2]string{{test.to4, test.want4}, {test.to6, test.want6}} {
			if target[0] == "" {
				continue
			}
			timeout := patience
			if target[1] == lost {
				timeout = time.Second
			}
			got, err := ask(test.from, target[0], timeout)
			var netErr net.Error
			switch {
			case errors.Is(err, syscall.ECONNREFUSED):
				got = refused
			case errors.As(err, &netErr) && netErr.Timeout():
				got = lost
			case err != nil:
				got = err.Error()
			case target[1] == "":
				got = ""
			}
			if got != target[1] {
				t.Errorf("%s: %s answers %q, want %q", test.name, target[0], got, target[1])
			}
		}
	}
	if t.Failed() {
		t.Log(runNFT(t, w.node, "", "list", "table", "inet", "kpng"))
	}
}

// TestAffinity checks that a client keeps its endpoint at all frontends of a service
// port, while other endpoints are added and removed. If its endpoint is removed, the
// client gets another endpoint.
func TestAffinity(t *testing.T) {
	w := newPacketWorld(t)
	b := startIn(t, w.node, Options{Options: backends.Options{PodInterfaces: []string{"pod*"}, NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}})
	sticky := func(endpoints ...string) *api.View {
		return view("web", []string{"10.96.0.1"}, endpoints, func(s *api.Service) {
			s.Type = api.NodePort
			s.Ports[0].NodePort = 30001
			s.AffinitySeconds = 100
		})
	}
	pods := map[string]string{"pod1": "!10.0.1.2", "pod2": "!10.0.2.2"}
	now := sticky(pods["pod1"], pods["pod2"])
	mustSync(t, b, batchOf(true, set(now)))
	pod := func(addr string) string {
		t.Helper()
		answer, err := ask(w.client, addr, patience)
		if err != nil {
			t.Fatal(err)
		}
		name, _, _ := strings.Cut(answer, " ")
		return name
	}
	change := func(to *api.View) {
		t.Helper()
		mustSync(t, b, batchOf(false, sink.Change{Old: now, New: to}))
		now = to
	}

	kept := pod("10.96.0.1:80")
	for range 10 {
		for _, addr := range []string{"10.96.0.1:80", "192.0.2.1:30001"} {
			if got := pod(addr); got != kept {
				t.Fatalf("at %s the client gets %s, want %s", addr, got, kept)
			}
		}
	}
	change(sticky(pods["pod1"], pods["pod2"], "!10.0.1.77"))
	mustSync(t, b, batchOf(true, set(now)))
	b = startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}})
	mustSync(t, b, batchOf(true, set(now)))
	for range 10 {
		if got := pod("10.96.0.1:80"); got != kept {
			t.Fatalf("after another endpoint was added and a restart, the client gets %s, want %s", got, kept)
		}
	}
	group := fmt.Sprintf(" . %d timeout", clientGroup(netip.MustParseAddr("192.0.2.2"), b.table.clientSeed))
	if listing := runNFT(t, w.node, "", "list", "map", "inet", "kpng", "clients4"); !strings.Contains(listing, group) {
		t.Errorf("the map of clients has no element%s:\n%s", group, listing)
	}
	other := map[string]string{"pod1": "pod2", "pod2": "pod1"}[kept]
	change(sticky(pods[other]))
	if got := pod("10.96.0.1:80"); got != other {
		t.Errorf("after the removal of its endpoint, the client gets %s", got)
	}
	change(sticky(pods["pod1"], pods["pod2"]))
	for range 10 {
		if got := pod("10.96.0.1:80"); got != other {
			t.Fatalf("after its first endpoint was added again, the client gets %s, want %s", got, other)
		}
	}
	change(view("web", []string{"10.96.0.1"}, []string{pods["pod1"], pods["pod2"]}, nil))
	seen := map[string]bool{}
	for range 40 {
		seen[pod("10.96.0.1:80")] = true
	}
	if len(seen) != 2 {
		t.Errorf("without affinity, 40 connections reach %v", seen)
	}
	for _, m := range []mapID{{kind: kindSlots, family: api.IPv4}, {kind: kindNumbers, family: api.IPv4}} {
		if listing := runNFT(t, w.node, "", "list", "map", "inet", "kpng", m.name()); strings.Contains(listing, "elements") {
			t.Errorf("without affinity, %s has elements:\n%s", m.name(), listing)
		}
	}
}

// TestOutsidersNeedACIDROfTheirFamily checks that a cluster CIDR of one family does not
// make the backend masquerade traffic of the other family.
func TestOutsidersNeedACIDROfTheirFamily(t *testing.T) {
	w := newPacketWorld(t)
	b := startIn(t, w.node, Options{Options: backends.Options{ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24")}, MasqueradeOutsiders: true, NodeAddresses: nodeaddr.Of()}})
	mustSync(t, b, batchOf(true, set(view("web", []string{"10.96.0.1", "fd00::1"}, []string{"!10.0.1.2", "!fd01:1::2"}, nil))))
	for _, test := range []struct {
		from     *netnstest.Namespace
		to, want string
	}{
		{w.pod2, "10.96.0.1:80", "pod1 10.0.2.2"},
		{w.client, "10.96.0.1:80", "pod1 10.0.1.1"},
		{w.pod2, "[fd00::1]:80", "pod1 fd01:2::2"},
		{w.client, "[fd00::1]:80", "pod1 2001:db8::2"},
	} {
		if got, err := ask(test.from, test.to, patience); err != nil || got != test.want {
			t.Errorf("%s answers %q, %v; want %q", test.to, got, err, test.want)
		}
	}
}

// TestPrioritiesOfSocketsDropNoPackets connects from sockets whose priority looks like the
// number of a chain, or like a refusal.
func TestPrioritiesOfSocketsDropNoPackets(t *testing.T) {
	w := newPacketWorld(t)
	serve(t, w.client, "client")
	mustSync(t, startIn(t, w.node, Options{}), batchOf(true))
	for _, priority := range []int{firstNumber, nft.DropLater, nft.RejectLater} {
		dialer := net.Dialer{Timeout: 20 * time.Second, Control: func(_, _ string, c syscall.RawConn) error {
			var setErr error
			err := c.Control(func(fd uintptr) {
				setErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, priority)
			})
			return errors.Join(err, setErr)
		}}
		if err := w.node.Do(func() error {
			c, err := dialer.Dial("tcp", "192.0.2.2:8080")
			if err == nil {
				c.Close()
			}
			return err
		}); err != nil {
			t.Errorf("priority %#x: %v", priority, err)
		}
	}
}

// TestAddressesOfTheNodeMayBeInAServiceCIDR checks that the node and a pod reach an address
// of the node although the address is in a service CIDR.
func TestAddressesOfTheNodeMayBeInAServiceCIDR(t *testing.T) {
	w := newPacketWorld(t)
	serve(t, w.node, "node")
	w.node.Add(t, "lo", "10.96.5.5/32")
	w.node.Add(t, "lo", "fd96::5/128")
	mustSync(t, startIn(t, w.node, Options{ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd96::/64")}}), batchOf(true))
	for _, address := range []string{"10.96.5.5:8080", "[fd96::5]:8080"} {
		for name, from := range map[string]*netnstest.Namespace{"a pod": w.pod1, "the node": w.node} {
			if got, err := ask(from, address, patience); !strings.HasPrefix(got, "node") {
				t.Errorf("%s gets %q, %v from %s", name, got, err, address)
			}
		}
	}
}

// TestAMissingSlotDropsPackets checks that the backend drops a packet whose slot has no
// endpoint. A concurrent transaction can remove the endpoint after the packet's slot was
// selected.
func TestAMissingSlotDropsPackets(t *testing.T) {
	w := newPacketWorld(t)
	b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
	w.client.Add(t, "eth0", "10.96.0.1/32")
	serve(t, w.client, "outside")
	mustSync(t, b, batchOf(true, set(view("web", []string{"10.96.0.1"}, []string{"!10.0.1.2"}, func(s *api.Service) { s.Ports[0].Port = 8080 }))))
	if got, err := ask(w.pod2, "10.96.0.1:8080", patience); err != nil || got != "pod1 10.0.2.2" {
		t.Fatalf("the service answers %q, %v", got, err)
	}
	runNFT(t, w.node, "flush map inet kpng endpoints4\n", "-f", "-")
	var timeout net.Error
	if got, err := ask(w.pod2, "10.96.0.1:8080", time.Second); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("without its endpoint, the service answers %q, %v; want a timeout", got, err)
	}
}
