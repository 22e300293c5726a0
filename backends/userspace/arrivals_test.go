// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// slowAddresses lets a test decide when slow addresses become local.
type slowAddresses struct {
	*fakeAddresses
	// results has a channel for each slow address. Add waits for a result from the channel,
	// and succeeds if the channel is closed. Other addresses become local immediately.
	results map[netip.Addr]chan error
}

func (s *slowAddresses) Add(ctx context.Context, addr netip.Addr) error {
	if result, slow := s.results[addr]; slow {
		select {
		case err := <-result:
			if err != nil {
				return err
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return s.fakeAddresses.Add(ctx, addr)
}

func (s *slowAddresses) has(addr netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.there, addr)
}

// newSlowAddresses returns a slowAddresses whose slow addresses are addrs.
func newSlowAddresses(addrs ...string) *slowAddresses {
	s := &slowAddresses{newFakeAddresses(), map[netip.Addr]chan error{}}
	for _, a := range addrs {
		s.results[netip.MustParseAddr(a)] = make(chan error)
	}
	return s
}

// loopbackSockets listens at 127.x.y.z instead of 10.x.y.z, because the host has no
// address 10.x.y.z.
type loopbackSockets struct{ hostSockets }

func (e loopbackSockets) ListenTCP(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error) {
	b := at.Addr().As4()
	if b[0] == 10 {
		b[0] = 127
	}
	return e.hostSockets.ListenTCP(ctx, netip.AddrPortFrom(netip.AddrFrom4(b), at.Port()))
}

func TestServiceIsServedWhenItsAddressIsLocal(t *testing.T) {
	a := newSlowAddresses("10.96.0.2", "10.96.0.3")
	w := newWorld(t, settings{addresses: a, sockets: loopbackSockets{}})
	port := freePort(t, "127.96.0.1")
	server := namedServer(t, "a")
	w.source.Set(serviceAt("first", "10.96.0.1", port, api.TCP).addEndpoints(server).view(),
		serviceAt("second", "10.96.0.2", port, api.TCP).addEndpoints(server).view(),
		serviceAt("third", "10.96.0.3", port, api.TCP).addEndpoints(server).view())
	served := func(addr string) {
		t.Helper()
		eventually(t, addr+" is served", func() bool { return !refused(t, addr, port) })
	}
	served("127.96.0.1")
	close(a.results[netip.MustParseAddr("10.96.0.3")])
	served("127.96.0.3")
	if !refused(t, "127.96.0.2", port) {
		t.Error("a service is served at an address that is not local")
	}
	close(a.results[netip.MustParseAddr("10.96.0.2")])
	served("127.96.0.2")
	w.applied()
}

func TestMissingAddressDelaysNoOtherChange(t *testing.T) {
	a := newSlowAddresses("10.96.0.2")
	node := nodeaddrs.Of(netip.MustParseAddr("127.0.0.5"))
	w := newWorld(t, settings{Options: Options{Options: backends.Options{NodeAddresses: node}}, addresses: a, sockets: loopbackSockets{}})
	port, nodePort := freePort(t, "127.96.0.1"), freePort(t, "127.0.0.5")
	bad := serviceAt("bad", "10.96.0.2", port, api.TCP).addEndpoints(namedServer(t, "bad")).modify(func(s *api.Service) {
		s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.3"))
	}).view()
	good := func(server string) *api.View {
		return serviceAt("good", "10.96.0.1", port, api.TCP).addEndpoints(namedServer(t, server)).modify(func(s *api.Service) {
			s.Type = api.NodePort
			s.Ports[0].NodePort = nodePort
		}).view()
	}
	for _, server := range []string{"a", "b", "c"} {
		w.source.Set(good(server), bad)
		eventually(t, "the other service gets another endpoint", func() bool {
			return !refused(t, "127.96.0.1", port) && askOnce(t, "127.96.0.1", port) == server
		})
	}
	eventually(t, "the service is served at its other address", func() bool { return !refused(t, "127.96.0.3", port) })
	node.Set(netip.MustParseAddr("127.0.0.6"))
	eventually(t, "the node port moves", func() bool {
		return !refused(t, "127.0.0.6", nodePort) && refused(t, "127.0.0.5", nodePort)
	})
	if failing := w.driver.Status().Failing; len(failing) != 1 || failing[0].Key != key("bad") {
		t.Errorf("failing services %v, want the one that waits for its address", failing)
	}
	a.results[netip.MustParseAddr("10.96.0.2")] <- errors.New("another program has it")
	eventually(t, "the error says why the address is missing", func() bool {
		failing := w.driver.Status().Failing
		return len(failing) == 1 && strings.Contains(failing[0].Err.Error(), "another program has it")
	})
	close(a.results[netip.MustParseAddr("10.96.0.2")])
	w.applied()
	if got := askOnce(t, "127.96.0.2", port); got != "bad" {
		t.Errorf("connected to %s", got)
	}
}

// TestAddressAddedAfterSyncReturned makes an address local only after Sync has returned.
func TestAddressAddedAfterSyncReturned(t *testing.T) {
	addr := netip.MustParseAddr("10.96.0.2")
	for name, gone := range map[string]bool{"is used": false, "is removed if its service was deleted": true} {
		t.Run(name, func(t *testing.T) {
			a := newSlowAddresses(addr.String())
			b, err := newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, addresses: a, sockets: loopbackSockets{}})
			if err != nil {
				t.Fatal(err)
			}
			if err := b.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			port := freePort(t, "127.96.0.2")
			all := fullOf(serviceAt("late", addr.String(), port, api.TCP).addEndpoints(namedServer(t, "late")).view())
			if failed, _ := sink.Acknowledged(b.Sync(t.Context(), all)); failed[key("late")] == nil {
				t.Error("a service whose address is not local is acknowledged")
			}
			if gone {
				all = fullOf()
				if err := b.Sync(t.Context(), all); err != nil {
					t.Error(err)
				}
			}
			close(a.results[addr])
			if gone {
				eventually(t, "the address is added and removed", func() bool { return b.local.idle() && !a.has(addr) })
			} else {
				eventually(t, "the service is served", func() bool { return !refused(t, "127.96.0.2", port) })
			}
			if err := b.Sync(t.Context(), all); err != nil {
				t.Error(err)
			}
			if err := b.Stop(context.Background()); err != nil || a.has(addr) {
				t.Errorf("at the end: address local %v, error %v", a.has(addr), err)
			}
		})
	}
}

// idle reports whether no address has users, and no address is being added or removed.
func (r *references) idle() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.count) == 0 && len(r.changing) == 0
}

func TestStartFailsIfLeftAddressesCannotBeRead(t *testing.T) {
	a := newSlowAddresses()
	a.leftErr = errors.New("no permission")
	b, err := newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, addresses: a})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); !errors.Is(err, a.leftErr) {
		t.Errorf("Start returned %v", err)
	}
}
