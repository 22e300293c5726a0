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
	"time"

	"github.com/google/nftables"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nftrule"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

func testTable(t *testing.T, ns *netnstest.Namespace, opts Options) *table {
	t.Helper()
	opts.NetNS = ns.FD
	if err := opts.complete(); err != nil {
		t.Fatal(err)
	}
	table, err := newTable(&opts, socketBuffer)
	if err != nil {
		t.Fatal(err)
	}
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
				e.value = string(nftrule.Native(0x1ff))
			case redirects, healthChecks:
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
		if e.set.kind == redirects && e.target() != id("10.96.0.1:8080", api.TCP) && e.target() != id("[fd00::1]:8080", api.TCP) {
			t.Errorf("target of %v is %s", e, e.target())
		}
	}
}

func TestChangedTableIsDetectedAndKeepsElements(t *testing.T) {
	for name, change := range map[string]func(c *nftables.Conn, t *table){
		"a rule was added": func(c *nftables.Conn, t *table) {
			rule := t.chains()[0].rules[0]
			c.AddRule(&nftables.Rule{Table: t.table(), Chain: t.chains()[0].Chain, Exprs: rule})
		},
		"a chain was emptied": func(c *nftables.Conn, t *table) { c.FlushChain(t.chains()[0].Chain) },
		"a set was replaced": func(c *nftables.Conn, t *table) {
			for _, chain := range t.chains() {
				c.FlushChain(chain.Chain)
			}
			set := setID{drops, api.IPv4}.set(t.table())
			c.DelSet(set)
			set.KeyType = nftables.TypeIPAddr
			c.AddSet(set, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			table := testTable(t, netnstest.New(t), Options{})
			if err := table.create(someElements()); err != nil {
				t.Fatal(err)
			}
			change(table.nft, table)
			if err := table.nft.Flush(); err != nil {
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
	const buffer = 256 << 10
	d := newDataplane(&Options{Options: backends.Options{NetNS: ns.FD, MasqueradeMark: 1}})
	var err error
	if d.table, err = newTable(d.opts, buffer); err != nil {
		t.Fatal(err)
	}
	d.elements, d.unused = map[element]bool{}, map[element]bool{}
	for i := range buffer / 10 {
		from := netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 8), 15: byte(i)})
		d.elements[element{set: setID{hairpins, api.IPv6}, key: addrKey(from) + frontendKey(serverID{netip.AddrPortFrom(from, 80), api.TCP})}] = true
	}
	d.elements[id("10.96.0.1:80", api.TCP).element()] = true
	if err := d.table.create(d.elements); err != nil {
		t.Fatal(err)
	}
	if err := d.compareTable(t.Context()); err != nil {
		t.Error(err)
	}
	maps.Copy(d.unused, d.elements)
	delete(d.unused, id("10.96.0.1:80", api.TCP).element())
	if err := d.deleteUnused(); err != nil || len(d.unused) > 0 {
		t.Errorf("%d elements were not deleted: %v", len(d.unused), err)
	}
	if elements, err := d.table.read(t.Context()); err != nil || len(elements) != 1 {
		t.Errorf("the table has %d elements (%v), want 1", len(elements), err)
	}
}

// TestCleanupKeepsTableOfLocalAddresses checks that the table still refuses packets if the
// interface cannot be deleted.
func TestCleanupKeepsTableOfLocalAddresses(t *testing.T) {
	d := newDataplane(&Options{Options: backends.Options{NetNS: netnstest.New(t).FD, MasqueradeMark: 1}})
	table := testTable(t, &netnstest.Namespace{FD: d.opts.NetNS}, Options{})
	if err := table.create(nil); err != nil {
		t.Fatal(err)
	}
	const notOpen = 1 << 20
	d.local.(*localAddresses).netNS = notOpen
	if err := d.cleanup(t.Context()); err == nil {
		t.Error("the interface was deleted")
	}
	if exists, err := table.exists(); err != nil || !exists {
		t.Errorf("the table exists: %t (%v)", exists, err)
	}
}

// TestCleanupKeepsTableOfVirtualServers checks that the table still checks source ranges
// and masquerades if virtual servers cannot be deleted.
func TestCleanupKeepsTableOfVirtualServers(t *testing.T) {
	d := newDataplane(&Options{Options: backends.Options{NetNS: netnstest.New(t).FD, MasqueradeMark: 1}})
	table := testTable(t, &netnstest.Namespace{FD: d.opts.NetNS}, Options{})
	if err := table.create(nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.cleanup(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("clean-up with a cancelled context returns %v", err)
	}
	if exists, err := table.exists(); err != nil || !exists {
		t.Errorf("the table exists: %t (%v)", exists, err)
	}
}

// TestChangedTableGetsRecordedElements checks that the backend can create a table again
// after another program has changed its elements and its chains. The elements of the
// other program exclude recorded elements, so the kernel would refuse all of them
// together.
func TestChangedTableGetsRecordedElements(t *testing.T) {
	d := newDataplane(&Options{})
	d.table = testTable(t, netnstest.New(t), Options{})
	d.elements = someElements()
	if err := d.table.create(d.elements); err != nil {
		t.Fatal(err)
	}
	for e := range d.elements {
		if e.set != (setID{redirects, api.IPv4}) {
			continue
		}
		other := e
		other.value = addrKey(netip.MustParseAddr("10.9.9.9")) + portKey(1)
		if err := d.table.change([]element{e}, []element{other}); err != nil {
			t.Fatal(err)
		}
	}
	d.table.nft.FlushChain(d.table.chains()[0].Chain)
	if err := d.table.nft.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.readTable(t.Context()); err != nil {
		t.Fatal(err)
	}
	if elements, err := d.table.read(t.Context()); err != nil || !maps.Equal(elements, d.elements) {
		t.Errorf("the new table has %d elements (%v), want %d", len(elements), err, len(d.elements))
	}
}

// TestFailedEndOfPassKeepsBackoff checks that a pass which does not end does not delay
// the next pass.
func TestFailedEndOfPassKeepsBackoff(t *testing.T) {
	b := &backend{machineAddresses: nodeaddr.Of()}
	b.tasks.Addresses = nodeaddr.Of()
	d := newDataplane(&b.opts)
	b.dataplane = d
	d.table = testTable(t, netnstest.New(t), Options{}) // the table does not exist, so changes fail
	d.elements, d.servers, d.unused = map[element]bool{}, map[serverID]*server{}, map[element]bool{}
	d.plans, d.refs, d.claims = map[types.NamespacedName]*plan{}, map[element]int{}, map[serverID]claim{}
	d.known, d.leftovers.Exist = true, true
	d.leftovers.RecordPass(time.Now(), true)
	before := d.leftovers
	web := view([]string{"!10.1.0.1"}, nil)
	err := b.program(t.Context(), &sink.Changes{Last: true, Services: slices.Values([]sink.Change{{Key: web.Key(), New: web}})})
	if !errors.Is(err, sink.ErrStartOver) {
		t.Fatalf("Sync returned %v", err)
	}
	if d.leftovers != before {
		t.Errorf("leftovers %+v after a pass that did not end, want %+v", d.leftovers, before)
	}
}

// dataplaneWithTable returns a dataplane whose table has the elements of someElements.
func dataplaneWithTable(t *testing.T) (*dataplane, *netnstest.Namespace) {
	ns := netnstest.New(t)
	d := newDataplane(&Options{Options: backends.Options{NetNS: ns.FD}})
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
	refused := element{set: setID{redirects, api.IPv4}, key: frontendKey(id("10.96.0.1:80", api.TCP)), value: addrKey(netip.MustParseAddr("10.9.9.9")) + portKey(1)}
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
// after a change of nf_tables. It also checks that a context can interrupt a comparison,
// but not always.
func TestComparisonReadsTableOnlyAfterChanges(t *testing.T) {
	d, ns := dataplaneWithTable(t)
	if err := d.local.(*localAddresses).connect(); err != nil {
		t.Fatal(err)
	}
	defer d.close()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for range maxInterrupted {
		if err := d.compare(cancelled); !errors.Is(err, context.Canceled) || !d.known || d.compared != 0 {
			t.Errorf("a cancelled comparison returns %v", err)
		}
	}
	if d.compare(cancelled); d.compared == 0 {
		t.Error("each comparison of the table was interrupted")
	}
	if err := d.compareTable(cancelled); err != nil {
		t.Errorf("without a change, the table was read: %v", err)
	}
	ns.Run(t, "nft", "add", "table", "ip", "other")
	if err := d.compareTable(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("after a change of another table, the comparison returns %v", err)
	}
	if err := d.compareTable(t.Context()); err != nil {
		t.Error(err)
	}
	if err := d.table.change([]element{id("10.96.0.1:80", api.TCP).element()}, nil); err != nil {
		t.Fatal(err)
	}
	if err := d.compareTable(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("after a change of the table, the comparison returns %v", err)
	}
}

// TestOrderOfElementsAndServers checks the table while the virtual server of a cluster IP
// does not exist: the table must neither accept packets to that IP nor redirect packets
// to it. Packets reach IPVS at an address of the machine even without elements. Therefore
// the table must check packets to such an address before the virtual server is created,
// and until the virtual server is deleted.
func TestOrderOfElementsAndServers(t *testing.T) {
	const notOpen = 1 << 20
	d := newDataplane(&Options{Options: backends.Options{NetNS: notOpen}, Scheduler: "rr"}) // deletions of virtual servers fail
	d.table = testTable(t, netnstest.New(t), Options{})
	if err := d.table.create(nil); err != nil {
		t.Fatal(err)
	}
	d.elements, d.servers, d.unused = map[element]bool{}, map[serverID]*server{}, map[element]bool{}
	d.plans, d.refs, d.claims = map[types.NamespacedName]*plan{}, map[element]int{}, map[serverID]claim{}
	d.planner.machineAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	web := view([]string{"10.1.0.1"}, func(s *api.Service) {
		s.Type, s.ExternalTrafficToLocal = api.LoadBalancer, true
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"))
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}}}
	})
	at, atMachine := id("10.96.0.1:80", api.TCP), id("192.0.2.1:80", api.TCP)
	p, err := d.planner.plan(web, testList)
	if err != nil {
		t.Fatal(err)
	}
	plans := map[types.NamespacedName]*plan{web.Key(): p}
	list := string(nftrule.Native(testList(nil)))
	checkMachine := func(step string, elements map[element]bool) {
		t.Helper()
		key := atMachine.element().key
		for kind, value := range map[setKind]string{frontends: "", restricted: list, nodeMasquerades: "", drops: ""} {
			if !elements[element{set: setID{kind, api.IPv4}, key: key, value: value}] {
				t.Errorf("%s: the set %s lacks the address of the machine", step, setNames[kind])
			}
		}
	}
	for _, step := range []struct {
		name   string
		change func() error
		want   bool
	}{
		{"before the virtual server is created", func() error { return d.addElements(plans, nil) }, false},
		{"after a failure to create it", func() error { return d.acceptPackets(plans) }, false},
		{"after its creation", func() error { d.servers[at] = &server{}; return d.acceptPackets(plans) }, true},
		{"when it exists already", func() error { return d.addElements(plans, nil) }, true},
		{"before it is created again", func() error { delete(d.servers, at); return d.addElements(plans, nil) }, false},
	} {
		if err := step.change(); err != nil {
			t.Fatal(err)
		}
		elements, err := d.table.read(t.Context())
		if err != nil || elements[at.element()] != step.want || !elements[addressElement(at.Addr())] {
			t.Errorf("%s: elements %v (%v), packets accepted: want %t", step.name, elements, err, step.want)
		}
		if redirect := slices.ContainsFunc(slices.Collect(maps.Keys(elements)), func(e element) bool { return e.set.kind == redirects }); redirect != step.want {
			t.Errorf("%s: packets are redirected to the cluster IP: %t, want %t", step.name, redirect, step.want)
		}
		checkMachine(step.name, elements)
	}

	// Without source ranges, the table admits all sources immediately.
	d.servers[at], d.servers[atMachine] = &server{}, &server{}
	restriction := element{set: setID{restricted, api.IPv4}, key: atMachine.element().key, value: list}
	web.Service.SourceRanges = nil
	unrestricted, err := d.planner.plan(web, testList)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.addElements(map[types.NamespacedName]*plan{web.Key(): unrestricted}, nil); err != nil {
		t.Fatal(err)
	}
	if elements, err := d.table.read(t.Context()); err != nil || elements[restriction] {
		t.Errorf("without source ranges, the table checks sources: %t (%v)", elements[restriction], err)
	}
	if err := d.addElements(plans, nil); err != nil {
		t.Fatal(err)
	}
	if err := d.acceptPackets(plans); err != nil {
		t.Fatal(err)
	}
	if err := d.addElements(map[types.NamespacedName]*plan{web.Key(): {}}, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.deleteUnused(); err == nil {
			t.Error("the virtual servers were deleted")
		}
		elements, err := d.table.read(t.Context())
		if err != nil || elements[at.element()] {
			t.Errorf("the table accepts packets to a cluster IP that is being deleted (%v)", err)
		}
		checkMachine("deletion", elements)
	}
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
