// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/types"
)

func TestMain(m *testing.M) {
	if os.Getenv(crowdEnv) != "" {
		runCrowd()
		return
	}
	if address := os.Getenv(restartedEnv); address != "" {
		runRestarted(address)
		return
	}
	goleak.VerifyTestMain(m)
}

// The function within returns a context that limits the time of one wait.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience, fmt.Errorf("waited for %v", patience))
	t.Cleanup(cancel)
	return ctx
}

// writer implements apitest.Writer for a state.
type writer struct{ tx *cluster.Tx }

func (w writer) SetService(s *api.Service)            { w.tx.SetService(s) }
func (w writer) DeleteService(k types.NamespacedName) { w.tx.DeleteService(k) }
func (w writer) SetSlice(s *api.EndpointSlice)        { w.tx.SetSlice(s) }
func (w writer) DeleteSlice(k types.NamespacedName)   { w.tx.DeleteSlice(k) }
func (w writer) SetNode(n *api.Node)                  { w.tx.SetNode(n) }
func (w writer) DeleteNode(name string)               { w.tx.DeleteNode(name) }
func update(s *cluster.State, write func(apitest.Writer)) {
	s.Update(func(tx *cluster.Tx) { write(writer{tx}) })
}

// world is a random cluster with its state.
type world struct {
	*apitest.World
	state *cluster.State
	step  int
}

func newWorld(seed uint64, nodes, services int) *world {
	w := &world{World: apitest.NewWorld(rand.New(rand.NewPCG(seed, 0)), nodes, services), state: cluster.New(cluster.Options{Resumable: true})}
	update(w.state, w.WriteAll)
	w.mark()
	w.state.SetSynced()
	return w
}

// change makes n random changes and then calls mark.
func (w *world) change(n int) {
	for range n {
		update(w.state, w.Change)
	}
	w.mark()
}

// mark increments the step in a marker service. A reader that has received this step has
// received all earlier changes too.
func (w *world) mark() {
	w.step++
	update(w.state, func(to apitest.Writer) { to.SetService(marker(w.step)) })
}

const markerAnnotation = "step"

func marker(step int) *api.Service {
	return &api.Service{
		Namespace: "zzz", Name: "marker", Type: api.ClusterIP,
		Annotations: map[string]string{markerAnnotation: strconv.Itoa(step)},
	}
}

// screen is a sink that formats services like kpng-json and keeps the last output.
type screen struct {
	mu    sync.Mutex
	print []byte
	step  int
	moved chan struct{}
}

func newScreen() *screen { return &screen{moved: make(chan struct{})} }

func (s *screen) sink() sink.Sink {
	encoded := map[*api.View][]byte{} // maps each view to its line in the last output
	return sink.FullState(func(_ context.Context, services []*api.View) error {
		var print bytes.Buffer
		before, step := encoded, 0
		encoded = make(map[*api.View][]byte, len(services))
		for _, service := range services {
			if service.Service.Name == "marker" {
				step, _ = strconv.Atoi(service.Service.Annotations[markerAnnotation])
			}
			line, ok := before[service]
			if !ok {
				var err error
				printed := *service
				printed.Lost = slices.Clone(service.Lost)
				for i := range printed.Lost {
					printed.Lost[i].Winner = types.NamespacedName{} // the winner may be from an earlier state
				}
				if line, err = json.Marshal(printed); err != nil {
					return err
				}
			}
			encoded[service] = line
			print.Write(append(line, '\n'))
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.print, s.step = print.Bytes(), step
		close(s.moved)
		s.moved = make(chan struct{})
		return nil
	})
}

// A test fails after the time patience without progress.
const patience = time.Minute

// waitOutput waits until the marker service has reached step, and then returns the
// output.
func (s *screen) waitOutput(t testing.TB, step int) []byte {
	t.Helper()
	for {
		s.mu.Lock()
		print, now, moved := s.print, s.step, s.moved
		s.mu.Unlock()
		if now >= step {
			return print
		}
		select {
		case <-moved:
		case <-time.After(patience):
			t.Fatalf("the print stays at step %d, want %d", now, step)
		}
	}
}

// drive runs the sink s with the source src until the test ends.
func drive(t testing.TB, src sink.Source, s sink.Sink) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sink.Run(ctx, src, s, sink.Options{})
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		src.Close()
	})
}

// start runs f in the background, until stop is called or the test ends.
func start(t testing.TB, f func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := f(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(stop)
	return stop
}

// socket returns the address of a unix socket that does not exist.
func socket(t testing.TB) string { return "unix://" + filepath.Join(t.TempDir(), "s") }

func listen(t testing.TB, address string) net.Listener {
	t.Helper()
	l, err := remote.Listen(address, 0)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// serve runs a server of the given state at the address.
func serve(t testing.TB, state *cluster.State, address string, opts remote.ServerOptions) (server *remote.Server, stop func()) {
	t.Helper()
	return serveOn(t, state, listen(t, address), opts)
}

func serveOn(t testing.TB, state *cluster.State, l net.Listener, opts remote.ServerOptions) (server *remote.Server, stop func()) {
	t.Helper()
	server, err := remote.NewServer(state, opts)
	if err != nil {
		t.Fatal(err)
	}
	return server, start(t, func(ctx context.Context) error { return server.Serve(ctx, l) })
}

// follow returns a running client of the servers at the addresses.
func follow(t testing.TB, node string, addresses ...string) (client *remote.Client, stop func()) {
	t.Helper()
	client, err := remote.NewClient(remote.ClientOptions{
		NodeName:    node,
		DialOptions: remote.Quick(remote.DialOptions{Addresses: addresses}),
	})
	if err != nil {
		t.Fatal(err)
	}
	return client, start(t, client.Run)
}

// The variable quick has the options of most servers in tests. These servers send each
// change immediately, and do not limit the rate of new streams.
var quick = remote.Batching(-1, remote.ServerOptions{StreamRate: 1e6})

// TestRemoteSinkReceivesSameAsInProcess makes 500 changes to 200 services. After each
// change, it compares the output of kpng-json for a remote client with the output for a
// sink in the server's process.
func TestRemoteSinkReceivesSameAsInProcess(t *testing.T) {
	w := newWorld(1, 8, 200)
	address := socket(t)
	serve(t, w.state, address, quick)
	for node, steps := range map[string]int{apitest.NodeName(1): 500, apitest.NodeName(5): 50, "unknown": 50} {
		here, there := newScreen(), newScreen()
		drive(t, feed.New(w.state, node), here.sink())
		client, _ := follow(t, node, address)
		drive(t, client.Source(), sinktest.NewRecorder(t, there.sink()))
		for range steps {
			w.change(1)
			want, got := here.waitOutput(t, w.step), there.waitOutput(t, w.step)
			if !bytes.Equal(got, want) {
				t.Fatalf("step %d, node %s: over the wire\n%s\nin process\n%s", w.step, node, got, want)
			}
		}
		if want, _ := w.state.Snapshot().Nodes.Get(node); !client.Views().Node.Equal(want) {
			t.Errorf("the node is %+v, want %+v", client.Views().Node, want)
		}
	}
}

// A sink that starts later receives the same views over the same stream.
func TestSourcesOfClientShareStream(t *testing.T) {
	state, address := manyServices(3), socket(t)
	server, _ := serve(t, state, address, quick)
	client, _ := follow(t, "n", address)
	for range 2 {
		rec := sinktest.NewRecorder(t, nil)
		drive(t, client.Source(), rec)
		if err := rec.Wait(within(t), func([]sinktest.Sync) bool { return len(rec.Views()) == 3 }); err != nil {
			t.Fatal(err)
		}
	}
	if n := server.Stats().Streams; n != 1 {
		t.Errorf("%d streams, want 1", n)
	}
}

// In the manifest, each endpoint names its pod.
func TestTargetsAndLoadBalancerClassReachClients(t *testing.T) {
	state := cluster.New(cluster.Options{})
	err := file.Watch(t.Context(), state, file.Options{
		Path: "../watcher/file/testdata/kubectl.yaml", Once: true, Options: watcher.Options{KeepTargets: true},
	})
	if err != nil {
		t.Fatal(err)
	}
	address := socket(t)
	serve(t, state, address, quick)
	client, _ := follow(t, "worker-1", address)
	source := client.Source()
	select {
	case <-source.Changed():
	case <-within(t).Done():
		t.Fatal("no answer")
	}
	u, err := source.Next()
	if err != nil {
		t.Fatal(err)
	}
	view := u.View(types.NamespacedName{Namespace: "prod", Name: "shop"})
	if got := view.Service.LoadBalancerClass; got != "example.com/lb" {
		t.Errorf("the class of the load balancer is %q", got)
	}
	var pods []string
	for _, e := range slices.Concat(view.Endpoints, view.Draining) {
		pods = append(pods, e.Target.String())
	}
	if want := []string{"prod/shop-1024415", "prod/shop-fd001024415", "prod/shop-1024429"}; !slices.Equal(pods, want) {
		t.Errorf("the endpoints are in pods %v, want %v", pods, want)
	}
}
