// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// TestKernel needs a kernel with IPVS, see TestConformance.
func TestKernel(t *testing.T) {
	if exec.Command("modprobe", "--dry-run", "ip_vs").Run() != nil {
		t.Skip("the kernel has no IPVS; run this test with test/kernel")
	}
	t.Run("a module that is loaded later ends the failures", testModuleLoadedLater) // first, because it loads ip_vs
	t.Run("changes by other programs are repaired", testRepair)
	t.Run("virtual servers of other programs are not touched", testForeignServer)
	t.Run("an interface of another program is not touched", testForeignInterface)
	t.Run("a missing scheduler fails only its service", testMissingScheduler)
	t.Run("a removed endpoint stays until its connections end", testGracefulRemoval)
	t.Run("clean-up leaves the namespace as it was", testCleanup)
	t.Run("an address that the machine gets or loses", testMachineAddress)
	t.Run("a restart deletes what the process before it left", testRestart)
	t.Run("elements of failing services are not pruned", testFailingServicesAreNotPruned)
}

// node is a backend in a network namespace of its own.
type node struct {
	*Backend
	t  testing.TB
	ns *netnstest.Namespace
}

func newNode(t testing.TB) *node {
	t.Helper()
	n := &node{t: t, ns: netnstest.New(t)}
	n.restart()
	return n
}

// restart makes a new backend, as a new process does.
func (n *node) restart() {
	n.t.Helper()
	b, err := New(Options{
		NetNS:         n.ns.FD,
		NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1")),
		Conntrack:     sink.Func(func(context.Context, *sink.Changes) error { return nil }),
	})
	if err != nil {
		n.t.Fatal(err)
	}
	if err := b.Start(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { b.Stop(context.Background()) })
	n.Backend = b
}

// pass delivers a pass with these views.
func (n *node) pass(views ...*api.ServiceEndpoints) error {
	return n.deliver(&sink.Changes{First: true, Last: true, NodeChanged: true}, views...)
}

func (n *node) deliver(c *sink.Changes, views ...*api.ServiceEndpoints) error {
	n.t.Helper()
	c.Services = func(yield func(sink.Change) bool) {
		for _, v := range views {
			if !yield(sink.Change{Key: v.Key(), New: v, Unsure: true}) {
				return
			}
		}
	}
	return n.Sync(n.t.Context(), c)
}

func (n *node) mustPass(views ...*api.ServiceEndpoints) {
	n.t.Helper()
	if err := n.pass(views...); err != nil {
		n.t.Fatal(err)
	}
}

// servers returns the virtual servers in the kernel as lines.
func (n *node) servers() (lines []string) {
	n.t.Helper()
	c := &n.dataplane.conn
	all, err := c.list()
	if err != nil {
		n.t.Fatal(err)
	}
	for id, s := range all {
		if err := c.readDestinations(id, s); err != nil {
			n.t.Fatal(err)
		}
		line := fmt.Sprintf("%s %s %d", id, s.scheduler, s.persistence)
		for _, at := range slices.SortedFunc(maps.Keys(s.destinations), netip.AddrPort.Compare) {
			line += fmt.Sprintf(" %s=%d", at, s.destinations[at].weight)
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return lines
}

func (n *node) mustHave(want ...string) {
	n.t.Helper()
	if got := n.servers(); !slices.Equal(got, want) {
		n.t.Errorf("virtual servers\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func testModuleLoadedLater(t *testing.T) {
	n := newNode(t)
	err := n.pass(view([]string{"10.1.0.1"}, nil))
	if err != nil && !strings.Contains(err.Error(), "load the module ip_vs") { // newer kernels load it themselves
		t.Errorf("error %v does not name the module", err)
	}
	if out, err := exec.Command("modprobe", "ip_vs").CombinedOutput(); err != nil {
		t.Fatalf("modprobe ip_vs: %v\n%s", err, out)
	}
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	n.mustHave("10.96.0.1:80/TCP rr 0 10.1.0.1:8080=1")
}

func testRepair(t *testing.T) {
	n := newNode(t)
	affine := func(s *api.Service) { s.SessionAffinity.ClientIP = &api.ClientIPAffinity{TimeoutSeconds: 90} }
	n.mustPass(view([]string{"10.1.0.1", "10.1.0.2"}, affine))
	const want = "10.96.0.1:80/TCP rr 90 10.1.0.1:8080=1 10.1.0.2:8080=1"
	n.mustHave(want)
	web, first, other := id("10.96.0.1:80", api.TCP), netip.MustParseAddrPort("10.1.0.1:8080"), netip.MustParseAddrPort("10.9.9.9:8080")
	d := n.dataplane
	for name, change := range map[string]func() error{
		"virtual server deleted": func() error { return d.conn.delete(web) },
		"scheduler changed":      func() error { return d.conn.set(web, false, "wlc", 0) },
		"endpoint deleted":       func() error { return d.conn.deleteDestination(web, first) },
		"weight changed":         func() error { return d.conn.setDestination(web, first, false, 0) },
		"endpoint added":         func() error { return d.conn.setDestination(web, other, true, 1) },
		"table deleted":          d.table.delete,
		"element deleted":        func() error { return d.table.change([]element{web.element()}, nil) },
		"rules deleted":          func() error { d.table.nft.FlushTable(d.table.table()); return d.table.nft.Flush() },
		"chain added": func() error {
			d.table.nft.AddRule(&nftables.Rule{Table: d.table.table(), Chain: d.table.chains()[0].Chain})
			return d.table.nft.Flush()
		},
		"interface deleted": d.local.delete,
		"route deleted":     func() error { return d.local.remove(web.Addr()) },
	} {
		if err := change(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		n.compareAt = time.Time{}
		err := n.Verify(t.Context())
		if errors.Is(err, sink.ErrStartOver) {
			err = n.pass(view([]string{"10.1.0.1", "10.1.0.2"}, affine))
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := d.removeIdle(t.Context()); err != nil { // the added endpoint
			t.Fatal(err)
		}
		n.mustHave(want)
		if elements, err := d.table.read(); err != nil || !maps.Equal(elements, d.elements) || !elements[web.element()] {
			t.Errorf("%s: the table has %d elements (%v), want %d", name, len(elements), err, len(d.elements))
		}
		if routes, err := d.local.list(); err != nil || len(routes) != 1 || !routes[web.Addr()] {
			t.Errorf("%s: local addresses %v (%v)", name, routes, err)
		}
	}
}

func testForeignServer(t *testing.T) {
	n := newNode(t)
	n.mustPass()
	other := id("203.0.113.1:80", api.TCP)
	if err := n.dataplane.conn.set(other, true, "wlc", 0); err != nil {
		t.Fatal(err)
	}
	external := view([]string{"10.1.0.1"}, func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(other.Addr()) })
	for range 2 {
		failed, ok := sink.Acknowledged(n.pass(external))
		if err := failed[external.Key()]; !ok || err == nil || !strings.Contains(err.Error(), "virtual server 203.0.113.1:80/TCP belongs to another program") {
			t.Errorf("error %v does not name the virtual server", err)
		}
		n.mustHave("10.96.0.1:80/TCP rr 0 10.1.0.1:8080=1", "203.0.113.1:80/TCP wlc 0")
	}
	if err := n.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustHave("203.0.113.1:80/TCP wlc 0")
	if err := n.dataplane.conn.delete(other); err != nil {
		t.Fatal(err)
	}
	n.mustPass(external)
	n.mustHave("10.96.0.1:80/TCP rr 0 10.1.0.1:8080=1", "203.0.113.1:80/TCP rr 0 10.1.0.1:8080=1")
}

func testForeignInterface(t *testing.T) {
	n := newNode(t)
	n.ns.Run(t, "ip", "link", "add", "kpng-ipvs", "type", "dummy")
	if err := n.pass(); err == nil || !strings.Contains(err.Error(), "interface kpng-ipvs exists") {
		t.Errorf("error %v does not name the interface", err)
	}
	if err := n.Cleanup(t.Context()); err == nil {
		t.Error("clean-up does not report the interface")
	}
	n.ns.Run(t, "ip", "link", "delete", "kpng-ipvs")
	n.mustPass()
}

func testMissingScheduler(t *testing.T) {
	n := newNode(t)
	bad := view([]string{"10.1.0.1"}, func(s *api.Service) {
		s.Name, s.Annotations = "bad", map[string]string{n.opts.SchedulerAnnotation: "nosuch"}
		s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
	})
	failed, ok := sink.Acknowledged(n.pass(bad, view([]string{"10.1.0.1"}, nil)))
	if err := failed[bad.Key()]; !ok || len(failed) != 1 || !strings.Contains(fmt.Sprint(err), "load the module ip_vs_nosuch") {
		t.Errorf("failed services %v", failed)
	}
	n.mustHave("10.96.0.1:80/TCP rr 0 10.1.0.1:8080=1")
}

func testGracefulRemoval(t *testing.T) {
	n := newNode(t)
	// The endpoints are addresses of the namespace.
	n.ns.Add(t, "lo", "10.1.0.1/32")
	n.ns.Add(t, "lo", "10.1.0.2/32")
	var client, served net.Conn
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	err := n.ns.Do(func() error {
		l, err := net.Listen("tcp", "10.1.0.1:8080")
		if err != nil {
			return err
		}
		defer l.Close()
		if client, err = net.DialTimeout("tcp", "10.96.0.1:80", 30*time.Second); err != nil {
			return err
		}
		served, err = l.Accept()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer served.Close()
	n.mustPass(view([]string{"10.1.0.2"}, nil))
	verify := func() {
		t.Helper()
		if err := n.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	verify()
	n.mustHave("10.96.0.1:80/TCP rr 0 10.1.0.1:8080=0 10.1.0.2:8080=1")
	if _, err := io.WriteString(client, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(served, make([]byte, 1)); err != nil {
		t.Fatalf("the connection to the removed endpoint has ended: %v", err)
	}
	// A reset connection leaves the kernel's table after 10 seconds.
	client.(*net.TCPConn).SetLinger(0)
	client.Close()
	const gone = "10.96.0.1:80/TCP rr 0 10.1.0.2:8080=1"
	for deadline := time.Now().Add(2 * time.Minute); n.servers()[0] != gone && time.Now().Before(deadline); time.Sleep(time.Second) {
		verify()
	}
	n.mustHave(gone)
}

func (n *node) inventory() string {
	n.t.Helper()
	out := n.ns.Run(n.t, "sh", "-ec", "ip addr; ip route show table all; ip -6 route show table all; nft list ruleset")
	return out + strings.Join(n.servers(), "\n")
}

func testCleanup(t *testing.T) {
	n := newNode(t)
	before := n.inventory()
	exposed := view([]string{"!10.1.0.1", "10.1.0.2"}, func(s *api.Service) {
		s.Type, s.ExternalTrafficToLocal, s.Ports[0].NodePort = api.LoadBalancer, true, 30080
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
	})
	n.mustPass(exposed)
	if n.inventory() == before || len(n.servers()) != 3 {
		t.Errorf("virtual servers %v", n.servers())
	}
	n.Stop(t.Context())
	n.restart()
	for range 2 {
		if err := n.Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if after := n.inventory(); after != before {
			t.Errorf("before\n%s\nafter\n%s", before, after)
		}
	}
}

// testMachineAddress checks that the backend leaves the other ports of an external IP alone
// while the machine has that address.
func testMachineAddress(t *testing.T) {
	n := newNode(t)
	external := netip.MustParseAddr("203.0.113.1")
	web := view([]string{"10.1.0.1"}, func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(external) })
	refused := element{set: setOf(addresses, external), key: addrKey(external)}
	n.mustPass(web)
	for _, step := range []struct {
		change func()
		local  bool
	}{
		{func() {}, true},
		{func() { n.ns.Add(t, "lo", "203.0.113.1/32") }, false},
		{func() { n.ns.Remove(t, "lo", "203.0.113.1/32") }, true},
	} {
		_, changed := n.machineAddresses.Addresses()
		step.change()
		if has := slices.Contains(n.dataplane.planner.machineAddrs, external); has == step.local {
			<-changed
			if err := n.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
				t.Fatalf("Verify returns %v, want a request of a pass", err)
			}
			n.mustPass(web)
		}
		d := n.dataplane
		if d.routes[external] != step.local || d.elements[refused] != step.local {
			t.Errorf("local by the backend: %t, other ports refused: %t, want %t", d.routes[external], d.elements[refused], step.local)
		}
		n.mustHave("10.96.0.1:80/TCP rr 0 10.1.0.1:8080=1", "203.0.113.1:80/TCP rr 0 10.1.0.1:8080=1")
	}
}

func testRestart(t *testing.T) {
	n := newNode(t)
	n.mustPass(view([]string{"10.1.0.1"}, func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30080 }))
	n.restart()
	n.mustPass(view([]string{"10.1.0.2"}, func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.2")) }))
	n.mustHave("10.96.0.2:80/TCP rr 0 10.1.0.2:8080=1")
	if routes, err := n.dataplane.local.list(); err != nil || len(routes) != 1 {
		t.Errorf("local addresses %v (%v)", routes, err)
	}
}

func testFailingServicesAreNotPruned(t *testing.T) {
	n := newNode(t)
	web := view([]string{"10.1.0.1"}, nil)
	n.mustPass(web)
	n.restart()
	if err := n.deliver(&sink.Changes{First: true, Last: true, NodeChanged: true, Failing: []types.NamespacedName{web.Key()}}); err != nil {
		t.Fatal(err)
	}
	n.mustHave("10.96.0.1:80/TCP rr 0 10.1.0.1:8080=1")
	n.dataplane.leftovers.PassAt = time.Now().Add(-time.Second)
	if err := n.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returns %v, want a request of a pass", err)
	}
	n.mustPass()
	n.mustHave()
}
