// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
)

// TestOwnAddressesAreNotUsedAsEndpoints makes a service whose only endpoint is one of its
// own addresses or its node port. In one case the endpoint is the address of a second
// service, whose endpoint is the first service.
func TestOwnAddressesAreNotUsedAsEndpoints(t *testing.T) {
	for name, endpointAt := range map[string]string{
		"its cluster IP": "127.0.0.2", "its external IP": "127.0.0.3", "its load-balancer IP": "127.0.0.4",
		"its node port": "127.0.0.1", "another service": "127.0.0.5",
	} {
		for _, protocol := range []api.Protocol{api.TCP, api.UDP} {
			t.Run(fmt.Sprint(name, " ", protocol), func(t *testing.T) {
				w := newWorld(t, settings{})
				port := freePort(t, "127.0.0.2")
				node := freePort(t, "127.0.0.1")
				to := port
				if name == "its node port" {
					to = node
				}
				loop := serviceAt("loop", "127.0.0.2", port, protocol).
					addEndpoints(netip.AddrPortFrom(netip.MustParseAddr(endpointAt), uint16(to))).
					modify(func(s *api.Service) {
						s.Type = api.LoadBalancer
						s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("127.0.0.3"))
						s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("127.0.0.4"))
						s.Ports[0].NodePort = node
					})
				back := serviceAt("back", "127.0.0.5", port, protocol).addEndpoints(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), uint16(port)))
				w.set(loop.view(), back.view())
				for range 2 {
					sendOnce(t, protocol, "127.0.0.2", port)
				}
				const warning = "Ignoring endpoints that this proxy serves itself"
				eventually(t, "the log reports it", func() bool { return strings.Contains(w.log.String(), warning) })
				if protocol == api.TCP {
					eventually(t, "both connections arrived", func() bool { return w.stats("loop").connections == 2 })
				}
				loops, others := w.stats("loop"), w.stats("back")
				if loops.connections > 2 || others.connections > 0 || loops.dialFailures+others.dialFailures > 0 {
					t.Errorf("traffic returned to the proxy: %+v, %+v", loops, others)
				}
				if got := strings.Count(w.log.String(), warning); got != 1 {
					t.Errorf("logged %d times", got)
				}
			})
		}
	}
}

// sendOnce sends a few bytes to a UDP port, or expects a reset from a TCP port.
func sendOnce(t *testing.T, protocol api.Protocol, addr string, port int32) {
	t.Helper()
	if protocol == api.UDP {
		udpDial(t, addr, port).Write([]byte("hello"))
		return
	}
	c, err := net.Dial("tcp", net.JoinHostPort(addr, fmt.Sprint(port)))
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v, want a reset", err)
	}
}

func TestOtherEndpointsOfALoopAreUsed(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	self := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), uint16(port))
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(self, namedServer(t, "a")).modify(func(s *api.Service) {
		s.AffinitySeconds = 100
	}).view())
	for range 4 {
		if got := askOnce(t, "127.0.0.2", port); got != "a" {
			t.Errorf("connected to %s", got)
		}
	}
}

// someDescriptors returns descriptors for the given numbers of listeners, and of connections
// and UDP clients.
func someDescriptors(listeners, others int) *descriptors {
	return &descriptors{free: listeners + others, maxListeners: 100}
}

// TestServiceCannotUseAllDescriptors connects more clients to a service than its share of
// descriptors allows.
func TestServiceCannotUseAllDescriptors(t *testing.T) {
	w := newWorld(t, settings{descriptors: someDescriptors(2, 50)})
	port := freePort(t, "127.0.0.2")
	server := namedServer(t, "a")
	w.set(serviceAt("hog", "127.0.0.2", port, api.TCP).addEndpoints(server).view(), serviceAt("web", "127.0.0.3", port, api.TCP).addEndpoints(server).view())
	var clients []*client
	served := make(chan int, 100)
	for i := range cap(served) {
		c := dial(t, "127.0.0.2", port)
		clients = append(clients, c)
		c.SetDeadline(time.Time{})
		go func() {
			fmt.Fprintln(c, "hello")
			if _, err := c.lines.ReadString('\n'); err == nil {
				served <- i
			}
		}()
	}
	eventually(t, "the log reports it", func() bool { return strings.Contains(w.log.String(), "Out of file descriptors for this service") })
	const share = 20 // 20 connections use 40 descriptors, which is four fifths of 50
	for range share {
		clients[<-served].Close() // frees its file descriptors for a waiting client
	}
	w.source.Delete(key("hog")) // while some clients are still waiting
	w.source.Set(serviceAt("web", "127.0.0.3", port, api.TCP).addEndpoints(server).view())
	for range 3 {
		if got := askOnce(t, "127.0.0.3", port); got != "a" {
			t.Errorf("a client of the other service reached %s", got)
		}
	}
	w.applied()
	for _, c := range clients {
		c.Close()
	}
}

// TestFullShareDoesNotAffectOtherServices makes a client of one service wait, because
// that service has used its share of descriptors.
func TestFullShareDoesNotAffectOtherServices(t *testing.T) {
	w := newWorld(t, settings{descriptors: someDescriptors(2, 50)})
	port := freePort(t, "127.0.0.2")
	server := namedServer(t, "a")
	w.set(serviceAt("hog", "127.0.0.2", port, api.TCP).addEndpoints(server).view(), serviceAt("web", "127.0.0.3", port, api.TCP).addEndpoints(server).view())
	var clients []*client
	for range 20 {
		c := dial(t, "127.0.0.2", port)
		c.ask()
		clients = append(clients, c)
	}
	waiting := dial(t, "127.0.0.2", port)
	fmt.Fprintln(waiting, "hello")
	eventually(t, "the log reports it", func() bool { return strings.Contains(w.log.String(), "Out of file descriptors for this service") })
	if got := askOnce(t, "127.0.0.3", port); got != "a" {
		t.Errorf("a client of the other service reached %s", got)
	}
	for _, c := range clients {
		c.Close()
	}
	if line, err := waiting.lines.ReadString('\n'); err != nil || line != "a hello\n" {
		t.Errorf("after other connections ended, the waiting one got the answer %q, error %v", line, err)
	}
}

func TestUDPClientsDoNotEvictOtherServices(t *testing.T) {
	w := newWorld(t, settings{Options: Options{MaxUDPClients: 32}})
	port := freePort(t, "127.0.0.2")
	server := udpServer(t, "a")
	w.set(serviceAt("dns", "127.0.0.2", port, api.UDP).addEndpoints(server).view(), serviceAt("hog", "127.0.0.3", port, api.UDP).addEndpoints(server).view())
	for range 8 {
		udpAsk(t, udpDial(t, "127.0.0.2", port))
	}
	for range 100 {
		udpAsk(t, udpDial(t, "127.0.0.3", port))
	}
	if s := w.stats("dns"); s.active != 8 {
		t.Errorf("%d of 8 clients remain because another service has many", s.active)
	}
}
