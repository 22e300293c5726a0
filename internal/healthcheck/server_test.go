// SPDX-License-Identifier: Apache-2.0

package healthcheck_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/healthcheck"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// network simulates a network where tests can make an address unavailable. Its listeners
// listen on loopback.
type network struct {
	mu    sync.Mutex
	taken map[string]error
	open  map[string]net.Listener
}

func newNetwork() *network {
	return &network{taken: map[string]error{}, open: map[string]net.Listener{}}
}

func (n *network) take(addr string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taken[addr] = err
}

func (n *network) listen(_ context.Context, addr netip.AddrPort) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	at := addr.String()
	if err := n.taken[at]; err != nil {
		return nil, err
	}
	if n.open[at] != nil {
		return nil, fmt.Errorf("listen %s: already in use", at)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	n.open[at] = l
	return listener{l, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.open, at)
	}}, nil
}

type listener struct {
	net.Listener
	closed func()
}

func (l listener) Close() error {
	l.closed()
	return l.Listener.Close()
}

// addrs returns the sorted listening addresses.
func (n *network) addrs() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	list := []string{}
	for at := range n.open {
		list = append(list, at)
	}
	slices.Sort(list)
	return list
}

func (n *network) get(t testing.TB, addr, path string) (int, http.Header, string) {
	t.Helper()
	n.mu.Lock()
	l := n.open[addr]
	n.mu.Unlock()
	if l == nil {
		t.Fatalf("no listener on %s, only on %q", addr, n.addrs())
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	response, err := client.Get("http://" + l.Addr().String() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, response.Header, string(body)
}

// world is a server under test. The test sets the content of its source.
type world struct {
	*network
	source *sinktest.Source
	driver *sink.Driver
}

func newWorld(t *testing.T, opts healthcheck.Options) *world {
	return newWorldIn(t, newNetwork(), nil, opts)
}

func newWorldIn(t *testing.T, n *network, clock clock.Clock, opts healthcheck.Options) *world {
	w := &world{network: n, source: sinktest.NewSource()}
	if opts.NodeAddresses == nil {
		opts.NodeAddresses = nodeaddr.Of(netip.MustParseAddr("10.0.0.1"))
	}
	w.driver = sink.NewDriver(w.source, sinktest.NewRecorder(t, healthcheck.NewServer(opts, w.listen, clock)), sink.Options{})
	w.source.MarkSynced()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.driver.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if open := w.addrs(); len(open) > 0 {
			t.Errorf("still listening on %q at the end", open)
		}
	})
	return w
}

// deliver puts views into the source and deletes services from it. Then it waits until
// the server has processed these changes.
func (w *world) deliver(t *testing.T, views []*api.View, deleted ...string) {
	t.Helper()
	w.source.Set(views...)
	for _, name := range deleted {
		w.source.Delete(types.NamespacedName{Namespace: "test", Name: name})
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	if err := w.driver.WaitApplied(ctx, w.source.Revision()); err != nil {
		t.Fatal(err)
	}
}

// localView returns the view of a service with a health-check node port and with ready
// endpoints on this node.
func localView(name string, port int32, endpoints ...string) *api.View {
	svc := sinktest.Service("test/"+name, "80", func(s *api.Service) {
		s.Type, s.IPFamilies = api.LoadBalancer, []api.Family{api.IPv4, api.IPv6}
		s.ExternalTrafficToLocal, s.HealthCheckNodePort = true, port
	})
	words := ""
	for _, e := range endpoints {
		words += " " + e + "@here"
	}
	return sinktest.View(sinktest.Node("here"), svc, words)
}

func one(v *api.View) []*api.View { return []*api.View{v} }

func TestResponses(t *testing.T) {
	var healthy atomic.Bool
	w := newWorld(t, healthcheck.Options{
		NodeAddresses: nodeaddr.Of(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")),
		Healthy:       healthy.Load,
	})
	for _, test := range []struct {
		name      string
		endpoints []string
		healthy   bool
		addr      string
		status    int
		body      string
		weight    string
	}{
		{"two endpoints on this node", []string{"10.1.0.1", "10.1.0.2"}, true, "10.0.0.1:30001", 200,
			`{"service":{"namespace":"test","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}`, "2"},
		{"no endpoint on this node", nil, true, "10.0.0.1:30001", 503,
			`{"service":{"namespace":"test","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}`, "0"},
		{"an unhealthy proxy", []string{"10.1.0.1"}, false, "10.0.0.1:30001", 503,
			`{"service":{"namespace":"test","name":"web"},"localEndpoints":1,"serviceProxyHealthy":false}`, "1"},
		{"endpoints of the listener's family are counted", []string{"10.1.0.1", "10.1.0.2", "fd01::1"}, true, "[fd00::1]:30001", 200,
			`{"service":{"namespace":"test","name":"web"},"localEndpoints":1,"serviceProxyHealthy":true}`, "1"},
		{"no endpoint of the listener's family", []string{"10.1.0.1"}, true, "[fd00::1]:30001", 503,
			`{"service":{"namespace":"test","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}`, "0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			healthy.Store(test.healthy)
			w.deliver(t, one(localView("web", 30001, test.endpoints...)))
			for _, path := range []string{"/", "/healthz", "/any//path/../?x=y"} {
				status, header, body := w.get(t, test.addr, path)
				if status != test.status {
					t.Errorf("%s: status %d, want %d", path, status, test.status)
				}
				if diff := cmp.Diff(test.body+"\n", body); diff != "" {
					t.Errorf("body (-want +got):\n%s", diff)
				}
				for key, want := range map[string]string{
					"Content-Type": "application/json", "X-Content-Type-Options": "nosniff", "X-Load-Balancing-Endpoint-Weight": test.weight,
				} {
					if got := header.Get(key); got != want {
						t.Errorf("header %s is %q, want %q", key, got, want)
					}
				}
			}
		})
	}
}

func TestPortsFollowTheirServices(t *testing.T) {
	w := newWorld(t, healthcheck.Options{})
	check := func(want ...string) {
		t.Helper()
		if diff := cmp.Diff(append([]string{}, want...), w.addrs()); diff != "" {
			t.Errorf("listening on (-want +got):\n%s", diff)
		}
	}
	w.deliver(t, []*api.View{localView("a", 30001), localView("b", 30002)})
	check("10.0.0.1:30001", "10.0.0.1:30002")
	w.deliver(t, one(localView("a", 30003)))
	check("10.0.0.1:30002", "10.0.0.1:30003")
	cluster := localView("b", 30002)
	svc := *cluster.Service
	svc.ExternalTrafficToLocal = false
	w.deliver(t, one(&api.View{Service: &svc}))
	check("10.0.0.1:30003")

	// Two services swap their ports.
	w.deliver(t, []*api.View{localView("a", 30003, "10.1.0.1"), localView("b", 30002)})
	w.deliver(t, []*api.View{localView("a", 30002, "10.1.0.1"), localView("b", 30003)})
	check("10.0.0.1:30002", "10.0.0.1:30003")
	if status, _, body := w.get(t, "10.0.0.1:30002", "/"); status != 200 {
		t.Errorf("after a swap: status %d: %s", status, body)
	}
	// One batch deletes service b and creates service c with the same port.
	w.deliver(t, one(localView("c", 30003, "10.1.0.1")), "b")
	if status, _, body := w.get(t, "10.0.0.1:30003", "/"); status != 200 {
		t.Errorf("after a service took over a port: status %d: %s", status, body)
	}

	// The source delivers all services again.
	w.source.Reset()
	w.deliver(t, nil, "a")
	check("10.0.0.1:30003")
}

// TestOlderServiceKeepsHealthCheckPort checks that the owner of a contested port depends
// only on the services, not on the order of their changes.
func TestOlderServiceKeepsHealthCheckPort(t *testing.T) {
	const year = 365 * 24 * time.Hour
	created := func(age time.Duration, name string, endpoints ...string) *api.View {
		v := localView(name, 30001, endpoints...)
		v.Service.Created = time.Unix(1_000_000_000, 0).Add(-age)
		return v
	}
	old, young := created(year, "old", "10.1.0.1"), created(0, "a-young")
	alsoYoung := created(0, "b-young", "10.1.0.1", "10.1.0.2")
	check := func(t *testing.T, w *world, when, name string) {
		t.Helper()
		if _, _, body := w.get(t, "10.0.0.1:30001", "/"); !strings.Contains(body, fmt.Sprintf("%q", name)) {
			t.Errorf("%s: the answer is not for service %s: %s", when, name, body)
		}
	}
	for name, steps := range map[string][]*api.View{
		"the older service is first": {old, young, alsoYoung},
		"the older service is last":  {alsoYoung, young, old},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, healthcheck.Options{})
			for _, v := range steps {
				w.deliver(t, one(v))
			}
			check(t, w, "with three services", "old")
			w.source.Reset()
			w.deliver(t, nil)
			check(t, w, "after a pass", "old")
			w.deliver(t, one(created(0, "a-young", "10.1.0.1")))
			check(t, w, "after a change of the younger service", "old")
			w.deliver(t, nil, "old")
			check(t, w, "after the deletion of the older service, services of the same age are sorted by name", "a-young")
			w.deliver(t, one(old))
			check(t, w, "after the older service has come back", "old")
			w.deliver(t, one(created(-year, "old")))
			check(t, w, "after the older service was deleted and created again in one batch", "a-young")
			w.deliver(t, nil, "a-young", "b-young")
			check(t, w, "after the deletion of the others", "old")
		})
	}
}

func TestPassInSeveralBatches(t *testing.T) {
	n := newNetwork()
	server := healthcheck.NewServer(healthcheck.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("10.0.0.1"))}, n.listen, nil)
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer server.Stop(t.Context())
	batch := func(first, last bool, views ...*api.View) {
		t.Helper()
		var changes []sink.Change
		for _, v := range views {
			changes = append(changes, sink.Change{Key: v.Key(), New: v, Unsure: true})
		}
		if err := server.Sync(t.Context(), &sink.Changes{First: first, Last: last, Services: slices.Values(changes)}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when string, want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, n.addrs()); diff != "" {
			t.Errorf("%s, listening on (-want +got):\n%s", when, diff)
		}
	}
	batch(true, true, localView("a", 30001), localView("gone", 30002), localView("moved", 30003))
	batch(true, false, localView("a", 30003, "10.1.0.1"))
	check("during a pass", "10.0.0.1:30002", "10.0.0.1:30003")
	batch(true, false, localView("a", 30003))
	check("after the pass began again", "10.0.0.1:30002", "10.0.0.1:30003")
	batch(false, false, localView("moved", 30001))
	check("after the other service was delivered", "10.0.0.1:30001", "10.0.0.1:30002", "10.0.0.1:30003")
	batch(false, true)
	check("after the pass", "10.0.0.1:30001", "10.0.0.1:30003")
}

func TestAddressesAreFollowed(t *testing.T) {
	addrs := nodeaddrs.Of(netip.MustParseAddr("10.0.0.1"))
	observed := make(chan [2]int, 10)
	w := newWorld(t, healthcheck.Options{NodeAddresses: addrs, Observe: func(open, failing int) { observed <- [2]int{open, failing} }})
	w.deliver(t, one(localView("a", 30001)))
	<-observed
	// The server skips fe80::1, because it does not know the address's interface.
	addrs.Set(netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fe80::1"))
	if got := <-observed; got != [2]int{2, 0} {
		t.Errorf("observed %v", got)
	}
	if diff := cmp.Diff([]string{"10.0.0.2:30001", "[fd00::1]:30001"}, w.addrs()); diff != "" {
		t.Errorf("listening on (-want +got):\n%s", diff)
	}
}

func TestFailedPortIsReportedAndRetried(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	type failure struct {
		service types.NamespacedName
		at      netip.AddrPort
		err     error
	}
	failures := make(chan failure, 10)
	observed := make(chan [2]int, 10)
	n := newNetwork()
	inUse := errors.New("address already in use")
	n.take("10.0.0.1:30001", inUse)
	w := newWorldIn(t, n, clock, healthcheck.Options{
		Failed: func(service types.NamespacedName, at netip.AddrPort, err error) {
			failures <- failure{service, at, err}
		},
		Observe: func(open, failing int) { observed <- [2]int{open, failing} },
	})
	w.deliver(t, []*api.View{localView("a", 30001), localView("b", 30002, "10.1.0.1")})
	want := failure{types.NamespacedName{Namespace: "test", Name: "a"}, netip.MustParseAddrPort("10.0.0.1:30001"), inUse}
	if got := <-failures; got != want {
		t.Errorf("reported %+v, want %+v", got, want)
	}
	if got := <-observed; got != [2]int{1, 1} {
		t.Errorf("observed %v open and failing ports", got)
	}
	if status, _, _ := w.get(t, "10.0.0.1:30002", "/"); status != 200 {
		t.Errorf("another service is affected: status %d", status)
	}

	step := func(d time.Duration) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !clock.HasWaiters(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("no retry is scheduled")
			}
		}
		clock.Step(d)
	}
	step(time.Second) // this retry fails with the same error, which is not reported again
	step(0)
	n.take("10.0.0.1:30001", nil)
	for deadline := time.Now().Add(time.Minute); len(n.addrs()) < 2 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		clock.Step(time.Second)
	}
	if got := <-observed; got != [2]int{2, 0} {
		t.Errorf("observed %v open and failing ports", got)
	}
	if len(failures) > 0 {
		t.Errorf("reported again: %+v", <-failures)
	}
}

// TestManyPortsBesideARefusedOne opens and closes the ports of many services. Some of the
// services have the same port, and one port cannot be opened.
func TestManyPortsBesideARefusedOne(t *testing.T) {
	n := newNetwork()
	n.take("10.0.0.1:30007", errors.New("address in use"))
	var counts [2]int
	var attempts atomic.Int64
	w := &world{network: n}
	server := healthcheck.NewServer(healthcheck.Options{
		NodeAddresses: nodeaddr.Of(netip.MustParseAddr("10.0.0.1")),
		Observe:       func(open, failing int) { counts = [2]int{open, failing} },
	}, func(ctx context.Context, at netip.AddrPort) (net.Listener, error) {
		attempts.Add(1)
		return w.listen(ctx, at)
	}, clocktesting.NewFakeClock(time.Now()))
	if err := server.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	deliver := func(services int, view func(i int) *api.View) {
		t.Helper()
		if err := server.Sync(t.Context(), &sink.Changes{Services: func(yield func(sink.Change) bool) {
			for i := range services {
				key := types.NamespacedName{Namespace: "test", Name: fmt.Sprint("web-", i)}
				if !yield(sink.Change{Key: key, New: view(i)}) {
					return
				}
			}
		}}); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second time, nothing has changed
		deliver(400, func(i int) *api.View { return localView(fmt.Sprint("web-", i), int32(30000+i%200)) })
	}
	if want := [2]int{199, 1}; counts != want || attempts.Load() != 200 {
		t.Errorf("open and failed ports: %v after %d attempts, want %v after 200", counts, attempts.Load(), want)
	}
	deliver(400, func(int) *api.View { return nil })
	if want := [2]int{0, 0}; counts != want || len(n.addrs()) > 0 {
		t.Errorf("open and failed ports of deleted services: %v, listening on %q", counts, n.addrs())
	}
	if err := server.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}
