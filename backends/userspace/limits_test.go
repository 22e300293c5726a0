// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// countedSockets counts the opened sockets. Their addresses are like those of
// loopbackSockets.
type countedSockets struct {
	loopbackSockets
	opened *atomic.Int64
}

func (c countedSockets) ListenTCP(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error) {
	c.opened.Add(1)
	return c.loopbackSockets.ListenTCP(ctx, at)
}

// wideService returns a service with the given numbers of external IPs and of ports. The
// argument first is the first external IP.
func wideService(name string, first netip.Addr, addrs, ports int, endpoints ...netip.AddrPort) *api.View {
	s := serviceAt(name, first.String(), 1, api.TCP).addEndpoints(endpoints...)
	var ips []netip.Addr
	for range addrs - 1 {
		first = first.Next()
		ips = append(ips, first)
	}
	s.Service.IPs.ExternalIPs = api.NewIPSet(ips...)
	s.Service.Ports = nil
	var named []api.PortName
	for i := range ports {
		name := fmt.Sprint("p", i)
		s.Service.Ports = append(s.Service.Ports, api.PortMapping{Name: name, Protocol: api.TCP, Port: int32(20000 + i)})
		named = append(named, api.PortName{Name: name, Port: 80})
	}
	for i := range s.Endpoints {
		s.Endpoints[i].PortOverrides = named
	}
	return s.view()
}

// startBackend starts a backend with simulated addresses and counted sockets.
func startBackend(t *testing.T, opts settings) (b *backend, a *fakeAddresses, opened *atomic.Int64) {
	t.Helper()
	a, opened = newFakeAddresses(), &atomic.Int64{}
	if opts.addresses == nil {
		opts.addresses = a
	}
	opts.NodeAddresses, opts.sockets = nodeaddr.Of(), countedSockets{opened: opened}
	b, err := newBackend(opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return b, a, opened
}

// syncChange delivers one changed service, and returns the error of that service.
func syncChange(t *testing.T, b *backend, next *api.View) error {
	t.Helper()
	c := sink.Change{Key: next.Key(), New: next}
	failed, ok := sink.Acknowledged(b.Sync(t.Context(), &sink.Changes{Services: func(yield func(sink.Change) bool) { yield(c) }}))
	if !ok {
		t.Fatal("Sync failed as a whole")
	}
	return failed[next.Key()]
}

// TestServiceWithTooManyListenersIsRefused delivers services that need more listeners than
// a service may have. None of their listeners is opened, and other services are not
// affected.
func TestServiceWithTooManyListenersIsRefused(t *testing.T) {
	first := netip.MustParseAddr("10.97.0.1")
	to := netip.MustParseAddrPort("127.0.0.1:80")
	for name, opts := range map[string]settings{
		"above Options.MaxListeners":              {Options: Options{MaxListeners: 40}},
		"above a quarter of the file descriptors": {descriptors: &descriptors{free: 1000, maxListeners: 160}},
	} {
		t.Run(name, func(t *testing.T) {
			b, a, opened := startBackend(t, opts)
			for _, endpoints := range [][]netip.AddrPort{{to}, nil} { // a later endpoint must not be the cause of a failure
				wide := wideService("wide", first, 41, 1, endpoints...)
				if err := syncChange(t, b, wide); err == nil || !strings.Contains(err.Error(), "listeners") {
					t.Errorf("the error is %v", err)
				}
			}
			if n := opened.Load(); n != 0 || len(a.there) != 0 {
				t.Errorf("%d listeners were opened and %d addresses added for a refused service", n, len(a.there))
			}
			if err := syncChange(t, b, wideService("web", netip.MustParseAddr("10.98.0.1"), 20, 1, to)); err != nil {
				t.Error(err)
			}
			// A service that becomes too large keeps its listeners.
			if err := syncChange(t, b, wideService("wide", first, 10, 2, to)); err != nil {
				t.Error(err)
			}
			before := opened.Load()
			if err := syncChange(t, b, wideService("wide", first, 10, 5, to)); err == nil {
				t.Error("the service got too many listeners")
			}
			if opened.Load() != before || len(b.services[key("wide")].listeners) != 20 {
				t.Errorf("the refused service has %d listeners, want 20 as before", len(b.services[key("wide")].listeners))
			}
		})
	}
}

// TestManyServicesLeaveRoomForListeners lets services take as many listeners as they may
// have. There must be room for another service.
func TestManyServicesLeaveRoomForListeners(t *testing.T) {
	d := newDescriptors(4000)
	for range 10 {
		a := &account{descriptors: d}
		for n := 1; a.reserve(n) == nil; n++ {
		}
	}
	if err := (&account{descriptors: d}).reserve(10); err != nil {
		t.Error(err)
	}
	if d.reserved > d.maxListeners {
		t.Errorf("%d listeners, want at most %d", d.reserved, d.maxListeners)
	}
}

// TestChangedEndpointTouchesNoListener replaces an endpoint of a service with many
// frontends. All frontends share one list of endpoints, and only that list changes.
func TestChangedEndpointTouchesNoListener(t *testing.T) {
	b, _, opened := startBackend(t, settings{})
	wide := func(last byte) *api.View {
		return wideService("wide", netip.MustParseAddr("10.97.0.1"), 20, 5, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, last}), 80))
	}
	if err := syncChange(t, b, wide(1)); err != nil {
		t.Fatal(err)
	}
	s := b.services[key("wide")]
	before := map[socketAddr]*rules{}
	for at, l := range s.listeners {
		before[at] = l.(*tcpListener).current.Load()
	}
	if len(before) != 100 || len(s.pools) != 1 || len(s.rules) != 5 {
		t.Fatalf("%d listeners with %d lists and %d rules, want 100 with 1 and 5", len(before), len(s.pools), len(s.rules))
	}
	if err := syncChange(t, b, wide(2)); err != nil {
		t.Fatal(err)
	}
	for at, l := range s.listeners {
		r := l.(*tcpListener).current.Load()
		if r != before[at] {
			t.Fatalf("the rules of %s were replaced", at)
		}
		if got, _ := r.elsewhere.pool.pick(netip.AddrPort{}, noneUnfit); got.String() != "10.244.0.2:80" {
			t.Fatalf("%s selects %s, want the new endpoint", at, got)
		}
	}
	if n := opened.Load(); n != 100 {
		t.Errorf("opened %d listeners, want 100", n)
	}
}

// heldAddresses blocks Add for the addresses of one network until the test ends.
type heldAddresses struct {
	*fakeAddresses
	held    netip.Prefix
	release chan struct{}
}

func (h *heldAddresses) Add(ctx context.Context, addr netip.Addr) error {
	if h.held.Contains(addr) {
		<-h.release
	}
	return h.fakeAddresses.Add(ctx, addr)
}

// TestManyAddressesOfAServiceDelayNoSync delivers a service with more addresses than Sync
// waits for. All of them become local in the end, and each listener is opened once.
func TestManyAddressesOfAServiceDelayNoSync(t *testing.T) {
	const addrs = 2 * maxAwaited
	a := &heldAddresses{newFakeAddresses(), netip.MustParsePrefix("10.97.1.128/25"), make(chan struct{})}
	b, _, opened := startBackend(t, settings{addresses: a})
	first := netip.MustParseAddr("10.97.0.1")
	wide := wideService("wide", first, addrs, 2, netip.MustParseAddrPort("127.0.0.1:80"))
	err := syncChange(t, b, wide)
	if err == nil || !strings.Contains(err.Error(), "more errors") || len(err.Error()) > 1000 {
		t.Errorf("the error is %v", err)
	}
	if n := opened.Load(); n < 2*maxAwaited {
		t.Errorf("%d listeners are open, want those of the addresses that are not held", n)
	}
	close(a.release)
	eventually(t, "all addresses are local", func() bool { return opened.Load() >= 2*addrs })
	if err := syncChange(t, b, wide); err != nil {
		t.Error(err)
	}
	if n := opened.Load(); n != 2*addrs {
		t.Errorf("opened %d listeners, want %d", n, 2*addrs)
	}
}

// TestFreedDescriptorsWakeOneConnection lets connections of several services wait. Only
// connections that get descriptors wake. Connections of the service with the fewest
// descriptors wake first.
func TestFreedDescriptorsWakeOneConnection(t *testing.T) {
	d := newDescriptors(20)
	few, many := &account{descriptors: d}, &account{descriptors: d}
	for many.take(2) {
	}
	for few.take(2) {
	}
	granted, ended := make(chan *account, 20), make(chan struct{})
	defer close(ended)
	for range 5 {
		for _, a := range []*account{many, few} {
			go func() {
				if a.takeUnless(2, ended) {
					granted <- a
				}
			}()
		}
	}
	waiting := func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		return few.waiters.Len() + many.waiters.Len()
	}
	eventually(t, "all wait", func() bool { return waiting() == 10 })
	for left := 9; left >= 7; left-- {
		many.give(2)
		if a := <-granted; a != few {
			t.Error("a connection of the service with more descriptors came first")
		}
		if n := waiting(); n != left {
			t.Fatalf("%d connections wait, want %d", n, left)
		}
	}
}

// TestWaitingConnectionsAreBounded makes more connections wait than a service may have.
func TestWaitingConnectionsAreBounded(t *testing.T) {
	a := &account{descriptors: newDescriptors(2)}
	a.take(2)
	ended, results := make(chan struct{}), make(chan bool, maxWaiting+1)
	for range maxWaiting + 1 {
		go func() { results <- a.takeUnless(2, ended) }()
	}
	if <-results {
		t.Error("a connection got descriptors above the share")
	}
	close(ended)
	for range maxWaiting {
		<-results
	}
	if a.waiters.Len() != 0 || len(a.waiting) != 0 {
		t.Error("connections still wait after their listener was closed")
	}
}

func TestAdmissionEqualsLinearSearch(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int{0, 1, 5, 50} {
		for range 50 {
			var list []netip.Prefix
			for range size {
				addr := netip.AddrFrom4([4]byte{10, byte(random.IntN(2)), byte(random.IntN(4)), byte(random.IntN(256))})
				list = append(list, netip.PrefixFrom(addr, 20+random.IntN(13)))
			}
			a := newAdmission(list)
			for range 200 {
				addr := netip.AddrFrom4([4]byte{10, byte(random.IntN(2)), byte(random.IntN(4)), byte(random.IntN(256))})
				want := slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(addr) })
				if got := a.admits(addr); got != want {
					t.Fatalf("%v admits %s: %v, want %v", list, addr, got, want)
				}
			}
		}
	}
}

// TestSourceRangesAreStoredOnce delivers a service with many frontends and source ranges.
// They share one list of ranges, and their socket filters are bounded.
func TestSourceRangesAreStoredOnce(t *testing.T) {
	netnstest.NeedRoot(t)
	b, _, _ := startBackend(t, settings{})
	wide := wideService("wide", netip.MustParseAddr("10.97.0.1"), 51, 2, netip.MustParseAddrPort("10.244.0.1:80"))
	var ranges []netip.Prefix
	for i := range 1000 {
		ranges = append(ranges, netip.PrefixFrom(netip.AddrFrom4([4]byte{127, byte(i >> 7), byte(i << 1), 0}), 24))
	}
	wide.Service.SourceRanges = []api.SourceRanges{{TargetIPs: wide.Service.IPs.ExternalIPs, Prefixes: ranges}}
	if err := syncChange(t, b, wide); err != nil {
		t.Fatal(err)
	}
	s := b.services[key("wide")]
	if len(s.admissions) != 1 || len(s.rules) != 4 {
		t.Errorf("%d lists of ranges and %d rules, want 1 and 4", len(s.admissions), len(s.rules))
	}
	if s.filters > maxFilters {
		t.Errorf("the socket filters have %d instructions, want at most %d", s.filters, maxFilters)
	}
	if err := syncChange(t, b, wideService("wide", netip.MustParseAddr("10.97.0.1"), 51, 2, netip.MustParseAddrPort("10.244.0.1:80"))); err != nil {
		t.Fatal(err)
	}
	if s.filters != 0 {
		t.Errorf("without source ranges, the socket filters have %d instructions", s.filters)
	}
}

// TestEvictionLooksAtOneService adds and removes clients of many services. The accounts
// must stay ordered by their numbers of clients.
func TestEvictionLooksAtOneService(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	u := newUDPClients(1000)
	var ports []*port
	for range 20 {
		ports = append(ports, &port{common: &common{}})
	}
	var clients []*udpClient
	for i := range 3000 {
		if i < 1000 || random.IntN(2) == 0 {
			c := &udpClient{port: ports[random.IntN(1+i%20)]}
			if !u.add(c, func() bool { return true }) {
				t.Fatal("not added")
			}
			clients = append(clients, c)
		} else {
			at := random.IntN(len(clients))
			u.remove(clients[at])
			clients = slices.Delete(clients, at, at+1)
		}
		most, total := 0, 0
		for _, p := range ports {
			n := len(p.udpClients.clients)
			most, total = max(most, n), total+n
			if n > 0 {
				if _, found := u.bySize[n-1][&p.udpClients]; !found {
					t.Fatalf("a service with %d clients is at another place", n)
				}
			}
		}
		if most != len(u.bySize) || total != u.count {
			t.Fatal(fmt.Errorf("the service with the most clients has %d of %d, but %d of %d are recorded", most, total, len(u.bySize), u.count))
		}
	}
}
