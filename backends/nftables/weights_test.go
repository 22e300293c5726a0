// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// weighted returns a service with an endpoint for each weight.
func weighted(edit func(*api.Service), weights ...int32) *api.View {
	v := product(1, 0, len(weights), edit)
	for i, w := range weights {
		v.Endpoints[i].Weight = w
	}
	return v
}

func hashed(a api.Algorithm) func(*api.Service) { return func(s *api.Service) { s.Algorithm = a } }

// slotsOf returns the slots of the only list of v, by endpoint.
func slotsOf(b *backend, v *api.View) map[netip.Addr]int {
	slots := map[netip.Addr]int{}
	l := &b.table.services[v.Key()][0]
	addrs := map[uint32]netip.Addr{}
	for i := range l.len() {
		addrs[l.record(i).number()] = l.record(i).addr()
	}
	for slot := range l.slotCount() {
		slots[addrs[l.slotNumber(slot)]]++
	}
	return slots
}

// TestWeightsChangeFewElements changes endpoints and weights. Only slots of the changed
// endpoint and an equal number of other slots may change. A restart changes nothing.
func TestWeightsChangeFewElements(t *testing.T) {
	weights := func(last ...int32) *api.View {
		all := make([]int32, 0, 41)
		for i := range 40 {
			all = append(all, int32(100*(i%3+1)))
		}
		return weighted(nil, append(all, last...)...)
	}
	for name, test := range map[string]struct {
		from, to *api.View
		max      int
	}{
		"a weight shrinks":       {weights(300), weights(200), 3},
		"a weight grows":         {weights(200), weights(700), 5 + 4}, // because the class changes, too
		"an endpoint is removed": {weights(300), weights(), 3*3 + 2},
	} {
		t.Run(name, func(t *testing.T) {
			var written int
			b, ns := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, countElements(&written))
			mustSync(t, b, batchOf(true, set(test.from)))
			written = 0
			mustSync(t, b, batchOf(false, sink.Change{Old: test.from, New: test.to, Key: test.to.Key()}))
			if written > test.max {
				t.Errorf("%d elements were written, want at most %d", written, test.max)
			}
			want := tableContents(t, b)
			if err := b.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			written = 0
			b = startIn(t, ns, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, countElements(&written))
			mustSync(t, b, batchOf(true, set(test.to)))
			if written > 0 || len(tableContents(t, b)) != len(want) {
				t.Errorf("the restart wrote %d elements", written)
			}
			mustSync(t, b, batchOf(false, sink.Change{Old: test.to, Key: test.to.Key()}))
			if left := tableContents(t, b); len(left) > 0 {
				t.Errorf("the deleted service leaves %v", left)
			}
		})
	}
}

// TestSlotsFollowWeights checks the share of each endpoint in the slots of its list, and that
// extreme weights need few slots.
func TestSlotsFollowWeights(t *testing.T) {
	many := make([]int32, 1000)
	for i := range many {
		many[i] = int32(i%65535 + 1)
	}
	for name, test := range map[string]struct {
		weights []int32
		slots   int // 0: unknown
	}{
		"1:2:7":                 {[]int32{100, 200, 700}, 10},
		"prime weights":         {[]int32{101, 211, 701}, 1013},
		"extreme weights":       {[]int32{1, 65535, 32767}, 0},
		"many different ones":   {many, 0},
		"one with another":      {[]int32{1, 1, 1, 2}, 5},
		"the default is 100":    {[]int32{0, 200}, 3},
		"large equal ones only": {[]int32{65535, 65535}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			b, _ := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
			v := weighted(nil, test.weights...)
			mustSync(t, b, batchOf(true, set(v)))
			slots, n, sum := slotsOf(b, v), 0, 0
			for i := range v.Endpoints {
				w := int(v.Endpoints[i].Weight)
				if w == 0 {
					w = api.DefaultWeight
				}
				n, sum = n+slots[v.Endpoints[i].Addr], sum+w
			}
			if test.slots > 0 && n != test.slots || n > max(minWeightedSlots, 16*len(test.weights)) {
				t.Errorf("the list has %d slots, want %d", n, test.slots)
			}
			for i := range v.Endpoints {
				w := v.Endpoints[i].Weight
				if w == 0 {
					w = api.DefaultWeight
				}
				got, want := float64(slots[v.Endpoints[i].Addr])/float64(n), float64(w)/float64(sum)
				if math.Abs(got-want) > max(0.03*want, 1.5/float64(n)) {
					t.Errorf("the share of weight %d is %.4f, want %.4f", w, got, want)
				}
			}
		})
	}
}

// TestChangesMoveFewHashSlots removes one of many endpoints, adds it again, and counts the
// clients of other endpoints that move. Only the slots that change are written.
func TestChangesMoveFewHashSlots(t *testing.T) {
	for _, n := range []int{2, 3, 16, 17, 100} {
		t.Run(fmt.Sprint(n, " endpoints"), func(t *testing.T) {
			var written int
			b, _ := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, countElements(&written))
			all, rest := product(1, 0, n, hashed(api.HashClient)), product(1, 0, n, hashed(api.HashClient))
			rest.Endpoints = append(rest.Endpoints[:1:1], rest.Endpoints[2:]...)
			mustSync(t, b, batchOf(true, set(all)))
			before := slotTable(b, all)
			for _, change := range [...]sink.Change{{Old: all, New: rest}, {Old: rest, New: all}} {
				change.Key = all.Key()
				written = 0
				mustSync(t, b, batchOf(false, change))
				after := slotTable(b, change.New)
				moved, others := 0, 0
				size := max(len(before), len(after))
				for i := range size { // a slot of the small table has the clients of several slots of the large one
					from, to := before[i*len(before)/size], after[i*len(after)/size]
					if from == all.Endpoints[1].Addr || to == all.Endpoints[1].Addr {
						continue
					}
					others++
					if from != to {
						moved++
					}
				}
				t.Logf("%d of %d slots of other endpoints moved", moved, others)
				if limit := (1/float64(n) + 0.01) * float64(others); float64(moved) > limit {
					t.Errorf("%d of %d slots moved, want at most %.0f", moved, others, limit)
				}
				changed := size - min(len(before), len(after))
				for i := range min(len(before), len(after)) {
					if before[i] != after[i] {
						changed++
					}
				}
				if written > 2*changed+6 {
					t.Errorf("%d elements were written for %d changed slots", written, changed)
				}
				before = after
			}
		})
	}
}

// TestHashedServicesShareTheirSlots makes services with stable hashing until one is
// refused. Services without stable hashing work. The refused service works after other
// services were deleted.
func TestHashedServicesShareTheirSlots(t *testing.T) {
	const large = 1 << 16
	b, _ := start(t, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, func(o *options) { o.maxHashSlots = 4 * large })
	mustSync(t, b, batchOf(true))
	hashedService := func(i, endpoints int) *api.View {
		v := numberedService(i, endpoints)
		v.Service.Algorithm = api.HashClient
		return v
	}
	first, second, random := hashedService(1, 17), hashedService(2, 17), numberedService(3, 17)
	refused := func(step string, c *sink.Changes, want ...*api.View) {
		t.Helper()
		var failed *sink.Failed
		err := b.Sync(t.Context(), c)
		if err != nil && !errors.As(err, &failed) {
			t.Fatal(err)
		}
		for _, v := range []*api.View{first, second, random} {
			got := failed != nil && (*failed)[v.Key()] != nil
			if got != slices.Contains(want, v) {
				t.Errorf("%s: service %s: %v, want refused: %t", step, v.Key(), err, !got)
			}
		}
	}
	refused("a quarter for one of two", batchOf(false, set(first), set(second), set(random)), second)
	if n := b.table.hashSlots; n != large {
		t.Errorf("%d slots are counted, want %d", n, large)
	}
	small := hashedService(1, 16)
	refused("a change of the first", batchOf(false, sink.Change{Old: first, New: small, Key: first.Key()}))
	refused("now there is room", batchOf(false, set(second)), second)
	refused("without the first", batchOf(false, sink.Change{Old: small, Key: first.Key()}, set(second)))
	refused("the second leaves", batchOf(false, sink.Change{Old: second, Key: second.Key()}))
	if n := b.table.hashSlots; n != 0 {
		t.Errorf("%d slots are counted, want none", n)
	}
}

// slotTable returns the endpoint of each slot of the only list of v.
func slotTable(b *backend, v *api.View) (addrs []netip.Addr) {
	l := &b.table.services[v.Key()][0]
	byNumber := map[uint32]netip.Addr{}
	for i := range l.len() {
		byNumber[l.record(i).number()] = l.record(i).addr()
	}
	for slot := range l.slotCount() {
		addrs = append(addrs, byNumber[l.slotNumber(slot)])
	}
	return addrs
}

// countElements makes n count the elements that the backend's transactions add and remove.
func countElements(n *int) func(*options) {
	return func(o *options) {
		o.exchange = func(batch []byte, send func([]byte) error) error {
			added, removed := changedElements(batch)
			*n += added + removed
			return send(batch)
		}
	}
}

// endpointsOfClients sends n connections of different clients to 10.96.0.1, and returns the
// endpoint of each client from connection tracking.
func endpointsOfClients(t testing.TB, w *packetWorld, n int) map[netip.Addr]netip.Addr {
	t.Helper()
	sendSYNs(t, w.client, netip.MustParseAddr("10.96.0.1"), n)
	c := netfilter.NewConn(w.node.FD)
	defer c.Close()
	endpoints := map[netip.Addr]netip.Addr{}
	err := c.Query(t.Context(), func(b *netfilter.Builder) {
		const getConnections = 1
		b.End(b.Begin(unix.NFNL_SUBSYS_CTNETLINK<<8|getConnections, unix.NLM_F_DUMP, unix.AF_INET))
	}, func(attributes []byte) {
		source := func(tuple uint16) netip.Addr {
			const ip, v4 = 1, 1
			return addrOf(netfilter.Attribute(netfilter.Attribute(netfilter.Attribute(attributes, tuple), ip), v4))
		}
		const original, reply = 1, 2
		if spoofed(0).Compare(source(original)) <= 0 && source(original).Compare(spoofed(n)) < 0 {
			endpoints[source(original)] = source(reply)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(endpoints) < n*99/100 { // the kernel may lose packets
		t.Fatalf("connection tracking has %d of %d connections", len(endpoints), n)
	}
	return endpoints
}

// TestConnectionsFollowWeights counts connections to endpoints with the weights 1, 2 and 7.
func TestConnectionsFollowWeights(t *testing.T) {
	const n = 20_000
	w := newPacketWorld(t)
	b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
	v := weighted(nil, 100, 200, 700)
	v.Service.Ports[0].Port = 80
	mustSync(t, b, batchOf(true, set(v)))
	counts := map[netip.Addr]int{}
	all := endpointsOfClients(t, w, n)
	for _, endpoint := range all {
		counts[endpoint]++
	}
	for i, want := range []float64{0.1, 0.2, 0.7} {
		// The standard deviation of the smallest share is 0.2 % of all connections.
		if got := float64(counts[v.Endpoints[i].Addr]) / float64(len(all)); math.Abs(got-want) > 0.01 {
			t.Errorf("endpoint %d gets %.4f of the connections, want %.2f", i, got, want)
		}
	}
}

// TestNodesHashClientsEqually sends connections of the same clients to two nodes, whose
// backends got the endpoints in other orders.
func TestNodesHashClientsEqually(t *testing.T) {
	const n = 5_000
	for _, algorithm := range []api.Algorithm{api.HashClient, api.HashConnection} {
		t.Run(fmt.Sprint(algorithm), func(t *testing.T) {
			var nodes []map[netip.Addr]netip.Addr
			for node := range 2 {
				w := newPacketWorld(t)
				b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
				v := product(1, 0, 10, hashed(algorithm))
				v.Service.Ports[0].Port = 80
				if node == 1 {
					some := product(1, 0, 10, hashed(algorithm))
					some.Service.Ports[0].Port = 80
					some.Endpoints = some.Endpoints[5:]
					mustSync(t, b, batchOf(true, set(some)))
					mustSync(t, b, batchOf(false, sink.Change{Old: some, New: v, Key: v.Key()}))
				} else {
					mustSync(t, b, batchOf(true, set(v)))
				}
				nodes = append(nodes, endpointsOfClients(t, w, n))
			}
			used := map[netip.Addr]bool{}
			for client, endpoint := range nodes[0] {
				used[endpoint] = true
				if other, ok := nodes[1][client]; ok && other != endpoint {
					t.Fatalf("client %s has the endpoints %s and %s", client, endpoint, other)
				}
			}
			if len(used) != 10 {
				t.Errorf("clients use %d endpoints, want 10", len(used))
			}
		})
	}
}
