// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/maglev"
	"github.com/kpng-project/kpng/sink"
)

func hex(n uint64) string { return fmt.Sprintf("%#x", n) }

// planned returns the plan of a view, and the names of its groups.
func planned(v *api.View) (*plan, *dataplane) {
	o := options{public: Options{Bridge: "b"}}
	if err := o.complete(); err != nil {
		panic(err)
	}
	d := newDataplane(&o)
	d.numbers = d.newNumbers()
	return d.planner.mustPlan(v), d
}

// mustPlan returns the plan of a view. It fails the test if the view needs too many
// groups.
func (p *planner) mustPlan(v *api.View) *plan {
	out, err := p.plan(v)
	if err != nil {
		panic(err)
	}
	return out
}

// addresses returns n addresses for which keep returns true.
func addresses(n int, keep func(netip.Addr) bool) (all []string) {
	for i := uint32(10<<24 + 245<<16); len(all) < n; i++ {
		a := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, i)))
		if keep == nil || keep(a) {
			all = append(all, a.String())
		}
	}
	return all
}

// TestNoAddressesMakeLargeGroups checks that Open vSwitch can list all groups. It also
// checks that all endpoints get equal shares.
func TestNoAddressesMakeLargeGroups(t *testing.T) {
	// A tenant has chosen addresses with equal bits of a hash without a key.
	chosen := addresses(1000, func(a netip.Addr) bool {
		h := fnv.New64a()
		h.Write(binary.BigEndian.AppendUint16(a.AsSlice(), 8080))
		return h.Sum64()>>1%8 == 0
	})
	sameSlot := addresses(maxBuckets+1, func(a netip.Addr) bool {
		return maglev.Hash([]byte(netip.AddrPortFrom(a, 8080).String()))>>32%maxBuckets == 1
	})
	for name, endpoints := range map[string][]string{
		"same slot": sameSlot,
		"256":       addresses(256, nil), "257": addresses(257, nil), "1000": addresses(1000, nil), "chosen": chosen,
		"more than groups of groups can have": addresses(maxBuckets*maxBuckets+1, nil),
		"IPv6":                                ipv6Addresses(300),
	} {
		t.Run(name, func(t *testing.T) {
			ip := "10.96.0.1"
			if strings.Contains(endpoints[0], ":") {
				ip = "fd00:10:96::1"
			}
			p, _ := planned(view("web", ip, endpoints, withAffinity))
			hashed, _ := planned(view("web", ip, endpoints, func(s *api.Service) { s.Algorithm = api.HashClient }))
			for id, g := range hashed.groups {
				if len(g.buckets) > maxBuckets {
					t.Errorf("group %#x of the hashed service has %d buckets", id, len(g.buckets))
				}
			}
			used := map[uint32]bool{}
			for id, g := range p.groups {
				buckets, size := g.buckets, 0
				for _, b := range buckets {
					size += 24 + len(b.Actions)
					for part := range openflow.Numbers(b.Actions) {
						used[part] = true
					}
				}
				if len(buckets) > maxBuckets || size > math.MaxUint16/2 {
					t.Errorf("group %#x has %d buckets of %d bytes", id, len(buckets), size)
				}
			}
			shares := map[openflow.Actions]float64{}
			var visit func(id uint32, share float64)
			visit = func(id uint32, share float64) {
				for _, b := range p.groups[id].buckets {
					share := share / float64(len(p.groups[id].buckets))
					group := false
					for part := range openflow.Numbers(b.Actions) {
						if _, group = p.groups[part]; group {
							visit(part, share)
						}
					}
					if !group {
						shares[b.Actions] += share * float64(len(endpoints))
					}
				}
			}
			for id, g := range p.groups {
				if !used[id] && len(g.buckets) > 0 {
					visit(id, 1)
				}
			}
			if len(shares) != len(endpoints) {
				t.Fatalf("%d endpoints, want %d", len(shares), len(endpoints))
			}
			for b, share := range shares {
				if share < 0.98 || share > 1.02 {
					t.Fatalf("endpoint %x gets %.3f of a fair share", b, share)
				}
			}
		})
	}
}

func ipv6Addresses(n int) (all []string) {
	for i := range n {
		a := [16]byte{0xfd, 14: byte(i >> 8), 15: byte(i)}
		all = append(all, netip.AddrFrom16(a).String())
	}
	return all
}

// TestEndpointsMoveLittle checks that a change of an endpoint of a large service changes few
// buckets.
func TestEndpointsMoveLittle(t *testing.T) {
	n := newNode(t)
	endpoints := addresses(2000, nil)
	n.mustPass(view("web", "10.96.0.1", endpoints))
	bucketsOf := func() map[string]bool {
		all := map[string]bool{}
		for id, g := range n.backend.dataplane.groups {
			for _, b := range g.buckets {
				all[string(binary.BigEndian.AppendUint32(nil, id))+string(b.Actions)] = true
			}
		}
		return all
	}
	before := bucketsOf()
	n.mustSync(view("web", "10.96.0.1", slices.Delete(endpoints, 0, 1)))
	n.mustMatch()
	changed := 0
	for b := range bucketsOf() {
		if !before[b] {
			changed++
		}
	}
	if changed > 8 {
		t.Errorf("%d of 2000 buckets changed", changed)
	}
}

// TestServicesNeverShareNumbers uses two services whose names have the same hash without a
// key. If one loses its session affinity, the clients of the other keep their endpoints.
func TestServicesNeverShareNumbers(t *testing.T) {
	const evil = "swsnxumb" // has the same FNV-32a hash of namespace, name and port as "affine"
	n := newNode(t)
	victim := view("affine", "10.96.0.1", []string{"!10.244.1.1", "10.244.2.1"}, withAffinity)
	n.mustPass(victim, view(evil, "10.96.0.66", []string{"10.244.2.9"}, withAffinity))
	d := n.backend.dataplane
	service := d.numbers.of[name{service: key("affine"), part: wholeService}]
	flow := "table=107,priority=10,idle_timeout=100,ip,nw_src=203.0.113.1"
	n.Ofctl(t, "add-flow", "cookie="+hex(d.opts.learnedCookies(service).Value)+","+flow+",reg2="+hex(uint64(service))+",reg3=0x10050 actions=drop")
	learned := func() int { return strings.Count(n.Ofctl(t, "dump-flows", "table=107"), "203.0.113.1") }
	n.mustSync(view(evil, "10.96.0.66", []string{"10.244.2.9"}))
	if learned() != 1 {
		t.Error("a client lost its endpoint because another service lost its affinity")
	}
	n.mustSync(view("affine", "10.96.0.1", []string{"!10.244.1.1", "10.244.2.1"}))
	if learned() != 0 {
		t.Error("a client keeps its endpoint although the service lost its affinity")
	}
}

// TestNumbersSurviveRestarts restarts the backend while services are added and deleted. A
// service that the new backend has not seen yet must keep its groups.
func TestNumbersSurviveRestarts(t *testing.T) {
	n := newNode(t)
	service := func(name string, octet string) *api.View {
		return view(name, "10.96.0."+octet, []string{"10.244.2." + octet}, withAffinity)
	}
	a, b, c := service("a", "1"), service("b", "2"), service("c", "3")
	n.mustPass(a, b)
	want := n.Listing(t)
	n.restart(t)
	// The pass begins with a new service.
	if err := n.sync(sink.Changes{First: true, NodeChanged: true}, "", c); err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(want, "\n") {
		if !strings.Contains(n.Listing(t), line) {
			t.Errorf("a new service changed %s", line)
		}
	}
	if err := n.sync(sink.Changes{}, "c", b); err != nil {
		t.Fatal(err)
	}
	if err := n.sync(sink.Changes{Last: true}, "", a); err != nil {
		t.Fatal(err)
	}
	n.mustMatch()
	n.mustBe(want)
}

// TestLowNumbersAreUsedFirst checks that new groups get low numbers although a group has a
// high number. Each pass visits all numbers below the highest one, and without records, the
// backend finds only low numbers.
func TestLowNumbersAreUsedFirst(t *testing.T) {
	_, d := planned(view("web", "10.96.0.1", []string{"10.244.2.1"}))
	first := d.opts.firstGroup()
	d.groups = map[uint32]*group{first + 1: {seed: 1}, first + groupCount/2: {seed: 2}, first + groupCount: {seed: 3}}
	d.numbers = d.newNumbers()
	for i, want := range []uint32{first, first + 2, first + 3} {
		if got := d.numberOf(name{part: i}); got != want {
			t.Errorf("number %d is %#x, want %#x", i, got, want)
		}
	}
}

// TestNumbersAreNotReusedWhileTheSwitchHasThem checks the allocation of numbers.
func TestNumbersAreNotReusedWhileTheSwitchHasThem(t *testing.T) {
	_, d := planned(view("web", "10.96.0.1", []string{"10.244.2.1"}))
	names := func(service string) name { return name{service: key(service)} }
	a := d.numberOf(names("a"))
	d.groups = map[uint32]*group{a: {seed: names("a").seed()}}
	d.numbers.release(a, true)
	if b := d.numberOf(names("b")); b == a {
		t.Error("a number is used again although the switch has its group")
	}
	d.numbers.deleted(a, d.groups[a].seed)
	delete(d.groups, a)
	if c := d.numberOf(names("c")); c != a {
		t.Errorf("%#x is not used again", a)
	}
	if again := d.numberOf(names("a")); again == a {
		t.Error("two names have one number")
	}
}

// TestServicesWithoutNumbersFail uses more lists than there are IDs of groups.
func TestServicesWithoutNumbersFail(t *testing.T) {
	n := newNode(t, func(o *options) { o.groupCount = 1 })
	a, b := view("a", "10.96.0.1", []string{"10.244.2.1"}), view("b", "10.96.0.2", []string{"10.244.2.2"})
	n.mustPass()
	err := n.sync(sink.Changes{}, "", a, b)
	failed, ok := sink.Acknowledged(err)
	if !ok || len(failed) != 1 || !errors.Is(failed[key("b")], errNumbers) {
		t.Fatalf("error %v, want that only service b fails, because it gets no number", err)
	}
	if err := n.sync(sink.Changes{}, "a"); err != nil {
		t.Fatal(err)
	}
	n.mustSync(b)
	n.mustMatch()
}

// TestABridgeHasOneOwner names the directory of the bridge in two ways.
func TestABridgeHasOneOwner(t *testing.T) {
	dir, link := t.TempDir(), filepath.Join(t.TempDir(), "run")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	own := func(runDir string) (release func(), err error) {
		b, err := newBackend(options{public: Options{Bridge: "br0", RunDir: runDir}})
		if err != nil {
			t.Fatal(err)
		}
		return b.own(t.Context())()
	}
	release, err := own(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if release, err := own(link); !errors.Is(err, sink.ErrOwned) {
		t.Errorf("second owner: %v", err)
		release()
	}
}

func TestOptions(t *testing.T) {
	for name, test := range map[string]struct {
		options Options
		want    string
	}{
		"valid":                 {Options{Bridge: "b"}, ""},
		"the highest priority":  {Options{Bridge: "b", Priority: 65533}, ""},
		"too high a priority":   {Options{Bridge: "b", Priority: 65534}, "priority 65534"},
		"no bridge":             {Options{}, "bridge"},
		"tables that are taken": {Options{Bridge: "b", FirstTable: 250}, "tables 250"},
		"an own table":          {Options{Bridge: "b", OutTable: 105}, "table 105"},
		"one zone":              {Options{Bridge: "b", Zone: 7, MasqueradeZone: 7}, "zone 7"},
		"one address twice":     {Options{Bridge: "b", MasqueradeAddresses: nodeAddrs, HairpinAddresses: nodeAddrs}, "192.168.1.2"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := newBackend(options{public: test.options})
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}
