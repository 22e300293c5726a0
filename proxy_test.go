// SPDX-License-Identifier: Apache-2.0

package kpng_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/kube"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func demo() kpng.Options {
	return kpng.Options{
		Manifests: "examples/demo.yaml",
		NodeName:  "vm-002",
		Services:  watcher.Options{ServiceProxyName: "kpng-example"},
	}
}

// names returns a sink. Its Sync sends the names of all services to the channel.
func names(to chan<- string) sink.Sink {
	return sink.FullState(func(ctx context.Context, services []*api.View) error {
		var list []string
		for _, s := range services {
			list = append(list, s.Service.Name)
		}
		select {
		case to <- strings.Join(list, " "):
		case <-ctx.Done():
		}
		return nil
	})
}

func TestRunDrivesEverySink(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	a, b, ended := make(chan string), make(chan string), make(chan error)
	go func() { ended <- kpng.Run(ctx, demo(), names(a), names(b)) }()
	for _, c := range []chan string{a, b} {
		if got := <-c; got != "kpng-example" {
			t.Errorf("services %q, want kpng-example", got)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run returned %v", err)
	}
}

func TestRunFollowsSourceOfProgram(t *testing.T) {
	got, lost := make(chan string), errors.New("the source is lost")
	release := make(chan bool)
	ended := make(chan error)
	go func() {
		ended <- kpng.Run(t.Context(), kpng.Options{NodeName: "n1", Source: func(_ context.Context, state *cluster.State) error {
			state.Update(func(tx *cluster.Tx) {
				tx.SetService(&api.Service{Namespace: "ns", Name: "web", Type: api.ClusterIP})
			})
			state.SetSynced()
			<-release
			return lost
		}}, names(got))
	}()
	if got := <-got; got != "web" {
		t.Errorf("services %q, want web", got)
	}
	close(release)
	if err := <-ended; !errors.Is(err, lost) {
		t.Errorf("Run returned %v, want %v", err, lost)
	}
}

func TestRunFollowsChanges(t *testing.T) {
	manifest := filepath.Join(t.TempDir(), "services.yaml")
	write := func(name string) {
		t.Helper()
		text := "apiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\nspec: {clusterIP: 10.0.0.1, ports: [{port: 80}]}\n"
		if err := os.WriteFile(manifest+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(manifest+".new", manifest); err != nil {
			t.Fatal(err)
		}
	}
	write("a")
	ctx, cancel := context.WithCancel(t.Context())
	delivered, ended := make(chan string), make(chan error)
	p, err := kpng.New(kpng.Options{Manifests: manifest, NodeName: "n", Sinks: []kpng.Sink{{Sink: names(delivered)}}})
	if err != nil {
		t.Fatal(err)
	}
	go func() { ended <- p.Run(ctx) }()
	if got := <-delivered; got != "a" {
		t.Errorf("services %q, want a", got)
	}
	if err := p.WaitApplied(ctx); err != nil {
		t.Error(err)
	}
	write("b")
	if got := <-delivered; got != "b" {
		t.Errorf("services %q, want b", got)
	}
	if s := p.Status(); len(s) != 1 || s[0].Passes != 1 {
		t.Errorf("status %+v, want one sink with one pass", s)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run returned %v", err)
	}
	if err := p.Run(ctx); err == nil {
		t.Error("second Run returned no error")
	}
}

type unstartable struct{ sink.Func }

func (unstartable) Start(context.Context) error { return errors.New("no such device") }

type startFunc struct {
	sink.Func
	start func()
}

func (s startFunc) Start(context.Context) error { s.start(); return nil }

func TestRunReturnsFatalErrors(t *testing.T) {
	never := sink.Func(func(context.Context, *sink.Changes) error {
		t.Error("sink was called")
		return nil
	})
	unstarted := startFunc{never, func() { t.Error("sink was started") }}
	nodeless := demo()
	nodeless.Manifests = "does/not/exist.yaml"
	two := demo()
	two.Config = &rest.Config{}
	nodes := cache.NewSharedInformer(&cache.ListWatch{}, &corev1.Node{}, 0)
	informers := kpng.Options{NodeName: "n", Informers: &kube.Informers{
		Services:       cache.NewSharedInformer(&cache.ListWatch{}, &corev1.Service{}, 0),
		EndpointSlices: nodes,
		Nodes:          nodes,
	}}
	missing := informers
	missing.Informers = &kube.Informers{Services: informers.Informers.Services, EndpointSlices: cache.NewSharedInformer(&cache.ListWatch{}, &discoveryv1.EndpointSlice{}, 0)}
	namesake := demo()
	namesake.Sinks = []kpng.Sink{{Sink: never, Options: sink.Options{Name: "a"}}, {Sink: never, Options: sink.Options{Name: "a"}}}
	negative := demo()
	negative.Sinks = []kpng.Sink{{Sink: never, Options: sink.Options{Name: "nft", BatchSize: -1}}}
	twice := &unstoppable{}
	for _, test := range []struct {
		name  string
		opts  kpng.Options
		sinks []sink.Sink
		want  string
	}{
		{"a nil sink", demo(), []sink.Sink{never, nil}, "sink 1 is nil"},
		{"a nil function", demo(), []sink.Sink{sink.FullState(nil)}, "sink is a nil sink.Func"},
		{"a negative option", negative, nil, "sink nft: option BatchSize is negative: -1"},
		{"one sink twice", demo(), []sink.Sink{never, twice, twice}, "sinks 1 and 2 are the same *kpng_test.unstoppable"},
		{"two sinks with the same name", namesake, nil, `the name "a"`},
		{"an informer for the wrong kind", informers, []sink.Sink{never}, "informer for endpointslices is one of *v1.Node"},
		{"a missing informer", missing, []sink.Sink{never}, "informer for nodes is missing"},
		{"no sink", demo(), nil, "no sink"},
		{"a sink that fails to start", demo(), []sink.Sink{unstartable{never}}, "no such device"},
		{"missing manifests", nodeless, []sink.Sink{unstarted}, "does/not/exist.yaml"},
		{"two sources", two, []sink.Sink{never}, "at most one"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := kpng.Run(t.Context(), test.opts, test.sinks...)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestInterruptedOnceIsAnError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	opts := demo()
	opts.Sinks = []kpng.Sink{{Options: sink.Options{Once: true}, Sink: sink.Func(func(context.Context, *sink.Changes) error {
		cancel()
		return errors.New("not yet")
	})}}
	err := kpng.Run(ctx, opts)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the error of the context", err)
	}
}

func TestStartOverAndWaitSynced(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	passes := make(chan bool, 10)
	opts := demo()
	opts.Sinks = []kpng.Sink{{Sink: sink.Func(func(_ context.Context, c *sink.Changes) error {
		var failed sink.Failed
		for s := range c.Services {
			failed.Add(s.Key, errors.New("no such device"))
		}
		if c.First {
			passes <- true
		}
		return failed.Err()
	})}}
	p, err := kpng.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	if err := p.WaitSynced(ctx); err != nil { // WaitSynced must return, although one service fails
		t.Error(err)
	}
	<-passes
	p.StartOver()
	<-passes
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := p.WaitSynced(t.Context()); err != nil {
		t.Errorf("WaitSynced returned before Run ended: %v", err)
	}
}

// unstoppable is a sink whose Stop fails. Its first Sync closes the channel synced.
type unstoppable struct {
	once   sync.Once
	synced chan struct{}
}

func (s *unstoppable) Sync(context.Context, *sink.Changes) error {
	s.once.Do(func() { close(s.synced) })
	return nil
}

func (s *unstoppable) Stop(context.Context) error { return errors.New("routes remain") }

func TestErrorsOfStopAreReturned(t *testing.T) {
	for _, test := range []struct {
		name string
		with []sink.Sink
		want int // number of errors
	}{
		{"the only sink", nil, 1},
		{"one of two sinks", []sink.Sink{sink.Func(func(context.Context, *sink.Changes) error { return nil })}, 1},
		{"both sinks", []sink.Sink{&unstoppable{synced: make(chan struct{})}}, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			s := &unstoppable{synced: make(chan struct{})}
			ended := make(chan error)
			go func() { ended <- kpng.Run(ctx, demo(), append(test.with, s)...) }()
			for _, s := range append(test.with, s) {
				if s, ok := s.(*unstoppable); ok {
					<-s.synced
				}
			}
			cancel()
			err := <-ended
			if err == nil || strings.Count(err.Error(), "routes remain") != test.want || errors.Is(err, context.Canceled) {
				t.Errorf("error %v, want %d errors of Stop and none of the context", err, test.want)
			}
		})
	}
}

func TestEachSinkHasItsOptions(t *testing.T) {
	nothing := sink.Func(func(context.Context, *sink.Changes) error { return nil })
	var synced [3]atomic.Bool
	opts := demo()
	for i, name := range []string{"tables", "", "checks"} {
		opts.Sinks = append(opts.Sinks, kpng.Sink{Sink: nothing, Options: sink.Options{
			Name: name, Once: true, Observer: sink.Observer{Synced: func(sink.SyncResult) { synced[i].Store(true) }},
		}})
	}
	p, err := kpng.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"tables", "1", "checks"} {
		if got := p.Status()[i].Name; got != want || !synced[i].Load() {
			t.Errorf("sink %d has the name %q and observed %t, want %q and true", i, got, synced[i].Load(), want)
		}
	}
}

func TestHealthOfANode(t *testing.T) {
	const plain = "apiVersion: v1\nkind: Node\nmetadata: {name: node-1}\n"
	manifest := filepath.Join(t.TempDir(), "node.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(manifest+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(manifest+".new", manifest); err != nil {
			t.Fatal(err)
		}
	}
	write("apiVersion: v1\nkind: List\nitems: []\n")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	nodes := make(chan *api.Node, 10)
	p, err := kpng.New(kpng.Options{Manifests: manifest, NodeName: " Node-1\n", Sinks: []kpng.Sink{{Sink: sink.Func(func(_ context.Context, c *sink.Changes) error {
		nodes <- c.Node
		return nil
	})}}})
	if err != nil {
		t.Fatal(err)
	}
	if r := p.Health(); r.Synced || r.NodeEligible {
		t.Errorf("before Run: %+v", r)
	}
	go func() { ended <- p.Run(ctx) }()
	for _, step := range []struct {
		name, text string
		eligible   bool
	}{
		{"the node never existed", "", true},
		{"the node exists", plain, true},
		{"the cluster autoscaler marks the node for deletion", plain + "spec: {taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]}\n", false},
		{"the Node object is removed", "apiVersion: v1\nkind: List\nitems: []\n", false},
	} {
		if step.text != "" {
			write(step.text)
		}
		<-nodes
		if err := p.WaitApplied(ctx); err != nil {
			t.Fatal(err)
		}
		if r := p.Health(); !r.Synced || r.NodeEligible != step.eligible {
			t.Errorf("%s: %+v, want eligible %t", step.name, r, step.eligible)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// An API server has a Node object for each node. If this node's object is missing, load
// balancers must not use the node.
func TestHealthNeedsNodeOfAPIServer(t *testing.T) {
	nodes := watch.NewFake()
	informer := func(example runtime.Object, list runtime.Object, changes watch.Interface) cache.SharedInformer {
		return cache.NewSharedInformer(&cache.ListWatch{
			ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) { return list, nil },
			WatchFuncWithContext: func(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
				if o.SendInitialEvents != nil { // streaming lists, since client-go v0.35
					return nil, apierrors.NewInvalid(schema.GroupKind{}, "", nil)
				}
				return changes, nil
			},
		}, example, 0)
	}
	informers := &kube.Informers{
		Services:       informer(&corev1.Service{}, &corev1.ServiceList{}, watch.NewFake()),
		EndpointSlices: informer(&discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{}, watch.NewFake()),
		Nodes:          informer(&corev1.Node{}, &corev1.NodeList{}, nodes),
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer func() {
		cancel()
		running.Wait()
	}()
	nothing := sink.Func(func(context.Context, *sink.Changes) error { return nil })
	p, err := kpng.New(kpng.Options{Informers: informers, NodeName: "n", Sinks: []kpng.Sink{{Sink: nothing}}})
	if err != nil {
		t.Fatal(err)
	}
	running.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	if r := p.Health(); r.NodeEligible {
		t.Errorf("before the first listing: %+v", r)
	}
	for _, i := range []cache.SharedInformer{informers.Services, informers.EndpointSlices, informers.Nodes} {
		running.Go(func() { i.Run(ctx.Done()) })
	}
	if err := p.WaitSynced(ctx); err != nil {
		t.Fatal(err)
	}
	if r := p.Health(); !r.Synced || r.NodeEligible {
		t.Errorf("without a Node object: %+v", r)
	}
	before := p.State().Snapshot().Revision
	nodes.Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	<-p.State().Changed(before)
	if r := p.Health(); !r.NodeEligible {
		t.Errorf("with a Node object: %+v", r)
	}
}

func TestNodeName(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ name, given, environment, want string }{
		{"the given name takes precedence", "given", "environment", "given"},
		{"the name is trimmed and in lower case", " VM-002\n", "", "vm-002"},
		{"NODE_NAME comes second", "", "Environment ", "environment"},
		{"the host name comes last", "", " ", strings.ToLower(host)},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("NODE_NAME", test.environment)
			if got, err := kpng.NodeName(test.given); got != test.want || err != nil {
				t.Errorf("%q, %v; want %q", got, err, test.want)
			}
		})
	}
}

func TestWaitsEndWithRun(t *testing.T) {
	opts := demo()
	opts.Manifests = "does/not/exist.yaml"
	opts.Sinks = []kpng.Sink{{Sink: sink.Func(func(context.Context, *sink.Changes) error { return nil })}}
	p, err := kpng.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 4)
	wait := func() { waited <- p.WaitApplied(context.Background()); waited <- p.WaitSynced(context.Background()) }
	go wait()
	if err := p.Run(t.Context()); err == nil {
		t.Error("Run returned no error for missing manifests")
	}
	wait()
	for range 4 {
		if err := <-waited; err == nil || !strings.Contains(err.Error(), "the proxy has ended: read manifests") {
			t.Errorf("a wait returned %v although the manifests are missing", err)
		}
	}
}

// One sink programs all services, one fails for one service, and one fails as a whole.
func TestWaitErrorsNameSinksAndServices(t *testing.T) {
	errBusy := errors.New("dataplane is busy")
	returns := func(result error) sink.Sink {
		return sink.Func(func(context.Context, *sink.Changes) error { return result })
	}
	opts := demo()
	opts.Sinks = []kpng.Sink{
		{Sink: returns(nil), Options: sink.Options{Name: "good"}},
		{Sink: returns(errBusy), Options: sink.Options{Name: "broken"}},
		{Sink: returns(&sink.Failed{{Namespace: "a", Name: "b"}: errBusy}), Options: sink.Options{Name: "partial"}},
	}
	p, err := kpng.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	check := func(err error, want, wantNot string) {
		t.Helper()
		for text := range strings.SplitSeq(want, "; ") {
			if err == nil || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), wantNot) {
				t.Errorf("error %v, want %q in it and not %q", err, text, wantNot)
			}
		}
	}
	for ; p.Status()[0].Passes == 0 || p.Status()[1].Failures == 0 || len(p.Status()[2].Failing) == 0; time.Sleep(time.Millisecond) {
	}
	expired, stop := context.WithTimeout(ctx, time.Millisecond)
	defer stop()
	check(p.WaitSynced(expired), "sink broken: wait for a pass: context deadline exceeded; dataplane is busy", "sink partial")
	check(p.WaitApplied(expired), "sink broken: ; sink partial: ; service a/b: dataplane is busy", "sink good")
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	check(p.WaitApplied(t.Context()), "sink partial: ; ended; service a/b: dataplane is busy", "state of the cluster")
}

func TestZeroProxyDoesNotRun(t *testing.T) {
	if err := new(kpng.Proxy).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "not created by New") {
		t.Errorf("got %v", err)
	}
}

// noObjects is an Events handler without a dataplane.
type noObjects struct{ calls int }

func (n *noObjects) SetService(context.Context, *api.Service) error    { n.calls++; return nil }
func (n *noObjects) DeleteService(context.Context, *api.Service) error { n.calls++; return nil }
func (n *noObjects) SetEndpoint(context.Context, *api.Service, *api.Endpoint) error {
	n.calls++
	return nil
}
func (n *noObjects) DeleteEndpoint(context.Context, *api.Service, *api.Endpoint) error {
	n.calls++
	return nil
}
func (n *noObjects) SetFrontend(context.Context, *api.Service, nodeview.Frontend) error {
	n.calls++
	return nil
}
func (n *noObjects) DeleteFrontend(context.Context, *api.Service, nodeview.Frontend) error {
	n.calls++
	return nil
}
func (n *noObjects) Verify(ctx context.Context) error { n.calls++; return nil }
func (n *noObjects) VerifyInterval() time.Duration    { return time.Millisecond }

// Several goroutines use a proxy with three sinks while manifests change and sinks fail.
// The race detector checks this test.
func TestProxyIsSafeForConcurrentUse(t *testing.T) {
	dir := t.TempDir()
	write := func(n int) {
		text := fmt.Sprintf("apiVersion: v1\nkind: Node\nmetadata: {name: node-1, labels: {topology.kubernetes.io/zone: z%d}}\n", n%3)
		for i := range 10 + n%5 {
			text += fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata: {name: s%d}\nspec: {clusterIP: 10.0.0.%d, ports: [{port: %d}]}\n", i, (i+n)%30+1, 80+n%2)
		}
		if err := errors.Join(os.WriteFile(filepath.Join(dir, ".new"), []byte(text), 0o600), os.Rename(filepath.Join(dir, ".new"), filepath.Join(dir, "a.yaml"))); err != nil {
			t.Error(err)
		}
	}
	write(0)
	calls := 0
	p, err := kpng.New(kpng.Options{Manifests: dir, NodeName: "node-1", Sinks: []kpng.Sink{
		{Sink: sink.FullState(func(context.Context, []*api.View) error { return nil })},
		{Sink: sink.Events(&noObjects{})},
		{Sink: sink.Func(func(_ context.Context, c *sink.Changes) error {
			var failed sink.Failed
			for s := range c.Services {
				calls++
				switch {
				case calls%41 == 0:
					panic("oops")
				case calls%7 == 0:
					failed.Add(s.Key, errors.New("dataplane is busy"))
				}
			}
			return failed.Err()
		}), Options: sink.Options{BatchSize: 7}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
	var all sync.WaitGroup
	all.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	for _, use := range []func(){
		func() { p.Status(); p.Health(); p.State().Snapshot() },
		func() { p.StartOver(); p.State().Objects(); time.Sleep(20 * time.Millisecond) },
		func() {
			ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			_, _ = p.WaitApplied(ctx), p.WaitSynced(ctx)
		},
	} {
		all.Go(func() {
			for ctx.Err() == nil {
				use()
				time.Sleep(time.Millisecond)
			}
		})
	}
	<-p.State().Changed(0)
	for i := range 20 {
		before := p.State().Snapshot().Revision
		write(i + 1)
		<-p.State().Changed(before)
	}
	cancel()
	all.Wait()
}
