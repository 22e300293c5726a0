// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// product returns a service with many ports, external IPs and endpoints. All ports have the
// same target port.
func product(ports, ips, endpoints int, edit func(*api.Service)) *api.View {
	list := make([]string, endpoints)
	for i := range list {
		list[i] = netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)}).String()
	}
	return view("product", []string{"10.96.0.1"}, list, func(s *api.Service) {
		s.Ports = nil
		for i := range ports {
			s.Ports = append(s.Ports, api.PortMapping{Name: fmt.Sprint("p", i), Protocol: api.TCP, Port: int32(1000 + i), TargetPort: 8080})
		}
		s.IPs.ExternalIPs = apitest.IPs("198.18.0.0", ips)
		if edit != nil {
			edit(s)
		}
	})
}

func local(s *api.Service) { s.Type, s.ExternalTrafficToLocal = api.NodePort, true }

func affine(s *api.Service) {
	s.AffinitySeconds = 10800
}

// TestElementsAreTheSumOfFrontendsAndLists counts the elements of services with many ports,
// addresses and endpoints.
func TestElementsAreTheSumOfFrontendsAndLists(t *testing.T) {
	otherTargets := func(v *api.View) {
		for i := range v.Endpoints {
			e := &v.Endpoints[i]
			e.PortOverrides = nil
			for p := range v.Service.Ports {
				e.PortOverrides = append(e.PortOverrides, api.PortName{Name: fmt.Sprint("p", p), Port: int32(9000 + p)})
			}
			slices.SortStableFunc(e.PortOverrides, func(a, b api.PortName) int { return strings.Compare(a.Name, b.Name) })
		}
	}
	nodePorts := func(s *api.Service) {
		s.Type = api.NodePort
		for i := range s.Ports {
			s.Ports[i].NodePort = int32(30000 + i)
		}
	}
	const frontends = 5 * (20 + 1)
	for name, test := range map[string]struct {
		edit  func(*api.Service)
		adapt func(*api.View)
		want  map[mapKind]int
	}{
		"ports with the same target port": {want: map[mapKind]int{kindFrontends: frontends, kindLists: 1, kindEndpoints: 30}},
		"ports with other target ports":   {adapt: otherTargets, want: map[mapKind]int{kindFrontends: frontends, kindLists: 5, kindEndpoints: 5 * 30}},
		"node ports":                      {edit: nodePorts, want: map[mapKind]int{kindFrontends: frontends + 2*5, kindLists: 1 + 1, kindEndpoints: 30}}, // a dual-stack service
		"policy Local":                    {edit: local, want: map[mapKind]int{kindFrontends: frontends, kindLists: 2, kindShortcuts: 1, kindEndpoints: 30}},
		"session affinity":                {edit: affine, want: map[mapKind]int{kindFrontends: frontends, kindLists: 5, kindSlots: 5 * 30, kindNumbers: 5 * 30}},
	} {
		t.Run(name, func(t *testing.T) {
			b, _ := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
			v := product(5, 20, 30, test.edit)
			if test.adapt != nil {
				test.adapt(v)
			}
			mustSync(t, b, batchOf(true, set(v)))
			got := map[mapKind]int{}
			for m, d := range b.table.state.digests {
				if m.kind == kindFrontends || m.belongsToList() {
					got[m.kind] += d.n
				}
			}
			for kind, n := range got {
				if n == 0 {
					delete(got, kind)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("elements by the kind of their map (-want +got):\n%s", diff)
			}
			mustSync(t, b, batchOf(false, sink.Change{Old: v, Key: v.Key()}))
			if left := tableContents(t, b); len(left) > 0 {
				t.Errorf("the deleted service leaves %v", left)
			}
		})
	}
}

// changedElements counts the elements that a transaction adds and removes.
func changedElements(batch []byte) (added, removed int) {
	for rest := batch; len(rest) > 0; rest = rest[binary.NativeEndian.Uint32(rest):] {
		message := rest[:binary.NativeEndian.Uint32(rest)]
		n := 0
		if msgType := binary.NativeEndian.Uint16(rest[4:]); msgType == nft.MessageType(unix.NFT_MSG_NEWSETELEM) || msgType == nft.MessageType(unix.NFT_MSG_DELSETELEM) {
			for range netfilter.Attributes(netfilter.Attribute(message[20:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
				n++
			}
			if msgType == nft.MessageType(unix.NFT_MSG_NEWSETELEM) {
				added += n
			} else {
				removed += n
			}
		}
	}
	return added, removed
}

// TestAnEndpointChangesFewElements counts the elements that are written when endpoints
// change. The counts do not depend on the numbers of frontends and of other endpoints.
func TestAnEndpointChangesFewElements(t *testing.T) {
	for name, test := range map[string]struct {
		edit     func(*api.Service)
		from, to int
		want     [2]int // added and removed
	}{
		"an endpoint is added":                       {from: 5, to: 6, want: [2]int{1, 0}},
		"the last endpoint is removed":               {from: 6, to: 5, want: [2]int{0, 1}},
		"the class changes, too":                     {from: 4, to: 5, want: [2]int{3, 1}}, // including the new element of the class
		"all endpoints are lost":                     {from: 1, to: 0, want: [2]int{2, 2}}, // the class changes here, too
		"an endpoint with session affinity is added": {edit: affine, from: 5, to: 6, want: [2]int{3 * 2, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			var f faults
			b, _ := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, f.use)
			from, to := product(3, 10, test.from, test.edit), product(3, 10, test.to, test.edit)
			mustSync(t, b, batchOf(true, set(from)))
			var got [2]int
			f.exchange = func(batch []byte, send func([]byte) error) error {
				added, removed := changedElements(batch)
				got[0], got[1] = got[0]+added, got[1]+removed
				return send(batch)
			}
			mustSync(t, b, batchOf(false, sink.Change{Old: from, New: to}))
			if got != test.want {
				t.Errorf("%d elements are added and %d removed, want %v", got[0], got[1], test.want)
			}
			f.exchange = nil
			checkFresh(t, b, set(to))
		})
	}
}

// TestLargeServicesAreSplit programs and deletes a service with more elements than one
// transaction may have. Endpoints are written before frontends, and removed after them. If
// the kernel refuses one of the transactions, the others are undone.
func TestLargeServicesAreSplit(t *testing.T) {
	large, other := product(51, 400, 3, nil), set(view("other", []string{"10.97.0.1"}, []string{"10.0.0.1"}, nil))
	var f faults
	b, _ := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, f.use)
	mustSync(t, b, batchOf(true, other))
	before := tableContents(t, b)
	var hasEndpoints []bool // for each transaction
	refuseAt := 2
	f.exchange = func(batch []byte, send func([]byte) error) error {
		if added, removed := changedElements(batch); added+removed > 0 {
			if added+removed > maxOps+10 {
				t.Errorf("a transaction changes %d elements", added+removed)
			}
			hasEndpoints = append(hasEndpoints, strings.Contains(string(batch), "\x00endpoints4\x00"))
			if len(hasEndpoints) == refuseAt {
				return &netfilter.Failure{Errno: unix.EINVAL}
			}
		}
		return send(batch)
	}
	failed, ok := sink.Acknowledged(b.Sync(t.Context(), batchOf(false, sink.Change{New: large})))
	if !ok || len(failed) != 1 {
		t.Errorf("failed: %v, acknowledged: %t; want one service", failed, ok)
	}
	if diff := cmp.Diff(before, tableContents(t, b)); diff != "" {
		t.Errorf("the failed service changed the table (-before +after):\n%s", diff)
	}
	refuseAt, hasEndpoints = -1, nil
	mustSync(t, b, batchOf(false, sink.Change{New: large, Unsure: true}))
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
	mustSync(t, b, batchOf(false, sink.Change{Old: large, Key: large.Key()}))
	if want := []bool{true, false, false, true}; !slices.Equal(hasEndpoints, want) {
		t.Errorf("the transactions have endpoints: %v, want %v", hasEndpoints, want)
	}
	checkFresh(t, b, other)
}

// TestAFrontendChangesWithItsSourceRanges splits a part with frontends that get or lose
// source ranges. Between two transactions, no packet may reach a frontend without its ranges.
func TestAFrontendChangesWithItsSourceRanges(t *testing.T) {
	frontendOf := func(kind mapKind, family api.Family, i int) *op {
		o := &op{elementID: elementID{m: mapID{kind: kind, family: family}}, hasNew: i%2 == 0, hasOld: i%2 != 0}
		o.key[0] = byte(i)
		return o
	}
	for n := 2; n < 9; n++ {
		p := part{}
		for i := range 20 {
			p.ops = append(p.ops, frontendOf(kindFrontends, nft.Families[i%2], i))
		}
		for i := range 20 {
			p.ops = append(p.ops, frontendOf(kindRestricted, nft.Families[i%2], i), frontendOf(kindLists, api.IPv4, i))
		}
		at, count := map[elementID]int{}, 0
		for i, some := range p.split(n) {
			if count += len(some.ops); len(some.ops) > n {
				t.Errorf("a part has %d ops, want at most %d", len(some.ops), n)
			}
			for _, o := range some.ops {
				at[o.elementID] = i
			}
		}
		if count != 60 {
			t.Errorf("the parts have %d ops, want 60", count)
		}
		for i := range 20 {
			frontend, restricted := frontendOf(kindFrontends, nft.Families[i%2], i), frontendOf(kindRestricted, nft.Families[i%2], i)
			if at[frontend.elementID] != at[restricted.elementID] {
				t.Errorf("with parts of %d ops, frontend %d changes without its source ranges", n, i)
			}
		}
	}
}

// TestArrangeMovesFewEndpoints changes a list at random. Endpoints must keep their numbers,
// and a slot may only change if its endpoint was removed or the slot is new.
func TestArrangeMovesFewEndpoints(t *testing.T) {
	for _, number := range []uint32{plainLists.first, numberedLists.first} {
		rng := rand.New(rand.NewPCG(1, uint64(number)))
		before := &list{listKey: listKey{family: api.IPv4, protocol: api.TCP, port: 80}, number: number}
		for range 500 {
			var targets []nodeview.Target
			for i := range 40 {
				if rng.IntN(3) > 0 {
					targets = append(targets, nodeview.Target{Endpoint: &api.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}, Port: 8080})
				}
			}
			after := &list{listKey: before.listKey, number: number}
			after.arrange(before, targets)
			old, numbers := map[record]record{}, map[uint32]bool{}
			for slot := range before.len() {
				r := before.record(slot)
				old[r.id()] = r
			}
			if after.len() != len(targets) {
				t.Fatalf("the list has %d endpoints, want %d", after.len(), len(targets))
			}
			present := map[record]bool{}
			for slot := range after.len() {
				r := after.record(slot)
				present[r.id()] = true
				if was, ok := old[r.id()]; ok && was != r {
					t.Errorf("endpoint %s has number %d, had %d", r.addr(), r.number(), was.number())
				}
				if isNumbered(number) && (r.number() == 0 || numbers[r.number()]) {
					t.Errorf("number %d of %s is not unique", r.number(), r.addr())
				}
				numbers[r.number()] = true
			}
			for _, target := range targets {
				if !present[record(appendRecord(nil, &target)).id()] {
					t.Errorf("endpoint %s is missing", target.Addr)
				}
			}
			for slot := range min(before.len(), after.len()) {
				if was, is := before.record(slot), after.record(slot); was.id() != is.id() && present[was.id()] {
					t.Errorf("slot %d changed from %s to %s without need", slot, was.addr(), is.addr())
				}
			}
			before = after
		}
	}
}

// TestArrangeRepairsRepeatedEndpoints arranges a list in which another program has repeated an
// endpoint.
func TestArrangeRepairsRepeatedEndpoints(t *testing.T) {
	target := func(i int) nodeview.Target {
		return nodeview.Target{Endpoint: &api.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}, Port: 8080}
	}
	for _, slots := range [][]int{{1, 1}, {1, 1, 1}, {3, 1, 1}, {2, 1, 1}} {
		before, after := &list{}, &list{}
		for _, l := range []*list{before, after} {
			l.listKey, l.number = listKey{family: api.IPv4, protocol: api.TCP, port: 80}, plainLists.first
		}
		var records []byte
		for _, i := range slots {
			target := target(i)
			records = appendRecord(records, &target)
		}
		before.slots = string(records)
		after.arrange(before, []nodeview.Target{target(1), target(2)})
		if after.len() != 2 || after.record(0).addr() == after.record(1).addr() {
			t.Errorf("slots with the endpoints %v become %q, want the endpoints 1 and 2", slots, after.slots)
		}
	}
}

// TestAReturningEndpointGetsAnotherNumber removes an endpoint of a list with session affinity
// and adds it again. A restart must not change the numbers.
func TestAReturningEndpointGetsAnotherNumber(t *testing.T) {
	sticky := func(endpoints ...string) *api.View {
		return view("web", []string{"10.96.0.1"}, endpoints, affine)
	}
	numberOf := func(b *backend, addr string) uint32 {
		t.Helper()
		for _, l := range b.table.services[sticky().Key()] {
			for slot := range l.len() {
				if r := l.record(slot); r.addr().String() == addr {
					return r.number()
				}
			}
		}
		return 0
	}
	both, one := sticky("10.0.0.1", "10.0.0.2"), sticky("10.0.0.2")
	b, ns := start(t, Options{})
	mustSync(t, b, batchOf(true, set(both)))
	first, second := numberOf(b, "10.0.0.1"), numberOf(b, "10.0.0.2")
	mustSync(t, b, batchOf(false, sink.Change{Old: both, New: one}), batchOf(false, sink.Change{Old: one, New: both}))
	again := numberOf(b, "10.0.0.1")
	b = startIn(t, ns, Options{})
	mustSync(t, b, batchOf(true, set(both)))
	if got := []uint32{numberOf(b, "10.0.0.1"), numberOf(b, "10.0.0.2")}; again == first || got[0] != again || got[1] != second {
		t.Errorf("the numbers are %d and %d, after a removal %d, after a restart %v", first, second, again, got)
	}
	checkFresh(t, b, set(both))
}

// TestWithoutNumbersOnlyNewListsFail takes all numbers of lists with session affinity.
func TestWithoutNumbersOnlyNewListsFail(t *testing.T) {
	b, _ := start(t, Options{})
	old := view("old", []string{"10.96.0.1"}, []string{"10.0.0.1"}, affine)
	mustSync(t, b, batchOf(true, set(old)))
	for {
		if _, err := b.table.numbers.assign(api.IPv4, true); err != nil {
			break
		}
	}
	more := view("old", []string{"10.96.0.1"}, []string{"10.0.0.1", "10.0.0.2"}, affine)
	plain := view("plain", []string{"10.96.0.2"}, []string{"10.0.0.3"}, nil)
	sticky := view("sticky", []string{"10.96.0.3"}, []string{"10.0.0.4"}, affine)
	failed, ok := sink.Acknowledged(b.Sync(t.Context(), batchOf(false, sink.Change{Old: old, New: more}, sink.Change{New: plain}, sink.Change{New: sticky})))
	if !ok || len(failed) != 1 || !errors.Is(failed[sticky.Key()], errNoNumber) {
		t.Errorf("failed: %v, acknowledged: %t", failed, ok)
	}
	checkFresh(t, b, set(more), set(plain))
}

// TestAddressesMoveInACycle moves each address of 50 services to the next service, in one
// Sync.
func TestAddressesMoveInACycle(t *testing.T) {
	const n = 50
	at := func(i, address int) *api.View {
		return view(fmt.Sprint("svc-", i), []string{fmt.Sprintf("10.96.0.%d", address)}, []string{fmt.Sprintf("10.0.0.%d", i)}, nil)
	}
	b, _ := start(t, Options{})
	var before, changes, after []sink.Change
	for i := range n {
		before = append(before, set(at(i, i)))
		changes = append(changes, sink.Change{Old: at(i, i), New: at(i, (i+1)%n)})
		after = append(after, set(at(i, (i+1)%n)))
	}
	mustSync(t, b, batchOf(true, before...), batchOf(false, changes...))
	checkFresh(t, b, after...)
}

// TestChangingListsLoseNoConnections adds and removes endpoints while clients connect.
func TestChangingListsLoseNoConnections(t *testing.T) {
	for name, edit := range map[string]func(*api.Service){"without session affinity": nil, "with session affinity": affine} {
		t.Run(name, func(t *testing.T) {
			w := newPacketWorld(t)
			b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
			views := []*api.View{
				view("web", []string{"10.96.0.1"}, []string{"!10.0.1.2"}, edit),
				view("web", []string{"10.96.0.1"}, webEndpoints, edit),
				view("web", []string{"10.96.0.1"}, []string{"!10.0.2.2"}, edit),
			}
			now := views[0]
			mustSync(t, b, batchOf(true, set(now)))
			askers := []*asker{keepAsking(w.client, "10.96.0.1:80"), keepAsking(w.node, "10.96.0.1:80")}
			few := func(a *asker) bool { return !a.has(100) }
			for i := 0; i < 300 || slices.ContainsFunc(askers, few); i++ {
				next := views[(i+1)%len(views)]
				mustSync(t, b, batchOf(false, sink.Change{Old: now, New: next}))
				now = next
			}
			for _, a := range askers {
				if err := a.stop(); err != nil {
					t.Errorf("after %d answers: %v", a.answers.Load(), err)
				}
			}
		})
	}
}

// TestEmptyListsKeepTheirFrontends checks that no frontend changes when a service loses all
// endpoints and gets them again.
func TestEmptyListsKeepTheirFrontends(t *testing.T) {
	var f faults
	b, _ := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, f.use)
	full, empty := product(20, 10, 2, local), product(20, 10, 0, local)
	mustSync(t, b, batchOf(true, set(full)))
	f.exchange = func(batch []byte, send func([]byte) error) error {
		if strings.Contains(string(batch), "services4\x00") {
			t.Error("a transaction changes frontends")
		}
		return send(batch)
	}
	mustSync(t, b, batchOf(false, sink.Change{Old: full, New: empty}), batchOf(false, sink.Change{Old: empty, New: full}))
	f.exchange = nil
	checkFresh(t, b, set(full))
}
