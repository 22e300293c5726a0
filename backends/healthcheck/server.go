// SPDX-License-Identifier: Apache-2.0

package healthcheck

import (
	"context"
	"iter"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// Options are a Server's settings.
type Options struct {
	// Addrs are the addresses to listen on. IPv6 link-local ones are left out, for
	// which there is nothing to listen on without an interface. Required.
	Addrs nodeaddr.Source
	// Healthy says whether the proxy itself is well: it has programmed everything once and
	// is not stuck. Default: it is.
	Healthy func() bool
	// Fault is told when a port cannot be listened on, once until it can or the
	// reason is another one, so that it may make an event of it. It is called by
	// one goroutine at a time and must not call the Server. Default: it is logged only.
	Fault func(Fault)
	// Observe is told how many ports are open, and how many cannot be opened, when
	// that changes. The same holds as for Fault. Default: nobody is told.
	Observe func(open, failing int)
	// Listen listens on an address. Default: TCP of this machine.
	Listen func(context.Context, netip.AddrPort) (net.Listener, error)
	// Clock is what a failed attempt's backoff is measured with. Default: the real one.
	Clock clock.Clock
}

// Fault is a port that cannot be listened on.
type Fault struct {
	Service types.NamespacedName
	Addr    netip.AddrPort
	Err     error
}

// Server is a sink that serves the health-check node ports of services. Nothing
// that fails in it is an error of the sink, or disturbs another service: it is
// reported and tried again.
type Server struct {
	opts Options

	stop    context.CancelFunc
	running chan struct{} // closed when there is no goroutine any more

	mu       sync.Mutex
	services map[types.NamespacedName]*service
	ports    map[int32]*port
	addrs    []netip.Addr
	retry    chan struct{} // has a value when there is a new failed attempt
	counts   [2]int        // what Observe was told last
	pass     sink.Pass
}

// port is a port that some service asks for.
type port struct {
	// claimants are the services that ask for it. The first has it, which was delivered
	// last: another one is about to change or to be pruned.
	claimants []types.NamespacedName
	doors     map[netip.Addr]*door
}

// service is what is told of a service. It is immutable.
type service struct {
	port   int32
	v4, v6 int // ready local endpoints
}

// New returns a Server.
func New(opts Options) *Server {
	if opts.Healthy == nil {
		opts.Healthy = func() bool { return true }
	}
	if opts.Fault == nil {
		opts.Fault = func(Fault) {}
	}
	if opts.Observe == nil {
		opts.Observe = func(int, int) {}
	}
	if opts.Listen == nil {
		opts.Listen = func(ctx context.Context, addr netip.AddrPort) (net.Listener, error) {
			return new(net.ListenConfig).Listen(ctx, "tcp", addr.String())
		}
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Server{
		opts: opts, retry: make(chan struct{}, 1),
		services: map[types.NamespacedName]*service{}, ports: map[int32]*port{},
	}
}

// Start implements sink.Starter. It returns at once; what it starts goes on after
// the end of ctx, until Stop.
func (s *Server) Start(ctx context.Context) error {
	ctx, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	s.running = make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	addrs, changed := s.opts.Addrs.Addresses()
	s.addrs = addrs
	go func() {
		defer close(s.running)
		s.run(ctx, changed)
	}()
	return nil
}

// Stop implements sink.Stopper. It closes all ports.
func (s *Server) Stop(context.Context) error {
	s.stop()
	<-s.running
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.ports {
		for addr, d := range p.doors {
			d.close()
			delete(p.doors, addr)
		}
	}
	s.observe()
	return nil
}

// Sync implements sink.Sink. It always returns nil.
func (s *Server) Sync(ctx context.Context, c *sink.Changes) error {
	if c.NodeChanged {
		nodeaddr.SetNode(s.opts.Addrs, c.Node)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := map[int32]bool{}
	s.pass.Begin(c)
	for change := range c.Services {
		s.set(change.Key, change.New, touched)
	}
	if c.Last {
		for key := range s.services {
			if s.pass.Stale(key) {
				s.set(key, nil, touched)
			}
		}
	}
	for number := range touched {
		s.arrange(ctx, number)
	}
	s.observe()
	return nil
}

// set notes the view of a service, nil if it is gone, and which ports have other
// claimants than before. The caller holds the lock.
func (s *Server) set(key types.NamespacedName, view *api.ServiceEndpoints, touched map[int32]bool) {
	var before, now int32
	if old := s.services[key]; old != nil {
		before = old.port
	}
	if view != nil {
		now = nodeview.HealthCheckPort(view.Service)
	}
	if before != now {
		if before != 0 {
			touched[before] = true
			p := s.ports[before]
			p.claimants = slices.DeleteFunc(p.claimants, func(k types.NamespacedName) bool { return k == key })
		}
		if now != 0 {
			touched[now] = true
			if s.ports[now] == nil {
				s.ports[now] = &port{doors: map[netip.Addr]*door{}}
			}
			s.ports[now].claimants = slices.Insert(s.ports[now].claimants, 0, key)
		}
	}
	if now == 0 {
		delete(s.services, key)
		return
	}
	s.services[key] = &service{port: now, v4: nodeview.ReadyLocal(view, api.IPv4), v6: nodeview.ReadyLocal(view, api.IPv6)}
}

// arrange opens and closes what one port asks for. The caller holds the lock.
func (s *Server) arrange(ctx context.Context, number int32) {
	p := s.ports[number]
	wanted := len(p.claimants) > 0
	for addr, d := range p.doors {
		if !wanted || !slices.Contains(s.addrs, addr) {
			d.close()
			delete(p.doors, addr)
		}
	}
	if !wanted {
		delete(s.ports, number)
		return
	}
	for _, other := range p.claimants[1:] {
		klog.FromContext(ctx).Info("Two services have one health-check node port", "port", number, "service", p.claimants[0], "unserved", other)
	}
	for _, addr := range s.addrs {
		if p.doors[addr] == nil && (addr.Is4() || !addr.IsLinkLocalUnicast()) {
			d := &door{at: netip.AddrPortFrom(addr, uint16(number))}
			p.doors[addr] = d
			s.open(ctx, p, d)
		}
	}
}

// open tries to listen. The caller holds the lock.
func (s *Server) open(ctx context.Context, p *port, d *door) {
	listener, err := s.opts.Listen(ctx, d.at)
	if err == nil {
		d.serve(listener, s.answer)
		return
	}
	if d.err == nil || d.err.Error() != err.Error() {
		klog.FromContext(ctx).Error(err, "Health checks of a service cannot be answered", "service", p.claimants[0], "address", d.at)
		s.opts.Fault(Fault{p.claimants[0], d.at, err})
	}
	d.failed(s.opts.Clock.Now(), err)
	select {
	case s.retry <- struct{}{}:
	default:
	}
}

// answer says what a port answers on an address.
func (s *Server) answer(at netip.AddrPort) (answer, bool) {
	s.mu.Lock()
	p := s.ports[int32(at.Port())]
	if p == nil || len(p.claimants) == 0 {
		s.mu.Unlock()
		return answer{}, false // it is about to be closed
	}
	key := p.claimants[0]
	svc := s.services[key]
	s.mu.Unlock()
	a := answer{Service: name{key.Namespace, key.Name}, LocalEndpoints: svc.v4, ServiceProxyHealthy: s.opts.Healthy()}
	if at.Addr().Is6() {
		a.LocalEndpoints = svc.v6
	}
	return a, true
}

// doors yields all doors with their ports. The caller holds the lock.
func (s *Server) doors() iter.Seq2[*door, *port] {
	return func(yield func(*door, *port) bool) {
		for _, p := range s.ports {
			for _, d := range p.doors {
				if !yield(d, p) {
					return
				}
			}
		}
	}
}

// observe reports how many ports are open and failing, if that has changed. The
// caller holds the lock.
func (s *Server) observe() {
	var counts [2]int
	for d := range s.doors() {
		if d.err == nil {
			counts[0]++
		} else {
			counts[1]++
		}
	}
	if counts != s.counts {
		s.counts = counts
		s.opts.Observe(counts[0], counts[1])
	}
}

// run follows the addresses, and tries again what failed.
func (s *Server) run(ctx context.Context, changed <-chan struct{}) {
	for {
		var due <-chan time.Time
		if at := s.nextAttempt(); !at.IsZero() {
			due = s.opts.Clock.After(at.Sub(s.opts.Clock.Now()))
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

// nextAttempt returns when the first of the failed ports is to be tried again,
// zero if there is none.
func (s *Server) nextAttempt() (first time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for d := range s.doors() {
		if d.err != nil && (first.IsZero() || d.next.Before(first)) {
			first = d.next
		}
	}
	return first
}

func (s *Server) tryAgain(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Clock.Now()
	for d, p := range s.doors() {
		if d.err != nil && !d.next.After(now) {
			s.open(ctx, p, d)
		}
	}
	s.observe()
}

// readdress arranges all ports anew for the addresses that there are now.
func (s *Server) readdress(ctx context.Context) (changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addrs, changed = s.opts.Addrs.Addresses()
	for number := range s.ports {
		s.arrange(ctx, number)
	}
	s.observe()
	return changed
}
