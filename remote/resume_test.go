// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

// An open gate forwards connections to a server. A closed gate closes every connection
// that it accepts. A gate also counts the bytes from the server.
type gate struct {
	address  string
	received atomic.Int64

	mu    sync.Mutex
	to    string // address of the server; empty while the gate is closed
	conns map[net.Conn]bool
}

func newGate(t testing.TB) *gate {
	l := listen(t, "127.0.0.1:0")
	g := &gate{address: "tcp://" + l.Addr().String(), conns: map[net.Conn]bool{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out := g.open(in)
			if out == nil {
				in.Close()
				continue
			}
			wg.Go(func() { g.copy(out, in, nil) })
			wg.Go(func() { g.copy(in, out, &g.received) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		g.close()
		wg.Wait()
	})
	return g
}

// open returns a connection to the server, or nil if the gate is closed or the server is
// down.
func (g *gate) open(in net.Conn) net.Conn {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.to == "" {
		return nil
	}
	out, err := net.Dial("unix", g.to)
	if err != nil {
		return nil
	}
	g.conns[in], g.conns[out] = true, true
	return out
}

func (g *gate) copy(to, from net.Conn, count *atomic.Int64) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if count != nil {
			count.Add(int64(n))
		}
		if _, werr := to.Write(buf[:n]); err != nil || werr != nil {
			return
		}
	}
}

// openTo opens the gate to a server at a unix socket.
func (g *gate) openTo(address string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.to = address[len("unix://"):]
}

// close closes the gate and its connections.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.to = ""
	for c := range g.conns {
		c.Close()
	}
	clear(g.conns)
}

// atLeast returns a function that makes Wait wait for n Syncs.
func atLeast(n int) func([]sinktest.Sync) bool {
	return func(syncs []sinktest.Sync) bool { return len(syncs) >= n }
}

// keys returns the names of the services in a Sync.
func keys(s sinktest.Sync) []string {
	var names []string
	for c := range s.Services {
		names = append(names, c.Key.Name)
	}
	return names
}

// plain returns a service that the World never changes.
func plain(name string, port int32) *api.Service {
	return &api.Service{
		Namespace: "plain", Name: name, Type: api.ClusterIP,
		Ports: []api.PortMapping{{Protocol: api.TCP, Port: port, TargetPort: port}},
	}
}

func TestReconnectSendsOnlyChanges(t *testing.T) {
	w := newWorld(3, 6, 300)
	for _, name := range []string{"changes", "goes", "stays"} {
		update(w.state, func(to apitest.Writer) { to.SetService(plain(name, 1)) })
	}
	address := socket(t)
	server, _ := serve(t, w.state, address, quick)
	g := newGate(t)
	g.openTo(address)
	client, _ := follow(t, "node-1", g.address)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	if err := rec.Wait(within(t), atLeast(1)); err != nil {
		t.Fatal(err)
	}
	first := g.received.Swap(0)

	g.close()
	update(w.state, func(to apitest.Writer) {
		to.SetService(plain("changes", 2))
		to.DeleteService(plain("goes", 1).Key())
		to.SetService(plain("comes", 1))
	})
	views := server.Stats().Views
	g.openTo(address)
	if err := rec.Wait(within(t), atLeast(2)); err != nil {
		t.Fatal(err)
	}
	got := rec.Syncs()[1]
	if want := []string{"changes", "comes", "goes"}; got.First || !slices.Equal(keys(got), want) {
		t.Errorf("got %v, first %t; want %v", keys(got), got.First, want)
	}
	if n := g.received.Load(); n > 2000 || n > first/20 {
		t.Errorf("%d bytes after the loss, %d at the start", n, first)
	}
	if n := server.Stats().Views - views; n > 4 { // the server may also compute the two old views for the lost stream
		t.Errorf("the server computed %d views, want at most 4", n)
	}
}

func TestChangeOfZoneInvalidatesToken(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	at := func(zone string) *api.Node {
		return &api.Node{Name: "n", Labels: map[string]string{"topology.kubernetes.io/zone": zone}}
	}
	update(state, func(to apitest.Writer) {
		to.SetNode(at("a"))
		to.SetService(hinted)
		to.SetSlice(hintedSlice)
	})
	state.SetSynced()
	address := socket(t)
	serve(t, state, address, quick)
	g := newGate(t)
	g.openTo(address)
	client, _ := follow(t, "n", g.address)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	if err := rec.Wait(within(t), atLeast(1)); err != nil {
		t.Fatal(err)
	}
	g.close()
	update(state, func(to apitest.Writer) { to.SetNode(at("b")) })
	g.openTo(address)
	if err := rec.Wait(within(t), atLeast(2)); err != nil {
		t.Fatal(err)
	}
	if got := rec.Views()[0].Endpoints; len(got) != 1 || got[0].Zone != "b" {
		t.Errorf("endpoints %+v, want that of zone b", got)
	}
}

// At first, only the first server is stale. Later, only the second server is stale.
func TestClientLeavesStaleServer(t *testing.T) {
	set := func(s *cluster.State, name string, stale bool) {
		s.Update(func(tx *cluster.Tx) {
			tx.SetService(plain(name, 1))
			tx.SetStale(stale)
		})
	}
	one, two := manyServices(0), manyServices(0)
	set(one, "old", true)
	set(two, "new", false)
	addresses := []string{socket(t), socket(t)}
	serve(t, one, addresses[0], quick)
	serve(t, two, addresses[1], quick)
	client, _ := follow(t, "n", addresses...)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	if err := rec.Wait(within(t), atLeast(1)); err != nil {
		t.Fatal(err)
	}
	set(two, "unseen", true)
	set(one, "newer", false)
	if err := rec.Wait(within(t), atLeast(2)); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(keys(rec.Syncs()[0]), keys(rec.Syncs()[1])), "[new] [new newer old]"; got != want {
		t.Errorf("the client received %s, want %s", got, want)
	}
}

func TestNewServerSendsOnlyDifferences(t *testing.T) {
	state := func(names ...string) *cluster.State {
		s := cluster.New(cluster.Options{Resumable: true})
		update(s, func(to apitest.Writer) {
			for _, name := range names {
				to.SetService(plain(name, 1))
			}
		})
		s.SetSynced()
		return s
	}
	one, two := socket(t), socket(t)
	_, stop := serve(t, state("a", "b", "c"), one, quick)
	client, _ := follow(t, "n", one, two)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	if err := rec.Wait(within(t), atLeast(1)); err != nil {
		t.Fatal(err)
	}
	stop()
	serve(t, state("b", "c", "d"), two, quick)
	if err := rec.Wait(within(t), atLeast(2)); err != nil {
		t.Fatal(err)
	}
	got := rec.Syncs()[1]
	if diff := cmp.Diff([]string{"a", "d"}, keys(got)); diff != "" || got.First {
		t.Errorf("first %t, services:\n%s", got.First, diff)
	}
}

// While the cluster changes, the test stops servers, relays, clients and connections in
// turn. At the end, every sink must have the same state as a sink in the server's
// process. The Recorder checks the order of all deliveries.
func TestNothingIsLostUnderChurn(t *testing.T) {
	w := newWorld(4, 5, 80)
	update(w.state, func(to apitest.Writer) { to.SetService(plain("stays", 1)) })
	origin, relayed := socket(t), socket(t)
	opts := quick
	opts.ServeCluster = true

	var stopServer, stopRelay, stopRelayed func()
	startServer := func() { _, stopServer = serve(t, w.state, origin, opts) }
	copied := cluster.New(cluster.Options{Resumable: true})
	startRelay := func() {
		stopRelay = start(t, func(ctx context.Context) error {
			return remote.Watch(ctx, copied, remote.Quick(remote.DialOptions{Addresses: []string{origin}}))
		})
	}
	startRelayed := func() { _, stopRelayed = serve(t, copied, relayed, opts) }
	startServer()
	startRelay()
	startRelayed()

	gates := []*gate{newGate(t), newGate(t)}
	gates[0].openTo(origin)
	gates[1].openTo(relayed)
	var screens []*screen
	var recs []*sinktest.Recorder
	var client *remote.Client
	var stopClient func()
	for _, g := range gates {
		client, stopClient = follow(t, "node-2", g.address)
		s := newScreen()
		rec := sinktest.NewRecorder(t, s.sink())
		drive(t, client.Source(), rec)
		screens, recs = append(screens, s), append(recs, rec)
	}
	for round := range 50 {
		w.change(10)
		switch round % 5 {
		case 0:
			gates[0].close()
			w.change(5)
			gates[0].openTo(origin)
		case 1:
			stopServer()
			w.change(5)
			startServer()
		case 2:
			stopRelay()
			w.change(5)
			startRelay()
		case 3:
			stopRelayed()
			w.change(5)
			startRelayed()
		case 4:
			stopClient()
			w.change(5)
			stopClient = start(t, client.Run)
		}
	}
	w.change(1)
	here := newScreen()
	drive(t, feed.New(w.state, "node-2"), here.sink())
	want := here.waitOutput(t, w.step)
	wantNode, _ := w.state.Snapshot().Nodes.Get("node-2")
	for i, s := range screens {
		if err := recs[i].Wait(within(t), func([]sinktest.Sync) bool { return recs[i].Node().Equal(wantNode) }); err != nil {
			t.Errorf("sink %d has the node %+v, want %+v: %v", i, recs[i].Node(), wantNode, err)
		}
		got := s.waitOutput(t, w.step)
		if !bytes.Equal(got, want) {
			t.Errorf("sink %d has\n%s\nwant\n%s", i, got, want)
		}
		delivered := 0
		for _, sync := range recs[i].Syncs() {
			if slices.Contains(keys(sync), "stays") {
				delivered++
			}
		}
		if delivered != 1 {
			t.Errorf("sink %d received an unchanged service %d times", i, delivered)
		}
	}
}

// The test connects one client after another. It closes each connection during the first
// answer. Each client receives twice as many bytes as the client before.
func TestPartialAnswerIsInvisible(t *testing.T) {
	w := newWorld(5, 5, 400)
	address := socket(t)
	serve(t, w.state, address, quick)
	u, err := feed.New(w.state, "node-1").Next()
	if err != nil {
		t.Fatal(err)
	}
	all := 0
	for range u.After(types.NamespacedName{}) {
		all++
	}
	for limit := int64(1000); ; limit *= 2 {
		l := listen(t, "127.0.0.1:0")
		done := make(chan struct{})
		go func() {
			defer close(done)
			in, err := l.Accept()
			l.Close()
			if err != nil {
				return
			}
			defer in.Close()
			out, err := net.Dial("unix", address[len("unix://"):])
			if err != nil {
				return
			}
			go func() {
				io.Copy(out, in)
				out.Close()
			}()
			io.Copy(in, io.LimitReader(out, limit))
			out.Close()
		}()
		client, err := remote.NewClient(remote.ClientOptions{NodeName: "node-1", DialOptions: remote.DialOptions{
			Addresses: []string{l.Addr().String()}, FailFast: true,
		}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- client.Run(ctx) }()
		var complete bool
		source := client.Source()
		select {
		case <-source.Changed():
			complete = true
		case <-ended:
			ended <- nil
		}
		cancel()
		<-ended
		<-done
		update, err := source.Next()
		if err != nil {
			t.Fatal(err)
		}
		source.Close()
		switch {
		case !complete && update != nil:
			t.Fatalf("after %d bytes the client shows something and says nothing", limit)
		case complete:
			n := 0
			for range update.After(types.NamespacedName{}) {
				n++
			}
			if n != all {
				t.Fatalf("%d services, want %d", n, all)
			}
			return
		}
	}
}

// A client's only server loses its own source, and later ends.
func TestStaleClient(t *testing.T) {
	set := func(s *cluster.State, name string, stale bool) {
		s.Update(func(tx *cluster.Tx) {
			tx.SetService(plain(name, 1))
			tx.SetStale(stale)
		})
	}
	state, address := manyServices(0), socket(t)
	set(state, "a", true)
	client, _ := follow(t, "n", address)
	if client.Stale() {
		t.Error("stale before the first answer")
	}
	_, stop := serve(t, state, address, quick)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	wait := func(syncs int) {
		t.Helper()
		if err := rec.Wait(within(t), atLeast(syncs)); err != nil {
			t.Fatal(err)
		}
	}
	wait(1)
	if !client.Stale() {
		t.Error("not stale although the server is")
	}
	set(state, "b", false)
	wait(2)
	if client.Stale() {
		t.Error("stale although the server is not")
	}
	stop()
	for ctx := within(t); !client.AgeLoss(4 * time.Minute); time.Sleep(time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatal("the client does not notice the end of the server")
		}
	}
	if !client.Stale() {
		t.Error("not stale four minutes after the end of the server")
	}
	set(state, "c", false)
	serve(t, state, address, quick)
	wait(3)
	if client.Stale() {
		t.Error("stale after the server came back")
	}
}

// During each Sync, another server replaces the server. All its views differ. The
// client's reader then lags too far and loses its position. Nevertheless each pass ends.
func TestPassesEndWhileServersAreReplaced(t *testing.T) {
	const services = 10_100
	var states [2]*cluster.State
	for i := range states {
		states[i] = cluster.New(cluster.Options{Resumable: true})
		states[i].Update(func(tx *cluster.Tx) {
			for n := range services {
				tx.SetService(&api.Service{Namespace: "ns", Name: fmt.Sprintf("s%05d", n+i), Type: api.ClusterIP, Annotations: map[string]string{"state": fmt.Sprint(i)}})
			}
		})
		states[i].SetSynced()
	}
	address := socket(t)
	_, stop := serve(t, states[0], address, quick)
	client, _ := follow(t, "n", address)
	source := client.Source()
	defer source.Close()
	replaced, begun := 0, 0
	programmed := map[types.NamespacedName]*api.View{}
	var pass sink.Pass
	d := sink.NewDriver(source, sink.Func(func(ctx context.Context, c *sink.Changes) error {
		pass.Begin(c)
		for s := range c.Services {
			programmed[s.Key] = s.New
		}
		for key := range programmed {
			if pass.Stale(key) || programmed[key] == nil {
				delete(programmed, key)
			}
		}
		if c.First {
			begun++
		}
		if replaced == 2 {
			return nil
		}
		replaced++
		before := client.Views().Revision
		stop()
		_, stop = serve(t, states[replaced%2], address, quick)
		for client.Views().Revision == before && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		return nil
	}), sink.Options{BatchSize: 6000})
	start(t, d.Run)
	if err := d.WaitApplied(within(t), 3); err != nil { // the first state, and the two states that replaced it
		t.Fatal(err)
	}
	if s := d.Status(); s.Passes != 2 || begun != 2 {
		t.Errorf("%d passes, and %d begun, want 2", s.Passes, begun)
	}
	views := client.Views()
	n := 0
	for _, v := range views.After(types.NamespacedName{}) {
		view := v.Get()
		if n++; !programmed[view.Key()].Equal(view) {
			t.Fatalf("service %s is programmed as %v, want %v", view.Key(), programmed[view.Key()], view)
		}
	}
	if len(programmed) != n || n != services {
		t.Errorf("%d services are programmed, want %d", len(programmed), n)
	}
}
