// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience limits the wait for events that should come immediately.
const patience = 10 * time.Second

// world is a backend together with its driver.
type world struct {
	*testing.T
	*backend
	source *sinktest.Source
	driver *sink.Driver
	ctx    context.Context
	stop   context.CancelFunc
	ended  chan error
	log    *logBuffer
	limit  int // expected number of free descriptors at the end
}

type logBuffer struct {
	mu    sync.Mutex
	lines []string
	// The logger calls the function reaction for the first line that contains the text in
	// the field awaited.
	awaited  string
	reaction func()
}

// onText makes the logger call f for the next log line that contains text.
func (b *logBuffer) onText(text string, f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.awaited, b.reaction = text, f
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Join(b.lines, "\n")
}

func (b *logBuffer) write(prefix, line string) {
	b.mu.Lock()
	b.lines = append(b.lines, line)
	reaction := b.reaction
	if reaction != nil && strings.Contains(line, b.awaited) {
		b.reaction = nil
	} else {
		reaction = nil
	}
	b.mu.Unlock()
	if reaction != nil {
		reaction()
	}
}

// newWorld starts a backend without services. By default, node ports are at 127.0.0.1 and
// ::1.
func newWorld(t *testing.T, opts settings) *world {
	t.Helper()
	if opts.NodeAddresses == nil {
		opts.NodeAddresses = nodeaddr.Of(netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback())
	}
	b, err := newBackend(opts)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, backend: b, source: sinktest.NewSource(), ended: make(chan error, 1), log: &logBuffer{}, limit: b.descriptors.free}
	w.ctx, w.stop = context.WithCancel(klog.NewContext(t.Context(), funcr.New(w.log.write, funcr.Options{Verbosity: 4})))
	w.driver = sink.NewDriver(w.source, sinktest.NewRecorder(t, b), sink.Options{})
	w.source.MarkSynced()
	go func() { w.ended <- w.driver.Run(w.ctx) }()
	t.Cleanup(w.end)
	return w
}

func (w *world) end() {
	w.stop()
	if err, ok := <-w.ended; ok {
		close(w.ended)
		if err != nil && !errors.Is(err, context.Canceled) {
			w.Errorf("the driver returned %v", err)
		}
		if got := w.descriptors.free; got != w.limit {
			w.Errorf("%d descriptors are free at the end, want %d", got, w.limit)
		}
	}
}

// set adds views to the source, or replaces the old views of the same
// services. Then it waits until the Backend has applied them.
func (w *world) set(views ...*api.View) {
	w.Helper()
	w.source.Set(views...)
	w.applied()
}

func (w *world) applied() {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	if err := w.driver.WaitApplied(ctx, w.source.Revision()); err != nil {
		w.Fatalf("not applied: %v, failing: %v", err, w.driver.Status().Failing)
	}
}

// setFailing adds views to the source and waits until a service fails. It returns the
// error of that service.
func (w *world) setFailing(views ...*api.View) error {
	w.Helper()
	w.source.Set(views...)
	var err error
	eventually(w.T, "a service fails", func() bool {
		failing := w.driver.Status().Failing
		if len(failing) == 0 {
			return false
		}
		err = failing[0].Err
		return true
	})
	return err
}

// fullOf returns the Changes of a pass that delivers only these views, in one Sync.
func fullOf(views ...*api.View) *sink.Changes {
	return &sink.Changes{First: true, Last: true, Services: func(yield func(sink.Change) bool) {
		for _, v := range views {
			if !yield(sink.Change{Key: v.Key(), New: v, Unsure: true}) {
				return
			}
		}
	}}
}

// eventually waits until the function done returns true.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("did not happen: %s", what)
		}
	}
}

// testService is a service that a test modifies.
type testService struct{ api.View }

// serviceAt returns a service with the cluster IP addr and one port.
func serviceAt(name, addr string, number int32, protocol api.Protocol) *testService {
	return &testService{api.View{Service: sinktest.Service(name, fmt.Sprintf("%s %d/%s", addr, number, protocol))}}
}

// addEndpoints adds endpoints that all traffic may use.
func (s *testService) addEndpoints(endpoints ...netip.AddrPort) *testService {
	return s.addScoped(api.Scopes{Internal: true, External: true, Cluster: true}, endpoints...)
}

// addScoped adds endpoints that only the traffic of these scopes may use.
func (s *testService) addScoped(scopes api.Scopes, endpoints ...netip.AddrPort) *testService {
	for _, e := range endpoints {
		s.Endpoints = append(s.Endpoints, endpoint(e, scopes))
	}
	slices.SortFunc(s.Endpoints, func(a, b api.Endpoint) int { return ordering.Endpoints(&a, &b) })
	return s
}

// addDraining adds an endpoint that keeps its connections, but gets no new ones.
func (s *testService) addDraining(e netip.AddrPort) *testService {
	s.Draining = append(s.Draining, endpoint(e, api.Scopes{}))
	return s
}

func (s *testService) modify(f func(*api.Service)) *testService {
	f(s.Service)
	return s
}

// markUnusable declares that the first port has no usable endpoint in the cluster.
func (s *testService) markUnusable() *testService {
	p := s.Service.Ports[0]
	for _, f := range s.Service.IPFamilies {
		s.Unusable = append(s.Unusable, api.PortFamily{Protocol: p.Protocol, Port: p.Port, Family: f})
	}
	return s
}

func (s *testService) view() *api.View { return &s.View }

func endpoint(e netip.AddrPort, scopes api.Scopes) api.Endpoint {
	return api.Endpoint{
		Addr:          e.Addr(),
		PortOverrides: []api.PortName{{Port: int32(e.Port())}},
		Scopes:        scopes,
		Conditions:    api.Conditions{Ready: true, Serving: true},
	}
}

func key(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

// freePort returns an unused port at addr.
func freePort(t *testing.T, addr string) int32 {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(addr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// listenAt runs a TCP server that calls handle for each connection until the test ends.
func listenAt(t *testing.T, at string, handle func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if outOfDescriptors(err) {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			}()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// namedServer answers each line with its own name and the same line.
func namedServer(t *testing.T, name string) netip.AddrPort {
	return namedServerAt(t, name, "127.0.0.1:0")
}

func namedServerAt(t *testing.T, name, at string) netip.AddrPort {
	t.Helper()
	return listenAt(t, at, func(c *net.TCPConn) {
		for lines := bufio.NewScanner(c); lines.Scan(); {
			if _, err := fmt.Fprintln(c, name, lines.Text()); err != nil {
				return
			}
		}
	})
}

// client is a TCP connection through a service.
type client struct {
	*testing.T
	*net.TCPConn
	lines *bufio.Reader
}

func dial(t *testing.T, addr string, port int32) *client {
	t.Helper()
	return dialFrom(t, "", addr, port)
}

// dialFrom connects to a service from a local address.
func dialFrom(t *testing.T, from, addr string, port int32) *client {
	t.Helper()
	d := net.Dialer{Timeout: patience}
	if from != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	c, err := d.Dial("tcp", net.JoinHostPort(addr, fmt.Sprint(port)))
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { c.Close() })
	return &client{t, c.(*net.TCPConn), bufio.NewReader(c)}
}

// ask sends a line. It returns the name of the server, which is the first word of the
// answer.
func (c *client) ask() string {
	c.Helper()
	if _, err := fmt.Fprintln(c, "hello"); err != nil {
		c.Fatal(err)
	}
	line, err := c.lines.ReadString('\n')
	if err != nil {
		c.Fatal(err)
	}
	name, _, _ := strings.Cut(line, " ")
	return name
}

// askOnce returns the name of the server that a new connection reaches.
func askOnce(t *testing.T, addr string, port int32) string {
	t.Helper()
	c := dial(t, addr, port)
	defer c.Close()
	return c.ask()
}

func socketAddrOf(t *testing.T, protocol api.Protocol, at string) socketAddr {
	t.Helper()
	addr, err := netip.ParseAddrPort(at)
	if err != nil {
		t.Fatal(err)
	}
	return socketAddr{protocol, addr}
}

// stats are the statistics of a port.
type stats struct{ connections, active, dialFailures, sent, received int64 }

// allStats returns the statistics of the services, which have one port each.
func (w *world) allStats() map[types.NamespacedName]stats {
	all := map[types.NamespacedName]stats{}
	w.PortStats(func(service types.NamespacedName, _ api.Protocol, _ int32, connections, active, dialFailures, sent, received int64) {
		all[service] = stats{connections, active, dialFailures, sent, received}
	})
	return all
}

func (w *world) stats(name string) stats {
	w.Helper()
	of, found := w.allStats()[key(name)]
	if !found {
		w.Fatalf("no statistics of %s", name)
	}
	return of
}
