// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sockdiag"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

const (
	// After a sweep, the sweeper pauses for sweepPause, or for sweepPauseFactor times the
	// duration of the sweep if that is longer.
	sweepPause       = 100 * time.Millisecond
	sweepPauseFactor = 9
)

// sweeper destroys sockets of one protocol in one network namespace. The programs have
// connected these sockets to an endpoint that the sockets must no longer use.
type sweeper struct {
	// netNS is the file descriptor of the namespace, or 0 for the namespace of the calling
	// thread.
	netNS    int
	protocol uint8
	// peers has the records of the programs by the cookies of sockets.
	peers *ebpf.Map
	// lost selects, from all connections, those whose sockets must be destroyed.
	lost func(all []connection) ([]connection, error)
	wake chan struct{} // has a value if a sweep is due
	stop context.CancelFunc
	done chan struct{} // closed when run has ended
}

// connection is a socket that the programs have connected to an endpoint.
type connection struct {
	sockdiag.Socket
	peer peer
}

// start starts the goroutine of s.
func (s *sweeper) start(ctx context.Context) *sweeper {
	s.wake, s.done = make(chan struct{}, 1), make(chan struct{})
	ctx, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	go s.run(ctx)
	return s
}

// request makes a sweep due. A nil sweeper does nothing.
func (s *sweeper) request() {
	if s == nil {
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *sweeper) run(ctx context.Context) {
	defer close(s.done)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
		// During the first sweep, a socket may not be connected yet, although its
		// endpoint was chosen before the change. The second sweep finds such sockets.
		for range 2 {
			start := time.Now()
			if err := s.sweep(); err != nil {
				klog.FromContext(ctx).Error(err, "Cannot destroy sockets that are connected to removed endpoints", "protocol", s.protocol)
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(max(sweepPause, sweepPauseFactor*time.Since(start))):
			}
		}
	}
}

// close stops the goroutine. A nil sweeper does nothing.
func (s *sweeper) close() {
	if s == nil {
		return
	}
	s.stop()
	<-s.done
}

func (s *sweeper) sweep() error {
	conn, err := sockdiag.Open(s.netNS)
	if err != nil {
		return err
	}
	defer conn.Close()
	all, err := s.connections(conn)
	if err != nil || len(all) == 0 {
		return err
	}
	lost, err := s.lost(all)
	for _, c := range lost {
		_, failed := conn.Destroy(c.Socket)
		err = errors.Join(err, failed)
	}
	return err
}

// connections returns the sockets that the programs have connected to an endpoint.
func (s *sweeper) connections(conn *sockdiag.Conn) (all []connection, err error) {
	err = conn.Connected(s.protocol, func(socket sockdiag.Socket) {
		c := connection{Socket: socket}
		if s.peers.Lookup(socket.Cookie, &c.peer) == nil && c.peer.Endpoint.addrPort() == socket.Peer {
			all = append(all, c)
		}
	})
	return all, err
}

// destroyAll destroys all UDP sockets that the programs have connected to an endpoint.
// Without the programs, no other sink can move them to another endpoint.
func destroyAll(netNS int, peers *ebpf.Map) error {
	if peers.NextKey(nil, new(uint64)) != nil {
		return nil // the map is empty, or belongs to another program
	}
	s := &sweeper{netNS: netNS, protocol: unix.IPPROTO_UDP, peers: peers, lost: func(all []connection) ([]connection, error) { return all, nil }}
	return s.sweep()
}

// hasMember reports whether UDP sockets may keep their endpoint.
func (p *programs) hasMember(of peer) (bool, error) {
	_, l, err := find(p.Frontends, p.NodeIps, frontendKey{IP: of.Service.IP, Port: of.Service.Port, Protocol: unix.IPPROTO_UDP})
	if err == nil {
		err = p.Members.Lookup(memberKey{List: l.ID, Endpoint: of.Endpoint}, new(uint32))
	}
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	return err == nil, err
}

// lostUDP returns the connections whose service no longer has the endpoint in the maps.
func (b *backend) lostUDP(all []connection) (lost []connection, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.complete || b.programs == nil {
		return nil, nil
	}
	has := map[peer]bool{}
	for _, c := range all {
		if _, known := has[c.peer]; !known {
			if has[c.peer], err = b.programs.hasMember(c.peer); err != nil {
				return nil, fmt.Errorf("read the endpoints of a service: %w", err)
			}
		}
		if !has[c.peer] {
			lost = append(lost, c)
		}
	}
	return lost, nil
}

// lostTCP returns the connections that must be reset because their service requests
// resets. The programs connected them before the service requested resets.
func (b *backend) lostTCP(all []connection) ([]connection, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var nodeAddrs []netip.Addr
	if b.opts.NodeAddresses != nil {
		nodeAddrs, _ = b.opts.NodeAddresses.Addresses()
	}
	existing := map[netip.AddrPort]nodeview.Existing{}
	for _, view := range b.resets {
		for f := range nodeview.Frontends(view) {
			if f.Protocol != api.TCP {
				continue
			}
			for at := range f.At(nodeAddrs) {
				existing[at] = f.Existing
			}
		}
	}
	return slices.DeleteFunc(all, func(c connection) bool { return !existing[c.peer.Service.addrPort()].Resets(c.Peer) }), nil
}

// recordResets records the services that request resets, and makes a sweep due if one of
// them has changed.
func (b *backend) recordResets(c *sink.Changes) {
	if !b.dataplane.below.Resets {
		return
	}
	if c.First {
		clear(b.resets)
	}
	for s := range c.Services {
		delete(b.resets, s.Key)
		if s.New != nil && s.New.Service.ResetConnections {
			b.resets[s.Key] = s.New
			b.tcp.request()
		}
	}
}

// sweptNetNS returns the cookie of the network namespace of the calling thread. It returns
// an error if the backend cannot destroy UDP sockets there.
func sweptNetNS() (cookie uint64, err error) {
	conn, err := sockdiag.Open(0)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.CanDestroy(unix.IPPROTO_UDP); err != nil {
		return 0, fmt.Errorf("destroy UDP sockets: %w", err)
	}
	return netNSCookie()
}
