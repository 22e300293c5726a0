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

// service is the state of one service. Backend.mu guards it.
type service struct {
	*engine
	key types.NamespacedName
	// view is the current view, or nil if the plan does not depend on the addresses of the
	// node. When these addresses change, a new plan is computed from the view.
	view *api.ServiceEndpoints
	// failed reports that the last Sync failed for this service. In a pass, stale is true
	// until the pass delivers the service.
	failed, stale bool
	// unsupported is the last error about unsupported frontends that was logged.
	unsupported string
	ports       map[portKey]*port
	// addresses has the addresses of the service. The value of a local address is nil. The
	// value of another address is the reason why it is not local.
	addresses map[netip.Addr]error
	// waiting is the current plan if one of its addresses is not local yet, else nil.
	waiting   *plan
	listeners map[socketAddr]listener
	// lingering has listeners that were closed because their frontends have no endpoints.
	// While such a frontend exists, the connections of its listener continue without a time
	// limit.
	lingering []lingerer
	// All ports of the service share the following fields.
	account    *account
	warnOfLoop *sync.Once
}

type lingerer struct {
	socketAddr
	listener
}

func newService(e *engine, key types.NamespacedName) *service {
	return &service{
		engine: e, key: key, ports: map[portKey]*port{}, addresses: map[netip.Addr]error{}, listeners: map[socketAddr]listener{},
		account: &account{descriptors: e.descriptors}, warnOfLoop: &sync.Once{},
	}
}

// withdraw closes the listeners that p does not need. After that, other services can
// listen there.
func (s *service) withdraw(p *plan) {
	keep := make(map[socketAddr]struct{}, len(p.sockets))
	for _, want := range p.sockets {
		keep[want.socketAddr] = struct{}{}
	}
	for at, l := range s.listeners {
		if _, ok := keep[at]; !ok {
			s.closeListener(at, l)
		}
	}
	s.lingering = slices.DeleteFunc(s.lingering, func(l lingerer) bool {
		_, keeps := keep[l.socketAddr]
		_, refuses := p.refused[l.socketAddr]
		if keeps || refuses {
			return isDrained(l)
		}
		s.retire(l.socketAddr, l.listener)
		return true
	})
}

// closeListener closes the listener l at a socket address. After that, another service
// can listen there.
func (s *service) closeListener(at socketAddr, l listener) {
	l.close()
	s.descriptors.adjust(-1)
	delete(s.listeners, at)
	s.sockets.set(at, nil)
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

// retire drains the connections of a closed listener in the background. Until these
// connections have ended, the address of l stays local.
func (s *service) retire(at socketAddr, l listener) {
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
		case <-s.drainEnded:
		}
		l.abort()
		<-l.drained()
		if holds {
			s.releaseAddress(context.Background(), at.at.Addr())
		}
	})
}

// The method apply applies those parts of the plan p whose addresses are already local.
// It returns the joined errors.
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
	for _, want := range p.sockets {
		if err := s.open(ctx, want); err != nil {
			errs = append(errs, err)
		}
	}
	s.endLostUDPClients(p)
	s.waiting = nil
	for _, addr := range p.addresses {
		if err := s.addresses[addr]; err != nil {
			s.waiting = p
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// complainOf logs an error about unsupported frontends, but not the same error twice in
// succession.
func (s *service) complainOf(unsupported error) {
	text := ""
	if unsupported != nil {
		text = unsupported.Error()
	}
	if text != "" && text != s.unsupported {
		s.log.Error(unsupported, "Some frontends of the service are not supported", "service", s.key)
	}
	s.unsupported = text
}

// The method open opens a listener, or updates the rules of an open listener.
func (s *service) open(ctx context.Context, want listenSpec) error {
	if l, ok := s.listeners[want.socketAddr]; ok {
		return l.setRules(want.rules)
	}
	if s.addresses[want.at.Addr()] != nil {
		return nil // finishChange opens the listener when the address is local
	}
	if other := s.sockets.owner(want.socketAddr); other != nil {
		if !other.stale && !other.failed {
			return fmt.Errorf("listen on %s: service %s still uses it", want.socketAddr, other.key)
		}
		// The pass or a retry will soon change or delete the service that has this socket now.
		// Until then, a change of node addresses must not update that service, because the
		// service would open the socket again.
		other.closeListener(want.socketAddr, other.listeners[want.socketAddr])
		other.view, other.waiting = nil, nil
	}
	l, err := s.listen(ctx, want.socketAddr, want.rules)
	if err != nil {
		return err
	}
	s.listeners[want.socketAddr] = l
	s.sockets.set(want.socketAddr, s)
	s.log.V(3).Info("Proxying for service", "servicePortName", want.rules.port.name, "protocol", want.protocol, "address", want.at)
	return nil
}

// endLostUDPClients removes the UDP clients of removed endpoints.
func (s *service) endLostUDPClients(p *plan) {
	for _, of := range p.ports {
		of.port.setServing(of.allEndpoints)
	}
	for _, want := range p.sockets {
		// This checks all clients of the socket, even those of another port that used it
		// before.
		if l, ok := s.listeners[want.socketAddr].(*udpListener); ok {
			l.endpointsLost(want.rules.port.serves)
		}
	}
}

// forget drops the ports and addresses that p does not need. It returns changes that
// release the addresses. If an address is just being added, finishChange releases it
// later.
func (s *service) forget(p *plan) (changes []*change) {
	for key, port := range s.ports {
		if _, ok := p.ports[key]; !ok {
			s.served.replace(port, nil)
			delete(s.ports, key)
		}
	}
	for addr, err := range s.addresses {
		if isPending(err) || slices.Contains(p.addresses, addr) {
			continue
		}
		delete(s.addresses, addr)
		if err == nil {
			changes = append(changes, &change{addr: addr})
		}
	}
	return changes
}

// releaseAddress removes one user of an address. If the address cannot be removed,
// releaseAddress logs the error, and Backend.sweep tries again.
func (e *engine) releaseAddress(ctx context.Context, addr netip.Addr) {
	if err := e.local.release(ctx, addr); err != nil {
		e.log.Error(err, addressesStay)
	}
}

const addressesStay = "Addresses stay on this host for now"
