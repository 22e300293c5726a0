// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sourcelists

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

func prefixes(text string) (list []netip.Prefix) {
	for _, s := range strings.Fields(text) {
		list = append(list, netip.MustParsePrefix(s))
	}
	return list
}

// kernel is a model of the kernel's elements.
type kernel struct {
	t      *testing.T
	ranges map[string]bool
}

func (k *kernel) change(remove, add []Range) {
	k.t.Helper()
	for _, r := range remove {
		if !k.ranges[string(r.Key())] {
			k.t.Fatalf("the kernel does not have %v", r)
		}
		delete(k.ranges, string(r.Key()))
	}
	for _, r := range add {
		if k.ranges[string(r.Key())] {
			k.t.Fatalf("the kernel already has %v", r)
		}
		k.ranges[string(r.Key())] = true
	}
}

// list returns the ranges of a list.
func (k *kernel) list(number uint32) (list []netip.Prefix) {
	for key := range k.ranges {
		if r, ok := ParseKey([]byte(key)); !ok {
			k.t.Fatalf("%x is not the key of a range", key)
		} else if r.List == number {
			list = append(list, r.Prefix)
		}
	}
	slices.SortFunc(list, comparePrefixes)
	return list
}

var (
	v4 = netip.MustParseAddr("203.0.113.1")
	v6 = netip.MustParseAddr("2001:db8::1")
)

// frontend returns the frontend of a view at an address.
func frontend(view *api.View, addr netip.Addr) *nodeview.Frontend {
	for f := range nodeview.Frontends(view) {
		if f.Addr == addr && f.Sources.Restricted {
			return &f
		}
	}
	return nil
}

func viewOf(name string, ranges []netip.Prefix) *api.View {
	svc := &api.Service{Namespace: "default", Name: name, Type: api.LoadBalancer, Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 8080}}}
	svc.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:96::1"))
	svc.IPs.LoadBalancerIPs = api.NewIPSet(v4, v6)
	svc.SourceRanges = []api.SourceRanges{{TargetIPs: svc.IPs.LoadBalancerIPs, Prefixes: ranges}}
	return &api.View{Service: svc}
}

// world changes services with the steps of the package comment.
type world struct {
	t        *testing.T
	lists    *Lists
	kernel   kernel
	numbers  map[types.NamespacedName]map[netip.Addr]uint32 // in the kernel
	views    map[types.NamespacedName]*api.View
	elements int // added and removed so far
}

func newWorld(t *testing.T) *world {
	return &world{t, New(nil), kernel{t, map[string]bool{}}, map[types.NamespacedName]map[netip.Addr]uint32{}, map[types.NamespacedName]*api.View{}, 0}
}

func (w *world) change(remove, add []Range) {
	w.t.Helper()
	w.kernel.change(remove, add)
	w.elements += len(remove) + len(add)
}

// sync programs views together. The transaction of a service fails if the function fails
// returns true. The kernel refuses a list if the function refuses returns true.
func (w *world) sync(views map[types.NamespacedName]*api.View, fails func(types.NamespacedName) bool, refuses func() bool) {
	w.t.Helper()
	var changes []*Change
	numbers := map[types.NamespacedName]map[netip.Addr]uint32{}
	for key, view := range views {
		c := w.lists.Begin(key, w.views[key], view)
		changes = append(changes, c)
		numbers[key] = map[netip.Addr]uint32{}
		for _, addr := range []netip.Addr{v4, v6} {
			if view == nil {
				continue
			}
			numbers[key][addr] = c.Number(frontend(view, addr))
		}
	}
	failed := map[types.NamespacedName]bool{}
	err := w.lists.Fresh(5, func(chunks []Chunk) (written []bool, err error) {
		n := 0
		for _, c := range chunks {
			n += len(c.Ranges)
			if refused := refuses(); refused {
				written = append(written, false)
				for _, key := range c.Services {
					failed[key] = true
				}
				continue
			}
			w.change(nil, c.Ranges)
			written = append(written, true)
		}
		if n > 5 || n == 0 {
			w.t.Errorf("%d ranges are written together, want at most 5", n)
		}
		return written, nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, c := range changes {
		hasFailed := failed[c.Service] || fails(c.Service)
		if !hasFailed {
			w.change(c.Remove, c.Add)
			w.numbers[c.Service], w.views[c.Service] = numbers[c.Service], views[c.Service]
		}
		c.End(hasFailed)
	}
}

// check checks that each service has its ranges in the kernel.
func (w *world) check() {
	w.t.Helper()
	for key, view := range w.views {
		if view == nil {
			continue
		}
		for _, addr := range []netip.Addr{v4, v6} {
			f := frontend(view, addr)
			if f == nil {
				w.t.Fatalf("%s has no restricted frontend at %s", key.Name, addr)
			}
			if n := w.lists.Of(key, f); n != w.numbers[key][addr] {
				w.t.Errorf("%s: the list at %s has the number %x, want %x", key.Name, addr, n, w.numbers[key][addr])
			}
			var want []netip.Prefix
			ranges := NewRanges(f.Family, f.Sources.Ranges)
			for i := range ranges.Len() {
				want = append(want, ranges.at(i))
			}
			if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(w.kernel.list(w.numbers[key][addr]))); diff != "" {
				w.t.Errorf("%s: the ranges at %s (-want +got):\n%s", key.Name, addr, diff)
			}
		}
	}
}

func (w *world) reap(n int) int {
	w.t.Helper()
	ranges := w.lists.Reap(n)
	w.change(ranges, nil)
	return len(ranges)
}

func never(types.NamespacedName) bool { return false }

func noRefusal() bool { return false }

func key(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

// TestListsFollowServices changes services at random. Some of the changes fail. Each
// service must have its ranges at each time, and finally no range may be left.
func TestListsFollowServices(t *testing.T) {
	pool := prefixes("10.0.0.0/8 10.0.0.0/9 10.128.0.0/9 10.1.0.0/16 10.1.0.0/24 192.0.2.0/24 192.0.2.1/32 128.0.0.0/1 ::/1 fd00::/8 fd00::/64 fd00::1/128 2001:db8::/32")
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			w := newWorld(t)
			for range 100 {
				views := map[types.NamespacedName]*api.View{}
				for range 1 + rng.IntN(4) {
					name := fmt.Sprint("svc-", rng.IntN(5))
					views[key(name)] = nil
					if rng.IntN(4) > 0 {
						chosen := slices.Clone(pool)
						rng.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
						views[key(name)] = viewOf(name, chosen[:rng.IntN(len(chosen))])
					}
				}
				w.sync(views, func(types.NamespacedName) bool { return rng.IntN(8) == 0 }, func() bool { return rng.IntN(8) == 0 })
				w.check()
				if rng.IntN(3) == 0 {
					w.reap(rng.IntN(20))
					w.check()
				}
				if rng.IntN(20) == 0 { // a new pass
					w.lists.EndPass()
					lists := New(nil)
					numbers := map[uint32]api.Family{}
					for _, byAddr := range w.numbers {
						for addr, number := range byAddr {
							numbers[number] = api.FamilyOf(addr)
						}
					}
					for k := range w.kernel.ranges {
						r, _ := ParseKey([]byte(k))
						numbers[r.List] = api.FamilyOf(r.Prefix.Addr())
					}
					for number, family := range numbers {
						lists.Found(number, family, w.kernel.list(number))
					}
					w.lists = lists
					views := maps.Clone(w.views)
					clear(w.views)
					before := w.elements
					w.sync(views, never, noRefusal)
					if w.elements != before {
						t.Errorf("a pass without changes writes %d ranges", w.elements-before)
					}
					if rng.IntN(2) == 0 {
						w.lists.EndPass()
					}
					w.check()
				}
			}
			views := map[types.NamespacedName]*api.View{}
			for key := range w.views {
				views[key] = nil
			}
			w.sync(views, never, noRefusal)
			w.lists.EndPass()
			for w.reap(7) > 0 {
			}
			if len(w.kernel.ranges)+len(w.lists.byNumber)+len(w.lists.byRanges)+w.lists.Unused() > 0 {
				t.Errorf("without services, %d ranges and %d lists are left, and %d ranges count as unused",
					len(w.kernel.ranges), len(w.lists.byNumber), w.lists.Unused())
			}
		})
	}
}

// TestAListEndsWithItsFrontends uses a frontend with source ranges. The service loses this
// frontend to another service, and gets it back.
func TestAListEndsWithItsFrontends(t *testing.T) {
	l := New(nil)
	view := viewOf("a", prefixes("192.0.2.0/24 2001:db8::/64"))
	without := &api.View{Service: view.Service, Lost: []api.LostClaim{{Claim: frontend(view, v4).Claim()}}}
	change := func(from, to *api.View, failed bool) {
		t.Helper()
		c := l.Begin(view.Key(), from, to)
		for _, addr := range []netip.Addr{v4, v6} {
			if f := frontend(to, addr); f != nil {
				c.Number(f)
			}
		}
		if err := l.Fresh(5, func(chunks []Chunk) ([]bool, error) { return []bool{true, true}[:len(chunks)], nil }); err != nil {
			t.Fatal(err)
		}
		c.End(failed)
	}
	check := func(unused int, hasList bool) {
		t.Helper()
		if got := l.Unused(); got != unused {
			t.Errorf("%d ranges are unused, want %d", got, unused)
		}
		if got := l.Of(view.Key(), frontend(view, v4)) != 0; got != hasList {
			t.Errorf("the address has a list: %t, want %t", got, hasList)
		}
	}
	change(nil, view, false)
	change(view, without, false)
	check(1, false)
	change(without, view, true)
	check(1, false)
	change(without, view, false)
	check(0, true)
}

// TestAListIsWrittenAfterAnError checks that a list is written after an error. If the kernel
// lacks the list because of the error, the next delivery of the service writes it.
func TestAListIsWrittenAfterAnError(t *testing.T) {
	l := New(nil)
	view := viewOf("web", prefixes("192.0.2.0/24"))
	for _, refused := range []error{errors.New("refused"), nil} {
		c := l.Begin(view.Key(), nil, view)
		c.Number(frontend(view, v4))
		var written []Range
		err := l.Fresh(5, func(chunks []Chunk) ([]bool, error) {
			for _, c := range chunks {
				written = append(written, c.Ranges...)
			}
			return make([]bool, len(chunks)), refused
		})
		c.End(err != nil)
		if !errors.Is(err, refused) || len(written) != 1 {
			t.Errorf("error %v, %d ranges are written, want one", err, len(written))
		}
	}
}

// TestAChangeOfARangeWritesOneElement checks how many elements each change writes.
func TestAChangeOfARangeWritesOneElement(t *testing.T) {
	var many []netip.Prefix
	for i := range 3000 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	w := newWorld(t)
	sync := func(want int, views ...*api.View) {
		t.Helper()
		all := map[types.NamespacedName]*api.View{}
		for _, v := range views {
			all[v.Key()] = v
		}
		before := w.elements
		w.sync(all, never, noRefusal)
		w.check()
		for w.reap(1000) > 0 {
		}
		if got := w.elements - before; got != want {
			t.Errorf("the change writes %d elements, want %d", got, want)
		}
	}
	sync(3000, viewOf("a", many), viewOf("b", slices.Concat(many[1:], many[:1])))
	sync(0, viewOf("c", many))
	sync(2999, viewOf("a", many[1:])) // the other services keep the list
	sync(1, viewOf("a", many[2:]))    // this list belongs to one service
	sync(2998, viewOf("a", many))     // the service uses the common list instead of its own list
	sync(0, viewOf("b", nil))
	sync(0, viewOf("c", nil))
	sync(2, viewOf("a", append(slices.Clone(many[1:]), netip.MustParsePrefix("192.0.2.0/24"))))
	// A source in 10.0.2.0/24 must find a range at each time, so the list is replaced.
	sync(2*3000-1, viewOf("a", append(slices.Clone(many[3:]), netip.MustParsePrefix("10.0.2.0/23"), netip.MustParsePrefix("192.0.2.0/24"))))
}
