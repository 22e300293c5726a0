// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/kubetest"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// withInformers is like inWorld, but sets Options.Informers to informers of all objects.
func withInformers(t *testing.T, opts Options, test func(*world)) {
	t.Helper()
	inWorld(t, opts, func(w *world) {
		client, err := kubernetes.NewForConfig(w.Config())
		if err != nil {
			t.Fatal(err)
		}
		factory := informers.NewSharedInformerFactory(client, noResync)
		w.opts.Informers = &Informers{
			Services:       factory.Core().V1().Services().Informer(),
			EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
			Nodes:          factory.Core().V1().Nodes().Informer(),
		}
		ctx, cancel := context.WithCancel(w.t.Context())
		defer func() {
			cancel()
			factory.Shutdown()
		}()
		factory.Start(ctx.Done())
		test(w)
	})
}

func TestObjectsOfInformersAreFiltered(t *testing.T) {
	everything := []kubetest.Object{
		service("web"), slice("web", "web-1", "10.0.0.1"),
		headless(service("db")), slice("db", "db-1", "10.0.0.2", corev1.IsHeadlessService, ""),
		service("special", proxyName, "x"), slice("special", "special-1", "10.0.0.3", proxyName, "x"),
		headless(service("special-db", proxyName, "x")),
		selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.0.0.4"),
		slice("stranger", "stranger-1", "10.0.0.5"),
		node("a"), node("b"),
	}
	for _, tc := range []struct {
		name string
		opts Options
		want []string
	}{
		{"for a general proxy", Options{}, []string{
			"service default/web", "slice default/web-1 10.0.0.1", "node a", "node b",
			"slice default/plain 10.0.0.4", "slice default/stranger-1 10.0.0.5", "slice default/special-1 10.0.0.3",
		}},
		{"for a named proxy", named("x"), []string{
			"service default/special", "slice default/special-1 10.0.0.3", "service default/special-db",
			"service default/byhand", "slice default/plain 10.0.0.4", "node a", "node b",
		}},
		{"for one node", Options{NodeName: "b"}, []string{
			"service default/web", "slice default/web-1 10.0.0.1", "node b",
			"slice default/plain 10.0.0.4", "slice default/stranger-1 10.0.0.5", "slice default/special-1 10.0.0.3",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			withInformers(t, tc.opts, func(w *world) {
				w.Set(everything...)
				w.start()
				w.expect(tc.want...)
			})
		})
	}
}

func TestInformersDeliverChanges(t *testing.T) {
	withInformers(t, named("x"), func(w *world) {
		w.start()
		w.Set(slice("byhand", "plain", "10.0.0.1"))
		w.expect()
		w.Set(selectorless("byhand", proxyName, "x"))
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
		w.Set(slice("byhand", "plain", "10.0.0.2", proxyName, "x"))
		w.expect("service default/byhand", "slice default/plain 10.0.0.2")
		w.Set(slice("byhand", "plain", "10.0.0.3"))
		w.expect("service default/byhand", "slice default/plain 10.0.0.3")
		w.Set(selectorless("byhand"))
		w.expect()
		w.Set(selectorless("byhand", proxyName, "x"))
		w.expect("service default/byhand", "slice default/plain 10.0.0.3")
		w.Set(service("byhand", proxyName, "x"))
		w.expect("service default/byhand")
		w.Delete(service("byhand"))
		w.expect()
	})
}

func TestInformersDeliverRecreatedObject(t *testing.T) {
	withInformers(t, Options{}, func(w *world) {
		w.Set(service("web"), node("a"))
		w.start()
		w.expect("service default/web", "node a")
		w.Delete(service("web"), node("a"))
		w.Set(service("web"))
		w.expect("service default/web")
	})
}

func TestUnstartedInformersAreLogged(t *testing.T) {
	withInformers(t, Options{}, func(w *world) {
		client, err := kubernetes.NewForConfig(w.Config())
		if err != nil {
			t.Fatal(err)
		}
		w.opts.Informers.Nodes = informers.NewSharedInformerFactory(client, noResync).Core().V1().Nodes().Informer()
		log := w.bufferLog()
		w.start()
		w.advance(time.Hour)
		if got := log(); strings.Count(got, "not synced yet") != 1 || !strings.Contains(got, `["nodes"]`) {
			t.Errorf("want one line that names the nodes, got %s", got)
		}
	})
}

func TestInformersKeepRunningAfterWatch(t *testing.T) {
	withInformers(t, Options{}, func(w *world) {
		w.Set(service("web"))
		w.start()
		w.expect("service default/web")
		if err := w.stop(); err != nil {
			t.Error(err)
		}
		w.Set(service("api"))
		synctest.Wait()
		w.expect("service default/web")
		if w.opts.Informers.Services.IsStopped() {
			t.Error("the informer was stopped")
		}
	})
}

func TestStoppedInformersAreErrors(t *testing.T) {
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	in := &Informers{
		Services:       factory.Core().V1().Services().Informer(),
		EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
		Nodes:          factory.Core().V1().Nodes().Informer(),
	}
	stop := make(chan struct{})
	factory.Start(stop)
	close(stop)
	factory.Shutdown()
	err = Watch(t.Context(), cluster.New(cluster.Options{}), Options{Informers: in})
	want := "follow informer of services: the informer has stopped; a stopped informer cannot be started again"
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestInformersOfWrongKindAreErrors(t *testing.T) {
	err := Options{Informers: swappedInformers()}.Validate()
	if err == nil || err.Error() != "informer for services is one of *v1.EndpointSlice" {
		t.Errorf("Validate = %v", err)
	}
}

// The type opaque hides the kind of its objects. So Watch detects the kind only when it
// receives an object.
func TestInformerOfWrongKindEndsWatch(t *testing.T) {
	withInformers(t, Options{}, func(w *world) {
		in := w.opts.Informers
		in.Services, in.Nodes = opaque{in.Nodes}, opaque{in.Services}
		w.Set(service("web"))
		w.start()
		if err := w.stop(); err == nil || !strings.Contains(err.Error(), "informer for nodes: unexpected object of type *v1.Service") {
			t.Errorf("Watch = %v", err)
		}
	})
}

type opaque struct{ cache.SharedInformer }

// GetStore returns an empty store, which hides the kind of the objects.
func (opaque) GetStore() cache.Store { return cache.NewStore(cache.MetaNamespaceKeyFunc) }

func TestInformersFindSlicesOfNewlyLabelledService(t *testing.T) {
	withInformers(t, named("x"), func(w *world) {
		w.Set(service("web"), managed("web", "web-1", "10.0.0.1"))
		w.start()
		w.expect()
		w.Set(service("web", proxyName, "x"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
		w.Set(managed("web", "web-1", "10.0.0.1", proxyName, "x"))
		w.Set(service("web"))
		w.expect("slice default/web-1 10.0.0.1")
	})
}
