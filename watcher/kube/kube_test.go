// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/kubetest"
	"github.com/kpng-project/kpng/internal/revstore"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// world consists of an API server and a Watch that follows it.
type world struct {
	*kubetest.Server
	t     *testing.T
	opts  Options
	state *cluster.State
	ctx   context.Context // the context of Watch
	stop  func() error    // ends Watch and returns its error
}

// inWorld runs test with a new world in a synctest bubble.
func inWorld(t *testing.T, opts Options, test func(*world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		w := &world{Server: kubetest.Start(t), t: t, opts: opts, state: cluster.New(cluster.Options{Resumable: true}), ctx: ctx}
		test(w)
		if w.stop != nil {
			w.stop()
		}
	})
}

func named(name string) Options {
	return Options{Options: watcher.Options{ServiceProxyName: name}}
}

// start starts Watch and waits until it is idle.
func (w *world) start() {
	w.t.Helper()
	opts := w.opts
	if opts.Informers == nil {
		opts.Config = w.Config()
	}
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan error, 1)
	go func() { ended <- Watch(ctx, w.state, opts) }()
	w.stop = func() error {
		cancel()
		err := <-ended
		w.stop = nil
		return err
	}
	if opts.Informers != nil {
		time.Sleep(time.Second) // give informers time, because they poll to detect that they are synced
	}
	synctest.Wait()
}

// bufferLog makes Watch log to a buffer. The returned function returns the buffer's text.
func (w *world) bufferLog() func() string {
	logger := ktesting.NewLogger(w.t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	w.ctx = klog.NewContext(w.t.Context(), logger)
	return func() string { return logger.GetSink().(ktesting.Underlier).GetBuffer().String() }
}

// advance lets the time d pass and then waits until all goroutines are idle.
func (w *world) advance(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// changedSince yields the services that changed after a revision of the state.
func (w *world) changedSince(revision uint64) iter.Seq2[types.NamespacedName, *api.ServiceState] {
	changes, ok := (*revstore.Snapshot[types.NamespacedName, *api.ServiceState])(w.state.Snapshot().States).Since(revision)
	if !ok {
		w.t.Fatal("the changes are no longer known")
	}
	return changes
}

// expect checks the objects in the state. Each line is an object, such as "service
// default/web", "slice default/web-1 10.0.0.1" or "node a".
func (w *world) expect(want ...string) {
	w.t.Helper()
	synctest.Wait()
	if !w.state.IsSynced() {
		w.t.Error("the state has not synced")
	}
	w.expectBeforeSync(want...)
}

func (w *world) expectBeforeSync(want ...string) {
	w.t.Helper()
	want = slices.Sorted(slices.Values(want))
	if diff := cmp.Diff(want, w.dump()); diff != "" {
		w.t.Errorf("state (-want +got):\n%s", diff)
	}
}

func (w *world) dump() []string {
	var got []string
	snapshot := w.state.Objects()
	for key := range snapshot.Services.All() {
		got = append(got, "service "+key.String())
	}
	for key, s := range snapshot.Slices.All() {
		line := "slice " + key.String()
		for _, e := range s.Endpoints {
			line += " " + e.Addr.String()
		}
		got = append(got, line)
	}
	for name := range snapshot.Nodes.All() {
		got = append(got, "node "+name)
	}
	slices.Sort(got)
	return got
}

// service returns a service with a cluster IP that no other service of the tests has.
func service(name string, labels ...string) *corev1.Service {
	h := fnv.New32()
	h.Write([]byte(name))
	sum := h.Sum(nil)
	return &corev1.Service{
		ObjectMeta: kubetest.Meta("default", name, labels...),
		Spec: corev1.ServiceSpec{
			ClusterIP: netip.AddrFrom4([4]byte{10, sum[1], sum[2], sum[3]}).String(),
			Selector:  map[string]string{"app": name},
			Ports:     []corev1.ServicePort{{Port: 80}},
		},
	}
}

func selectorless(name string, labels ...string) *corev1.Service {
	s := service(name, labels...)
	s.Spec.Selector = nil
	return s
}

func headless(s *corev1.Service) *corev1.Service {
	s.Spec.ClusterIP = "None"
	return s
}

func slice(service, name, addr string, labels ...string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  kubetest.Meta("default", name, append(labels, discoveryv1.LabelServiceName, service)...),
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{addr}}},
	}
}

func node(name string) *corev1.Node { return &corev1.Node{ObjectMeta: kubetest.Meta("", name)} }

const proxyName = watcher.LabelServiceProxyName

func TestGeneralProxySeesUnlabelledServices(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.Set(
			service("web"), slice("web", "web-1", "10.0.0.1"),
			service("special", proxyName, "x"), slice("special", "special-1", "10.0.0.2", proxyName, "x"),
			headless(service("db")), slice("db", "db-1", "10.0.0.3", corev1.IsHeadlessService, ""),
			node("a"), node("b"),
		)
		w.start()
		w.expect("service default/web", "slice default/web-1 10.0.0.1", "slice default/special-1 10.0.0.2", "node a", "node b")
	})
}

// The proxy label of an EndpointSlice does not matter, as with kube-proxy. Only the label
// of its service matters.
func TestUnlabelledServiceKeepsItsEndpoints(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.Set(service("web", proxyName, "x"), slice("web", "web-1", "10.0.0.1", proxyName, "x"))
		w.start()
		w.Set(service("web"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
	})
}

func TestNamedProxySeesItsLabelAndHeadlessServices(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.Set(
			service("web"), slice("web", "web-1", "10.0.0.1"),
			service("other", proxyName, "y"), slice("other", "other-1", "10.0.0.4", proxyName, "y"),
			service("special", proxyName, "x"), slice("special", "special-1", "10.0.0.2", proxyName, "x"),
			headless(service("db", proxyName, "x")), slice("db", "db-1", "10.0.0.3", proxyName, "x", corev1.IsHeadlessService, ""),
		)
		w.start()
		w.expect("service default/special", "slice default/special-1 10.0.0.2", "service default/db", "slice default/db-1 10.0.0.3")
	})
}

func TestServerFiltersObjects(t *testing.T) {
	for _, tc := range []struct {
		name string
		opts Options
		want map[string]string // for each resource: label selector | field selector
	}{
		{"a general proxy requests objects that have no label and are not headless, and all nodes", Options{}, map[string]string{
			services:       "!service.kubernetes.io/service-proxy-name | spec.clusterIP!=None",
			endpointSlices: "!service.kubernetes.io/headless | ",
			nodes:          " | ",
		}},
		{"a named proxy requests objects with its label", named("x"), map[string]string{
			services:       "service.kubernetes.io/service-proxy-name=x | ",
			endpointSlices: "service.kubernetes.io/service-proxy-name=x | ",
			nodes:          " | ",
		}},
		{"a proxy of one node requests only that node", Options{NodeName: "a"}, map[string]string{
			services:       "!service.kubernetes.io/service-proxy-name | spec.clusterIP!=None",
			endpointSlices: "!service.kubernetes.io/headless | ",
			nodes:          " | metadata.name=a",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inWorld(t, tc.opts, func(w *world) {
				w.start()
				got := map[string]string{}
				for _, r := range w.Seen(func(kubetest.Request) bool { return true }) {
					parts := strings.Split(r.Labels, ",")
					slices.Sort(parts)
					got[r.Resource] = strings.Join(parts, ",") + " | " + r.Fields
					if r.InitialEvents {
						t.Errorf("request %+v is for a streaming list", r)
					}
					if accept := r.Header.Get("Accept"); !strings.HasPrefix(accept, "application/vnd.kubernetes.protobuf") {
						t.Errorf("Accept %q of %s does not request protobuf", accept, r.Resource)
					}
					if encoding := r.Header.Get("Accept-Encoding"); strings.Contains(encoding, "gzip") {
						t.Errorf("Accept-Encoding %q of %s requests compression", encoding, r.Resource)
					}
				}
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Errorf("requests (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func TestChangesArrive(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.start()
		w.expect()
		w.Set(service("web"), slice("web", "web-1", "10.0.0.1"), node("a"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1", "node a")
		w.Set(slice("web", "web-1", "10.0.0.2"))
		w.expect("service default/web", "slice default/web-1 10.0.0.2", "node a")
		w.Bookmark()
		w.Delete(slice("web", "web-1", ""), node("a"))
		w.expect("service default/web")
		w.Delete(service("web"))
		w.expect()
	})
}

func TestLabelFlipsAreAddsAndDeletes(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.Set(service("web"), slice("web", "web-1", "10.0.0.1"))
		w.start()
		w.Set(service("web", proxyName, "x"))
		w.expect("slice default/web-1 10.0.0.1")
		w.Set(service("web"), slice("web", "web-1", "10.0.0.1"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
		w.Set(headless(service("web")))
		w.expect("slice default/web-1 10.0.0.1")
	})
}

func TestRecreatedObjectReplacesItsPredecessor(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		first := service("web")
		w.Set(first)
		w.start()
		second := service("web")
		second.UID = "second"
		w.Delete(first)
		w.Set(second)
		w.expect("service default/web")
		got, _ := w.state.Objects().Services.Get(types.NamespacedName{Namespace: "default", Name: "web"})
		if got.UID != "second" {
			t.Errorf("UID %q, want that of the second object", got.UID)
		}
		third := service("web")
		third.UID = "third"
		w.Unplug(true)
		w.Delete(second)
		w.Set(third)
		w.Compact()
		w.Unplug(false)
		w.advance(2 * time.Minute)
		got, _ = w.state.Objects().Services.Get(types.NamespacedName{Namespace: "default", Name: "web"})
		if got == nil || got.UID != "third" {
			t.Errorf("after a relist: %+v, want the third object", got)
		}
	})
}

func TestDroppedWatchResumes(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.Set(service("web"))
		w.start()
		w.Set(service("api"))
		w.expect("service default/web", "service default/api")
		w.advance(2 * time.Second)
		w.Seen(func(kubetest.Request) bool { return true })
		w.Drop(nil)
		w.Set(service("db"))
		w.advance(2 * time.Minute)
		w.expect("service default/web", "service default/api", "service default/db")
		checks := 0
		for _, r := range w.Seen(func(r kubetest.Request) bool { return r.Resource == services && r.Verb == "list" }) {
			if !isCheck(r) {
				t.Errorf("a dropped watch led to a listing: %+v", r)
			}
			checks++
		}
		if checks != 1 {
			t.Errorf("%d checks of the resource version after a dropped watch, want 1", checks)
		}
	})
}

func TestWatchErrorLosesNothing(t *testing.T) {
	for name, last := range map[string]*apierrors.StatusError{
		"410 Gone":              apierrors.NewResourceExpired("too old resource version"),
		"500 Internal error":    apierrors.NewInternalError(errors.New("etcd is away")),
		"429 Too many requests": apierrors.NewTooManyRequests("later", 1),
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, named("x"), func(w *world) {
				w.Set(service("web", proxyName, "x"), slice("web", "web-1", "10.0.0.1", proxyName, "x"),
					selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.0.0.2"))
				w.start()
				w.advance(2 * time.Second)
				w.Drop(last)
				w.Delete(slice("web", "web-1", ""), slice("byhand", "plain", ""), service("web"))
				if apierrors.IsResourceExpired(last) {
					w.Compact()
				}
				w.Set(slice("byhand", "another", "10.0.0.3"))
				w.advance(2 * time.Minute)
				w.expect("service default/byhand", "slice default/another 10.0.0.3")
			})
		})
	}
}

func TestOutageEndsWithOnlyDifferences(t *testing.T) {
	for _, compacted := range []bool{false, true} {
		t.Run(fmt.Sprintf("compacted=%t", compacted), func(t *testing.T) {
			inWorld(t, Options{}, func(w *world) {
				w.Set(service("stays"), service("goes"), slice("stays", "stays-1", "10.0.0.1"))
				w.start()
				before := w.state.Objects()
				w.Unplug(true)
				w.advance(10 * time.Minute)
				away := w.state.Objects()
				revision := func(o *cluster.Objects) uint64 {
					return (*revstore.Snapshot[types.NamespacedName, *api.Service])(o.Services).Revision()
				}
				if revision(away) != revision(before) || !away.Stale {
					t.Errorf("revision of services went from %d to %d while the server was away; stale %t", revision(before), revision(away), away.Stale)
				}
				w.Delete(service("goes"))
				w.Set(service("comes"))
				if compacted {
					w.Compact()
				}
				w.Unplug(false)
				w.advance(2 * time.Minute)
				w.expect("service default/stays", "service default/comes", "slice default/stays-1 10.0.0.1")
				got := map[string]bool{}
				for key, state := range w.changedSince(before.Revision) {
					got[key.Name] = state == nil
				}
				if diff := cmp.Diff(map[string]bool{"goes": true, "comes": false}, got); diff != "" {
					t.Errorf("changed services, true for deletions (-want +got):\n%s", diff)
				}
				if w.state.Snapshot().Stale {
					t.Error("the server is back, but the state is still stale")
				}
			})
		})
	}
}

// TestStateIsStaleBeforeNextRequest has two outages. During the second outage, the
// reflectors wait longer than StaleAfter between two requests.
func TestStateIsStaleBeforeNextRequest(t *testing.T) {
	inWorld(t, Options{StaleAfter: 5 * time.Second}, func(w *world) {
		w.start()
		w.Unplug(true)
		w.advance(10 * time.Minute)
		w.Unplug(false)
		w.advance(70 * time.Second)
		if w.state.Snapshot().Stale {
			t.Error("the state is stale although the server is back")
		}
		w.Unplug(true)
		for _, want := range []bool{false, true} {
			w.advance(4 * time.Second)
			if stale := w.state.Snapshot().Stale; stale != want {
				t.Errorf("stale %t, want %t", stale, want)
			}
		}
	})
}

func TestUnusableObjectsAreOmitted(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		orphan := slice("web", "orphan", "10.0.0.1")
		delete(orphan.Labels, discoveryv1.LabelServiceName)
		w.Set(service("web"), orphan, slice("web", "bad", "10.0.0.300"), slice("web", "good", "10.0.0.3"))
		w.start()
		w.expect("service default/web", "slice default/bad", "slice default/good 10.0.0.3")
		unlabelled := slice("web", "good", "10.0.0.3")
		delete(unlabelled.Labels, discoveryv1.LabelServiceName)
		w.Set(unlabelled)
		w.expect("service default/web", "slice default/bad")
	})
}

func TestInvalidFieldsAreInState(t *testing.T) {
	for name, labels := range map[string][]string{"": nil, "x": {watcher.LabelServiceProxyName, "x"}} {
		t.Run("proxy "+name, func(t *testing.T) {
			inWorld(t, named(name), func(w *world) {
				expect := func(want string) {
					t.Helper()
					synctest.Wait()
					w.waitForLookUp()
					if got, _ := w.state.Snapshot().Refused.Get(types.NamespacedName{Namespace: "default", Name: "web"}); got != want {
						t.Errorf("refused for %q, want %q", got, want)
					}
				}
				const wrong = `"x" is not a value that kpng knows; ignoring it`
				annotated := func(annotation string) (*corev1.Service, *discoveryv1.EndpointSlice) {
					web, web1 := service("web", labels...), slice("web", "web-1", "10.0.0.1", labels...)
					web.Annotations, web1.Annotations = map[string]string{annotation: "x"}, map[string]string{annotation: "x"}
					return web, web1
				}
				web, _ := annotated("kpng.io/algorithm")
				_, web1 := annotated("kpng.io/weight")
				w.Set(web, web1)
				w.start()
				expect("invalid fields ignored: metadata.annotations[kpng.io/algorithm]: " + wrong + "; and those of 1 more objects")
				right, right1 := annotated("other")
				w.Set(right)
				expect("invalid fields ignored: EndpointSlice web-1: metadata.annotations[kpng.io/weight]: " + wrong)
				w.Set(right1)
				expect("")
				w.Set(web)
				expect("invalid fields ignored: metadata.annotations[kpng.io/algorithm]: " + wrong)
				w.Delete(web)
				expect("")
			})
		})
	}
}

func forbid(resource string) func(kubetest.Request) *apierrors.StatusError {
	return func(r kubetest.Request) *apierrors.StatusError {
		if r.Resource != resource {
			return nil
		}
		return apierrors.NewForbidden(schema.GroupResource{Group: "discovery.k8s.io", Resource: resource}, "",
			fmt.Errorf("User %q cannot %s resource %q", "proxy", r.Verb, resource))
	}
}

func TestMissingPermissionIsLoggedAndRetried(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		log := w.bufferLog()
		w.Refuse = forbid(endpointSlices)
		w.Set(service("web"), slice("web", "web-1", "10.0.0.1"))
		w.start()
		w.advance(10 * time.Minute)
		if w.state.IsSynced() {
			t.Error("synced without slices")
		}
		w.Mu.Lock()
		w.Refuse = nil
		w.Mu.Unlock()
		w.advance(2 * time.Minute)
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
		want := `list endpointslices at API server http://api.test: missing permission; grant the verbs list and watch on resource \"endpointslices\" of API group \"discovery.k8s.io\" in all namespaces: `
		if got := log(); !strings.Contains(got, want) {
			t.Errorf("want an error with %s, got %s", want, got)
		}
	})
}

func TestMissingListsAreLoggedOnce(t *testing.T) {
	for _, tc := range []struct {
		name string
		opts Options
		want string
	}{
		{"for a general proxy", Options{}, `["endpointslices","nodes"]`},
		{"for a named proxy", named("x"), `["endpointslices","nodes"]`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inWorld(t, tc.opts, func(w *world) {
				log := w.bufferLog()
				unblock := w.block(func(r kubetest.Request) bool { return r.Resource != services })
				w.Set(selectorless("one", proxyName, "x"), selectorless("two", proxyName, "x"))
				w.start()
				w.advance(noticeAfter - time.Millisecond)
				if log := log(); strings.Contains(log, "Still waiting") {
					t.Errorf("logged too early: %s", log)
				}
				w.advance(time.Hour)
				got := log()
				if strings.Count(got, "Still waiting") != 1 || !strings.Contains(got, tc.want) {
					t.Errorf("want one line with %s, got %s", tc.want, got)
				}
				unblock()
			})
		})
	}
}

// The name of a proxy may be misspelled.
func TestNameWithoutServicesIsLogged(t *testing.T) {
	for _, name := range []string{"x", "y", ""} {
		inWorld(t, named(name), func(w *world) {
			log := w.bufferLog()
			w.Set(service("web", proxyName, "x"))
			w.start()
			w.advance(time.Hour)
			if got := strings.Count(log(), "no Service is for this proxy"); got != map[string]int{"y": 1}[name] {
				t.Errorf("proxy %q: %d warnings in %s", name, got, log())
			}
		})
	}
}

func TestNothingIsLoggedAfterFirstLists(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		log := w.bufferLog()
		w.start()
		w.advance(time.Hour)
		if log := log(); log != "" {
			t.Errorf("logged: %s", log)
		}
	})
}

func TestFailFastReturnsFirstError(t *testing.T) {
	for _, tc := range []struct {
		name   string
		breaks func(*world)
		want   string
	}{
		{"a forbidden resource", func(w *world) { w.Refuse = forbid(nodes) },
			` nodes at API server http://api.test: missing permission; grant the verbs list and watch on resource "nodes" of API group "" at cluster scope: `},
		{"a missing credential", func(w *world) {
			w.Refuse = func(kubetest.Request) *apierrors.StatusError { return apierrors.NewUnauthorized("Unauthorized") }
		}, "credentials are missing or not accepted; grant "},
		{"an unreachable server", func(w *world) { w.Unplug(true) },
			" at API server http://api.test: dial tcp: connect: connection refused"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inWorld(t, Options{FailFast: true}, func(w *world) {
				tc.breaks(w)
				w.start()
				err := w.stop()
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("Watch = %v, want an error with %q", err, tc.want)
				}
			})
		})
	}
}

func TestFailFastEndsWithFirstSync(t *testing.T) {
	inWorld(t, Options{FailFast: true}, func(w *world) {
		w.Set(service("web"))
		w.start()
		w.Unplug(true)
		w.advance(time.Hour)
		w.Unplug(false)
		w.Set(service("api"))
		w.advance(2 * time.Minute)
		w.expect("service default/web", "service default/api")
		if err := w.stop(); err != nil {
			t.Error(err)
		}
	})
}

func TestWatchEndsImmediatelyDuringOutage(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.Unplug(true)
		w.start()
		w.advance(10 * time.Minute)
		began := time.Now()
		if err := w.stop(); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("took %v", took)
		}
	})
}

func TestInvalidOptionsAreErrors(t *testing.T) {
	for name, opts := range map[string]Options{
		"neither Config nor Informers":     {},
		"an informer is missing":           {Informers: &Informers{}},
		"informers of the wrong kinds":     {Informers: swappedInformers()},
		"a name that is not a label value": {Options: watcher.Options{ServiceProxyName: "a b"}},
		"a malformed pattern":              {Options: watcher.Options{KeepLabels: []string{"["}}},
		"a contradictory Config":           {Config: badConfig()},
		"a Config with an invalid server":  {Config: badHost()},
	} {
		if err := Watch(t.Context(), cluster.New(cluster.Options{}), opts); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// swappedInformers returns informers of wrong kinds, without objects.
func swappedInformers() *Informers {
	factory := informers.NewSharedInformerFactory(nil, 0)
	return &Informers{
		Services:       factory.Discovery().V1().EndpointSlices().Informer(),
		EndpointSlices: factory.Core().V1().Services().Informer(),
		Nodes:          factory.Core().V1().Nodes().Informer(),
	}
}

func badConfig() *rest.Config {
	return &rest.Config{Host: "https://api.test", TLSClientConfig: rest.TLSClientConfig{CAFile: "does-not-exist"}}
}

func badHost() *rest.Config { return &rest.Config{Host: "://"} }
