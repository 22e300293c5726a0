// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	clocktesting "k8s.io/utils/clock/testing"
)

// refused reports whether a connection is refused or reset. A listener that closes before
// it accepts a connection resets the connection.
func refused(t *testing.T, addr string, port int32) bool {
	t.Helper()
	c, err := net.DialTimeout("tcp", net.JoinHostPort(addr, fmt.Sprint(port)), patience)
	if err == nil {
		c.Close()
	} else if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("connect to %s: %v", addr, err)
	}
	return err != nil
}

// dropped reports whether a connection is neither accepted nor refused.
func dropped(t *testing.T, addr string, port int32) bool {
	t.Helper()
	c, err := net.DialTimeout("tcp", net.JoinHostPort(addr, fmt.Sprint(port)), 200*time.Millisecond)
	if err == nil {
		c.Close()
		return false
	}
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func TestEstablishedConnectionSurvivesChangesOfItsService(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	first, second := namedServer(t, "first"), namedServer(t, "second")
	service := func() *testService { return serviceAt("web", "127.0.0.2", port, api.TCP) }
	w.set(service().addEndpoints(first).view())
	c := dial(t, "127.0.0.2", port)
	c.ask()
	for _, next := range []struct {
		name string
		view *api.View
	}{
		{"its endpoint is taken out of service", service().addEndpoints(second).addDraining(first).view()},
		{"its endpoint is removed", service().addEndpoints(second).view()},
		{"the service has no endpoints", service().markUnusable().view()},
		{"the service gets an external IP", service().addEndpoints(second).modify(func(s *api.Service) {
			s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("127.0.0.3"))
		}).view()},
	} {
		w.set(next.view)
		if got := c.ask(); got != "first" {
			t.Errorf("%s: the connection reached %s", next.name, got)
		}
	}
	if got := askOnce(t, "127.0.0.2", port); got != "second" {
		t.Errorf("a new connection reached %s", got)
	}
	if got := askOnce(t, "127.0.0.3", port); got != "second" {
		t.Errorf("a connection to the external IP reached %s", got)
	}
}

func TestUnchangedListenerStaysOpen(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	service := serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a"))
	w.set(service.view())
	at := socketAddr{api.TCP, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), uint16(port))}
	before := w.listenerAt(at)
	w.source.Reset() // the next update of the source has Lost set
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "b")).view())
	if w.listenerAt(at) != before {
		t.Error("the listener was replaced")
	}
}

func (w *world) listenerAt(at socketAddr) listener {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sockets.owner(at).listeners[at]
}

func TestServicesSwapAddresses(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	a, b := namedServer(t, "a"), namedServer(t, "b")
	w.set(serviceAt("a", "127.0.0.2", port, api.TCP).addEndpoints(a).view(), serviceAt("b", "127.0.0.3", port, api.TCP).addEndpoints(b).view())
	w.set(serviceAt("a", "127.0.0.3", port, api.TCP).addEndpoints(a).view(), serviceAt("b", "127.0.0.2", port, api.TCP).addEndpoints(b).view())
	if got := askOnce(t, "127.0.0.3", port) + askOnce(t, "127.0.0.2", port); got != "ab" {
		t.Errorf("connected to %s", got)
	}
}

func TestPassInSeveralBatches(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	a, b, gone := namedServer(t, "a"), namedServer(t, "b"), namedServer(t, "g")
	at := func(name string, last int, to netip.AddrPort) *api.View {
		return serviceAt(name, fmt.Sprintf("127.0.0.%d", last), port, api.TCP).addEndpoints(to).view()
	}
	w.set(at("a", 2, a), at("b", 3, b), at("gone", 4, gone))
	served := func(want string) {
		t.Helper()
		if got := askOnce(t, "127.0.0.2", port) + askOnce(t, "127.0.0.3", port) + askOnce(t, "127.0.0.4", port); got != want {
			t.Errorf("connected to %s, want %s", got, want)
		}
	}
	batch := func(first, last bool, views ...*api.View) {
		t.Helper()
		c := fullOf(views...)
		c.First, c.Last = first, last
		if err := w.Sync(w.ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	// The services swap their addresses. After the first batch, service a already has the
	// former address of service b, and service b has no address.
	batch(true, false, at("a", 3, a))
	if got := askOnce(t, "127.0.0.3", port) + askOnce(t, "127.0.0.4", port); got != "ag" {
		t.Errorf("connected to %s, want ag", got)
	}
	batch(false, false, at("b", 2, b))
	served("bag")
	// During a new pass, the services swap their addresses again.
	batch(true, false, at("a", 2, a))
	batch(false, false, at("b", 3, b))
	served("abg")
	batch(false, true)
	if got := askOnce(t, "127.0.0.2", port) + askOnce(t, "127.0.0.3", port); got != "ab" {
		t.Errorf("connected to %s, want ab", got)
	}
	if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.4:%d", port)); err == nil {
		c.Close()
		t.Error("a service that was not delivered in the pass is served after it")
	}
}

func TestPortInUseFailsOnlyItsService(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	taken, err := net.Listen("tcp", fmt.Sprintf("127.0.0.2:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	both := func(s *api.Service) { s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("127.0.0.3")) }
	err = w.setFailing(
		serviceAt("blocked", "127.0.0.2", port, api.TCP).modify(both).addEndpoints(namedServer(t, "blocked")).view(),
		serviceAt("web", "127.0.0.4", port, api.TCP).addEndpoints(namedServer(t, "web")).view())
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), fmt.Sprintf("127.0.0.2:%d/TCP", port)) {
		t.Errorf("error %q, want one that names the port in use", err)
	}
	if got := askOnce(t, "127.0.0.4", port); got != "web" {
		t.Errorf("the other service reached %s", got)
	}
	if got := askOnce(t, "127.0.0.3", port); got != "blocked" {
		t.Errorf("the service's other address reached %s", got)
	}
	taken.Close()
	w.applied()
	if got := askOnce(t, "127.0.0.2", port); got != "blocked" {
		t.Errorf("after the port became free, connected to %s", got)
	}
}

func TestUnsupportedFrontendsAreLoggedAndOthersServed(t *testing.T) {
	for name, change := range map[string]func(*api.Service){
		"a service of all ports": func(s *api.Service) { s.AllPorts, s.Ports = true, nil },
		"SCTP": func(s *api.Service) {
			s.Ports = append(s.Ports, api.PortMapping{Name: "sctp", Protocol: api.SCTP, Port: 80, TargetPort: 80})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, settings{})
			port := freePort(t, "127.0.0.2")
			for range 2 { // in the second pass, nothing has changed
				w.source.Reset()
				w.set(serviceAt("odd", "127.0.0.2", port, api.TCP).modify(change).addEndpoints(namedServer(t, "a")).view())
			}
			if name == "SCTP" && askOnce(t, "127.0.0.2", port) != "a" {
				t.Error("the TCP port is not served")
			}
			if got := strings.Count(w.log.String(), "a userspace proxy"); got != 1 {
				t.Errorf("logged %d times, want once:\n%s", got, w.log.String())
			}
		})
	}
}

func TestVerdictsWithoutEndpoints(t *testing.T) {
	netnstest.NeedRoot(t)
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("none", "127.0.0.2", port, api.TCP).markUnusable().view(), serviceAt("elsewhere", "127.0.0.3", port, api.TCP).view())
	if !refused(t, "127.0.0.2", port) {
		t.Error("the connection is not refused although no endpoint is usable")
	}
	if !dropped(t, "127.0.0.3", port) {
		t.Error("the connection is not dropped although only other nodes have endpoints")
	}
	w.set(serviceAt("none", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a")).view(),
		serviceAt("elsewhere", "127.0.0.3", port, api.TCP).addEndpoints(namedServer(t, "b")).view())
	if got := askOnce(t, "127.0.0.2", port) + askOnce(t, "127.0.0.3", port); got != "ab" {
		t.Errorf("with endpoints, connected to %s", got)
	}
}

// TestSourceRangesDropOthers connects to a load-balancer IP that admits only some
// loopback addresses.
func TestSourceRangesDropOthers(t *testing.T) {
	netnstest.NeedRoot(t)
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a")).modify(func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("127.0.0.3"))
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{
			netip.MustParsePrefix("127.9.0.0/16"), netip.MustParsePrefix("127.10.0.1/32"),
		}}}
	}).view())
	for from, want := range map[string]bool{"127.9.3.4": true, "127.10.0.1": true, "127.10.0.2": false, "127.8.0.1": false} {
		d := net.Dialer{Timeout: 200 * time.Millisecond, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.Dial("tcp", fmt.Sprintf("127.0.0.3:%d", port))
		if err == nil {
			c.Close()
		}
		if got := err == nil; got != want {
			t.Errorf("from %s: connected %v, want %v (%v)", from, got, want, err)
		}
	}
	if got := askOnce(t, "127.0.0.2", port); got != "a" {
		t.Errorf("the unrestricted cluster IP reached %s", got)
	}
}

// TestLocalPolicyIsShortCircuitedForThisNode connects from this node to a service whose
// endpoints are all on other nodes.
func TestLocalPolicyIsShortCircuitedForThisNode(t *testing.T) {
	netnstest.NeedRoot(t)
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addScoped(api.Scopes{Internal: true, Cluster: true}, namedServer(t, "far")).
		modify(func(s *api.Service) {
			s.ExternalTrafficToLocal = true
			s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("127.0.0.3"))
		}).view())
	if got := askOnce(t, "127.0.0.3", port); got != "far" {
		t.Errorf("this node reached %s", got)
	}
}

func TestClientKeepsItsEndpoint(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	w := newWorld(t, settings{clock: clock})
	port := freePort(t, "127.0.0.2")
	servers := []netip.AddrPort{namedServer(t, "a"), namedServer(t, "b"), namedServer(t, "c")}
	affine := func(s *api.Service) {
		s.AffinitySeconds = 100
	}
	service := func() *testService { return serviceAt("web", "127.0.0.2", port, api.TCP) }
	from := func(addr string) string {
		c := dialFrom(t, addr, "127.0.0.2", port)
		defer c.Close()
		return c.ask()
	}
	w.set(service().addEndpoints(servers...).modify(affine).view())
	first := from("127.5.0.1")
	if second := from("127.5.0.2"); second == first {
		t.Errorf("two clients share %s", first)
	}
	for range 4 {
		clock.Step(90 * time.Second) // less than the timeout; each connection starts the timeout again
		if got := from("127.5.0.1"); got != first {
			t.Fatalf("connected to %s, before to %s", got, first)
		}
	}

	var others []netip.AddrPort
	var kept netip.AddrPort
	for i, name := range []string{"a", "b", "c"} {
		if name == first {
			kept = servers[i]
		} else {
			others = append(others, servers[i])
		}
	}
	w.set(service().addEndpoints(kept, others[0]).modify(affine).view())
	if got := from("127.5.0.1"); got != first {
		t.Errorf("connected to %s because another endpoint was removed", got)
	}
	w.set(service().addEndpoints(others...).modify(affine).view())
	next := from("127.5.0.1")
	if next == first {
		t.Errorf("still connects to %s, which was removed", first)
	}
	w.set(service().addEndpoints(servers...).modify(affine).view())
	if got := from("127.5.0.1"); got != next {
		t.Errorf("connected to %s, before to %s", got, next)
	}

	clock.Step(101 * time.Second)
	seen := map[string]bool{}
	for range 5 { // enough connections to reach all three endpoints, even if they begin in the middle of a round
		seen[from("127.5.0.1")] = true
		clock.Step(101 * time.Second)
	}
	if len(seen) != 3 {
		t.Errorf("after the timeout connected only to %v", seen)
	}

	w.set(service().addEndpoints(servers...).view())
	seen = map[string]bool{}
	for range 5 {
		seen[from("127.5.0.1")] = true
	}
	if len(seen) != 3 {
		t.Errorf("without affinity connected only to %v", seen)
	}
}

func TestTrafficFromInterfaceAddressesIsLocal(t *testing.T) {
	w := newWorld(t, settings{})
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		addr := netip.MustParsePrefix(a.String()).Addr()
		if !w.startsHere(addr) {
			t.Errorf("traffic from %s is not local", addr)
		}
	}
	if addr := netip.MustParseAddr("198.51.100.1"); w.startsHere(addr) {
		t.Errorf("traffic from %s is local", addr)
	}
}

func TestNodePortsFollowNodeAddresses(t *testing.T) {
	addrs := nodeaddrs.Of(netip.MustParseAddr("127.0.0.5"))
	w := newWorld(t, settings{Options: Options{Options: backends.Options{NodeAddresses: addrs}}})
	port, nodePort := freePort(t, "127.0.0.2"), freePort(t, "127.0.0.5")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a")).modify(func(s *api.Service) {
		s.Type = api.NodePort
		s.Ports[0].NodePort = nodePort
	}).view())
	if got := askOnce(t, "127.0.0.5", nodePort); got != "a" {
		t.Errorf("connected to %s", got)
	}
	if !refused(t, "127.0.0.6", nodePort) {
		t.Error("the node port is served at an address that is not selected")
	}
	c := dial(t, "127.0.0.5", nodePort)
	c.ask()
	addrs.Set(netip.MustParseAddr("127.0.0.6"))
	eventually(t, "the node port moves", func() bool {
		return !refused(t, "127.0.0.6", nodePort) && refused(t, "127.0.0.5", nodePort)
	})
	if got := c.ask(); got != "a" {
		t.Errorf("the existing connection reached %s", got)
	}
}

func TestBothFamiliesAreServed(t *testing.T) {
	w := newWorld(t, settings{})
	server := namedServerAt(t, "six", "[::1]:0")
	port := freePort(t, "::1")
	w.set(serviceAt("web", "::1", port, api.TCP).addEndpoints(server).view())
	if got := askOnce(t, "::1", port); got != "six" {
		t.Errorf("connected to %s", got)
	}
	if !refused(t, "127.0.0.1", port) {
		t.Error("the other family is served too")
	}
}

func TestConnectionsOfDeletedServiceDrain(t *testing.T) {
	w := newWorld(t, settings{Options: Options{DrainTimeout: 300 * time.Millisecond}})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a")).view())
	c := dial(t, "127.0.0.2", port)
	c.ask()
	w.source.Delete(key("web"))
	w.applied()
	if !refused(t, "127.0.0.2", port) {
		t.Error("a new connection is not refused")
	}
	if got := c.ask(); got != "a" {
		t.Errorf("while the connection drains, connected to %s", got)
	}
	begin := time.Now()
	if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v, want a reset", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("the connection ended after %v", took)
	}
}

func TestConnectionsOfAServiceWithoutEndpointsAreNotLimited(t *testing.T) {
	w := newWorld(t, settings{Options: Options{DrainTimeout: 100 * time.Millisecond}})
	port := freePort(t, "127.0.0.2")
	server := namedServer(t, "a")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(server).view())
	c := dial(t, "127.0.0.2", port)
	c.ask()
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).markUnusable().view())
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(server).view())
	c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("while its service exists, the connection ended with %v", err)
	}
	c.SetReadDeadline(time.Now().Add(patience))
	w.source.Delete(key("web"))
	w.applied()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after the deletion of its service, the connection ended with %v, want a reset", err)
	}
}

func TestStopWaitsForConnectionsToEnd(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a")).view())
	c := dial(t, "127.0.0.2", port)
	c.ask()
	w.stop()
	eventually(t, "new connections are refused", func() bool { return refused(t, "127.0.0.2", port) })
	if got := c.ask(); got != "a" {
		t.Errorf("while the backend stops, connected to %s", got)
	}
	c.Close()
	w.end()
}

func TestStatsCount(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(namedServer(t, "a")).view())
	c := dial(t, "127.0.0.2", port)
	c.ask()
	askOnce(t, "127.0.0.2", port)
	want := stats{connections: 2, active: 1, sent: 12, received: 16}
	eventually(t, "one connection remains, and all bytes are counted", func() bool { return w.stats("web") == want })
}

// statsByEndpoint returns the counters of a backend, by endpoint.
func (w *world) statsByEndpoint() map[netip.AddrPort]backends.Stats {
	w.Helper()
	all := map[netip.AddrPort]backends.Stats{}
	if err := w.backend.Stats(w.Context(), func(s backends.Stats) bool { all[s.Endpoint] = s; return true }); err != nil {
		w.Fatal(err)
	}
	return all
}

// A removed endpoint stays until its connections have ended and the service changes.
func TestStatsCountByEndpoint(t *testing.T) {
	w := newWorld(t, settings{Options: Options{Options: backends.Options{Stats: true}}})
	port := freePort(t, "127.0.0.2")
	a, b := namedServer(t, "a"), namedServer(t, "b")
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(a).view())
	c := dial(t, "127.0.0.2", port)
	c.ask()
	c.ask()
	want := backends.Stats{Service: key("web"), Protocol: api.TCP, Endpoint: a, Connections: 1, Active: 1, FromClients: 12, ToClients: 16}
	eventually(t, "the bytes are counted", func() bool { return w.statsByEndpoint()[a] == want })
	if got := w.statsByEndpoint(); len(got) != 1 {
		t.Errorf("counters %+v, want only %+v", got, want)
	}
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(b).view())
	if got := w.statsByEndpoint(); got[a] != want || got[b].Endpoint != b || got[b].Connections != 0 {
		t.Errorf("counters after a change of endpoints: %+v", got)
	}
	c.Close()
	eventually(t, "the connection has ended", func() bool { return w.statsByEndpoint()[a].Active == 0 })
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(b, namedServer(t, "c")).view())
	if _, found := w.statsByEndpoint()[a]; found {
		t.Error("the removed endpoint without connections is still counted")
	}
}

func TestStatsCountUDPClients(t *testing.T) {
	w := newWorld(t, settings{Options: Options{Options: backends.Options{Stats: true}}})
	port := freePort(t, "127.0.0.2")
	a := udpServer(t, "a")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(a).view())
	for range 2 {
		c := udpDial(t, "127.0.0.2", port)
		udpAsk(t, c)
		udpAsk(t, c)
	}
	eventually(t, "the bytes are counted", func() bool {
		got := w.statsByEndpoint()[a]
		return got.ToClients > 0 && got.FromClients > 0 && got.FromClients == w.stats("dns").sent
	})
	if got := w.statsByEndpoint()[a]; got.Connections != 2 || got.Active != 2 {
		t.Errorf("counters %+v, want 2 connections", got)
	}
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).view())
	eventually(t, "the clients have left", func() bool { return w.statsByEndpoint()[a].Active == 0 })
}

func TestStatsNeedTheOption(t *testing.T) {
	w := newWorld(t, settings{})
	if err := w.backend.Stats(t.Context(), func(backends.Stats) bool { return true }); err == nil {
		t.Error("the backend has counters without the option Stats")
	}
}
