// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// service is what there is of a service. It belongs to who syncs.
type service struct {
	*engine
	key types.NamespacedName
	// view is the one to plan anew when the node's addresses change; nil if that
	// changes nothing.
	view *api.ServiceEndpoints
	// failed says that the last Sync reported it as failed, and stale that it has not
	// been delivered since the pass began.
	failed, stale bool
	// unsupported is what was logged of what cannot be served.
	unsupported string
	ports       map[portKey]*port
	// addresses are those of the service, each with why it is not local: nil if it is.
	addresses map[netip.Addr]error
	// waiting is what the service needs while an address is not local, else nil.
	waiting   *plan
	listeners map[place]listener
	// lingering are closed listeners whose connections go on without a limit, as
	// the service still has the frontend: it only has no endpoint, or had none.
	lingering []lingerer
	// account and warnOfLoop are shared by the ports.
	account    *account
	warnOfLoop *sync.Once
}

type lingerer struct {
	place
	listener
}

func newService(e *engine, key types.NamespacedName) *service {
	return &service{
		engine: e, key: key, ports: map[portKey]*port{}, addresses: map[netip.Addr]error{}, listeners: map[place]listener{},
		account: &account{descriptors: e.descriptors}, warnOfLoop: &sync.Once{},
	}
}

// withdraw closes what p does not need, so that others may have it.
func (s *service) withdraw(p *plan) {
	keep := make(map[place]struct{}, len(p.places))
	for _, want := range p.places {
		keep[want.place] = struct{}{}
	}
	for at, l := range s.listeners {
		if _, ok := keep[at]; !ok {
			s.leave(at, l)
		}
	}
	s.lingering = slices.DeleteFunc(s.lingering, func(l lingerer) bool {
		_, keeps := keep[l.place]
		_, refuses := p.refused[l.place]
		if keeps || refuses {
			return isDrained(l)
		}
		s.retire(l.place, l.listener)
		return true
	})
}

// leave closes the listener of a place, so that another one can have it.
func (s *service) leave(at place, l listener) {
	l.close()
	s.descriptors.use(-1)
	delete(s.listeners, at)
	s.held.set(at, nil)
	s.log.V(3).Info("Stopping service", "service", s.key, "listener", at)
	s.lingering = append(s.lingering, lingerer{at, l})
}

func isDrained(l listener) bool {
	select {
	case <-l.drained():
		return true
	default:
		return false
	}
}

// retire lets the connections of a closed listener end, and keeps its address
// local for so long.
func (s *service) retire(at place, l listener) {
	if isDrained(l) {
		return
	}
	err, known := s.addresses[at.at.Addr()]
	holds := known && err == nil && s.local.share(at.at.Addr())
	s.running.Go(func() {
		timeout := time.NewTimer(s.opts.DrainTimeout)
		defer timeout.Stop()
		select {
		case <-l.drained():
		case <-timeout.C:
		case <-s.hurry:
		}
		l.abort()
		<-l.drained()
		if holds {
			s.forgo(context.Background(), at.at.Addr())
		}
	})
}

// apply brings about p, as far as it can at addresses that are local already. It
// returns what it could not.
func (s *service) apply(ctx context.Context, p *plan) error {
	s.complainOf(p.unsupported)
	var errs []error
	for key, of := range p.ports {
		if s.ports[key] != of.port {
			s.served.replace(s.ports[key], of.port)
			s.ports[key] = of.port
			s.log.V(3).Info("Adding new service", "servicePortName", of.name, "protocol", of.protocol, "portNum", of.number)
		}
		of.port.pools = of.pools
		of.port.affinity.setTimeout(of.affinity)
	}
	for _, want := range p.places {
		if err := s.open(ctx, want); err != nil {
			errs = append(errs, err)
		}
	}
	s.settleUDP(p)
	s.waiting = nil
	for _, addr := range p.addresses {
		if err := s.addresses[addr]; err != nil {
			s.waiting = p
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// complainOf logs what cannot be served, once.
func (s *service) complainOf(unsupported error) {
	text := ""
	if unsupported != nil {
		text = unsupported.Error()
	}
	if text != "" && text != s.unsupported {
		s.log.Error(unsupported, "Not all of the service can be served", "service", s.key)
	}
	s.unsupported = text
}

// open makes somebody listen at a place, under the rules there.
func (s *service) open(ctx context.Context, want placed) error {
	if l, ok := s.listeners[want.place]; ok {
		return l.setRules(want.rules)
	}
	if s.addresses[want.at.Addr()] != nil {
		return nil // once the address is local
	}
	if other := s.held.of(want.place); other != nil {
		if !other.stale && !other.failed {
			return fmt.Errorf("listening at %s: service %s still does", want.place, other.key)
		}
		// The other service is about to change or to be pruned. Until then it does not
		// follow the node's addresses, as it would need the place again.
		other.leave(want.place, other.listeners[want.place])
		other.view, other.waiting = nil, nil
	}
	l, err := s.listen(ctx, want.place, want.rules)
	if err != nil {
		return err
	}
	s.listeners[want.place] = l
	s.held.set(want.place, s)
	s.log.V(3).Info("Proxying for service", "servicePortName", want.rules.port.name, "protocol", want.protocol, "address", want.at)
	return nil
}

// settleUDP ends the UDP clients whose endpoint went.
func (s *service) settleUDP(p *plan) {
	for _, of := range p.ports {
		of.port.setServing(of.serving)
	}
	for _, want := range p.places {
		// The clients may be of another port, which had the place before.
		if l, ok := s.listeners[want.place].(*udpListener); ok {
			l.endpointsLost(want.rules.port.serves)
		}
	}
}

// forget lets go of the ports and addresses that p does not need. It returns the changes
// that release these addresses. One that is still being made local is released after that.
func (s *service) forget(p *plan) (changes []*change) {
	for key, port := range s.ports {
		if _, ok := p.ports[key]; !ok {
			s.served.replace(port, nil)
			delete(s.ports, key)
		}
	}
	for addr, err := range s.addresses {
		if isComing(err) || slices.Contains(p.addresses, addr) {
			continue
		}
		delete(s.addresses, addr)
		if err == nil {
			changes = append(changes, &change{addr: addr})
		}
	}
	return changes
}

// forgo releases an address. What fails is tried again later.
func (e *engine) forgo(ctx context.Context, addr netip.Addr) {
	if err := e.local.release(ctx, addr); err != nil {
		e.log.Error(err, addressesStay)
	}
}

const addressesStay = "Addresses stay on this host for now"
