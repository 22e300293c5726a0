// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/internal/ovstest"
	"github.com/kpng-project/kpng/maglev"
	"github.com/kpng-project/kpng/nodeview"
	"golang.org/x/sys/unix"
)

func withUDP(algorithm api.Algorithm) func(*api.Service) {
	return func(s *api.Service) { s.Ports[0].Protocol, s.Algorithm = api.UDP, algorithm }
}

// weighted sets the weights of a view's endpoints.
func weighted(v *api.View, weights ...int32) *api.View {
	for i := range v.Endpoints {
		v.Endpoints[i].Weight = weights[i%len(weights)]
	}
	return v
}

// clients returns n clients, each of which has several ports.
func clients(n, ports int) (all []netip.AddrPort) {
	for i := range n / ports {
		addr := netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
		for port := range ports {
			all = append(all, netip.AddrPortFrom(addr, uint16(1024+port)))
		}
	}
	return all
}

// choices sends a datagram of each client to the service, after the switch has forgotten all
// connections. It returns the endpoints that connection tracking has recorded.
func (n *testNetwork) choices(t *testing.T, clients []netip.AddrPort) map[netip.AddrPort]netip.AddrPort {
	t.Helper()
	if _, err := control(t.Context(), n.Dir, "dpctl/flush-conntrack"); err != nil {
		t.Fatal(err)
	}
	var fd int
	err := n.pods[podA].Do(func() (err error) { fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW); return err })
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	to := netip.MustParseAddr(clusterIP)
	chosen := map[netip.AddrPort]netip.AddrPort{}
	for progress := time.Now(); len(chosen) < len(clients); {
		for i, from := range clients {
			if _, ok := chosen[from]; ok {
				continue
			}
			b := append([]byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, from.Addr().AsSlice()...)
			b = append(b, to.AsSlice()...)
			b = binary.BigEndian.AppendUint16(b, from.Port())
			b = append(b, 0, 80, 0, 8, 0, 0) // without a checksum
			if err := unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: to.As4()}); err != nil && err != unix.ENOBUFS {
				t.Fatal(err)
			}
			if i%64 == 0 {
				time.Sleep(time.Millisecond) // the queue of the switch is short
			}
		}
		all, err := listConnections(t.Context(), &n.backend.opts, udp)
		if err != nil {
			t.Fatal(err)
		}
		before := len(chosen)
		for c := range all {
			chosen[c.Source] = c.Endpoint
		}
		if len(chosen) > before {
			progress = time.Now()
		} else if time.Since(progress) > time.Minute {
			t.Fatalf("only %d of %d clients have an endpoint", len(chosen), len(clients))
		}
	}
	return chosen
}

// shares returns the share of each endpoint in the choices.
func shares(chosen map[netip.AddrPort]netip.AddrPort) map[string]float64 {
	all := map[string]float64{}
	for _, e := range chosen {
		all[e.Addr().String()] += 1 / float64(len(chosen))
	}
	return all
}

// manyConnections returns a number of connections that is large enough for shares close
// to the expected shares.
func manyConnections() int {
	if slowMachine() {
		return 4000
	}
	return 10_000
}

// TestWeightsDecideShares compares the shares of endpoints with their weights. A change of
// the weights ends no connection.
func TestWeightsDecideShares(t *testing.T) {
	n := newNetwork(t)
	endpoints := []string{"10.244.2.1", "10.244.2.2", "10.244.2.3"}
	for i, test := range []struct {
		algorithm api.Algorithm
		weights   []int32
	}{
		{api.Random, []int32{1, 2, 7}},
		{api.HashConnection, []int32{700, 100, 200}},
		{api.Random, []int32{100, 100, 100}},
		{api.Random, []int32{65535, 100, 65535}},
	} {
		v := weighted(view("web", clusterIP, endpoints, withUDP(test.algorithm)), test.weights...)
		if i == 0 {
			n.mustPass(v)
		} else {
			before := n.tracked(t)
			n.mustSync(v)
			if after := n.tracked(t); after != before {
				t.Errorf("%d of %d connections remain after a change of weights", after, before)
			}
		}
		n.mustMatch()
		sum, all := 0.0, manyConnections()
		for j := range test.weights {
			sum += float64(test.weights[j])
		}
		got := shares(n.choices(t, clients(all, 40)))
		for j, e := range endpoints {
			want := float64(test.weights[j]) / sum
			// Four standard deviations of independent choices, and 1 % for rounded weights.
			if limit := 4*math.Sqrt(want*(1-want)/float64(all)) + 0.01*want; math.Abs(got[e]-want) > limit {
				t.Errorf("weights %d: endpoint %d has a share of %.4f, want %.4f ± %.4f", test.weights, j, got[e], want, limit)
			}
			t.Logf("weights %d: endpoint %d has a share of %.4f, want %.4f: %+.1f %%", test.weights, j, got[e], want, 100*(got[e]/want-1))
		}
	}
}

// tracked returns the number of UDP connections to the service.
func (n *testNetwork) tracked(t *testing.T) int {
	t.Helper()
	all, err := listConnections(t.Context(), &n.backend.opts, udp)
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestNodesChooseEqually checks that two nodes choose the same endpoints, although the
// nodes got them in different orders. A removed endpoint must move few connections of
// other endpoints.
func TestNodesChooseEqually(t *testing.T) {
	if slowMachine() {
		t.Skip("takes too long on an emulated machine")
	}
	a, b := newNetwork(t), newNetwork(t)
	a.mustPass()
	b.mustPass()
	for _, test := range []struct {
		algorithm api.Algorithm
		endpoints int
		weights   []int32
	}{
		{api.HashConnection, 100, []int32{1}},
		{api.HashClient, 10, []int32{1, 2, 7}},
		{api.HashConnection, 257, []int32{1}}, // one more than the buckets of a group
	} {
		name := fmt.Sprintf("algorithm %v, %d endpoints, weights %d", test.algorithm, test.endpoints, test.weights)
		all := addresses(test.endpoints, nil)
		web := func(first, last int) *api.View {
			return weighted(view("web", clusterIP, all[first:last], withUDP(test.algorithm)), test.weights...)
		}
		n := len(all)
		a.mustSync(web(0, n))
		for _, part := range [][2]int{{n / 2, n}, {n / 3, n - 1}, {0, n / 3}, {0, n}} { // weights change, too
			b.mustSync(web(part[0], part[1]))
		}
		from := clients(20_000, 20)
		before := a.choices(t, from)
		different := 0
		for client, e := range b.choices(t, from) {
			if before[client] != e {
				different++
			}
		}
		if different > 0 {
			t.Errorf("%s: the nodes choose different endpoints for %d of %d clients", name, different, len(from))
		}
		byClient := map[netip.Addr]netip.AddrPort{}
		for client, e := range before {
			if first, ok := byClient[client.Addr()]; ok && test.algorithm == api.HashClient && first != e {
				t.Fatalf("%s: client %s has two endpoints", name, client.Addr())
			}
			byClient[client.Addr()] = e
		}
		v := web(0, n)
		removed := v.Endpoints[n/2].Addr
		v.Endpoints = slices.Delete(v.Endpoints, n/2, n/2+1)
		a.mustSync(v)
		moved, others := 0, 0
		for client, e := range a.choices(t, from) {
			if before[client].Addr() != removed {
				others++
				if before[client] != e {
					moved++
				}
			}
		}
		share, limit := float64(moved)/float64(others), 1/float64(n)+0.01
		t.Logf("%s: one removed endpoint moves %.2f %% of other connections", name, 100*share)
		if share > limit {
			t.Errorf("%s: one removed endpoint moves %d of %d other connections", name, moved, others)
		}
	}
}

// TestBucketsWithEqualIDs uses more keys of buckets than there are IDs, as if hashes
// collided.
func TestBucketsWithEqualIDs(t *testing.T) {
	g := &group{}
	for range 3 {
		g.add("10.0.0.1:80", 1, "")
	}
	if len(g.buckets) != 3 {
		t.Errorf("%d buckets, want 3", len(g.buckets))
	}
	for id, b := range g.buckets {
		if b.ID != id {
			t.Errorf("bucket %d has ID %d", id, b.ID)
		}
	}
}

// TestFactors checks that factors of extreme weights are valid.
func TestFactors(t *testing.T) {
	for _, test := range []struct {
		weights []float64
		want    []uint16
	}{
		{nil, []uint16{}},
		{[]float64{100, 100}, []uint16{1, 1}},
		{[]float64{0, 0}, []uint16{1, 1}},
		{[]float64{1, 2}, []uint16{43690, 65535}},
		{[]float64{1, 65535 * 256}, []uint16{1, 65535}},
	} {
		if got := factorsOf(test.weights); !slices.Equal(got, test.want) {
			t.Errorf("factors of %v: %d, want %d", test.weights, got, test.want)
		}
	}
}

// TestSourceRangesApplyToNodePorts checks that source ranges of node ports admit clients at
// node ports, and do not concern the cluster IP.
func TestSourceRangesApplyToNodePorts(t *testing.T) {
	n := newNetwork(t)
	web := func(source string) *api.View {
		return view("web", clusterIP, []string{"!" + podB}, withPorts, func(s *api.Service) {
			s.SourceRanges = []api.SourceRanges{{NodePorts: true, Prefixes: []netip.Prefix{netip.MustParsePrefix(source)}}}
		})
	}
	n.mustPass(web("203.0.113.0/24"))
	n.greet(t, podA, 0, clusterIP+":80")
	dropped := func() bool {
		// The source is checked before the connection is committed, so nothing is tracked.
		c, err := n.dial(outside, 5600, "udp4", gateway+":30080")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.Write([]byte("x"))
		c.SetDeadline(time.Now().Add(time.Second))
		_, err = c.Read(make([]byte, 100))
		return err != nil
	}
	if !dropped() {
		t.Error("a client outside the source ranges reaches the node port")
	}
	n.mustSync(web("192.0.2.0/24"))
	n.greet(t, outside, 0, gateway+":30080")
	ovstest.Await(t, "an admitted client has an answer", func() bool { return !dropped() })
}

// TestLawOfStableHashing simulates the choices of the switch with another hash function. In
// lists of all sizes, an endpoint that is added or removed moves at most 1/N + 1 % of the
// other clients.
func TestLawOfStableHashing(t *testing.T) {
	const clients = 5000
	hash := func(a, b uint32) uint32 {
		return uint32(maglev.Hash(binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, a), b)))
	}
	// chosen returns the actions of the endpoint of each client.
	chosen := func(v *api.View) (all [clients]openflow.Actions) {
		p, d := planned(v)
		top := d.numberOf(name{service: v.Key(), list: listOf(v)})
		sorted := map[uint32][]openflow.Bucket{}
		for id, g := range p.groups {
			sorted[id] = slices.SortedFunc(maps.Values(g.buckets), byID)
		}
		for client := range all {
			for id := top; id != 0; id = openflow.GroupOf(all[client]) {
				best := uint32(0)
				client32 := hash(uint32(client), uint32(d.numbers.seed(id)))
				for _, b := range sorted[id] {
					if product := hash(b.ID, client32) & 0xffff * uint32(b.Weight); product >= best {
						best, all[client] = product, b.Actions
					}
				}
			}
		}
		return all
	}
	for _, weights := range [][]int32{{100}, {1, 2, 7}} {
		largest := 0.0
		for _, n := range []int{3, 10, 17, 30, 64, 100, 256, 257, 1000} {
			all := addresses(n, nil)
			web := func() *api.View { return weighted(view("web", clusterIP, all, withUDP(api.HashClient)), weights...) }
			before := chosen(web())
			for removed := n / 4; removed < n/4+2; removed++ {
				v := web()
				v.Endpoints = slices.Delete(v.Endpoints, removed, removed+1)
				gone := netip.MustParseAddr(all[removed])
				moved, others := 0, 0
				for client, e := range chosen(v) {
					if openflow.TranslatedTo(before[client]).Addr() != gone {
						others++
						if e != before[client] {
							moved++
						}
					}
				}
				share, limit := float64(moved)/float64(others), 1/float64(n)+0.01
				largest = max(largest, share/limit)
				if share > limit {
					t.Errorf("weights %d: endpoint %d of %d moves %.2f %% of other clients", weights, removed, n, 100*share)
				}
			}
		}
		t.Logf("weights %d: at most %.2f of the limit", weights, largest)
	}
}

// listOf returns the ID of the only list of a view.
func listOf(v *api.View) (id nodeview.ListID) {
	for f := range nodeview.Frontends(v) {
		id = f.Elsewhere.List
	}
	return id
}
