// SPDX-License-Identifier: Apache-2.0

package healthcheck

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/connlimit"
	"github.com/kpng-project/kpng/internal/healthport"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options are a Server's settings.
type Options struct {
	// NodeAddresses provides the addresses to listen on. It is required. The Server ignores
	// IPv6 link-local addresses, because it does not know their interfaces.
	NodeAddresses nodeaddr.Source
	// Healthy reports whether the proxy has programmed all services at least once and is not
	// stuck. Default: always healthy.
	Healthy func() bool
	// Failed is called when the Server cannot open the port of a service at an address.
	// Failed may create an event, for example. It is not called again while attempts fail
	// for the same reason. Its calls never overlap. It must not call the Server. Default:
	// the error is only logged.
	Failed func(service types.NamespacedName, at netip.AddrPort, err error)
	// Observe is called with the numbers of open and failing ports whenever they change. Its
	// calls never overlap. It must not call the Server. Default: none.
	Observe func(open, failing int)

	// Tests replace these fields: listen opens a listener at an address, and clock measures
	// the backoff of failed attempts.
	listen func(context.Context, netip.AddrPort) (net.Listener, error)
	clock  clock.Clock
}

// Server is a sink that serves the health-check node ports of services. If it cannot
// listen on a port, Sync returns no error and other services are not affected. The Server
// reports the failure and retries. Start returns immediately. The goroutines of the Server
// run until Stop, even after the context of Start ends.
type Server interface {
	sink.Sink
	sink.Starter
	sink.Stopper
}

// server implements [Server].
type server struct {
	opts Options

	stop    context.CancelFunc
	running chan struct{} // closed when all goroutines have ended

	mu       sync.Mutex
	services map[types.NamespacedName]*service
	ports    map[int32]*port
	addrs    []netip.Addr
	retry    chan struct{} // has a value after a new failed attempt
	// open is the number of open sockets. failing has the other sockets with their ports,
	// so that a change or a retry need not search all sockets.
	open    int
	failing map[*socket]*port
	counts  [2]int // the last arguments of Observe
	// prunes is true if services may be stale at the end of a pass: there were some when the
	// pass began. Otherwise pass is not used, which has the key of every delivered service.
	prunes bool
	pass   sink.Pass
	// connections has the connections to all ports.
	connections *connlimit.Queue
}

// maxConnections limits the connections to all ports together, so that clients of one
// service cannot use all file descriptors of the process.
const maxConnections = 4096

// port is a health-check node port of one or more services.
type port struct {
	// claimants are the services with this port, sorted by age and then by name. The first
	// claimant owns the port. So each node and each restart selects the same service.
	claimants []*service
	sockets   map[netip.Addr]*socket
}

// service is the state of one service: its port, and its number of ready local endpoints
// by family. It is immutable.
type service struct {
	key     types.NamespacedName
	created time.Time
	port    int32
	v4, v6  int // ready local endpoints
}

// newService returns the state of a service with this view, or nil if the service has no
// health-check node port. The view is nil if the service was deleted.
func newService(key types.NamespacedName, view *api.View) *service {
	if view == nil || healthport.Of(view.Service) == 0 {
		return nil
	}
	return &service{
		key: key, created: view.Service.Created, port: healthport.Of(view.Service),
		v4: healthport.Ready(view, api.IPv4), v6: healthport.Ready(view, api.IPv6),
	}
}

// byAge orders services by age, then by namespace and name.
func byAge(a, b *service) int {
	return cmp.Or(a.created.Compare(b.created), ordering.Keys(a.key, b.key))
}

// positionOf returns the position of the service "of" in a sorted list of claimants.
func positionOf(claimants []*service, of *service) int {
	at, _ := slices.BinarySearchFunc(claimants, of, byAge)
	return at
}

// New returns a Server.
func New(opts Options) Server {
	if opts.Healthy == nil {
		opts.Healthy = func() bool { return true }
	}
	if opts.Failed == nil {
		opts.Failed = func(types.NamespacedName, netip.AddrPort, error) {}
	}
	if opts.Observe == nil {
		opts.Observe = func(int, int) {}
	}
	if opts.listen == nil {
		opts.listen = func(ctx context.Context, addr netip.AddrPort) (net.Listener, error) {
			return new(net.ListenConfig).Listen(ctx, "tcp", addr.String())
		}
	}
	if opts.clock == nil {
		opts.clock = clock.RealClock{}
	}
	return &server{
		opts: opts, retry: make(chan struct{}, 1),
		services: map[types.NamespacedName]*service{}, ports: map[int32]*port{}, failing: map[*socket]*port{},
		connections: connlimit.NewQueue(maxConnections),
	}
}

// Start implements [Server].
func (s *server) Start(ctx context.Context) error {
	ctx, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	s.running = make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	addrs, changed := s.opts.NodeAddresses.Addresses()
	s.addrs = addrs
	go func() {
		defer close(s.running)
		s.run(ctx, changed)
	}()
	return nil
}

// Stop implements sink.Stopper. It closes all ports.
func (s *server) Stop(context.Context) error {
	s.stop()
	<-s.running
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.ports {
		for addr := range p.sockets {
			s.closeSocket(p, addr)
		}
	}
	s.observe()
	return nil
}

// Sync implements sink.Sink. It always returns nil.
func (s *server) Sync(ctx context.Context, c *sink.Changes) error {
	if c.NodeChanged {
		nodeaddrs.SetNode(s.opts.NodeAddresses, c.Node)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := map[int32]bool{}
	if c.First {
		s.prunes = len(s.services) > 0
	}
	if s.prunes {
		s.pass.Begin(c)
	}
	for change := range c.Services {
		s.setService(change.Key, change.New, touched)
	}
	if s.prunes && c.Last {
		for key := range s.services {
			if s.pass.Stale(key) {
				s.setService(key, nil, touched)
			}
		}
	}
	for number := range touched {
		s.arrange(ctx, number)
	}
	s.observe()
	return nil
}

// setService updates the view of a service, or deletes the service if view is nil. It
// adds to touched the ports that get or lose a claimant. The caller holds the lock.
func (s *server) setService(key types.NamespacedName, view *api.View, touched map[int32]bool) {
	old, next := s.services[key], newService(key, view)
	if old != nil && next != nil && old.port == next.port && old.created.Equal(next.created) {
		claimants := s.ports[old.port].claimants
		claimants[positionOf(claimants, old)] = next
		s.services[key] = next
		return
	}
	if old != nil {
		p := s.ports[old.port]
		at := positionOf(p.claimants, old)
		p.claimants = slices.Delete(p.claimants, at, at+1)
		delete(s.services, key)
		touched[old.port] = true
	}
	if next != nil {
		p := s.ports[next.port]
		if p == nil {
			p = &port{sockets: map[netip.Addr]*socket{}}
			s.ports[next.port] = p
		}
		p.claimants = slices.Insert(p.claimants, positionOf(p.claimants, next), next)
		s.services[key] = next
		touched[next.port] = true
	}
}

// arrange opens the missing sockets of one port, and closes its sockets that are no
// longer needed. The caller holds the lock.
func (s *server) arrange(ctx context.Context, number int32) {
	p := s.ports[number]
	wanted := len(p.claimants) > 0
	for addr := range p.sockets {
		if _, has := slices.BinarySearchFunc(s.addrs, addr, netip.Addr.Compare); !wanted || !has {
			s.closeSocket(p, addr)
		}
	}
	if !wanted {
		delete(s.ports, number)
		return
	}
	if others := p.claimants[1:]; len(others) > 0 {
		klog.FromContext(ctx).Info("Several services have the same health-check node port; the oldest one keeps it",
			"port", number, "service", p.claimants[0].key, "unserved", others[0].key, "numberUnserved", len(others))
	}
	for _, addr := range s.addrs {
		if p.sockets[addr] == nil && (addr.Is4() || !addr.IsLinkLocalUnicast()) {
			d := &socket{at: netip.AddrPortFrom(addr, uint16(number))}
			p.sockets[addr] = d
			s.openSocket(ctx, p, d)
		}
	}
}

// closeSocket closes the socket of a port at an address. The caller holds the lock.
func (s *server) closeSocket(p *port, addr netip.Addr) {
	d := p.sockets[addr]
	if _, failing := s.failing[d]; failing {
		delete(s.failing, d)
	} else {
		s.open--
	}
	d.close()
	delete(p.sockets, addr)
}

// openSocket tries to listen on the address and port of d. The caller holds the lock.
func (s *server) openSocket(ctx context.Context, p *port, d *socket) {
	listener, err := s.opts.listen(ctx, d.at)
	if err == nil {
		delete(s.failing, d)
		s.open++
		d.serve(s.connections.Listen(listener), s.answerAt)
		return
	}
	s.failing[d] = p
	if d.err == nil || d.err.Error() != err.Error() {
		klog.FromContext(ctx).Error(err, "Cannot serve health checks of a service", "service", p.claimants[0].key, "address", d.at)
		s.opts.Failed(p.claimants[0].key, d.at, err)
	}
	d.recordFailure(s.opts.clock.Now(), err)
	select {
	case s.retry <- struct{}{}:
	default:
	}
}

// answerAt returns the response to requests at an address and port. It returns false if
// no service has the port.
func (s *server) answerAt(at netip.AddrPort) (answer, bool) {
	s.mu.Lock()
	p := s.ports[int32(at.Port())]
	if p == nil || len(p.claimants) == 0 {
		s.mu.Unlock()
		return answer{}, false // no service has this port any more, so the port will soon be closed
	}
	svc := p.claimants[0]
	s.mu.Unlock()
	a := answer{Service: name{svc.key.Namespace, svc.key.Name}, LocalEndpoints: svc.v4, ServiceProxyHealthy: s.opts.Healthy()}
	if at.Addr().Is6() {
		a.LocalEndpoints = svc.v6
	}
	return a, true
}

// observe calls Options.Observe if the number of open or failed ports has changed. The
// caller holds the lock.
func (s *server) observe() {
	counts := [2]int{s.open, len(s.failing)}
	if counts != s.counts {
		s.counts = counts
		s.opts.Observe(counts[0], counts[1])
	}
}

// run follows changes of the addresses until ctx ends. It also retries failed ports.
func (s *server) run(ctx context.Context, changed <-chan struct{}) {
	for {
		var due <-chan time.Time
		if at := s.nextAttempt(); !at.IsZero() {
			due = s.opts.clock.After(at.Sub(s.opts.clock.Now()))
		}
		select {
		case <-ctx.Done():
			return
		case <-s.retry:
		case <-due:
			s.tryAgain(ctx)
		case <-changed:
			changed = s.readdress(ctx)
		}
	}
}

// nextAttempt returns the time of the next retry, or zero if no port has failed.
func (s *server) nextAttempt() (first time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for d := range s.failing {
		if first.IsZero() || d.next.Before(first) {
			first = d.next
		}
	}
	return first
}

func (s *server) tryAgain(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.clock.Now()
	for d, p := range s.failing {
		if !d.next.After(now) {
			s.openSocket(ctx, p, d)
		}
	}
	s.observe()
}

// readdress reads the addresses, and opens and closes the sockets of all ports
// accordingly.
func (s *server) readdress(ctx context.Context) (changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addrs, changed = s.opts.NodeAddresses.Addresses()
	for number := range s.ports {
		s.arrange(ctx, number)
	}
	s.observe()
	return changed
}
