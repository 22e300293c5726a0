// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/kpng-project/kpng/api"
)

// socketAddr is the protocol, the address and the port of a listening socket.
type socketAddr struct {
	protocol api.Protocol
	at       netip.AddrPort
}

func (p socketAddr) String() string { return p.at.String() + "/" + p.protocol.String() }

// socketOwners maps listening sockets to their services. It is safe for concurrent use.
type socketOwners struct {
	mu  sync.RWMutex
	all map[socketAddr]*service
}

// owner returns the service that listens at a socket address, or nil.
func (p *socketOwners) owner(at socketAddr) *service {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.all[at]
}

// set records that the service s listens at a socket address. If s is nil, no
// service listens there.
func (p *socketOwners) set(at socketAddr, s *service) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s == nil {
		delete(p.all, at)
	} else {
		p.all[at] = s
	}
}

// listener handles the clients of one socket.
type listener interface {
	// setRules sets the rules for new clients. It does not affect connected clients.
	setRules(*rules) error
	// close closes the listening socket, so that another listener can use the address. It
	// closes the sockets of UDP clients, and keeps established TCP connections.
	close()
	// drained returns a channel that is closed when close was called and the last connection
	// has ended.
	drained() <-chan struct{}
	// resetLost resets the established connections to lost endpoints of services that request
	// this.
	resetLost()
	// abort resets the connections that still exist after close.
	abort()
	// filtered returns the number of instructions of the socket filter.
	filtered() int
}

// frontend is the common part of TCP and UDP listeners.
type frontend struct {
	*engine
	socketAddr
	raw     syscall.RawConn
	current atomic.Pointer[rules]
	// screened is the attached socket filter. filter is the number of its instructions.
	// backend.mu guards these fields.
	screened screen
	filter   int
}

func (f *frontend) filtered() int { return f.filter }

// maxFilters limits the number of instructions of all socket filters of a service, because
// each listener has its own copy of the filter.
const maxFilters = 1 << 18

func (f *frontend) setRules(r *rules) error {
	if f.current.Load() == r {
		return nil
	}
	if s := r.screen(); s != f.screened {
		room := maxFilters - r.port.filters + f.filter
		n, err := s.attach(f.raw, f.at.Addr().Is4(), f.opts.ClusterCIDRs, room)
		if err != nil {
			return fmt.Errorf("filter clients of %s: %w", f.socketAddr, err)
		}
		r.port.filters += n - f.filter
		f.screened, f.filter = s, n
	}
	f.current.Store(r)
	return nil
}

// listen opens a listener. The rules r apply from the first client on.
func (e *engine) listen(ctx context.Context, p socketAddr, r *rules) (l listener, err error) {
	if p.protocol == api.UDP {
		l, err = e.listenUDP(ctx, p, r)
	} else {
		l, err = e.listenTCP(ctx, p, r)
	}
	if err != nil {
		e.unopened.of(p).Add(1)
		return nil, err
	}
	e.listening.of(p).Add(1)
	e.descriptors.adjust(1)
	return l, nil
}
