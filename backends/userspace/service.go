// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// service is the state of one service. backend.mu guards it.
type service struct {
	*engine
	*common
	// view is the current view, or nil if the plan does not depend on the addresses of the
	// node. When these addresses change, a new plan is computed from the view.
	view *api.View
	// failed reports that the last Sync failed for this service. In a pass, stale is true
	// until the pass delivers the service.
	failed, stale bool
	// unsupported is the last error about unsupported frontends that was logged.
	unsupported string
	ports       map[portKey]*port
	// rules, pools and admissions are those of the last plan. The next plan shares them.
	rules      map[rules]*rules
	pools      map[nodeview.ListID]plannedPool
	admissions admissions
	// addresses has the addresses of the service. The value of a local address is nil. For
	// an address that is not local, the value is the reason.
	addresses map[netip.Addr]error
	// waiting is the current plan if some of its addresses are not local yet, else nil. The
	// field missing is the number of these addresses.
	waiting   *plan
	missing   int
	listeners map[socketAddr]listener
	// broken has the errors of listeners that could not be opened or changed.
	broken map[socketAddr]error
	// lingering has listeners that were closed because their frontends have no endpoints.
	// While such a frontend exists, the connections of its listener continue without a time
	// limit.
	lingering []lingerer
}

type lingerer struct {
	socketAddr
	listener
}

func newService(e *engine, key types.NamespacedName) *service {
	return &service{
		engine: e, common: &common{service: key, account: account{descriptors: e.descriptors}},
		ports: map[portKey]*port{}, addresses: map[netip.Addr]error{}, listeners: map[socketAddr]listener{},
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
	s.listening.of(at).Add(-1)
	s.engine.descriptors.adjust(-1)
	s.filters -= l.filtered()
	delete(s.listeners, at)
	s.sockets.set(at, nil)
	s.log.V(3).Info("Stopping service", "service", s.service, "listener", at)
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

// apply applies those parts of the plan p whose addresses are already local.
// The method err returns the errors.
func (s *service) apply(ctx context.Context, p *plan) {
	s.complainOf(p.unsupported.err())
	s.setPorts(p)
	for _, of := range p.pools {
		of.pool.set(of.next)
	}
	s.rules, s.pools, s.admissions = p.rules, p.pools, p.admissions
	if s.opts.Stats {
		for _, port := range s.ports {
			port.counted.prune(port.serves)
		}
	}
	s.affinity.setTimeout(p.affinity)
	s.broken = nil
	for _, want := range p.sockets {
		s.open(ctx, want)
	}
	s.endLostUDPClients()
	if p.resets {
		for _, l := range s.listeners {
			l.resetLost()
		}
		for _, l := range s.lingering {
			l.resetLost()
		}
	}
	s.waiting, s.missing = nil, 0
	for _, addr := range p.addresses {
		if s.addresses[addr] != nil {
			s.waiting = p
			s.missing++
		}
	}
}

// arrive records that an address of the waiting plan is local, or why it is not. It opens
// the listeners at that address.
func (s *service) arrive(ctx context.Context, addr netip.Addr, err error) {
	s.addresses[addr] = err
	if err != nil {
		return
	}
	for _, want := range s.waiting.at[addr] {
		s.open(ctx, want)
	}
	if s.missing--; s.missing == 0 {
		s.waiting = nil
	}
}

// err returns the reasons why the plan p is not completely applied.
func (s *service) err(p *plan) error {
	var errs errorList
	if len(s.broken) > 0 {
		for _, want := range p.sockets {
			errs.add(s.broken[want.socketAddr])
		}
	}
	for _, addr := range p.addresses {
		errs.add(s.addresses[addr])
	}
	return errs.err()
}

// setPorts updates the ports of the service. The clients of removed ports lose their
// affinity.
func (s *service) setPorts(p *plan) {
	lost := false
	for key, port := range s.ports {
		if _, ok := p.ports[key]; !ok {
			s.served.replace(port, nil)
			delete(s.ports, key)
			lost = true
		}
	}
	for key, of := range p.ports {
		if before := s.ports[key]; before != of.port {
			s.served.replace(before, of.port)
			s.ports[key] = of.port
			lost = lost || before != nil
			s.log.V(3).Info("Adding new service", "servicePortName", of.name, "protocol", of.protocol, "portNum", of.number)
		}
		of.port.existing.Store(&of.existing)
	}
	if lost {
		s.affinity.detachIf(func(c portClient, _ attachment) bool { return s.ports[c.portKey] != c.port })
	}
}

// complainOf logs an error about unsupported frontends, but not the same error twice in
// succession.
func (s *service) complainOf(unsupported error) {
	text := ""
	if unsupported != nil {
		text = unsupported.Error()
	}
	if text != "" && text != s.unsupported {
		s.log.Error(unsupported, "Some frontends of the service are not supported", "service", s.service)
	}
	s.unsupported = text
}

// open opens a listener, or updates the rules of an open listener. It records
// an error in s.broken.
func (s *service) open(ctx context.Context, want listenSpec) {
	if err := s.tryOpen(ctx, want); err != nil {
		if s.broken == nil {
			s.broken = map[socketAddr]error{}
		}
		s.broken[want.socketAddr] = err
	}
}

func (s *service) tryOpen(ctx context.Context, want listenSpec) error {
	if l, ok := s.listeners[want.socketAddr]; ok {
		return l.setRules(want.rules)
	}
	if s.addresses[want.at.Addr()] != nil {
		return nil // finishChange opens the listener when the address is local
	}
	if other := s.sockets.owner(want.socketAddr); other != nil {
		if !other.stale && !other.failed {
			return fmt.Errorf("listen on %s: service %s still uses it", want.socketAddr, other.service)
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

// endLostUDPClients removes the UDP clients of removed endpoints. It also checks the
// clients of another service port that used the same socket before.
func (s *service) endLostUDPClients() {
	for _, c := range s.udp.which(&s.udpClients, func(c *udpClient) bool {
		return !c.listener.current.Load().port.serves(c.endpoint)
	}) {
		c.end()
	}
}

// forget drops the addresses that p does not need. It returns changes that release the
// addresses. If an address is just being added, finishChange releases it later.
func (s *service) forget(p *plan) (changes []*change) {
	for addr, err := range s.addresses {
		if _, needed := p.at[addr]; needed || isPending(err) {
			continue
		}
		delete(s.addresses, addr)
		if err == nil {
			changes = append(changes, &change{addr: addr, unawaited: len(changes) >= maxAwaited})
		}
	}
	return changes
}

// releaseAddress removes one user of an address. If the address cannot be removed,
// releaseAddress logs the error, and backend.sweep tries again.
func (e *engine) releaseAddress(ctx context.Context, addr netip.Addr) {
	if err := e.local.release(ctx, addr); err != nil {
		e.log.Error(err, addressesStay)
	}
}

const addressesStay = "Addresses stay on this host for now"

// port is the state of a service port. It exists as long as the service has this port.
type port struct {
	portKey
	// name is the name in logs: namespace/service or, if the port has a name,
	// namespace/service:port. In the API, the port has the name portName.
	name, portName string
	counters       counters
	counted        endpointCounters
	// common is the state that all ports of the service share.
	*common
	// existing has, by family, the endpoints whose clients stay according to the last applied
	// plan. Before the first plan, it is nil.
	existing atomic.Pointer[existing]
}

// common is the state that all ports of a service share.
type common struct {
	service    types.NamespacedName
	affinity   affinity
	account    account // counts the descriptors of the service
	udpClients udpAccount
	warnOfLoop sync.Once
	// filters is the number of instructions of the socket filters of the service's listeners.
	// backend.mu guards it.
	filters int
}

// ports is the set of the ports of all services. It is safe for concurrent use. Because
// it has its own lock, readers need not wait for a Sync.
type ports struct {
	mu  sync.Mutex
	all map[*port]struct{}
}

// replace replaces the port p by next. If p is nil, it only adds next. If next
// is nil, it only removes p.
func (s *ports) replace(p, next *port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, p)
	if next == nil {
		return
	}
	if s.all == nil {
		s.all = map[*port]struct{}{}
	}
	s.all[next] = struct{}{}
}

func (s *ports) list() []*port {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.all))
}

type portKey struct {
	protocol api.Protocol
	number   int32
}

func newPort(c *common, p *api.PortMapping) *port {
	return &port{portKey: portKey{p.Protocol, p.Port}, name: portName(c.service, p), portName: p.Name, common: c}
}

func portName(service types.NamespacedName, p *api.PortMapping) string {
	if p.Name == "" {
		return service.String()
	}
	return service.String() + ":" + p.Name
}

// counters has the statistics of a port. Only the number of active connections can
// decrease.
type counters struct {
	connections, active, dialFailures    atomic.Int64
	bytesToEndpoints, bytesFromEndpoints atomic.Int64
}

// existing has the endpoints to which existing connections and flows may continue.
type existing map[api.Family]nodeview.Existing

// serves reports whether e is an endpoint of the port, including endpoints
// that get no new connections.
func (p *port) serves(e netip.AddrPort) bool {
	now := p.existing.Load()
	return now != nil && (*now)[api.FamilyOf(e.Addr())].Has(e)
}

// resets reports whether established connections to e are reset.
func (p *port) resets(e netip.AddrPort) bool {
	now := p.existing.Load()
	return now != nil && (*now)[api.FamilyOf(e.Addr())].Resets(e)
}

// errorList has the first errors of many. So their joined text stays short, however many
// addresses and ports a service has.
type errorList struct {
	first []error
	more  int // number of further errors
}

// maxErrors is the maximum number of errors in an errorList.
const maxErrors = 4

// add adds err unless it is nil.
func (l *errorList) add(err error) {
	switch {
	case err == nil:
	case len(l.first) < maxErrors:
		l.first = append(l.first, err)
	default:
		l.more++
	}
}

// err returns the joined errors, or nil if there are none.
func (l *errorList) err() error {
	if l.more > 0 {
		return errors.Join(append(l.first[:maxErrors:maxErrors], fmt.Errorf("%d more errors", l.more))...)
	}
	return errors.Join(l.first...)
}
