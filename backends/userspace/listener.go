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

// place is where a socket listens.
type place struct {
	protocol api.Protocol
	at       netip.AddrPort
}

func (p place) String() string { return p.at.String() + "/" + p.protocol.String() }

// places are where services listen. It is safe for concurrent use.
type places struct {
	mu  sync.RWMutex
	all map[place]*service
}

// of returns the service that listens at p, nil if none does.
func (p *places) of(at place) *service {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.all[at]
}

// set says that s listens at a place, or with nil that nobody does.
func (p *places) set(at place, s *service) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s == nil {
		delete(p.all, at)
	} else {
		p.all[at] = s
	}
}

// listener serves the clients of one place.
type listener interface {
	// setRules says what becomes of clients from now on; those that are served
	// are left alone.
	setRules(*rules) error
	// close makes room for another listener. It ends UDP clients, and leaves TCP
	// connections that are served alone.
	close()
	// drained is closed once no connection is left after close.
	drained() <-chan struct{}
	// abort resets the connections that are left after close.
	abort()
}

// frontend is what listeners have in common.
type frontend struct {
	*engine
	place
	raw     syscall.RawConn
	current atomic.Pointer[rules]
	// screened belongs to who syncs.
	screened screen
}

func (f *frontend) setRules(r *rules) error {
	if s := r.screen(f.opts.PodCIDRs); !s.equal(&f.screened) {
		if err := s.attach(f.raw, f.at.Addr().Is4()); err != nil {
			return fmt.Errorf("limiting who reaches %s: %w", f.place, err)
		}
		f.screened = s
	}
	f.current.Store(r)
	return nil
}

// listen opens a listener that is under r from its first client on.
func (e *engine) listen(ctx context.Context, p place, r *rules) (l listener, err error) {
	if p.protocol == api.UDP {
		l, err = e.listenUDP(ctx, p, r)
	} else {
		l, err = e.listenTCP(ctx, p, r)
	}
	if err == nil {
		e.descriptors.use(1)
	}
	return l, err
}
