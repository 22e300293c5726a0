// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/sink"
)

// large returns the view of a service with these numbers of ports, external IPs and
// endpoints. Every second port is a UDP port.
func large(name string, ports, externalIPs, endpoints int, edits ...func(*api.Service)) *api.View {
	var addrs []string
	for i := range endpoints {
		addrs = append(addrs, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String())
	}
	edit := func(s *api.Service) {
		s.Ports = nil
		for i := range ports {
			p := api.PortMapping{Name: fmt.Sprint("p", i), Protocol: api.TCP, Port: int32(i + 1), TargetPort: 8080}
			if i%2 == 1 {
				p.Protocol = api.UDP
			}
			s.Ports = append(s.Ports, p)
		}
		s.IPs.ExternalIPs = apitest.IPs("192.0.0.0", externalIPs)
		for _, e := range edits {
			e(s)
		}
	}
	return view(name, []string{"10.96.0.1"}, addrs, edit)
}

// counts has the numbers of elements that a step wrote to the tables, and the numbers of
// elements that it deleted.
type counts struct{ frontends, slots, members, deleted int }

func (k *fakeKernel) counts() counts {
	return counts{k.frontends.written, k.slots.written, k.members.written, k.frontends.deleted + k.slots.deleted + k.members.deleted}
}

// written returns the counts of a Sync.
func (k *fakeKernel) written(c sink.Changes, views ...*api.View) counts {
	k.t.Helper()
	all := map[string]*api.View{}
	for _, v := range views {
		all[v.Service.Name] = v
	}
	return k.step(func() error { return k.sync(k.t.Context(), changesOf(c, all)) })
}

func (k *fakeKernel) step(f func() error) counts {
	k.t.Helper()
	before := k.counts()
	if err := f(); err != nil {
		k.t.Fatal(err)
	}
	now := k.counts()
	return counts{now.frontends - before.frontends, now.slots - before.slots, now.members - before.members, now.deleted - before.deleted}
}

func (k *fakeKernel) mustWrite(step string, got, want counts) {
	k.t.Helper()
	if got != want {
		k.t.Errorf("%s: %+v, want %+v", step, got, want)
	}
}

// uncheckedKernel returns a fake kernel of the default size that does not check each write,
// because a check takes time in proportion to the tables.
func uncheckedKernel(t *testing.T) *fakeKernel {
	k := newFakeKernel(t, 1<<18, 1<<20, 1<<18)
	k.frontends.check, k.slots.check, k.members.check = func() {}, func() {}, func() {}
	return k
}

// TestElementsAreFrontendsPlusLists checks that an endpoint is written once for all ports
// that lead to it, also by an update, a restart and a deletion.
func TestElementsAreFrontendsPlusLists(t *testing.T) {
	const ports, endpoints, ips = 50, 100, 21 // one cluster IP, and external IPs
	pass := sink.Changes{First: true, Last: true}
	k := uncheckedKernel(t)
	web := large("web", ports, ips-1, endpoints)
	k.mustWrite("load", k.written(pass, web), counts{ports * ips, endpoints, endpoints, 0})
	k.mustWrite("change without a difference", k.written(sink.Changes{}, web), counts{})
	k.mustWrite("lose an endpoint", k.written(sink.Changes{}, large("web", ports, ips-1, endpoints-1)),
		counts{ports * ips, endpoints - 1, endpoints - 1, 2 * endpoints})
	k.mustWrite("get it again", k.written(sink.Changes{}, web), counts{ports * ips, endpoints, endpoints, 2 * (endpoints - 1)})
	k.mustWrite("get a port", k.written(sink.Changes{}, large("web", ports+1, ips-1, endpoints)), counts{ips, 0, 0, 0})
	k.mustWrite("lose a port", k.written(sink.Changes{}, web), counts{0, 0, 0, ips})
	k.restart()
	k.mustWrite("restart", k.written(pass, web), counts{})
	k.mustHave(map[string]*api.View{"web": web})
	k.mustWrite("delete", k.step(func() error {
		return k.sync(t.Context(), changesOf(sink.Changes{}, map[string]*api.View{"web": nil}))
	}), counts{deleted: ports*ips + 2*endpoints})
}

// TestListsOfEarlierVersionsAreMerged starts with maps in which each frontend has a list of
// its own. The first pass must not remove a list while a frontend needs it.
func TestListsOfEarlierVersionsAreMerged(t *testing.T) {
	k := newFakeKernel(t, 100, 1000, 1000)
	web := large("web", 6, 0, 3)
	k.written(sink.Changes{First: true, Last: true}, web)
	slots, members := k.slots.elements, k.members.elements
	k.slots.elements, k.members.elements = map[slotKey]address{}, map[memberKey]uint32{}
	next := uint64(1)
	for f, l := range k.frontends.elements {
		for i := range l.Count {
			k.slots.elements[slotKey{List: next, Index: i}] = slots[slotKey{List: l.ID, Index: i}]
		}
		for m := range members {
			if f.Protocol == api.UDP.Number() {
				k.members.elements[memberKey{List: next, Endpoint: m.Endpoint}] = 0
			}
		}
		k.frontends.elements[f] = list{ID: next, Count: l.Count}
		next++
	}
	k.restart()
	k.written(sink.Changes{First: true, Last: true}, web)
	k.mustHave(map[string]*api.View{"web": web})
	k.mustWrite("another pass", k.written(sink.Changes{First: true, Last: true}, web), counts{})
}

// TestOneServiceCannotFillTheMaps checks that the other sink handles a service that needs
// more than its share of a map, and that other services do not change.
func TestOneServiceCannotFillTheMaps(t *testing.T) {
	other := view("other", []string{"10.96.0.2"}, []string{"10.0.0.1"}, nil)
	for name, test := range map[string]struct {
		fits, tooLarge *api.View
		reason         string
	}{
		"ports":     {large("web", 64, 0, 1), large("web", 65, 0, 1), "it needs more than 64 elements of map frontends, the share of a service"},
		"endpoints": {large("web", 1, 0, 64), large("web", 1, 0, 65), "it needs more than 64 elements of map slots, the share of a service"},
		"members": {
			large("web", 1, 0, 32, withAffinity(1)), large("web", 1, 0, 33, withAffinity(1)),
			"it needs more than 32 elements of map members, the share of a service",
		},
	} {
		k := newFakeKernel(t, 512, 512, 512)
		k.share = size{64, 64, 64}
		if name == "members" {
			k.share.members = 32
		}
		k.restart()
		all := map[string]*api.View{"other": other, "web": test.fits}
		k.written(sink.Changes{First: true, Last: true}, other, test.fits)
		if k.usage().servicesLeft != 0 {
			t.Errorf("%s: a service of the largest size is left", name)
		}
		k.mustHave(all)
		k.written(sink.Changes{}, test.tooLarge)
		if got := k.tooLarge[test.tooLarge.Key()]; got != test.reason || k.usage().servicesLeft != 1 {
			t.Errorf("%s: reason %q, usage %+v", name, got, k.usage())
		}
		k.mustHave(map[string]*api.View{"other": other})
		k.written(sink.Changes{}, test.fits)
		k.mustHave(all)
		if k.usage().servicesLeft != 0 {
			t.Errorf("%s: the service is left although it became smaller", name)
		}
	}
}

// TestLargeServicesLeftCostNothing checks services that do not fit. They must write
// nothing when other services free a little space.
func TestLargeServicesLeftCostNothing(t *testing.T) {
	k := newFakeKernel(t, 100, 100, 100)
	tcp := func(s *api.Service) { s.Ports = s.Ports[:1] }
	small := view("small", []string{"10.96.1.1"}, []string{"10.0.0.1", "10.0.0.2"}, tcp)
	views := []*api.View{small}
	for i := range 4 {
		v := large(fmt.Sprint("web", i), 1, 0, 60+i)
		v.Service.IPs.ClusterIPs = view("", []string{fmt.Sprint("10.96.0.", i)}, nil, nil).Service.IPs.ClusterIPs
		views = append(views, v)
	}
	k.written(sink.Changes{First: true, Last: true}, views...)
	if n := len(k.left); n != 3 {
		t.Fatalf("%d services are left, want 3", n)
	}
	k.mustWrite("change of another service", k.written(sink.Changes{}, view("small", []string{"10.96.1.1"}, []string{"10.0.0.1"}, tcp)), counts{1, 1, 0, 2})
}

// TestClientsEndWithTheirService changes services with session affinity. The maps must have
// an element for each cluster IP of these services. The clients of a service must be
// deleted together with it.
func TestClientsEndWithTheirService(t *testing.T) {
	k := newFakeKernel(t, 100, 100, 100)
	a, b := view("a", []string{"10.96.0.1"}, []string{"10.0.0.1"}, withAffinity(10)), view("b", []string{"10.96.0.2"}, []string{"10.0.0.1"}, withAffinity(10))
	ipOf := func(v *api.View) ipKey { return v.Service.IPs.ClusterIPs.Family(api.IPv4)[0].As16() }
	mustCount := func(step string, want map[ipKey]uint64) {
		t.Helper()
		k.verify()
		if !maps.Equal(k.counted.elements, want) {
			t.Errorf("%s: counts %v, want %v", step, k.counted.elements, want)
		}
	}
	k.written(sink.Changes{First: true, Last: true}, a, b)
	mustCount("load", map[ipKey]uint64{ipOf(a): 0, ipOf(b): 0})
	for _, v := range []*api.View{a, b} {
		for i := range uint64(3) {
			f := toFrontend(v.Service.IPs.ClusterIPs.Family(api.IPv4)[0], api.TCP, 80)
			k.clients.elements[clientKey{NetNS: i, Frontend: f}] = choice{Time: i * 4e9}
		}
	}
	mustCount("clients", map[ipKey]uint64{ipOf(a): 3, ipOf(b): 3})
	k.time = 13e9
	mustCount("timeout", map[ipKey]uint64{ipOf(a): 2, ipOf(b): 2})
	k.written(sink.Changes{}, view("a", []string{"10.96.0.1"}, []string{"10.0.0.1"}, nil))
	mustCount("no affinity", map[ipKey]uint64{ipOf(b): 2})
	if n := len(k.clients.elements); n != 3 {
		t.Errorf("%d clients, want 3", n)
	}
	k.written(sink.Changes{First: true, Last: true}, a, b)
	mustCount("another pass", map[ipKey]uint64{ipOf(a): 0, ipOf(b): 2})
	k.time = 0
	k.restart()
	k.written(sink.Changes{First: true, Last: true}, a, b)
	mustCount("restart", map[ipKey]uint64{ipOf(a): 0, ipOf(b): 3})
	k.written(sink.Changes{First: true, Last: true})
	mustCount("no services", map[ipKey]uint64{})
	if n := len(k.clients.elements); n != 0 {
		t.Errorf("%d clients, want none", n)
	}
}
