// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/kpng-project/kpng/watcher"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

func TestFailingSinkReceivesEachChangeOnce(t *testing.T) {
	for _, test := range []struct {
		name string
		// failures returns one step for each Sync call that delivers the first change. The step
		// is the sink's reaction to the call. The last step calls wait.
		failures func(wait func()) []sinkscript.Step
		// acked is true if the last step returns no error.
		acked bool
		// alone is true if the driver delivers the failing service in a separate Sync after the
		// steps.
		alone bool
	}{
		{"the sink fails three times", func(wait func()) []sinkscript.Step {
			return append(sinkscript.Repeat(2, sinkscript.Fail(errors.New("no"))), stepAfter(wait, sinkscript.Fail(errors.New("no"))))
		}, false, true},
		{"the sink panics", func(wait func()) []sinkscript.Step {
			return []sinkscript.Step{stepAfter(wait, sinkscript.Panic("no"))}
		}, false, false},
		{"the sink blocks", func(wait func()) []sinkscript.Step {
			return []sinkscript.Step{stepAfter(wait, sinkscript.Fail(nil))}
		}, true, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			server := shared.Get(t)
			n := newTenant(t, server)
			services := map[string]*corev1.Service{}
			for _, name := range []string{"a", "b", "brief", "c", "d"} {
				services[name] = newService(name, n.name, servicePort("", 80, 80))
			}
			n.put(services["a"], services["b"], services["c"])
			script := sinkscript.New(nil)
			rec := sinktest.NewRecorder(t, script)
			p, _ := run(t, kpng.Options{
				Config:   server.Config(),
				NodeName: n.name,
				Services: watcher.Options{ServiceProxyName: n.name},
				Sinks:    []kpng.Sink{{Sink: rec}},
			})
			if err := p.WaitApplied(within(t)); err != nil {
				t.Fatal(err)
			}

			waiting, release := make(chan struct{}), make(chan struct{})
			failures := test.failures(func() {
				close(waiting)
				<-release
			})
			script.Add(failures...)
			syncs := len(rec.Syncs())
			port := func(name string, number int32) {
				services[name].Spec.Ports[0].Port = number
				n.put(services[name])
			}
			port("a", 81)
			select {
			case <-waiting:
			case <-within(t).Done():
				t.Fatal("the last step does not begin")
			}
			// The driver collects the changes that arrive during the last step. Then it delivers
			// them in one Sync.
			port("a", 82)
			port("a", 83)
			port("b", 81)
			n.put(services["brief"])
			n.remove(services["brief"], services["c"])
			n.put(services["d"])
			waitState(t, p, func(s *cluster.Objects) bool {
				_, ok := s.Services.Get(types.NamespacedName{Namespace: n.name, Name: "d"})
				return ok
			})
			close(release)
			if err := p.WaitApplied(within(t)); err != nil {
				t.Fatal(err)
			}

			all := rec.Syncs()[syncs+len(failures):]
			count := 1
			if test.alone {
				count = 2
			}
			if len(all) != count {
				t.Errorf("%d syncs after the failures, want %d", len(all), count)
			}
			type change struct {
				old, new int32 // the service's port before and after the change
				unsure   bool
			}
			got := map[string]change{}
			for _, s := range all {
				for c := range s.Services {
					if _, twice := got[c.Key.Name]; twice {
						t.Errorf("service %s was delivered twice", c.Key)
					}
					got[c.Key.Name] = change{portOf(c.Old), portOf(c.New), c.Unsure}
				}
				if s.First {
					t.Error("a pass began")
				}
			}
			want := map[string]change{"a": {80, 83, true}, "b": {80, 81, false}, "c": {80, 0, false}, "d": {0, 80, false}}
			if test.acked {
				want["a"] = change{81, 83, false}
			}
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(change{})); diff != "" {
				t.Errorf("last deliveries (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff([]string{"a IPv4 83!", "b IPv4 81!", "d IPv4 80!"}, describe(rec.Views())); diff != "" {
				t.Errorf("state of the sink (-want +got):\n%s", diff)
			}
		})
	}
}

// stepAfter returns a step that calls wait, and then step.
func stepAfter(wait func(), step sinkscript.Step) sinkscript.Step {
	return func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
		wait()
		return step(ctx, c, s)
	}
}

func portOf(v *api.View) int32 {
	if v == nil {
		return 0
	}
	return v.Service.Ports[0].Port
}

// waitState waits until isDone returns true for a snapshot of p's state.
func waitState(t *testing.T, p *kpng.Proxy, isDone func(*cluster.Objects) bool) {
	t.Helper()
	ctx := within(t)
	for {
		s := p.State().Objects()
		if isDone(s) {
			return
		}
		select {
		case <-p.State().Changed(s.Revision):
		case <-ctx.Done():
			t.Fatalf("wait for state: %v", context.Cause(ctx))
		}
	}
}

// permissions contains the permissions that a proxy needs.
var permissions = []rbacv1.PolicyRule{
	{APIGroups: []string{""}, Resources: []string{"services", "nodes"}, Verbs: []string{"list", "watch"}},
	{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list", "watch"}},
}

// This test is not parallel, because it would also count goroutines of parallel tests.
func TestRunLeaksNoGoroutines(t *testing.T) {
	server := shared.Get(t)
	n := newTenant(t, server)
	n.put(newService("web", n.name, servicePort("", 80, 80)))
	for _, byHand := range []string{"x", "y"} {
		s := newService(byHand, n.name, servicePort("", 80, 80))
		s.Spec.Selector = nil
		n.put(s)
	}
	// Use new users, because client-go would use connections of known users again.
	somebody := server.User(t, permissions...)
	nobody := server.User(t)
	nowhere := rest.CopyConfig(nobody)
	nowhere.Host = "https://127.0.0.1:1"

	never := make(chan struct{})
	for _, test := range []struct {
		name string
		opts kpng.Options
		step sinkscript.Step
		// wait returns when it is time to stop the proxy.
		wait func(*testing.T, *kpng.Proxy, *wire)
	}{
		{"after everything is applied", kpng.Options{Config: somebody}, nil, applied},
		{"while a sync runs", kpng.Options{Config: somebody}, sinkscript.Block(never), func(t *testing.T, p *kpng.Proxy, _ *wire) {
			waitState(t, p, func(*cluster.Objects) bool { return p.State().IsSynced() })
		}},
		{"immediately", kpng.Options{Config: somebody}, nil, func(*testing.T, *kpng.Proxy, *wire) {}},
		{"while the server cannot be reached", kpng.Options{Config: nowhere}, nil, failed},
		{"while the server refuses", kpng.Options{Config: nobody}, nil, failed},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			w := newWire()
			test.opts.Config = w.tap(rest.CopyConfig(test.opts.Config))
			test.opts.NodeName = n.name
			test.opts.Services.ServiceProxyName = n.name
			script := sinkscript.New(nil)
			if test.step != nil {
				script.Add(test.step)
			}
			p, stop := run(t, test.opts, sinktest.NewRecorder(t, script))
			test.wait(t, p, w)
			stop()
			goleak.VerifyNone(t, before)
		})
	}
}

// This test is not parallel, because it would also count goroutines of parallel tests.
func TestNoHandlersRemainOnInformers(t *testing.T) {
	server := shared.Get(t)
	n := newTenant(t, server)
	opts := kpng.Options{
		Informers: startInformers(t, server),
		NodeName:  n.name,
		Services:  watcher.Options{ServiceProxyName: n.name},
	}
	// An informer may start goroutines until it has delivered its first change. So let a
	// first proxy receive changes before the goroutines are counted.
	p, stop := run(t, opts, sinktest.NewRecorder(t, nil))
	applied(t, p, nil)
	web := newService("web", n.name, servicePort("", 80, 80))
	n.put(web, newSlice("web", web, nil, newEndpoint("10.1.0.1", "")), n.node(""))
	waitState(t, p, func(s *cluster.Objects) bool {
		return s.Services.Len() == 1 && s.Slices.Len() == 1 && s.Nodes.Len() == 1
	})
	stop()

	before := goleak.IgnoreCurrent()
	p, stop = run(t, opts, sinktest.NewRecorder(t, nil))
	applied(t, p, nil)
	stop()
	goleak.VerifyNone(t, before)
}

func applied(t *testing.T, p *kpng.Proxy, _ *wire) {
	t.Helper()
	if err := p.WaitApplied(within(t)); err != nil {
		t.Fatal(err)
	}
}

func failed(t *testing.T, _ *kpng.Proxy, w *wire) {
	t.Helper()
	w.wait(t, 0, "a request that fails", func(r request) bool { return r.err != nil || r.status >= 400 })
}
