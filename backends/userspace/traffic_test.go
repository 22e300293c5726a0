// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
)

// weighted sets the weights of the endpoints of s.
func weighted(s *testService, weights map[netip.AddrPort]int32) *testService {
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		e.Weight = weights[netip.AddrPortFrom(e.Addr, uint16(e.PortOverrides[0].Port))]
	}
	return s
}

func TestConnectionsFollowWeights(t *testing.T) {
	w, port := newWorld(t, settings{}), freePort(t, "127.0.0.2")
	a, b, c := namedServer(t, "a"), namedServer(t, "b"), namedServer(t, "c")
	for _, algorithm := range []api.Algorithm{api.Random, api.HashConnection} {
		w.set(weighted(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(a, b, c), map[netip.AddrPort]int32{a: 1, b: 2, c: 7}).
			modify(func(s *api.Service) { s.Algorithm = algorithm }).view())
		const n = 2000
		counts := map[string]int{}
		for range n {
			counts[askOnce(t, "127.0.0.2", port)]++
		}
		for name, want := range map[string]float64{"a": 0.1, "b": 0.2, "c": 0.7} {
			if got := float64(counts[name]) / n; math.Abs(got-want) > 0.03 {
				t.Errorf("%s: %s got %.1f %% of the connections, want %.0f %%", algorithm, name, 100*got, 100*want)
			}
		}
	}
}

// names asks the service once from each of n client addresses.
func names(t *testing.T, addr string, port int32, n int) (out []string) {
	t.Helper()
	for i := range n {
		c := dialFrom(t, fmt.Sprintf("127.0.%d.%d", 1+i/200, 10+i%200), addr, port)
		out = append(out, c.ask())
		c.Close()
	}
	return out
}

// Two nodes are two backends at different addresses. They get the endpoints through changes
// in different orders.
func TestHashedClientsKeepTheirEndpointsOnAllNodes(t *testing.T) {
	const clients = 400
	first, second, port := newWorld(t, settings{}), newWorld(t, settings{}), freePort(t, "127.0.0.2")
	var servers []netip.AddrPort
	for i := range 10 {
		servers = append(servers, namedServer(t, fmt.Sprint(i)))
	}
	on := func(addr string, servers ...netip.AddrPort) *api.View {
		return serviceAt("web", addr, port, api.TCP).addEndpoints(servers...).modify(func(s *api.Service) { s.Algorithm = api.HashClient }).view()
	}
	first.set(on("127.0.0.2", servers...))
	second.set(on("127.0.0.3", servers[:3]...))
	second.set(on("127.0.0.3", servers...))
	before := names(t, "127.0.0.2", port, clients)
	if again := names(t, "127.0.0.2", port, clients); !slices.Equal(before, again) {
		t.Error("clients got another endpoint although nothing has changed")
	}
	if other := names(t, "127.0.0.3", port, clients); !slices.Equal(before, other) {
		t.Error("clients got another endpoint on the second node")
	}
	first.set(on("127.0.0.2", servers[1:]...))
	after := names(t, "127.0.0.2", port, clients)
	others, moved := 0, 0
	for i, name := range before {
		if name == "0" {
			continue
		}
		if others++; after[i] != name {
			moved++
		}
	}
	if others == clients || float64(moved) > float64(others)*(0.1+0.01) {
		t.Errorf("one of ten endpoints was removed: %d of %d clients of the others moved", moved, others)
	}
	t.Logf("%d of %d clients of other endpoints moved", moved, others)
}

// If the endpoint of a client refuses, the client gets the same other endpoint each time.
func TestHashedClientsSkipRefusingEndpoints(t *testing.T) {
	w, port := newWorld(t, settings{}), freePort(t, "127.0.0.2")
	dead := netip.MustParseAddrPort(fmt.Sprintf("127.0.0.1:%d", freePort(t, "127.0.0.1")))
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(dead, namedServer(t, "a"), namedServer(t, "b")).
		modify(func(s *api.Service) { s.Algorithm = api.HashClient }).view())
	first := names(t, "127.0.0.2", port, 50)
	if again := names(t, "127.0.0.2", port, 50); !slices.Equal(first, again) || !slices.Contains(first, "a") || !slices.Contains(first, "b") {
		t.Errorf("clients got %q, then %q", first, again)
	}
}

func TestConnectionsToLostEndpoints(t *testing.T) {
	for _, reset := range []bool{false, true} {
		notReady := func(e *api.Endpoint) { e.Conditions = api.Conditions{Serving: true, Terminating: true} }
		weightZero := func(e *api.Endpoint) { e.Drain = true }
		for _, test := range []struct {
			name string
			next func(s *testService, a, b netip.AddrPort)
			ends bool
		}{
			{"removed", func(s *testService, a, b netip.AddrPort) { s.addEndpoints(b) }, true},
			{"removed, and no other is left", func(s *testService, a, b netip.AddrPort) { s.markUnusable() }, true},
			{"not ready", func(s *testService, a, b netip.AddrPort) { s.addEndpoints(b).addDraining(a); notReady(&s.Draining[0]) }, true},
			{"not ready, but used because none is ready", func(s *testService, a, b netip.AddrPort) { s.addEndpoints(a); notReady(&s.Endpoints[0]) }, false},
			{"weight zero", func(s *testService, a, b netip.AddrPort) {
				s.addEndpoints(b).addDraining(a)
				weightZero(&s.Draining[0])
			}, false},
			{"only on lists of other nodes", func(s *testService, a, b netip.AddrPort) { s.addEndpoints(b).addDraining(a) }, false},
		} {
			t.Run(fmt.Sprintf("%s, reset %t", test.name, reset), func(t *testing.T) {
				w, port := newWorld(t, settings{}), freePort(t, "127.0.0.2")
				a, b := namedServer(t, "a"), namedServer(t, "b")
				service := func() *testService {
					return serviceAt("web", "127.0.0.2", port, api.TCP).modify(func(s *api.Service) { s.ResetConnections = reset })
				}
				w.set(service().addEndpoints(a).view())
				c := dial(t, "127.0.0.2", port)
				c.ask()
				next := service()
				test.next(next, a, b)
				w.set(next.view())
				if !reset || !test.ends {
					for range 3 {
						if got := c.ask(); got != "a" {
							t.Errorf("the connection reached %q, want a", got)
						}
					}
					return
				}
				c.SetDeadline(time.Now().Add(time.Second))
				if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("reading returned %v within a second, want a reset", err)
				}
			})
		}
	}
}

func TestSourceRangesApplyToNodePorts(t *testing.T) {
	netnstest.NeedRoot(t)
	w, port, nodePort := newWorld(t, settings{}), freePort(t, "127.0.0.2"), freePort(t, "127.0.0.1")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a")).modify(func(s *api.Service) {
		s.Type, s.Ports[0].NodePort = api.LoadBalancer, nodePort
		s.SourceRanges = []api.SourceRanges{{
			TargetIPs: api.NewIPSet(netip.MustParseAddr("127.0.0.2")), NodePorts: true,
			Prefixes: []netip.Prefix{netip.MustParsePrefix("127.1.0.0/16")},
		}}
	}).view())
	for _, at := range []netip.AddrPort{
		netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(nodePort)), netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), uint16(port)),
	} {
		c := dialFrom(t, "127.1.0.1", at.Addr().String(), int32(at.Port()))
		if got := c.ask(); got != "a" {
			t.Errorf("%s: an admitted client reached %q", at, got)
		}
		d := net.Dialer{Timeout: 200 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.2.0.1")}}
		if c, err := d.Dial("tcp", at.String()); err == nil {
			c.Close()
			t.Errorf("%s: a client that is not admitted could connect", at)
		}
	}
}
