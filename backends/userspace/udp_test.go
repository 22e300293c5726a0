// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	clocktesting "k8s.io/utils/clock/testing"
)

// udpServer answers each datagram with its own name and the same datagram.
func udpServer(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		b := make([]byte, maxDatagram)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				c.WriteToUDPAddrPort(append([]byte(name+" "), b[:n]...), from)
			}
		}
	})
	t.Cleanup(func() {
		c.Close()
		done.Wait()
	})
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func udpDial(t *testing.T, addr string, port int32) *net.UDPConn {
	t.Helper()
	c, err := net.Dial("udp", net.JoinHostPort(addr, fmt.Sprint(port)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}

// udpAsk repeats a datagram until there is an answer. It returns the name of the server,
// which is the first word of the answer.
func udpAsk(t *testing.T, c *net.UDPConn) string {
	t.Helper()
	var name string
	eventually(t, "a datagram is answered", func() bool {
		c.Write([]byte("hello"))
		c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		b := make([]byte, maxDatagram)
		n, err := c.Read(b)
		name, _, _ = strings.Cut(string(b[:n]), " ")
		return err == nil
	})
	return name
}

func TestUDPClientKeepsItsEndpoint(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(udpServer(t, "a"), udpServer(t, "b")).view())
	got := map[string]int{}
	for range 10 {
		c := udpDial(t, "127.0.0.2", port)
		name := udpAsk(t, c)
		got[name]++
		for range 3 {
			if again := udpAsk(t, c); again != name {
				t.Fatalf("one client reached %s and then %s", name, again)
			}
		}
	}
	if diff := cmp.Diff(map[string]int{"a": 5, "b": 5}, got); diff != "" {
		t.Errorf("clients by endpoint (-want +got):\n%s", diff)
	}
}

func TestLargestDatagramIsMoved(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(udpServer(t, "a")).view())
	c := udpDial(t, "127.0.0.2", port)
	const size = 65507 - len("a ") // the server adds its name, so the answer has the maximum size
	if _, err := c.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	c.SetReadDeadline(time.Now().Add(patience))
	if n, err := c.Read(make([]byte, maxDatagram)); n != 65507 || err != nil {
		t.Errorf("received %d bytes, error %v", n, err)
	}
}

func TestIdleUDPClientIsDropped(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	w := newWorld(t, settings{Options: Options{UDPTimeout: time.Minute}, clock: clock})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(udpServer(t, "a")).view())
	silent, talking := udpDial(t, "127.0.0.2", port), udpDial(t, "127.0.0.2", port)
	udpAsk(t, silent)
	udpAsk(t, talking)
	clock.Step(50 * time.Second)
	udpAsk(t, talking)
	clock.Step(20 * time.Second)
	eventually(t, "one client remains", func() bool { return w.stats("dns").active == 1 })
	udpAsk(t, talking)
	if got := w.stats("dns").connections; got != 2 {
		t.Errorf("%d clients were counted, want 2: an active client is kept", got)
	}
}

func TestUDPClientLeavesRemovedEndpoint(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	first, second := udpServer(t, "first"), udpServer(t, "second")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(first).view())
	c := udpDial(t, "127.0.0.2", port)
	if got := udpAsk(t, c); got != "first" {
		t.Fatalf("reached %s", got)
	}
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(second).addDraining(first).view())
	if got := udpAsk(t, c); got != "first" {
		t.Errorf("reached %s although the first endpoint still serves", got)
	}
	if got := udpAsk(t, udpDial(t, "127.0.0.2", port)); got != "second" {
		t.Errorf("a new client reached %s, which is on no list", got)
	}
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(second).view())
	if got := udpAsk(t, c); got != "second" {
		t.Errorf("reached %s, which was removed", got)
	}
}

func TestUDPClientLeavesEndpointOfRemovedPort(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	named := func(name string, server netip.AddrPort) *api.View {
		s := serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(server)
		s.Service.Ports[0].Name, s.Endpoints[0].PortOverrides[0].Name = name, name
		return s.view()
	}
	w.set(named("old", udpServer(t, "first")))
	c := udpDial(t, "127.0.0.2", port)
	udpAsk(t, c)
	w.set(named("new", udpServer(t, "second")))
	if got := udpAsk(t, c); got != "second" {
		t.Errorf("reached %s, which was removed", got)
	}
}

// TestNewUDPClientDuringRemovalOfItsEndpoint removes an endpoint that was just chosen for
// a new client.
func TestNewUDPClientDuringRemovalOfItsEndpoint(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	first, second := udpServer(t, "first"), udpServer(t, "second")
	changed := make(chan struct{})
	w.log.onText("Mapped service to endpoint", func() {
		defer close(changed)
		w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(second).view())
	})
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(first).view())
	c := udpDial(t, "127.0.0.2", port)
	c.Write([]byte("hello"))
	<-changed
	if got := udpAsk(t, c); got != "second" {
		t.Errorf("reached %s, which was removed", got)
	}
}

func TestUDPClientLeavesRefusingEndpoint(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	dead := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(freePort(t, "127.0.0.1")))
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(dead, udpServer(t, "alive")).view())
	for range 4 {
		if got := udpAsk(t, udpDial(t, "127.0.0.2", port)); got != "alive" {
			t.Errorf("reached %s", got)
		}
	}
}

func TestAffinityDoesNotKeepRefusingUDPEndpoint(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	dead := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(freePort(t, "127.0.0.1")))
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(dead, udpServer(t, "alive")).modify(func(s *api.Service) {
		s.AffinitySeconds = 100
	}).view())
	for range 4 {
		if got := udpAsk(t, udpDial(t, "127.0.0.2", port)); got != "alive" {
			t.Errorf("reached %s", got)
		}
	}
}

func TestUDPIsRefusedAfterServiceIsDeleted(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(udpServer(t, "a")).view())
	c := udpDial(t, "127.0.0.2", port)
	udpAsk(t, c)
	w.source.Delete(key("dns"))
	w.applied()
	eventually(t, "datagrams are refused", func() bool {
		c.SetDeadline(time.Now().Add(200 * time.Millisecond))
		c.Write([]byte("hello"))
		_, err := c.Read(make([]byte, 10))
		return errors.Is(err, syscall.ECONNREFUSED)
	})
}

func TestTableOfUDPClientsIsBounded(t *testing.T) {
	w := newWorld(t, settings{Options: Options{MaxUDPClients: 32}})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(udpServer(t, "a")).view())
	for range 100 {
		udpAsk(t, udpDial(t, "127.0.0.2", port))
		if got := w.stats("dns").active; got > 32 {
			t.Fatalf("%d concurrent clients", got)
		}
	}
	if got := w.stats("dns").connections; got != 100 {
		t.Errorf("%d clients were counted, want 100", got)
	}
}

// TestBurstOfUDPClientsUsesFewBatches lets 1,000 clients receive answers at the same
// time.
func TestBurstOfUDPClientsUsesFewBatches(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(udpServer(t, "a")).view())
	var clients []*net.UDPConn
	for range 1000 {
		c := udpDial(t, "127.0.0.2", port)
		udpAsk(t, c)
		clients = append(clients, c)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 20 {
		for _, c := range clients {
			c.Write(make([]byte, 1000))
		}
	}
	udpAsk(t, udpDial(t, "127.0.0.2", port)) // the server answers this datagram last, when all others have been forwarded
	runtime.ReadMemStats(&after)
	if mib := (after.TotalAlloc - before.TotalAlloc) >> 20; mib > 128 {
		t.Errorf("20 MB of datagrams allocated %d MiB, want at most 128", mib)
	}
}

func TestGetWaitsForFreeBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBatches()
		var made []*batch
		for range maxBatches {
			made = append(made, b.get())
		}
		got := make(chan *batch, 1)
		go func() { got <- b.get() }()
		synctest.Wait()
		if len(got) > 0 {
			t.Fatalf("more than %d batches exist", maxBatches)
		}
		b.put(made[0])
		if <-got != made[0] {
			t.Error("another batch was created although one was free")
		}
	})
}

// TestTwentyThousandUDPClients makes twice as many clients as are allowed. The backend
// must remove the clients that have been idle longest.
func TestTwentyThousandUDPClients(t *testing.T) {
	const clients, room = 20_000, 10_000
	w := newWorld(t, settings{Options: Options{MaxUDPClients: room}})
	port := freePort(t, "127.0.0.2")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(udpServer(t, "a")).view())
	for first := 0; first < clients; first += 100 {
		var sockets []*net.UDPConn
		for i := range 100 {
			from := &net.UDPAddr{IP: net.IPv4(127, 1, byte((first+i)>>8), byte(first+i))}
			c, err := net.DialUDP("udp", from, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2), Port: int(port)})
			if err != nil {
				t.Fatal(err)
			}
			c.Write([]byte("hello"))
			sockets = append(sockets, c)
		}
		for i, c := range sockets {
			c.SetReadDeadline(time.Now().Add(patience))
			if _, err := c.Read(make([]byte, 10)); err != nil {
				t.Fatalf("client %d: %v", first+i, err)
			}
			c.Close()
		}
	}
	s := w.stats("dns")
	if s.connections != clients || s.active > room || s.active < room/2 {
		t.Errorf("%d clients were counted and %d remain, want %d and at most %d", s.connections, s.active, clients, room)
	}
}
