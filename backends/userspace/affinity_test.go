// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"
)

// affineRules returns rules with affinity for a port with this number of endpoints. It
// also returns the route to these endpoints.
func affineRules(endpoints int, timeout time.Duration) (*rules, route) {
	var targets []netip.AddrPort
	for i := range endpoints {
		targets = append(targets, netip.MustParseAddrPort(fmt.Sprintf("10.244.0.%d:80", i+1)))
	}
	rt := route{pool: newPool(content{sorted: targets})}
	return &rules{port: &port{common: &common{}}, elsewhere: rt, node: rt, affinity: timeout}, rt
}

func TestConcurrentConnectionsOfAClientShareAnEndpoint(t *testing.T) {
	r, rt := affineRules(50, time.Minute)
	now := time.Now()
	for i := range 2000 {
		client := netip.AddrFrom4([4]byte{127, 0, byte(i >> 8), byte(i)})
		var got [8]netip.AddrPort
		var all sync.WaitGroup
		for j := range got {
			all.Go(func() { got[j], _ = r.endpoint(rt, netip.AddrPortFrom(client, 0), noneUnfit, now) })
		}
		all.Wait()
		for _, e := range got {
			if e != got[0] {
				t.Fatalf("client %s got %s and %s", client, got[0], e)
			}
		}
	}
}

func TestChangedAffinityTimeoutAppliesImmediately(t *testing.T) {
	r, rt := affineRules(2, 100*time.Second)
	client, now := netip.MustParseAddr("127.0.0.1"), time.Now()
	// Even without affinity, a client can get the same endpoint again by chance. So
	// clientMoves tries many times.
	clientMoves := func(prepare func()) bool {
		for range 20 {
			first, _ := r.endpoint(rt, netip.AddrPortFrom(client, 0), noneUnfit, now)
			prepare()
			second, _ := r.endpoint(rt, netip.AddrPortFrom(client, 0), noneUnfit, now)
			if first != second {
				return true
			}
		}
		return false
	}
	if clientMoves(func() { now = now.Add(50 * time.Second) }) {
		t.Error("the client left its endpoint before the timeout")
	}
	if !clientMoves(func() {
		r.affinity = 100 * time.Second
		r.endpoint(rt, netip.AddrPortFrom(client, 0), noneUnfit, now)
		now, r.affinity = now.Add(50*time.Second), 10*time.Second
	}) {
		t.Error("the client kept its endpoint after the new timeout")
	}
	r.affinity = 100 * time.Second
	if !clientMoves(func() { r.port.affinity.setTimeout(0) }) {
		t.Error("the client got its old endpoint after affinity was disabled and enabled")
	}
}

// In TestAffinityClientsAreBounded, all ports of a service get new clients.
func TestAffinityClientsAreBounded(t *testing.T) {
	r, rt := affineRules(2, time.Hour)
	ports := []*port{r.port, {common: r.port.common}, {common: r.port.common}}
	now := time.Now()
	pick := func(i int, addr netip.Addr) portClient {
		now = now.Add(time.Millisecond)
		of := *r
		of.port = ports[i%len(ports)]
		of.endpoint(rt, netip.AddrPortFrom(addr, 0), noneUnfit, now)
		return portClient{of.port, addr}
	}
	old := pick(0, netip.MustParseAddr("192.0.2.1"))
	addr := netip.MustParseAddr("10.128.0.0")
	var last portClient
	for i := range 3 * maxAttached {
		addr = addr.Next()
		last = pick(i, addr)
	}
	a := &r.port.affinity
	if len(a.clients) != maxAttached {
		t.Errorf("affinity of %d clients, want %d", len(a.clients), maxAttached)
	}
	if _, ok := a.clients[last]; !ok {
		t.Error("the last client has no affinity")
	}
	if _, ok := a.clients[old]; ok {
		t.Error("the first client still has affinity")
	}
}

func noneUnfit(netip.AddrPort) bool { return false }
