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

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// TestKernel needs a kernel with IPVS, see TestConformance.
func TestKernel(t *testing.T) {
	if exec.Command("modprobe", "--dry-run", "ip_vs").Run() != nil {
		t.Skip("the kernel has no IPVS; run this test with test/kernel")
	}
	t.Run("a module that is loaded later ends the failures", testModuleLoadedLater) // first, because it loads ip_vs
	t.Run("changes by other programs are repaired", testRepair)
	t.Run("a driver finds and repairs a changed virtual server", testRepairByDriver)
	t.Run("virtual servers of other programs are not touched", testForeignServer)
	t.Run("virtual servers of other programs are not touched after a failure", testForeignServerAfterFailure)
	t.Run("a deleted table is created again", testTableDeleted)
	t.Run("the loss of all objects is found during a pause", testLoss)
	t.Run("the node is refused at its own cluster IPs", testOwnClusterIPs)
	t.Run("filtering does not depend on the nat chains of others", testOtherNATChain)
	t.Run("without its table, a new process knows its virtual servers", testTableDeletedWhileStopped)
	t.Run("an incomplete listing does not hide virtual servers", testIncompleteListing)
	t.Run("an external IP with the port of a node port", testAddressOfNodePort)
	t.Run("an external IP and port that are a node port of the same service", testOwnAddressAndNodePort)
	t.Run("IPVS without connection tracking is an error", testConntrackSetting)
	t.Run("schedulers that hash sources omit removed endpoints", testSourceHashing)
	t.Run("health checks reach the node at load-balancer IPs", testHealthChecks)
	t.Run("this node reaches another node whose address is an external IP", testAddressOfOtherNode)
	t.Run("IPv6 connections of the node get a source that endpoints know", testSourceOfIPv6)
	t.Run("an interface of another program is not touched", testForeignInterface)
	t.Run("an interface without routes is created again", testInterfaceLost)
	t.Run("the alias identifies the interface", testInterfaceNames)
	t.Run("a missing scheduler fails only its service", testMissingScheduler)
	t.Run("without a virtual server, a port of a service is refused", testRefusedWithoutServer)
	t.Run("a delivered service replaces its verdicts from before the pass", testVerdictsFromBefore)
	t.Run("a removed endpoint stays until its connections end", testGracefulRemoval)
	t.Run("clean-up leaves the namespace as it was", testCleanup)
	t.Run("clean-up waits for connections if that is requested", testDrain)
	t.Run("a new process undoes an interrupted clean-up", testInterruptedDrain)
	t.Run("an address that the machine gets or loses", testMachineAddress)
	t.Run("a restart deletes what the process before it left", testRestart)
	t.Run("elements of failing services are not pruned", testFailingServicesAreNotPruned)
	t.Run("remaining source ranges do not conflict with new ones", testLeftRanges)
	t.Run("the work of a Verify is limited", testManyLeaving)
	t.Run("weights determine shares, and are counted", testWeights)
	t.Run("connections to lost endpoints end on request", testResets)
	t.Run("the counters of many services are read soon", testManyStats)
	t.Run("a frontend is described", testInspect)
	t.Run("no connection fails while a service moves", testMoves)
	t.Run("services of both dataplanes share an address", testSharedAddress)
	t.Run("random histories", testHistories)
}

// node is a backend in a network namespace of its own.
type node struct {
	*backend
	t  testing.TB
	ns *netnstest.Namespace
}

func newNode(t testing.TB) *node {
	t.Helper()
	n := &node{t: t, ns: netnstest.New(t)}
	n.restart()
	return n
}

// restart makes and starts a new backend, as a new process does.
func (n *node) restart(edit ...func(*options)) {
	n.t.Helper()
	n.renew(edit...)
	b := n.backend
	backendtest.TakeOver(&b.owner, n.ns.FD, " ", b.opts.Instance)
	if err := b.Start(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { b.Stop(context.Background()) })
}

// renew makes a new backend and does not start it.
func (n *node) renew(edit ...func(*options)) {
	n.t.Helper()
	opts := options{verifyInterval: -1, public: Options{Options: backends.Options{
		NetNS:         n.ns.FD,
		NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1")),
		Conntrack:     sink.Func(func(context.Context, *sink.Changes) error { return nil }),
	}}}
	for _, f := range edit {
		f(&opts)
	}
	b, err := newBackend(opts)
	if err != nil {
		n.t.Fatal(err)
	}
	n.backend = b
}

// pass delivers a pass with these views.
func (n *node) pass(views ...*api.View) error {
	return n.deliver(&sink.Changes{First: true, Last: true, NodeChanged: true}, views...)
}

func (n *node) deliver(c *sink.Changes, views ...*api.View) error {
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

func (n *node) mustPass(views ...*api.View) {
	n.t.Helper()
	if err := n.pass(views...); err != nil {
		n.t.Fatal(err)
	}
}

// servers returns the virtual servers in the kernel as lines.
func (n *node) servers() (lines []string) {
	n.t.Helper()
	c := n.dataplane.conn
	all, err := c.list()
	if err != nil {
		n.t.Fatal(err)
	}
	for id, s := range all {
		if err := c.readDestinations(id, s); err != nil {
			n.t.Fatal(err)
		}
		line := fmt.Sprintf("%s %s", id, s.scheduler)
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
	if err != nil && !strings.Contains(err.Error(), "load the module ip_vs") { // newer kernels load ip_vs themselves
		t.Errorf("error %v does not name the module", err)
	}
	if out, err := exec.Command("modprobe", "ip_vs").CombinedOutput(); err != nil {
		t.Fatalf("modprobe ip_vs: %v\n%s", err, out)
	}
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	const want = "10.96.0.1:80/TCP rr 10.1.0.1:8080=1"
	n.mustHave(want)

	// The module can only be unloaded without virtual servers.
	if err := n.dataplane.conn.delete(id("10.96.0.1:80", api.TCP)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("modprobe", "-r", "ip_vs_rr", "ip_vs").CombinedOutput(); err != nil {
		t.Fatalf("modprobe -r: %v\n%s", err, out)
	}
	if err := n.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) || !strings.Contains(err.Error(), "net.ipv4.vs.conntrack") {
		t.Errorf("without the module, Verify returns %v", err)
	}
	if err := n.dataplane.conn.set(id("10.96.0.1:80", api.TCP), true, settings{scheduler: "rr"}); err != nil && !errors.Is(err, errNoIPVS) {
		t.Errorf("error %v does not name the module", err)
	}
	if err := n.pass(view([]string{"10.1.0.1"}, nil)); err != nil && !strings.Contains(err.Error(), "load the module ip_vs") {
		t.Errorf("error %v does not name the module", err)
	}
	if out, err := exec.Command("modprobe", "ip_vs").CombinedOutput(); err != nil {
		t.Fatalf("modprobe ip_vs: %v\n%s", err, out)
	}
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	n.mustHave(want)

	// The module is loaded again between two requests.
	if err := n.dataplane.conn.delete(id("10.96.0.1:80", api.TCP)); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"-r ip_vs_rr ip_vs", "ip_vs"} {
		if out, err := exec.Command("modprobe", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("modprobe %s: %v\n%s", args, err, out)
		}
	}
	if err := n.dataplane.conn.set(id("10.96.0.1:80", api.TCP), true, settings{scheduler: "rr"}); err != nil {
		t.Error(err)
	}
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	n.mustHave(want)
}

func testRepair(t *testing.T) {
	n := newNode(t)
	n.mustPass(view([]string{"10.1.0.1", "10.1.0.2"}, nil))
	const want = "10.96.0.1:80/TCP rr 10.1.0.1:8080=1 10.1.0.2:8080=1"
	n.mustHave(want)
	web, first, other := id("10.96.0.1:80", api.TCP), netip.MustParseAddrPort("10.1.0.1:8080"), netip.MustParseAddrPort("10.9.9.9:8080")
	d := n.dataplane
	edit := func(fill func(*nft.Writer)) error { return d.table.conn.Transact(t.Context(), fill) }
	for name, change := range map[string]func() error{
		"virtual server deleted": func() error { return d.conn.delete(web) },
		"scheduler changed":      func() error { return d.conn.set(web, false, settings{scheduler: "wlc", flags: d.planner.owner}) },
		"flags deleted":          func() error { return d.conn.set(web, false, settings{scheduler: "rr"}) }, // as ipvsadm -E does
		"endpoint deleted":       func() error { return d.conn.deleteDestination(web, first) },
		"weight changed":         func() error { return d.conn.setDestination(web, first, false, 0) },
		"endpoint added":         func() error { return d.conn.setDestination(web, other, true, 1) },
		"method changed": func() error {
			_, err := d.conn.(*conn).request(setDest, netlink.Acknowledge, web, nil, func(e *netlink.AttributeEncoder) {
				encodeDestination(e, first)
				e.Uint32(destMethod, 3) // direct routing
				e.Uint32(destWeight, 1)
				e.Uint32(destUpper, 0)
				e.Uint32(destLower, 0)
			})
			return err
		},
		"threshold changed": func() error {
			_, err := d.conn.(*conn).request(setDest, netlink.Acknowledge, web, nil, func(e *netlink.AttributeEncoder) {
				encodeDestination(e, first)
				e.Uint32(destMethod, methodMasquerade)
				e.Uint32(destWeight, 1)
				e.Uint32(destUpper, 10)
				e.Uint32(destLower, 0)
			})
			return err
		},
		"persistence added": func() error {
			return d.conn.set(web, false, settings{scheduler: "rr", flags: d.planner.owner | 1})
		},
		"table deleted":   func() error { return d.table.conn.Delete(t.Context()) },
		"element deleted": func() error { return d.table.change([]element{web.element()}, nil) },
		"rules deleted": func() error {
			return edit(func(w *nft.Writer) {
				for _, c := range d.table.chains() {
					w.FlushChain(c.Name)
				}
			})
		},
		"rule added": func() error {
			return edit(func(w *nft.Writer) { w.AddRules(nft.MarkAll, []nft.Rule{nft.Return}) })
		},
		"interface deleted": d.local.delete,
		"route deleted":     func() error { return d.local.remove(web.Addr()) },
	} {
		if err := change(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		n.searchAt = time.Time{}
		err := n.Verify(t.Context())
		if errors.Is(err, sink.ErrStartOver) {
			err = n.pass(view([]string{"10.1.0.1", "10.1.0.2"}, nil))
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := d.removeIdle(t.Context()); err != nil { // the added endpoint
			t.Fatal(err)
		}
		n.mustHave(want)
		s, err := d.conn.read(web)
		if err != nil || s.destinations[first].edited {
			t.Errorf("%s: the virtual server is %+v (%v)", name, s, err)
		}
		if elements, err := d.table.read(t.Context()); err != nil || !maps.Equal(elements, d.elements) || !elements[web.element()] {
			t.Errorf("%s: the table has %d elements (%v), want %d", name, len(elements), err, len(d.elements))
		}
		if routes, err := d.local.list(); err != nil || len(routes) != 1 || !routes[web.Addr()] {
			t.Errorf("%s: local addresses %v (%v)", name, routes, err)
		}
	}
}

// impatient is a sink whose Verify is called every 10 ms.
type impatient struct{ sink.Sink }

func (i *impatient) Unwrap() sink.Sink           { return i.Sink }
func (*impatient) VerifyInterval() time.Duration { return 10 * time.Millisecond }

func testRepairByDriver(t *testing.T) {
	n := &node{t: t, ns: netnstest.New(t)}
	n.renew()
	src := sinktest.NewSource()
	src.Set(view([]string{"10.1.0.1", "10.1.0.2"}, nil))
	src.MarkSynced()
	progress := make(chan error, 10_000)
	d := sink.NewDriver(src, &impatient{n.backend}, sink.Options{
		Observer: sink.Observer{
			Synced: func(r sink.SyncResult) { progress <- r.Err },
			Verified: func(err error) { // ends the pauses, so that the next Verify compares
				n.mu.Lock()
				defer n.mu.Unlock()
				n.searchAt = time.Time{}
				progress <- err
			},
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	defer func() { cancel(); <-ended }()

	other := &node{t: t, ns: n.ns} // another program: it has its own connection to IPVS
	other.renew()
	defer other.dataplane.close()
	const want = "10.96.0.1:80/TCP rr 10.1.0.1:8080=1 10.1.0.2:8080=1"
	until := func(what string) {
		t.Helper()
		for calls := 0; !slices.Equal(other.servers(), []string{want}); calls++ {
			select {
			case err := <-progress:
				if calls == 1000 {
					t.Fatalf("%s: not repaired by 1,000 calls of the driver: the last returned %v, and the virtual servers are %q", what, err, other.servers())
				}
			case <-time.After(time.Minute):
				t.Fatalf("%s: the driver did nothing for a minute", what)
			}
		}
	}
	until("first pass")
	web, c := id("10.96.0.1:80", api.TCP), other.dataplane.conn
	for what, change := range map[string]func() error{
		"weight changed":         func() error { return c.setDestination(web, netip.MustParseAddrPort("10.1.0.1:8080"), false, 0) },
		"endpoint deleted":       func() error { return c.deleteDestination(web, netip.MustParseAddrPort("10.1.0.1:8080")) },
		"endpoint added":         func() error { return c.setDestination(web, netip.MustParseAddrPort("10.9.9.9:8080"), true, 1) },
		"virtual server deleted": func() error { return c.delete(web) },
	} {
		if err := change(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		until(what)
	}
}

func testForeignServer(t *testing.T) {
	n := newNode(t)
	n.mustPass()
	other := id("203.0.113.1:80", api.TCP)
	if err := n.dataplane.conn.set(other, true, settings{scheduler: "wlc"}); err != nil {
		t.Fatal(err)
	}
	external := view([]string{"10.1.0.1"}, func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(other.Addr()) })
	for range 2 {
		failed, ok := sink.Acknowledged(n.pass(external))
		if err := failed[external.Key()]; !ok || err == nil || !strings.Contains(err.Error(), "virtual server 203.0.113.1:80/TCP belongs to another program") {
			t.Errorf("error %v does not name the virtual server", err)
		}
		n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1", "203.0.113.1:80/TCP wlc")
	}
	if err := n.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustHave("203.0.113.1:80/TCP wlc")
	if err := n.dataplane.conn.delete(other); err != nil {
		t.Fatal(err)
	}
	n.mustPass(external)
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1", "203.0.113.1:80/TCP rr 10.1.0.1:8080=1")
}

// testForeignServerAfterFailure checks that the backend does not take over a virtual server
// that it could not create itself.
func testForeignServerAfterFailure(t *testing.T) {
	n := newNode(t)
	bad := view([]string{"10.1.0.1"}, func(s *api.Service) { s.Annotations = map[string]string{n.opts.SchedulerAnnotation: "nosuch"} })
	if failed, _ := sink.Acknowledged(n.pass(bad)); failed[bad.Key()] == nil {
		t.Fatal("the missing scheduler causes no error")
	}
	if err := n.dataplane.conn.set(id("10.96.0.1:80", api.TCP), true, settings{scheduler: "wlc"}); err != nil {
		t.Fatal(err)
	}
	const want = "10.96.0.1:80/TCP wlc"
	if err := n.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	n.mustHave(want)
	if failed, _ := sink.Acknowledged(n.deliver(&sink.Changes{}, view([]string{"10.1.0.1"}, nil))); failed[bad.Key()] == nil {
		t.Error("the virtual server of another program causes no error")
	}
	n.mustHave(want)
	n.restart()
	n.mustPass()
	n.mustHave(want)
}

// testTableDeleted checks that the backend recovers after the table was deleted.
func testTableDeleted(t *testing.T) {
	n := newNode(t)
	web := view([]string{"10.1.0.1"}, nil)
	other := view([]string{"10.1.0.1"}, func(s *api.Service) {
		s.Name, s.IPs.ClusterIPs = "other", api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
	})
	for name, step := range map[string]func() error{
		"a service is removed": func() error { return n.remove(other) },
		"nothing changes":      func() error { return n.Verify(t.Context()) },
	} {
		n.mustPass(web, other)
		n.searchAt = time.Time{}
		if err := n.dataplane.table.conn.Delete(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := step(); !errors.Is(err, sink.ErrStartOver) {
			t.Fatalf("%s: error %v does not request a pass", name, err)
		}
		n.mustPass(web)
		n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1")
	}
	// A program that deletes the table repeatedly does not cause constant passes.
	before := time.Now()
	n.searchAt = time.Time{}
	if err := errors.Join(n.dataplane.table.conn.Delete(t.Context()), n.Verify(t.Context())); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returns %v, want a request of a pass", err)
	}
	if pause := n.searchAt.Sub(before); pause < time.Second {
		t.Errorf("the next search follows after %v, want a pause", pause)
	}
	n.mustPass(web)
	n.searchAt = time.Now().Add(time.Hour)
	if err := errors.Join(n.dataplane.table.conn.Delete(t.Context()), n.Verify(t.Context())); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("during a pause, Verify returns %v, want a request of a pass", err)
	}
}

// testLoss removes all objects of a kind during the pause after a change by another program.
func testLoss(t *testing.T) {
	n := newNode(t)
	web := view([]string{"10.1.0.1"}, nil)
	n.mustPass(web)
	inventory := func() string {
		routes := n.ns.Run(t, "sh", "-ec", "ip route show table local dev kpng-ipvs | cut -d' ' -f1-2; nft list ruleset")
		return routes + strings.Join(n.servers(), "\n")
	}
	want := inventory()
	for _, damage := range []string{
		"nft delete table inet kpng-ipvs", "nft flush table inet kpng-ipvs", "nft flush ruleset",
		"ip link del kpng-ipvs", "ip link set kpng-ipvs down", "ip route flush table local dev kpng-ipvs", "ipvsadm -C",
	} {
		n.searchAt = time.Now().Add(time.Hour)
		if err := n.Verify(t.Context()); err != nil {
			t.Fatalf("before %q: %v", damage, err)
		}
		if damage == "ipvsadm -C" { // the program may be missing
			for id := range n.dataplane.servers {
				if err := n.dataplane.conn.delete(id); err != nil {
					t.Fatal(err)
				}
			}
		} else {
			n.ns.Run(t, strings.Fields(damage)...)
		}
		// The first Verify requests a comparison if virtual servers are lost.
		err := errors.Join(n.Verify(t.Context()), n.Verify(t.Context()))
		if errors.Is(err, sink.ErrStartOver) {
			err = n.pass(web)
		}
		if err != nil {
			t.Errorf("after %q: %v", damage, err)
		}
		if diff := cmp.Diff(want, inventory()); diff != "" {
			t.Errorf("%q is not repaired (-want +got):\n%s", damage, diff)
		}
	}
}

// testOwnClusterIPs checks cluster IPs that are also addresses of another interface.
func testOwnClusterIPs(t *testing.T) {
	n := newNode(t)
	backendtest.RefusedAtOwnClusterIPs(t, n.ns, &api.Node{Name: "node"}, func(v *api.View) { n.mustPass(v) })
}

// testOtherNATChain adds nat chains of another program before the backend's nat chains.
// They translate packets that the backend filters.
func testOtherNATChain(t *testing.T) {
	n := newNode(t)
	client, pod := netnstest.New(t), netnstest.New(t)
	n.ns.Set(t, "ipv4/ip_forward=1")
	n.ns.Join(t, "veth0", client, "eth0")
	n.ns.Join(t, "veth1", pod, "eth0")
	n.ns.Add(t, "veth0", "198.51.100.1/24")
	client.Add(t, "eth0", "198.51.100.2/24")
	client.Route(t, "0.0.0.0/0", "198.51.100.1", "eth0")
	n.ns.Add(t, "veth1", "10.1.0.254/24")
	pod.Add(t, "eth0", "10.1.0.1/24")
	pod.Route(t, "0.0.0.0/0", "10.1.0.254", "eth0")
	netnstest.Listen(t, pod.Do, "10.1.0.1:8080", func(net.Conn) {})
	none := view(nil, func(s *api.Service) {
		s.Name, s.IPs.ClusterIPs = "none", api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
	})
	n.mustPass(none, view([]string{"10.1.0.1"}, func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}}
	}))
	for _, priority := range []string{"-199", "1000"} {
		n.ns.RunWith(t, `add table inet other
			delete table inet other
			table inet other {
				chain prerouting { type nat hook prerouting priority `+priority+`
					ip daddr { 203.0.113.1, 203.0.113.9, 10.96.0.2 } tcp dport { 80, 81 } dnat ip to 10.1.0.1:8080
				}
			}
			`, "nft", "-f", "-")
		for address, want := range map[string]bool{"203.0.113.1:80": false, "203.0.113.9:80": true, "10.96.0.2:80": true, "10.96.0.2:81": true} {
			backendtest.CheckConnect(t, client, address, want)
		}
	}
}

// testTableDeletedWhileStopped checks that the backend recognizes its virtual servers
// although the table was deleted.
func testTableDeletedWhileStopped(t *testing.T) {
	n := newNode(t)
	web := view([]string{"10.1.0.1"}, func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30080 })
	n.mustPass(web)
	want := []string{"10.96.0.1:80/TCP rr 10.1.0.1:8080=1", "192.0.2.1:30080/TCP rr 10.1.0.1:8080=1"}
	flush := func() {
		t.Helper()
		if err := n.dataplane.table.conn.Delete(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.restart()
	}
	flush()
	n.mustPass(web)
	n.mustHave(want...)
	if routes, err := n.dataplane.local.list(); err != nil || len(routes) != 1 {
		t.Errorf("local addresses %v (%v)", routes, err)
	}
	flush()
	if err := n.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustHave()
}

// testIncompleteListing checks that the backend finds virtual servers that the kernel
// omits from a listing.
func testIncompleteListing(t *testing.T) {
	n := newNode(t)
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	hidden := true
	n.restart(func(o *options) {
		o.servers = func(kernel virtualServers) virtualServers { return &incompleteServers{kernel, &hidden} }
	})
	if err := n.deliver(&sink.Changes{First: true, NodeChanged: true}); err != nil {
		t.Fatal(err)
	}
	if err := n.deliver(&sink.Changes{Last: true}, view([]string{"10.1.0.2"}, nil)); err != nil {
		t.Fatal(err)
	}
	hidden = false
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=0 10.1.0.2:8080=1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Sync(ctx, &sink.Changes{First: true, NodeChanged: true, Services: slices.Values([]sink.Change(nil))}); !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context: error %v", err)
	}

	// No service needs the virtual server any more.
	hidden = true
	if err := n.deliver(&sink.Changes{First: true, NodeChanged: true}); err != nil {
		t.Fatal(err)
	}
	if err := n.deliver(&sink.Changes{Last: true}); err != nil {
		t.Fatal(err)
	}
	hidden = false
	n.mustHave()
}

// incompleteServers omits all virtual servers from listings while they are hidden.
type incompleteServers struct {
	virtualServers
	hidden *bool
}

func (s *incompleteServers) list() (map[serverID]*server, error) {
	if *s.hidden {
		return map[serverID]*server{}, nil
	}
	return s.virtualServers.list()
}

// testAddressOfNodePort checks a service whose external IP and port are also a node port
// of another service.
func testAddressOfNodePort(t *testing.T) {
	n := newNode(t)
	web := view([]string{"10.1.0.1"}, func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30080 })
	other := view([]string{"10.1.0.2"}, func(s *api.Service) {
		s.Name, s.Ports[0].Port = "other", 30080
		s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
		s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"))
	})
	at := func(v *api.View) {
		t.Helper()
		if err := n.dataplane.removeIdle(t.Context()); err != nil { // deletes the endpoints of the service that lost the frontend
			t.Fatal(err)
		}
		want := fmt.Sprintf("192.0.2.1:30080/TCP rr %s:8080=1", v.Endpoints[0].Addr)
		if got := n.servers(); !slices.Contains(got, want) {
			t.Errorf("virtual servers %v, want %s", got, want)
		}
	}
	otherFails := func(err error) {
		t.Helper()
		failed, ok := sink.Acknowledged(err)
		if err := failed[other.Key()]; !ok || len(failed) != 1 || !strings.Contains(fmt.Sprint(err), web.Key().String()) {
			t.Errorf("failed services %v, want %s with an error that names %s", failed, other.Key(), web.Key())
		}
		at(web)
	}
	otherFails(n.pass(other, web))
	otherFails(n.deliver(&sink.Changes{}, other))
	if err := n.remove(web); err != nil {
		t.Fatal(err)
	}
	if err := n.deliver(&sink.Changes{}, other); err != nil {
		t.Fatal(err)
	}
	at(other)
	otherFails(n.deliver(&sink.Changes{}, web)) // the node port of web wins
	n.restart()
	if err := n.deliver(&sink.Changes{First: true, NodeChanged: true}, other); err != nil {
		t.Fatal(err)
	}
	otherFails(n.deliver(&sink.Changes{Last: true}, web))
}

// testOwnAddressAndNodePort checks a service whose external IP is an address of the node.
// The number of one of its ports is the node port of its other port. So two frontends have
// the same address and port, but need different elements in the table. This conflict must
// not stop other services.
func testOwnAddressAndNodePort(t *testing.T) {
	n := newNode(t)
	bad := view([]string{"10.1.0.1"}, func(s *api.Service) {
		s.Name, s.Type = "bad", api.NodePort
		s.Ports[0].Port, s.Ports[0].NodePort = 30080, 31000
		s.Ports = append(s.Ports, api.PortMapping{Name: "b", Protocol: api.TCP, Port: 80, TargetPort: 8080, NodePort: 30080})
		s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
		s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"))
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.ExternalIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
	})
	web := view([]string{"10.1.0.1"}, nil)
	failed, ok := sink.Acknowledged(n.pass(bad, web))
	if err := failed[bad.Key()]; !ok || len(failed) != 1 || !strings.Contains(fmt.Sprint(err), "192.0.2.1:30080/TCP") {
		t.Errorf("failed services %v, want one", failed)
	}
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1", "10.96.0.2:30080/TCP rr 10.1.0.1:8080=1", "10.96.0.2:80/TCP rr 10.1.0.1:8080=1",
		"192.0.2.1:30080/TCP rr 10.1.0.1:8080=1", "192.0.2.1:31000/TCP rr 10.1.0.1:8080=1", "192.0.2.1:80/TCP rr 10.1.0.1:8080=1")
}

// testConntrackSetting checks that the backend returns an error if net.ipv4.vs.conntrack
// is 0, because nothing can be masqueraded then.
func testConntrackSetting(t *testing.T) {
	n := newNode(t)
	n.restart(func(o *options) { o.Sysctls = backends.IgnoreSysctls })
	if err := n.pass(view(nil, nil)); err == nil || !strings.Contains(err.Error(), "net.ipv4.vs.conntrack is 0") {
		t.Errorf("error %v does not name the setting", err)
	}
	n.restart()
	n.mustPass(view(nil, nil))
	n.ns.Set(t, "ipv4/vs/conntrack=0")
	if err := n.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) || !strings.Contains(err.Error(), "net.ipv4.vs.conntrack is 0") {
		t.Errorf("after a change of the setting, Verify returns %v", err)
	}
}

// TestStrictARP checks that the kernel has the settings of strict ARP only if the options
// request them. It needs no IPVS.
func TestStrictARP(t *testing.T) {
	n := newNode(t)
	values := func() string {
		return strings.Join(strings.Fields(n.ns.Run(t, "sh", "-ec", "cat /proc/sys/net/ipv4/conf/all/arp_ignore /proc/sys/net/ipv4/conf/all/arp_announce")), " ")
	}
	for _, step := range []struct {
		name string
		edit func(*options)
		want string
	}{
		{"without strict ARP", func(o *options) { o.Sysctls = backends.SetSysctls }, "0 0"},
		{"strict ARP is only checked", func(o *options) { o.StrictARP = true }, "0 0"},
		{"strict ARP", func(o *options) { o.StrictARP, o.Sysctls = true, backends.SetSysctls }, "1 2"},
	} {
		n.restart(step.edit)
		if got := values(); got != step.want {
			t.Errorf("%s: arp_ignore and arp_announce are %s, want %s", step.name, got, step.want)
		}
	}
}

// testSourceHashing checks that new clients reach endpoints while a removed endpoint still
// has a connection.
func testSourceHashing(t *testing.T) {
	n := newNode(t)
	n.ns.Add(t, "lo", "10.1.0.1/32")
	n.ns.Add(t, "lo", "10.1.0.2/32")
	n.ns.Add(t, "lo", "10.2.0.1/24") // on lo, the whole network is local
	for _, addr := range []string{"10.1.0.1:8080", "10.1.0.2:8080"} {
		defer n.listen(addr).Close()
	}
	for _, scheduler := range []string{"sh", "mh"} {
		hashed := func(s *api.Service) { s.Annotations = map[string]string{n.opts.SchedulerAnnotation: scheduler} }
		n.mustPass()
		n.mustPass(view([]string{"10.1.0.1"}, hashed))
		dial := func(client byte) (c net.Conn) {
			t.Helper()
			if err := n.ns.Do(func() (err error) {
				from := &net.TCPAddr{IP: net.IPv4(10, 2, 0, client)}
				c, err = (&net.Dialer{LocalAddr: from, Timeout: 30 * time.Second}).Dial("tcp", "10.96.0.1:80")
				return err
			}); err != nil {
				t.Fatalf("%s: client %d: %v", scheduler, client, err)
			}
			return c
		}
		defer dial(1).Close()
		n.mustPass(view([]string{"10.1.0.2"}, hashed))
		if got := n.servers(); len(got) != 1 || !strings.Contains(got[0], "10.1.0.1:8080=0") {
			t.Fatalf("%s: virtual servers %v", scheduler, got)
		}
		for client := range byte(20) {
			dial(client + 2).Close()
		}
	}
}

// listen opens a TCP listener in the namespace.
func (n *node) listen(addr string) (l net.Listener) {
	n.t.Helper()
	if err := n.ns.Do(func() (err error) { l, err = net.Listen("tcp", addr); return err }); err != nil {
		n.t.Fatal(err)
	}
	return l
}

// dial opens and closes a TCP connection from the namespace.
func (n *node) dial(addr string) error {
	return n.ns.Do(func() error {
		c, err := net.DialTimeout("tcp", addr, 30*time.Second)
		if err == nil {
			c.Close()
		}
		return err
	})
}

// testHealthChecks checks that health checks at a load-balancer IP reach the node, and
// that connections to other ports of this IP do not.
func testHealthChecks(t *testing.T) {
	n := newNode(t)
	n.restart(func(o *options) { o.HealthzPort = 10256 })
	n.ns.Add(t, "lo", "192.0.2.1/32")
	n.ns.Run(t, "ip", "route", "add", "203.0.113.2", "dev", "lo") // IPVS does not serve this address
	withPolicy := func(name, clusterIP, ip string, local bool) *api.View {
		return view([]string{"!10.1.0.1"}, func(s *api.Service) {
			s.Name, s.IPs.ClusterIPs = name, api.NewIPSet(netip.MustParseAddr(clusterIP))
			s.Type, s.ExternalTrafficToLocal, s.HealthCheckNodePort = api.LoadBalancer, local, 30999
			s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr(ip))
		})
	}
	n.mustPass(withPolicy("cluster", "10.96.0.1", "203.0.113.1", false), withPolicy("local", "10.96.0.2", "203.0.113.2", true))
	defer n.listen("192.0.2.1:10256").Close()
	defer n.listen("192.0.2.1:30999").Close()
	defer n.listen("0.0.0.0:22").Close()
	for _, addr := range []string{"203.0.113.1:10256", "203.0.113.2:30999"} {
		if err := n.dial(addr); err != nil {
			t.Errorf("health check: %v", err)
		}
	}
	if err := n.dial("203.0.113.1:22"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("another port: error %v, want connection refused", err)
	}
}

// testAddressOfOtherNode checks that packets to an external IP reach the node that has this
// address.
func testAddressOfOtherNode(t *testing.T) {
	n := newNode(t)
	n.restart(func(o *options) { o.NodeNetworks = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")} })
	other := netnstest.New(t)
	n.ns.Join(t, "veth0", other, "eth0")
	n.ns.Add(t, "veth0", "198.51.100.1/24")
	other.Add(t, "eth0", "198.51.100.2/24")
	n.mustPass(view([]string{"10.1.0.1"}, func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("198.51.100.2")) }))
	for _, addr := range []string{"198.51.100.2:10250", "198.51.100.2:80"} {
		var l net.Listener
		if err := other.Do(func() (err error) { l, err = net.Listen("tcp", addr); return err }); err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := n.dial(addr); err != nil {
			t.Error(err)
		}
	}
}

// testSourceOfIPv6 checks that an endpoint can answer this node although the kernel selects
// a source address to which the endpoint has no route.
func testSourceOfIPv6(t *testing.T) {
	n := newNode(t)
	pod := netnstest.New(t)
	n.ns.Join(t, "veth0", pod, "eth0")
	n.ns.Add(t, "lo", "fd00:96::ffff/128") // the kernel selects this source, because it is similar to the address of the service
	n.ns.Add(t, "veth0", "2001:db8::1/64")
	pod.Add(t, "eth0", "2001:db8::2/64")
	n.mustPass(view([]string{"2001:db8::2"}, func(s *api.Service) {
		s.IPFamilies, s.IPs.ClusterIPs = []api.Family{api.IPv6}, api.NewIPSet(netip.MustParseAddr("fd00:96::1"))
	}))
	var l net.Listener
	if err := pod.Do(func() (err error) { l, err = net.Listen("tcp", "[::]:8080"); return err }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := n.dial("[fd00:96::1]:80"); err != nil {
		t.Error(err)
	}
}

// remove delivers the deletion of a service.
func (n *node) remove(v *api.View) error {
	return n.Sync(n.t.Context(), &sink.Changes{Services: slices.Values([]sink.Change{{Key: v.Key(), Old: v}})})
}

func testForeignInterface(t *testing.T) {
	n := newNode(t)
	n.ns.Run(t, "ip", "link", "add", "kpng-ipvs", "up", "type", "dummy")
	if err := n.pass(); err == nil || !strings.Contains(err.Error(), "interface kpng-ipvs exists") {
		t.Errorf("error %v does not name the interface", err)
	}
	n.ns.Run(t, "ip", "link", "delete", "kpng-ipvs")
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	n.ns.Run(t, "ip", "link", "delete", "kpng-ipvs")
	n.ns.Run(t, "ip", "link", "add", "kpng-ipvs", "up", "type", "dummy")
	if err := n.Cleanup(t.Context()); err == nil || !strings.Contains(err.Error(), "interface kpng-ipvs exists") {
		t.Errorf("clean-up returns %v, which does not name the interface", err)
	}
	n.mustHave()
	if l, err := n.dataplane.table.conn.Find(t.Context()); err != nil || l.Exists {
		t.Errorf("after clean-up, the table exists: %t (%v)", l.Exists, err)
	}
}

// testInterfaceLost checks that the backend repairs the interface after another program
// has deleted it or set it down, even if the interface has no routes.
func testInterfaceLost(t *testing.T) {
	n := newNode(t)
	web := view([]string{"fd00:1::1"}, func(s *api.Service) {
		s.IPFamilies, s.IPs.ClusterIPs = []api.Family{api.IPv6}, api.NewIPSet(netip.MustParseAddr("fd00:96::1"))
	})
	for _, args := range []string{"delete kpng-ipvs", "set kpng-ipvs down"} {
		n.mustPass()
		n.ns.Run(t, strings.Fields("ip link "+args)...)
		if err := n.deliver(&sink.Changes{}, web); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("ip link %s: error %v does not request a pass", args, err)
		}
		n.mustPass(web)
		if routes, err := n.dataplane.local.list(); err != nil || len(routes) != 1 {
			t.Errorf("ip link %s: local addresses %v (%v)", args, routes, err)
		}
	}

	// With this MTU, the kernel removes IPv6 from the interface. A pass cannot repair that,
	// so the failure must not cause passes.
	n.mustPass()
	n.ns.Run(t, "ip", "link", "set", "kpng-ipvs", "mtu", "1000")
	if failed, ok := sink.Acknowledged(n.deliver(&sink.Changes{}, web)); !ok || failed[web.Key()] == nil {
		t.Errorf("without IPv6 at the interface: failed services %v, want %s", failed, web.Key())
	}
}

// testInterfaceNames checks an interface that a crash has left without its alias, and an
// interface whose name differs from the option Interface.
func testInterfaceNames(t *testing.T) {
	n := newNode(t)
	before := n.inventory()
	n.ns.Run(t, "ip", "link", "add", "kpng-ipvs", "type", "dummy")
	web := view([]string{"10.1.0.1"}, nil)
	n.mustPass(web)
	n.restart(func(o *options) { o.Interface = "other" })
	n.mustPass(web)
	if out := n.ns.Run(t, "ip", "-o", "link"); strings.Count(out, "\n") != 2 {
		t.Errorf("interfaces\n%s\nwant lo and kpng-ipvs", out)
	}
	if routes, err := n.dataplane.local.list(); err != nil || len(routes) != 1 {
		t.Errorf("local addresses %v (%v)", routes, err)
	}
	if err := n.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := n.inventory(); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
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
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1")
}

// testRefusedWithoutServer checks that connections to a port of a service never reach a
// program of the node, even if the port's virtual server cannot be created.
func testRefusedWithoutServer(t *testing.T) {
	n := newNode(t)
	n.ns.Add(t, "lo", "192.0.2.1/32")
	defer n.listen("0.0.0.0:22").Close()
	defer n.listen("0.0.0.0:80").Close()
	loadBalancer := func(s *api.Service) {
		s.Type, s.IPs.LoadBalancerIPs = api.LoadBalancer, api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
	}
	ssh := func(s *api.Service) {
		loadBalancer(s)
		s.Ports = append(s.Ports, api.PortMapping{Name: "ssh", Protocol: api.TCP, Port: 22, TargetPort: 8080})
	}
	bad := view([]string{"10.1.0.1"}, func(s *api.Service) {
		ssh(s)
		s.Annotations = map[string]string{n.opts.SchedulerAnnotation: "nosuch"}
	})
	refused := func(addrs ...string) {
		t.Helper()
		for _, addr := range addrs {
			if err := n.dial(addr); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s: error %v, want connection refused", addr, err)
			}
		}
	}
	fails := func(err error) {
		t.Helper()
		if failed, ok := sink.Acknowledged(err); !ok || failed[bad.Key()] == nil {
			t.Errorf("failed services %v, want %s", failed, bad.Key())
		}
	}
	n.mustPass(view([]string{"10.1.0.1"}, loadBalancer))
	fails(n.deliver(&sink.Changes{}, bad))
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1", "203.0.113.1:80/TCP rr 10.1.0.1:8080=1")
	refused("10.96.0.1:22", "203.0.113.1:22")

	// Another program deletes virtual servers, and a new process cannot create them again.
	for _, at := range []string{"10.96.0.1:80", "203.0.113.1:80"} {
		if err := n.dataplane.conn.delete(id(at, api.TCP)); err != nil {
			t.Fatal(err)
		}
	}
	n.restart()
	if err := n.deliver(&sink.Changes{First: true, NodeChanged: true}); err != nil { // the pass has not delivered the service yet
		t.Fatal(err)
	}
	refused("10.96.0.1:80", "203.0.113.1:80")
	fails(n.pass(bad))
	n.mustHave()
	refused("10.96.0.1:80", "203.0.113.1:80")

	n.mustPass(view(nil, ssh))
	n.mustHave("10.96.0.1:22/TCP rr", "10.96.0.1:80/TCP rr", "203.0.113.1:22/TCP rr", "203.0.113.1:80/TCP rr")
	if got := n.dataplane.elements; !got[id("10.96.0.1:22", api.TCP).element()] || !got[id("203.0.113.1:80", api.TCP).element()] {
		t.Error("the table refuses packets to virtual servers that exist")
	}
}

// testVerdictsFromBefore checks that a service does not keep the verdicts of an earlier
// process, even if the pass has not ended or another service fails.
func testVerdictsFromBefore(t *testing.T) {
	n := newNode(t)
	n.mustPass(view(nil, nil))
	n.restart()
	web := view([]string{"10.1.0.1"}, nil)
	if err := n.deliver(&sink.Changes{First: true, NodeChanged: true}, web); err != nil {
		t.Fatal(err)
	}
	rejects := element{set: setID{rejects, api.IPv4}, key: id("10.96.0.1:80", api.TCP).element().key}
	if elements, err := n.dataplane.table.read(t.Context()); err != nil || elements[rejects] || !maps.Equal(elements, n.dataplane.elements) {
		t.Errorf("the service is rejected: %t (%v)", elements[rejects], err)
	}

	// The only frontend of this service belongs to another program. The failure of the
	// service does not prevent pruning.
	foreign := view(nil, func(s *api.Service) {
		s.Name, s.IPs.ClusterIPs = "foreign", api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
	})
	if err := n.dataplane.conn.set(id("10.96.0.2:80", api.TCP), true, settings{scheduler: "wlc"}); err != nil {
		t.Fatal(err)
	}
	old := element{set: setID{addresses, api.IPv4}, key: addrKey(netip.MustParseAddr("10.96.0.9"))}
	if err := n.dataplane.table.change(nil, []element{old}); err != nil {
		t.Fatal(err)
	}
	if failed, ok := sink.Acknowledged(n.deliver(&sink.Changes{First: true, NodeChanged: true}, foreign, web)); !ok || len(failed) != 1 {
		t.Fatalf("failed services %v, want %s", failed, foreign.Key())
	}
	if err := n.deliver(&sink.Changes{Last: true, Failing: []types.NamespacedName{foreign.Key()}}); err != nil {
		t.Fatal(err)
	}
	if n.dataplane.elements[old] {
		t.Error("after the pass, the table has elements that no service needs")
	}
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
	const both = "10.96.0.1:80/TCP rr 10.1.0.1:8080=0 10.1.0.2:8080=1"
	n.mustHave(both)

	// removeIdle reads a changed virtual server to count connections. The next comparison
	// must find the changes anyway.
	web := id("10.96.0.1:80", api.TCP)
	if err := errors.Join(
		n.dataplane.conn.set(web, false, settings{scheduler: "wlc"}),
		n.dataplane.conn.deleteDestination(web, netip.MustParseAddrPort("10.1.0.2:8080")),
	); err != nil {
		t.Fatal(err)
	}
	n.idleAt, n.searchAt = time.Time{}, time.Now().Add(time.Hour)
	verify()
	n.searchAt = time.Time{}
	verify()
	n.mustHave(both)
	if got := n.dataplane.servers[web].flags; got != n.dataplane.planner.owner {
		t.Errorf("the flags of the virtual server are %#x, want %#x", got, n.dataplane.planner.owner)
	}
	if _, err := io.WriteString(client, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(served, make([]byte, 1)); err != nil {
		t.Fatalf("the connection to the removed endpoint has ended: %v", err)
	}
	// IPVS keeps a connection in its table for 10 seconds after a reset.
	client.(*net.TCPConn).SetLinger(0)
	client.Close()
	const gone = "10.96.0.1:80/TCP rr 10.1.0.2:8080=1"
	for deadline := time.Now().Add(2 * time.Minute); n.servers()[0] != gone && time.Now().Before(deadline); time.Sleep(time.Second) {
		verify()
	}
	n.mustHave(gone)
}

func testDrain(t *testing.T) {
	n := newNode(t)
	n.ns.Add(t, "lo", "10.1.0.1/32") // the address of the endpoint
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	l := n.listen("10.1.0.1:8080")
	defer l.Close()
	var client net.Conn
	if err := n.ns.Do(func() (err error) { client, err = net.DialTimeout("tcp", "10.96.0.1:80", 30*time.Second); return err }); err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	served, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer served.Close()
	n.Stop(t.Context())
	n.restart(func(o *options) { o.Drain = time.Hour })
	cleaned := make(chan error, 1)
	go func() { cleaned <- n.Cleanup(t.Context()) }()
	for err == nil { // until new connections are left to another backend, which does not exist here
		time.Sleep(50 * time.Millisecond)
		err = n.dial("10.96.0.1:80")
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a new connection ends with %v", err)
	}
	time.Sleep(2 * minDrainPause)
	if _, err := io.WriteString(client, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(served, make([]byte, 1)); err != nil {
		t.Fatalf("the connection has ended: %v", err)
	}
	select {
	case err := <-cleaned:
		t.Fatalf("clean-up ended before the connection (%v)", err)
	default:
	}
	client.Close()
	served.Close()
	if err := <-cleaned; err != nil {
		t.Fatal(err)
	}
	n.mustHave()
}

func testInterruptedDrain(t *testing.T) {
	n := newNode(t)
	n.ns.Add(t, "lo", "198.51.100.1/32")
	n.ns.Run(t, "ip", "route", "add", "default", "dev", "lo", "src", "198.51.100.1")
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	before := n.inventory()
	if err := n.dataplane.local.useNodeSource(); err != nil {
		t.Fatal(err)
	}
	if n.inventory() == before {
		t.Fatal("the route has no source")
	}
	n.Stop(t.Context())
	n.restart()
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	if diff := cmp.Diff(before, n.inventory()); diff != "" {
		t.Errorf("the node differs (-before +after):\n%s", diff)
	}
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
		s.Type, s.Ports[0].NodePort = api.LoadBalancer, 30080
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
	})
	n.mustPass(exposed, affine(func(s *api.Service) {
		s.Name, s.IPs.ClusterIPs = "affine", api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
	}))
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

// testMachineAddress checks that the backend does not refuse packets to other ports of an
// external IP while the machine has that address.
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
		n.gain("192.0.2." + fmt.Sprint(2+len(n.dataplane.planner.machineAddrs))) // an address that no service has
		if err := n.Verify(t.Context()); err != nil {
			t.Errorf("after a change of another address, Verify returns %v", err)
		}
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
		n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1", "203.0.113.1:80/TCP rr 10.1.0.1:8080=1")
	}
}

// gain adds an address to the namespace and waits until the backend has noticed it.
func (n *node) gain(addr string) {
	n.t.Helper()
	_, changed := n.machineAddresses.Addresses()
	n.ns.Add(n.t, "lo", addr+"/32")
	<-changed
}

func testRestart(t *testing.T) {
	n := newNode(t)
	n.mustPass(view([]string{"10.1.0.1"}, func(s *api.Service) { s.Type, s.Ports[0].NodePort = api.NodePort, 30080 }))
	n.restart()
	n.mustPass(view([]string{"10.1.0.2"}, func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.2")) }))
	n.mustHave("10.96.0.2:80/TCP rr 10.1.0.2:8080=1")
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
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1")
	panics := sink.Change{Key: web.Key(), New: &api.View{}, Unsure: true}
	err := n.Sync(t.Context(), &sink.Changes{First: true, Last: true, NodeChanged: true, Services: slices.Values([]sink.Change{panics})})
	if failed, ok := sink.Acknowledged(err); !ok || failed[web.Key()] == nil {
		t.Errorf("error %v, want one of %s", err, web.Key())
	}
	n.mustHave("10.96.0.1:80/TCP rr 10.1.0.1:8080=1")
	// When the service succeeds, its old frontend is deleted.
	moved := view([]string{"10.1.0.1"}, func(s *api.Service) { s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.2")) })
	if err := n.deliver(&sink.Changes{}, moved); err != nil {
		t.Fatal(err)
	}
	n.mustHave("10.96.0.2:80/TCP rr 10.1.0.1:8080=1")
}

// testLeftRanges makes a service fail in a pass and then changes its source ranges. The
// old ranges in the table must not conflict with the new ranges.
func testLeftRanges(t *testing.T) {
	n := newNode(t)
	ranges := func(prefix string) *api.View {
		return view([]string{"10.1.0.1"}, func(s *api.Service) {
			s.Type, s.IPs.LoadBalancerIPs = api.LoadBalancer, api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
			s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix(prefix)}}}
		})
	}
	web := ranges("198.51.100.0/24")
	n.mustPass(web)
	n.restart()
	if err := n.deliver(&sink.Changes{First: true, Last: true, NodeChanged: true, Failing: []types.NamespacedName{web.Key()}}); err != nil {
		t.Fatal(err)
	}
	if err := n.deliver(&sink.Changes{}, ranges("198.51.100.0/25")); err != nil {
		t.Error(err)
	}
	// Linux 6.1 silently ignores a range inside another range.
	d := n.dataplane
	if elements, err := d.table.read(t.Context()); err != nil || !maps.Equal(elements, d.elements) {
		t.Errorf("the table has %d elements (%v), want %d", len(elements), err, len(d.elements))
	}
}

// testManyLeaving checks that one call of removeIdle reads a limited number of virtual
// servers, and that Verify calls removeIdle again only after a pause.
func testManyLeaving(t *testing.T) {
	n := newNode(t)
	n.mustPass()
	for i := range maxIdleReads + 1 {
		n.dataplane.leaving[serverID{netip.AddrPortFrom(netip.MustParseAddr("10.96.0.1"), uint16(i+1)), api.TCP}] = true
	}
	for _, want := range []int{1, 0} {
		if err := n.dataplane.removeIdle(t.Context()); err != nil || len(n.dataplane.leaving) != want {
			t.Errorf("%d virtual servers remain (%v), want %d", len(n.dataplane.leaving), err, want)
		}
	}
	n.dataplane.leaving[id("10.96.0.1:80", api.TCP)] = true
	n.searchAt = time.Now().Add(time.Hour)
	for _, want := range []int{0, 1} {
		if err := n.Verify(t.Context()); err != nil || len(n.dataplane.leaving) != want {
			t.Errorf("%d virtual servers remain (%v), want %d", len(n.dataplane.leaving), err, want)
		}
		n.dataplane.leaving[id("10.96.0.1:80", api.TCP)] = true
		n.idleAt = n.idleAt.Add(time.Hour)
	}
}
