// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

func testTable(t *testing.T, ns *netnstest.Namespace, public Options) *table {
	t.Helper()
	opts := options{public: public}
	opts.NetNS = ns.FD
	if err := opts.complete(); err != nil {
		t.Fatal(err)
	}
	table := newTable(&opts)
	t.Cleanup(func() { table.conn.Close() })
	return table
}

func id(at string, p api.Protocol) serverID { return serverID{netip.MustParseAddrPort(at), p} }

// someElements has elements of every set.
func someElements() map[element]bool {
	all := map[element]bool{}
	for i, at := range []string{"10.96.0.1:80", "[fd00::1]:80"} {
		server := id(at, api.TCP)
		key, addr := frontendKey(server), server.Addr()
		client := netip.MustParsePrefix([]string{"192.0.2.0/25", "2001:db8::/63"}[i])
		for kind := range setKinds {
			e := element{set: setOf(kind, addr), key: key}
			switch kind {
			case addresses, clusterIPs:
				e.key = addrKey(addr)
			case sources:
				e = sourceElement(sourcelists.Range{List: 0x1ff, Prefix: client})
			case restricted:
				e.value = string(nft.Native(0x1ff))
			case healthChecks:
				e.value = addrKey(addr) + portKey(8080)
			case hairpins:
				e.key = addrKey(addr) + key
			}
			all[e] = true
		}
	}
	return all
}

func TestTableKeepsElements(t *testing.T) {
	table := testTable(t, netnstest.New(t), Options{Options: backends.Options{MasqueradeOutsiders: true, PodInterfaces: []string{"veth*"}, ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}})
	if got, err := table.read(t.Context()); !errors.Is(err, errChanged) || len(got) > 0 {
		t.Fatalf("without a table, read returns %v, %v", got, err)
	}
	want := someElements()
	if err := table.create(want); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		got, err := table.read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(got, want) {
			t.Fatalf("the table has %d elements, want %d:\n%v\n%v", len(got), len(want), got, want)
		}
	}
	check()
	for e := range want {
		if err := table.change([]element{e}, nil); err != nil {
			t.Fatalf("delete %v: %v", e, err)
		}
		delete(want, e)
	}
	check()
	for e := range someElements() {
		if e.set.kind == frontends && e.server() != id("10.96.0.1:80", api.TCP) && e.server() != id("[fd00::1]:80", api.TCP) {
			t.Errorf("virtual server of %v is %s", e, e.server())
		}
	}
}

func TestChangedTableIsDetectedAndKeepsElements(t *testing.T) {
	for name, change := range map[string]func(w *nft.Writer, t *table){
		"a rule was added": func(w *nft.Writer, t *table) {
			c := t.chains()[0]
			w.AddRules(c.Name, c.Rules[:1])
		},
		"a chain was emptied": func(w *nft.Writer, t *table) { w.FlushChain(t.chains()[0].Name) },
		"a set was replaced": func(w *nft.Writer, t *table) {
			for _, chain := range t.chains() {
				w.FlushChain(chain.Name)
			}
			name := setID{drops, api.IPv4}.name()
			w.DeleteChainsAndSets(nil, []string{name})
			w.NewSet(nft.NewSet(name, 0, []nft.Type{nft.TypeIPv4}, nil))
		},
	} {
		t.Run(name, func(t *testing.T) {
			table := testTable(t, netnstest.New(t), Options{})
			if err := table.create(someElements()); err != nil {
				t.Fatal(err)
			}
			if err := table.conn.Transact(t.Context(), func(w *nft.Writer) { change(w, table) }); err != nil {
				t.Fatal(err)
			}
			elements, err := table.read(t.Context())
			if !errors.Is(err, errChanged) || len(elements) < len(someElements())-1 {
				t.Fatalf("read returns %d elements and error %v, want errChanged", len(elements), err)
			}
			if err := table.create(elements); err != nil {
				t.Fatal(err)
			}
			if again, err := table.read(t.Context()); err != nil || !maps.Equal(again, elements) {
				t.Errorf("the new table has %d elements (%v), want %d", len(again), err, len(elements))
			}
		})
	}
}

// Other programs may add elements and sets that this package cannot decode. A new table
// has none of these.
func TestForeignElementsAndSets(t *testing.T) {
	for name, input := range map[string]string{
		"an element for all keys": "add element inet kpng-ipvs frontends4 { * }",
		"an unknown set":          "add set inet kpng-ipvs foreign { type cgroupsv2; }",
		"a set of a foreign type": "flush table inet kpng-ipvs\ndelete set inet kpng-ipvs drops4\nadd set inet kpng-ipvs drops4 { type cgroupsv2; }",
	} {
		t.Run(name, func(t *testing.T) {
			ns := netnstest.New(t)
			table := testTable(t, ns, Options{})
			want := map[element]bool{addressElement(netip.MustParseAddr("10.96.0.1")): true}
			if err := table.create(want); err != nil {
				t.Fatal(err)
			}
			ns.RunWith(t, input, "nft", "-f", "-")
			elements, err := table.read(t.Context())
			if err != nil && !errors.Is(err, errChanged) || !maps.Equal(elements, want) {
				t.Fatalf("read returns %v, %v, want %v", elements, err, want)
			}
			if err := table.create(elements); err != nil {
				t.Fatal(err)
			}
			if elements, err := table.read(t.Context()); err != nil || !maps.Equal(elements, want) {
				t.Errorf("the new table has %v (%v), want %v", elements, err, want)
			}
		})
	}
}

// TestTableOfAnySize checks that the backend recovers after another program has deleted a
// large table, and that the backend can delete all elements.
func TestTableOfAnySize(t *testing.T) {
	ns := netnstest.New(t)
	const n = 26_000
	d := newDataplane(&options{verifyInterval: -1, maxElements: 1000, public: Options{Options: backends.Options{NetNS: ns.FD, MasqueradeMark: 1}}})
	defer d.close()
	d.elements = map[element]bool{}
	for i := range n {
		from := netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 8), 15: byte(i)})
		d.elements[element{set: setID{hairpins, api.IPv6}, key: addrKey(from) + frontendKey(serverID{netip.AddrPortFrom(from, 80), api.TCP})}] = true
	}
	d.elements[id("10.96.0.1:80", api.TCP).element()] = true
	if err := d.table.create(d.elements); err != nil {
		t.Fatal(err)
	}
	if elements, err := d.readElements(t.Context()); err != nil || !maps.Equal(elements, d.elements) {
		t.Errorf("the table has %d elements (%v), want %d", len(elements), err, len(d.elements))
	}
	remove := slices.DeleteFunc(slices.Collect(maps.Keys(d.elements)), func(e element) bool { return e.set.kind != hairpins })
	if err := d.changeInParts(remove, nil); err != nil {
		t.Error(err)
	}
	if elements, err := d.table.read(t.Context()); err != nil || len(elements) != 1 {
		t.Errorf("the table has %d elements (%v), want 1", len(elements), err)
	}
}

// TestCleanupKeepsTableOfLocalAddresses checks that the table still refuses packets if the
// interface cannot be deleted.
func TestCleanupKeepsTableOfLocalAddresses(t *testing.T) {
	const notOpen = 1 << 20
	d := newDataplane(&options{
		verifyInterval: -1, public: Options{Options: backends.Options{NetNS: netnstest.New(t).FD, MasqueradeMark: 1}},
		routes: func(localRoutes) localRoutes { return &localAddresses{netNS: notOpen} },
	})
	table := testTable(t, &netnstest.Namespace{FD: d.opts.NetNS}, Options{})
	if err := table.create(nil); err != nil {
		t.Fatal(err)
	}
	if err := d.cleanup(t.Context()); err == nil {
		t.Error("the interface was deleted")
	}
	if l, err := table.conn.Find(t.Context()); err != nil || !l.Exists {
		t.Errorf("the table exists: %t (%v)", l.Exists, err)
	}
}

// TestCleanupKeepsTableOfVirtualServers checks that the table still checks source ranges
// and masquerades if virtual servers cannot be deleted.
func TestCleanupKeepsTableOfVirtualServers(t *testing.T) {
	d := newDataplane(&options{verifyInterval: -1, public: Options{Options: backends.Options{NetNS: netnstest.New(t).FD, MasqueradeMark: 1}}})
	table := testTable(t, &netnstest.Namespace{FD: d.opts.NetNS}, Options{})
	if err := table.create(nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.cleanup(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("clean-up with a cancelled context returns %v", err)
	}
	if l, err := table.conn.Find(t.Context()); err != nil || !l.Exists {
		t.Errorf("the table exists: %t (%v)", l.Exists, err)
	}
}

// TestChangedTableGetsRecordedElements checks that the backend can create a table again
// after another program has changed its elements and its chains. The elements of the
// other program exclude recorded elements, so the kernel would refuse all of them
// together.
func TestChangedTableGetsRecordedElements(t *testing.T) {
	d := newDataplane(&options{verifyInterval: -1, public: Options{}})
	d.table = testTable(t, netnstest.New(t), Options{})
	d.elements = someElements()
	if err := d.table.create(d.elements); err != nil {
		t.Fatal(err)
	}
	for e := range d.elements {
		if e.set != (setID{healthChecks, api.IPv4}) {
			continue
		}
		other := e
		other.value = addrKey(netip.MustParseAddr("10.9.9.9")) + portKey(1)
		if err := d.table.change([]element{e}, []element{other}); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.table.conn.Transact(t.Context(), func(w *nft.Writer) { w.FlushChain(nft.MarkAll) }); err != nil {
		t.Fatal(err)
	}
	if _, err := d.readTable(t.Context()); err != nil {
		t.Fatal(err)
	}
	if elements, err := d.table.read(t.Context()); err != nil || !maps.Equal(elements, d.elements) {
		t.Errorf("the new table has %d elements (%v), want %d", len(elements), err, len(d.elements))
	}
}

// dataplaneWithTable returns a dataplane whose table has the elements of someElements.
func dataplaneWithTable(t *testing.T) (*dataplane, *netnstest.Namespace) {
	ns := netnstest.New(t)
	d := newDataplane(&options{verifyInterval: -1, public: Options{Options: backends.Options{NetNS: ns.FD}}})
	d.table = testTable(t, ns, Options{})
	d.elements, d.known = someElements(), true
	if err := d.table.create(d.elements); err != nil {
		t.Fatal(err)
	}
	return d, ns
}

// TestRefusedElementsDoNotStopOtherServices checks the error for elements that the kernel
// refuses. If only these elements are the cause, the driver must be able to find their
// service, so the error must not request a pass.
func TestRefusedElementsDoNotStopOtherServices(t *testing.T) {
	d, _ := dataplaneWithTable(t)
	refused := element{set: setID{healthChecks, api.IPv4}, key: frontendKey(id("10.96.0.1:80", api.TCP)), value: addrKey(netip.MustParseAddr("10.9.9.9")) + portKey(1)}
	if err := d.changeTable(nil, []element{refused}); err == nil || errors.Is(err, sink.ErrStartOver) || !d.known {
		t.Errorf("error %v, want one that does not request a pass", err)
	}
	if elements, err := d.table.read(t.Context()); err != nil || !maps.Equal(elements, d.elements) {
		t.Errorf("the table has %d elements (%v), want %d", len(elements), err, len(d.elements))
	}
	if err := d.table.change([]element{id("10.96.0.1:80", api.TCP).element()}, nil); err != nil {
		t.Fatal(err)
	}
	if err := d.changeTable(nil, []element{refused}); !errors.Is(err, sink.ErrStartOver) || d.known {
		t.Errorf("after a change by another program, error %v does not request a pass", err)
	}
}

// TestComparisonReadsTableOnlyAfterChanges checks that a comparison reads the table only
// after a change of nf_tables, and that a context can interrupt it.
func TestComparisonReadsTableOnlyAfterChanges(t *testing.T) {
	d, ns := dataplaneWithTable(t)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	compare := func(ctx context.Context) error {
		elements, err := d.readElements(ctx)
		if err == nil && !maps.Equal(elements, d.elements) {
			err = errors.New("the elements differ")
		}
		return err
	}
	if err := compare(cancelled); !errors.Is(err, context.Canceled) || d.compared != 0 {
		t.Errorf("a cancelled comparison returns %v", err)
	}
	if err := compare(t.Context()); err != nil {
		t.Error(err)
	}
	if err := compare(cancelled); err != nil {
		t.Errorf("without a change, the table was read: %v", err)
	}
	ns.Run(t, "nft", "add", "table", "ip", "other")
	if err := compare(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("after a change of another table, the comparison returns %v", err)
	}
	if err := compare(t.Context()); err != nil {
		t.Error(err)
	}
	if err := d.table.change([]element{id("10.96.0.1:80", api.TCP).element()}, nil); err != nil {
		t.Fatal(err)
	}
	if err := compare(t.Context()); err == nil {
		t.Error("the comparison does not find a missing element")
	}
	flush := func(w *nft.Writer) { w.FlushChain(nft.MarkAll) }
	if err := errors.Join(d.table.conn.Transact(t.Context(), flush), compare(t.Context())); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("after a change of rules, the comparison returns %v", err)
	}
}

// newMemoryNode returns a backend with virtual servers in memory and routes of the loopback
// interface, like newSubject.
func newMemoryNode(t testing.TB, ns *netnstest.Namespace, servers virtualServers, edit ...func(*options)) *node {
	n := &node{t: t, ns: ns}
	n.restart(append(edit, func(o *options) {
		o.Sysctls = backends.IgnoreSysctls
		inMemory(o, servers)
	})...)
	n.machineAddresses = nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))
	return n
}

// TestDriftIsRepairedWithoutPass deletes single objects.
func TestDriftIsRepairedWithoutPass(t *testing.T) {
	servers := fakeServers{}
	n := newMemoryNode(t, netnstest.New(t), servers)
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	d, web := n.dataplane, id("10.96.0.1:80", api.TCP)
	want := objects(t, d)
	for name, damage := range map[string]func() error{
		"frontend element": func() error { return d.table.change([]element{web.element()}, nil) },
		"address element":  func() error { return d.table.change([]element{addressElement(web.Addr())}, nil) },
		"foreign element":  func() error { return d.table.change(nil, []element{addressElement(netip.MustParseAddr("10.96.0.9"))}) },
		"virtual server":   func() error { delete(servers, web); return nil },
		"endpoints":        func() error { clear(servers[web].destinations); return nil },
	} {
		if err := errors.Join(damage(), n.Verify(t.Context())); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(sorted(want), sorted(objects(t, d))); diff != "" {
			t.Errorf("%s is not repaired (-want +got):\n%s", name, diff)
		}
	}
}

func sorted(lines []string) []string { slices.Sort(lines); return lines }

// brokenServers refuse to create or delete virtual servers.
type brokenServers struct {
	fakeServers
	create, remove error
}

func (s *brokenServers) set(id serverID, create bool, to settings) error {
	if s.create != nil {
		return s.create
	}
	return s.fakeServers.set(id, create, to)
}

func (s *brokenServers) delete(id serverID) error {
	if s.remove != nil {
		return s.remove
	}
	return s.fakeServers.delete(id)
}

// TestOrderOfElementsAndServers checks the table while the virtual server of a cluster IP
// does not exist: the table must not accept packets to that IP. Packets reach IPVS at an address of the machine even without elements. Therefore
// the table must check packets to such an address before the virtual server is created,
// and until the virtual server is deleted.
func TestOrderOfElementsAndServers(t *testing.T) {
	servers := &brokenServers{fakeServers: fakeServers{}, create: unix.ENOMEM}
	n := newMemoryNode(t, netnstest.New(t), servers)
	d := n.dataplane
	restrictedTo := func(ranges ...netip.Prefix) *api.View {
		return view([]string{"10.1.0.1"}, func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"))
			if ranges != nil {
				s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: ranges}}
			}
		})
	}
	web := restrictedTo(netip.MustParsePrefix("198.51.100.0/24"))
	at, atMachine := id("10.96.0.1:80", api.TCP), id("192.0.2.1:80", api.TCP)
	check := func(step string, accepted bool, atMachineKinds ...setKind) {
		t.Helper()
		elements, err := d.table.read(t.Context())
		if err != nil || !maps.Equal(elements, d.elements) {
			t.Errorf("%s: the table has %d elements (%v), want %d", step, len(elements), err, len(d.elements))
		}
		var kinds []setKind
		for e := range elements {
			if e.set.kind.describesFrontend() && e.server() == atMachine {
				kinds = append(kinds, e.set.kind)
			}
		}
		if slices.Sort(kinds); !slices.Equal(kinds, atMachineKinds) {
			t.Errorf("%s: the address of the machine has elements of the kinds %v, want %v", step, kinds, atMachineKinds)
		}
		if elements[at.element()] != accepted {
			t.Errorf("%s: packets are accepted: %t, want %t", step, elements[at.element()], accepted)
		}
	}
	if failed, ok := sink.Acknowledged(n.pass(web)); !ok || failed[web.Key()] == nil {
		t.Error("the service does not fail")
	}
	check("without virtual servers", false, frontends, restricted, masquerades)
	servers.create = nil
	if err := n.deliver(&sink.Changes{}, web); err != nil {
		t.Fatal(err)
	}
	check("with virtual servers", true, frontends, restricted, masquerades)
	clear(servers.fakeServers)
	servers.create = unix.ENOMEM
	if err := n.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("Verify returns %v, want a request of a pass", err)
	}
	check("after a failed repair", false, frontends, restricted, masquerades)
	servers.create = nil
	n.mustPass(web)
	if err := n.deliver(&sink.Changes{}, restrictedTo()); err != nil {
		t.Fatal(err)
	}
	check("without source ranges", true, frontends, masquerades)
	n.mustPass(web)
	servers.remove = unix.ENOMEM
	for range 2 {
		if failed, ok := sink.Acknowledged(n.remove(web)); !ok || failed[web.Key()] == nil {
			t.Error("the virtual servers were deleted")
		}
		check("deletion", false, frontends, restricted, masquerades)
	}
	servers.remove = nil
	if err := n.remove(web); err != nil {
		t.Fatal(err)
	}
	check("deleted", false)
}

// TestProgramNFTLoadsTable checks that nft can list the table and load the listing, as
// some Linux distributions do at shutdown and boot.
func TestProgramNFTLoadsTable(t *testing.T) {
	ns := netnstest.New(t)
	table := testTable(t, ns, Options{Options: backends.Options{MasqueradeOutsiders: true, PodInterfaces: []string{"cni0"}}})
	if err := table.create(someElements()); err != nil {
		t.Fatal(err)
	}
	const script = `nft list ruleset >"$1/before" && nft flush ruleset && nft -f "$1/before" && nft list ruleset | diff "$1/before" -`
	ns.Run(t, "sh", "-ec", script, "sh", t.TempDir())
}
