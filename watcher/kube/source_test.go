// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/kubetest"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// isCheck reports whether r looks for the server's resource version.
func isCheck(r kubetest.Request) bool {
	return r.Verb == "list" && r.Fields == "metadata.name=kubernetes"
}

// fieldsOf returns the field selectors of all requests for services since the last call,
// except checks.
func (w *world) fieldsOf(resource string) (all []string) {
	for _, r := range w.Seen(func(r kubetest.Request) bool { return r.Resource == resource && !isCheck(r) }) {
		all = append(all, strings.TrimSpace(r.Verb+" "+r.Fields))
	}
	return all
}

const noHeadless = "spec.clusterIP!=None"

// API servers before v1.31 refuse the field selector spec.clusterIP.
func TestOldServerWorks(t *testing.T) {
	for name, opts := range map[string]Options{"without a name": {NodeName: "a"}, "with FailFast": {NodeName: "a", FailFast: true}} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, opts, func(w *world) {
				log := w.bufferLog()
				w.Old = true
				w.Set(service("web"), slice("web", "web-1", "10.0.0.1"), headless(service("db")), node("a"), node("b"))
				w.start()
				w.expect("service default/web", "slice default/web-1 10.0.0.1", "node a")
				w.Set(service("db"), headless(service("web")), service("api"), headless(service("cache")))
				w.expect("service default/db", "service default/api", "slice default/web-1 10.0.0.1", "node a")
				for range 5 {
					w.Drop(nil)
					w.advance(5 * time.Minute)
				}
				w.Delete(service("api"))
				w.expect("service default/db", "slice default/web-1 10.0.0.1", "node a")
				want := []string{"list " + noHeadless, "list", "watch", "watch", "watch", "watch", "watch", "watch"}
				if diff := cmp.Diff(want, w.fieldsOf(services)); diff != "" {
					t.Errorf("requests for services (-want +got):\n%s", diff)
				}
				if got := log(); strings.Count(got, "older than v1.31") != 1 || strings.Contains(got, "Request to the API server failed") {
					t.Errorf("logged %s", got)
				}
			})
		})
	}
}

func TestServerIsUpgradedAndDowngraded(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.Set(service("web"), headless(service("db")))
		w.start()
		w.expect("service default/web")
		change := func(old bool, after time.Duration) {
			w.Mu.Lock()
			w.Old = old
			w.Mu.Unlock()
			w.advance(after)
			w.Seen(func(kubetest.Request) bool { return true })
			w.Drop(nil)
			w.advance(time.Minute)
		}
		for round := range 2 {
			change(true, 2*time.Second)
			name := fmt.Sprintf("api-%d", round)
			w.Set(service(name), headless(service("web")))
			w.expect([]string{"service default/api-0", "service default/api-1"}[:round+1]...)
			if diff := cmp.Diff([]string{"watch " + noHeadless, "watch"}, w.fieldsOf(services)); diff != "" {
				t.Errorf("after the downgrade (-want +got):\n%s", diff)
			}
			change(false, newFieldsAfter)
			w.Set(headless(service("cache")))
			w.expect([]string{"service default/api-0", "service default/api-1"}[:round+1]...)
			if diff := cmp.Diff([]string{"watch " + noHeadless}, w.fieldsOf(services)); diff != "" {
				t.Errorf("after the upgrade (-want +got):\n%s", diff)
			}
		}
	})
}

// A bad request for another reason is an error.
func TestBadRequestIsReported(t *testing.T) {
	inWorld(t, Options{FailFast: true}, func(w *world) {
		w.Refuse = func(r kubetest.Request) *apierrors.StatusError {
			if r.Resource == services {
				return apierrors.NewBadRequest("no such thing")
			}
			return nil
		}
		w.start()
		if err := w.stop(); err == nil || !strings.Contains(err.Error(), "list services at API server http://api.test: no such thing") {
			t.Errorf("Watch = %v", err)
		}
	})
}

// After etcd was restored from a backup, the state follows within a minute.
func TestRestoredResourceVersionsAreNoticed(t *testing.T) {
	for name, opts := range map[string]Options{"unnamed": {}, "one node": {NodeName: "a"}, "named": named("x"), "named, all slices": named("x")} {
		for _, busy := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, lists fail=%t", name, busy), func(t *testing.T) {
				inWorld(t, opts, func(w *world) {
					log := w.bufferLog()
					var labels []string
					if opts.ServiceProxyName != "" {
						labels = []string{proxyName, "x"}
					}
					if strings.Contains(name, "all slices") {
						w.Set(selectorless("byhand", labels...))
					}
					zoned := node("a")
					w.Set(service("web", labels...), service("kept", labels...), slice("web", "web-1", "10.0.0.1", labels...), zoned)
					restore := w.Backup()
					for i := range 200 {
						w.Set(service(fmt.Sprintf("later-%d", i), labels...))
					}
					zoned.Labels = map[string]string{"topology.kubernetes.io/zone": "later"}
					w.Set(slice("web", "web-1", "10.0.0.2", labels...), slice("web", "web-2", "10.0.0.3", labels...), zoned)
					w.Delete(service("kept"))
					w.start()
					w.advance(time.Hour)
					w.Seen(func(kubetest.Request) bool { return true })
					if busy {
						begin := time.Now()
						w.Mu.Lock()
						w.Refuse = func(r kubetest.Request) *apierrors.StatusError {
							if r.Verb == "list" && time.Since(begin) < 10*time.Second {
								return apierrors.NewTooManyRequests("later", 1)
							}
							return nil
						}
						w.Mu.Unlock()
					}
					restore()
					w.advance(time.Second)
					w.Set(slice("web", "web-1", "10.0.0.4", labels...))
					w.advance(time.Minute)
					want := []string{"service default/web", "service default/kept", "slice default/web-1 10.0.0.4", "node a"}
					if strings.Contains(name, "all slices") {
						want = append(want, "service default/byhand")
					}
					w.expect(want...)
					if got, _ := w.state.Objects().Nodes.Get("a"); got == nil || got.Zone() != "" {
						t.Errorf("node %+v, want it without a zone", got)
					}
					if got := log(); strings.Count(got, "went back") != 3 {
						t.Errorf("want one line for each resource, got %s", got)
					}
					w.Set(service("new", labels...))
					w.waitForLookUp()
					w.expect(append(want, "service default/new")...)
				})
			})
		}
	}
}

// A check costs one small request for each watch that begins again.
func TestResourceVersionIsCheckedOncePerWatch(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.start()
		w.advance(time.Hour)
		w.Seen(func(kubetest.Request) bool { return true })
		for range 3 {
			w.Drop(nil)
			w.advance(time.Hour)
		}
		if got := len(w.Seen(isCheck)); got != 3*3 {
			t.Errorf("%d checks of three resources after three lost watches, want 9", got)
		}
	})
}

// A check without permission to list does not end a working watch.
func TestForbiddenCheckIsGivenUp(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.start()
		w.advance(time.Minute)
		w.Mu.Lock()
		w.Refuse = func(r kubetest.Request) *apierrors.StatusError {
			if isCheck(r) {
				return apierrors.NewForbidden(schema.GroupResource{Resource: services}, "", nil)
			}
			return nil
		}
		w.Mu.Unlock()
		w.Seen(isCheck)
		w.Drop(nil)
		w.advance(time.Hour)
		w.Set(service("web"))
		w.expect("service default/web")
		if got := len(w.Seen(isCheck)); got != 3 {
			t.Errorf("%d checks, want one for each resource", got)
		}
	})
}
