// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/kubetest"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// forAll reports whether r is for all slices, and forSome whether r is for the slices of
// some services.
func forAll(r kubetest.Request) bool { return r.Resource == endpointSlices && r.Labels == "" }
func forSome(r kubetest.Request) bool {
	return strings.Contains(r.Labels, discoveryv1.LabelServiceName)
}

// block delays the responses to matching requests until the caller calls unblock.
func (w *world) block(match func(kubetest.Request) bool) (unblock func()) {
	gate := make(chan struct{})
	w.Mu.Lock()
	w.Refuse = func(r kubetest.Request) *apierrors.StatusError {
		if match(r) {
			<-gate
		}
		return nil
	}
	w.Mu.Unlock()
	return func() {
		close(gate)
		synctest.Wait()
	}
}

// away ends all watches, as a restart of the server does. Until endOutage is called, the
// server rejects matching requests.
func (w *world) away(match func(kubetest.Request) bool) (endOutage func()) {
	var refusing atomic.Bool
	refusing.Store(true)
	w.Mu.Lock()
	w.Refuse = func(r kubetest.Request) *apierrors.StatusError {
		if refusing.Load() && match(r) {
			return apierrors.NewTooManyRequests("later", 1)
		}
		return nil
	}
	w.Mu.Unlock()
	w.Drop(nil)
	return func() {
		refusing.Store(false)
		w.advance(10 * time.Minute)
	}
}

// waitForLookUp waits until a look-up of slices has been answered. There must have been no
// look-up for a while.
func (w *world) waitForLookUp() { w.advance(gatherFor * 3 / 2) }

// expectWatch checks that exactly one watch of slices exists. If all is true, the watch
// must be for all slices. If all is false, it must be for the slices with the proxy's
// label only.
func (w *world) expectWatch(all bool) {
	w.t.Helper()
	synctest.Wait()
	want := proxyName + "=x"
	if all {
		want = ""
	}
	if diff := cmp.Diff([]string{want}, w.Watched(endpointSlices)); diff != "" {
		w.t.Errorf("label selectors of the watches of slices (-want +got):\n%s", diff)
	}
}

// managed returns an EndpointSlice as the EndpointSlice controller would write it.
func managed(service, name, addr string, labels ...string) *discoveryv1.EndpointSlice {
	return slice(service, name, addr, append(labels, discoveryv1.LabelManagedBy, managedByController)...)
}

func TestUnlabelledSlicesOfServicesWithoutSelectorAreServed(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.Set(
			selectorless("byhand", proxyName, "x"),
			slice("byhand", "plain", "10.0.0.1"),
			slice("byhand", "labelled", "10.0.0.2", proxyName, "x"),
			slice("byhand", "mislabelled", "10.0.0.3", proxyName, "y"),
			managed("byhand", "left-behind", "10.0.0.7"),
			slice("stranger", "stranger-1", "10.0.0.4"),
			service("web", proxyName, "x"), slice("web", "added-by-hand", "10.0.0.5"),
		)
		w.start()
		w.expect("service default/byhand", "service default/web", "slice default/plain 10.0.0.1",
			"slice default/labelled 10.0.0.2", "slice default/mislabelled 10.0.0.3", "slice default/left-behind 10.0.0.7")
		w.expectWatch(true)
		w.Set(slice("byhand", "plain", "10.0.0.11"), slice("byhand", "another", "10.0.0.6"))
		w.Delete(slice("byhand", "mislabelled", ""), slice("byhand", "left-behind", ""))
		w.expect("service default/byhand", "service default/web",
			"slice default/plain 10.0.0.11", "slice default/labelled 10.0.0.2", "slice default/another 10.0.0.6")
		w.Set(slice("stranger", "plain", "10.0.0.11")) // a slice may change to another service
		w.expect("service default/byhand", "service default/web", "slice default/labelled 10.0.0.2", "slice default/another 10.0.0.6")
	})
}

func TestWatchIsFilteredWhileAllServicesHaveASelector(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.Set(service("web", proxyName, "x"), slice("web", "web-1", "10.0.0.1", proxyName, "x"))
		w.start()
		w.expectWatch(false)
		w.Set(slice("byhand", "plain", "10.0.0.2"), selectorless("byhand", proxyName, "x"))
		w.waitForLookUp()
		want := []string{"service default/web", "slice default/web-1 10.0.0.1"}
		w.expect(append(want, "service default/byhand", "slice default/plain 10.0.0.2")...)
		w.expectWatch(true)
		before := w.state.Snapshot().Revision
		w.Delete(selectorless("byhand"))
		w.expect(want...)
		w.advance(filteredAfter - time.Second)
		w.expectWatch(true)
		w.advance(2 * time.Second)
		w.expectWatch(false)
		w.expect(want...)
		for key := range w.changedSince(before) {
			if key.Name != "byhand" {
				t.Errorf("the new watch changed %s", key)
			}
		}
	})
}

func TestGeneralProxyHasOneWatch(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.Set(selectorless("byhand"), slice("byhand", "plain", "10.0.0.1"))
		w.start()
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
		if some := w.Seen(forSome); len(some) > 0 {
			t.Errorf("requests for the slices of some services: %+v", some)
		}
	})
}

func TestManyServicesWithoutSelectorNeedOneWatch(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.start()
		w.Seen(forAll)
		var want []string
		for i := range 40 {
			name, addr := fmt.Sprintf("s%d", i), fmt.Sprintf("10.0.0.%d", i)
			w.Set(slice(name, name, addr), selectorless(name, proxyName, "x"))
			want = append(want, "service default/"+name, "slice default/"+name+" "+addr)
		}
		w.waitForLookUp()
		w.expect(want...)
		w.expectWatch(true)
		all := slices.DeleteFunc(w.Seen(forAll), func(r kubetest.Request) bool { return r.Verb != "watch" })
		if len(all) != 1 {
			t.Errorf("all slices were watched %d times, want once", len(all))
		}
	})
}

func TestFirstSyncWaitsForSlicesOfServicesWithoutSelector(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		unblock := w.block(forAll)
		w.Set(selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.0.0.1"))
		w.start()
		w.advance(time.Minute)
		if w.state.IsSynced() {
			t.Error("synced before the slices were listed")
		}
		unblock()
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
	})
}

func TestServiceIsPublishedTogetherWithItsSlices(t *testing.T) {
	for name, later := range map[string]struct {
		service *corev1.Service
		slice   *discoveryv1.EndpointSlice
	}{
		"without a selector":             {selectorless("new", proxyName, "x"), slice("new", "new-1", "10.0.0.1")},
		"whose slices have no label yet": {service("new", proxyName, "x"), managed("new", "new-1", "10.0.0.1")},
	} {
		for _, unfiltered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, unfiltered=%t", name, unfiltered), func(t *testing.T) {
				inWorld(t, named("x"), func(w *world) {
					var want []string
					if unfiltered {
						w.Set(selectorless("byhand", proxyName, "x"))
						want = append(want, "service default/byhand")
					}
					w.start()
					w.Set(later.slice)
					w.expect(want...)
					before := w.state.Snapshot().Revision
					w.Set(later.service)
					w.waitForLookUp()
					w.expect(append(want, "service default/new", "slice default/new-1 10.0.0.1")...)
					for key, s := range w.changedSince(before) {
						if key.Name == "new" && (s.Service == nil || len(s.Slices) != 1) {
							t.Errorf("published %+v", s)
						}
					}
				})
			})
		}
	}
}

func TestNewServiceWithSelectorNeedsNoRequest(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.start()
		w.Seen(forSome)
		w.Set(service("web", proxyName, "x"), slice("web", "web-1", "10.0.0.1", proxyName, "x"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
		w.Set(slice("api", "api-1", "10.0.0.2", proxyName, "x"), service("api", proxyName, "x"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1", "service default/api", "slice default/api-1 10.0.0.2")
		external := service("external", proxyName, "x")
		external.Spec.Type = corev1.ServiceTypeExternalName
		w.Set(external)
		w.expect("service default/web", "slice default/web-1 10.0.0.1", "service default/api", "slice default/api-1 10.0.0.2", "service default/external")
		w.advance(time.Minute)
		if some := w.Seen(forSome); len(some) > 0 {
			t.Errorf("requests for its slices: %+v", some)
		}
	})
}

// A service gets the proxy's label. The controller labels the service's slices soon after
// that, or much later.
func TestNewlyLabelledServiceHasItsEndpoints(t *testing.T) {
	for _, soon := range []bool{true, false} {
		for _, end := range []string{"labelled", "deleted", "changed and labelled"} {
			t.Run(fmt.Sprintf("soon=%t %s", soon, end), func(t *testing.T) {
				inWorld(t, named("x"), func(w *world) {
					w.Set(service("web"), managed("web", "web-1", "10.0.0.1"), slice("web", "byhand", "10.0.0.9"))
					w.start()
					w.expect()
					w.Set(service("web", proxyName, "x"))
					w.waitForLookUp()
					w.expect("service default/web", "slice default/web-1 10.0.0.1")
					w.expectWatch(false)
					if !soon {
						w.advance(labelledWithin)
						w.expect("service default/web", "slice default/web-1 10.0.0.1")
						w.expectWatch(true)
					}
					want := []string{"service default/web"}
					switch end {
					case "labelled":
						w.Set(managed("web", "web-1", "10.0.0.1", proxyName, "x"))
						want = append(want, "slice default/web-1 10.0.0.1")
					case "deleted":
						w.Delete(managed("web", "web-1", ""))
					case "changed and labelled":
						w.Set(managed("web", "web-1", "10.0.0.2"), managed("web", "web-1", "10.0.0.2", proxyName, "x"))
						want = append(want, "slice default/web-1 10.0.0.2")
					}
					if soon && end == "deleted" {
						w.advance(labelledWithin) // wait for an unfiltered watch, because the filtered watch does not report the deletion
					}
					w.expect(want...)
					w.advance(filteredAfter)
					w.expect(want...)
					w.expectWatch(false)
					w.Set(service("web"))
					if end == "deleted" {
						want = nil
					}
					w.expect(slices.DeleteFunc(want, func(line string) bool { return strings.HasPrefix(line, "service") })...)
				})
			})
		}
	}
}

func TestFailedLookUpIsRetried(t *testing.T) {
	for _, unfiltered := range []bool{false, true} {
		t.Run(fmt.Sprintf("unfiltered=%t", unfiltered), func(t *testing.T) {
			inWorld(t, named("x"), func(w *world) {
				var want []string
				if unfiltered {
					w.Set(selectorless("first", proxyName, "x"))
					want = append(want, "service default/first")
				}
				w.start()
				unblock := w.block(forSome)
				w.Set(managed("web", "web-1", "10.0.0.1"))
				w.expect(want...)
				w.Set(service("web", proxyName, "x"))
				w.advance(findTimeout)
				w.expect(want...)
				w.advance(gatherFor * 3 / 2)
				want = append(want, "service default/web") // without its endpoints, because the request has failed
				w.expect(want...)
				unblock()
				w.advance(2 * gatherFor * 3 / 2)
				w.expect(append(want, "slice default/web-1 10.0.0.1")...)
			})
		})
	}
}

// A server may take longer to answer than the time for which services are held back.
func TestSlowLookUpIsLoggedAndEnds(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		log := w.bufferLog()
		w.Set(service("web"), managed("web", "web-1", "10.0.0.1"))
		w.start()
		w.Mu.Lock()
		w.Refuse = func(r kubetest.Request) *apierrors.StatusError {
			if forSome(r) {
				time.Sleep(2 * findTimeout)
			}
			return nil
		}
		w.Mu.Unlock()
		w.Set(service("web", proxyName, "x"))
		w.advance(gatherFor*3/2 + findTimeout)
		w.expect("service default/web")
		for _, want := range []string{"Cannot list the slices of services", "default/web", "deadline exceeded"} {
			if got := log(); !strings.Contains(got, want) {
				t.Errorf("want an error with %s, got %s", want, got)
			}
		}
		w.advance(time.Minute)
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
	})
}

// Requests for the slices of some services do not delay other services and slices.
func TestSlowLookUpDelaysNothingElse(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.Set(service("old", proxyName, "x"), slice("old", "old-1", "10.0.0.1", proxyName, "x"))
		w.start()
		defer w.block(forSome)()
		for i := range 200 {
			w.Set(service(fmt.Sprintf("moved-%d", i), proxyName, "x"))
		}
		w.advance(gatherFor * 3 / 2) // a request is under way
		w.Set(slice("old", "old-1", "10.0.0.2", proxyName, "x"),
			service("new", proxyName, "x"), slice("new", "new-1", "10.0.0.3", proxyName, "x"))
		w.Delete(service("moved-0"))
		want := []string{"service default/old", "slice default/old-1 10.0.0.2", "service default/new", "slice default/new-1 10.0.0.3"}
		w.expect(want...)
		w.advance(findTimeout)
		for i := range 199 {
			want = append(want, fmt.Sprintf("service default/moved-%d", i+1))
		}
		w.expect(want...)
		w.Set(service("late", proxyName, "x")) // while requests fail, no service waits for a request
		w.expect(append(want, "service default/late")...)
	})
}

// A node sends few requests, even if many services become wanted, or if the clocks of
// servers are wrong.
func TestLookUpsAreMerged(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.start()
		w.Seen(forSome)
		count := func() int { return len(w.Seen(forSome)) }
		for i := range 100 {
			s := service(fmt.Sprintf("s%d", i), proxyName, "x")
			s.CreationTimestamp = metav1.NewTime(time.Now().Add(time.Duration(i-50) * time.Minute))
			w.Set(s)
		}
		w.advance(time.Minute)
		if got := count(); got != 2 {
			t.Errorf("%d requests for 100 services, want 2", got)
		}
		for i := range 600 { // ten services a second
			w.Set(service(fmt.Sprintf("more-%d", i), proxyName, "x"))
			w.advance(100 * time.Millisecond)
		}
		if got := count(); got > 30 {
			t.Errorf("%d requests in a minute, want at most 30", got)
		}
		var failing atomic.Bool
		failing.Store(true)
		w.Mu.Lock()
		w.Refuse = func(r kubetest.Request) *apierrors.StatusError {
			if forSome(r) && failing.Load() {
				return apierrors.NewForbidden(schema.GroupResource{Resource: endpointSlices}, "", nil)
			}
			return nil
		}
		w.Mu.Unlock()
		for i := range 1000 {
			w.Set(service(fmt.Sprintf("last-%d", i), proxyName, "x"), managed(fmt.Sprintf("last-%d", i), fmt.Sprintf("slice-%d", i), "10.0.0.1"))
		}
		w.advance(time.Hour)
		if got := count(); got > 100 {
			t.Errorf("%d requests in an hour in which all fail, want at most 100", got)
		}
		failing.Store(false)
		w.advance(2 * failingPause)
		if got := len(w.dump()); got != 100+600+1000+1000 {
			t.Errorf("%d objects, want 2700", got)
		}
	})
}

// A slice that changes during a request may be newer than the answer.
func TestAnswerReplacesNoNewerSlice(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(s *stores)
		want   []string
	}{
		"changed":  {func(s *stores) { s.slices.Update(slice("byhand", "plain", "10.0.0.2")) }, []string{"slice default/plain 10.0.0.2"}},
		"deleted":  {func(s *stores) { s.slices.Delete(slice("byhand", "plain", "")) }, nil},
		"labelled": {func(s *stores) { s.slices.Update(slice("byhand", "plain", "10.0.0.2", proxyName, "x")) }, []string{"slice default/plain 10.0.0.2"}},
		"moved":    {func(s *stores) { s.slices.Update(slice("stranger", "plain", "10.0.0.2")) }, nil},
		"deleted, service too": {func(s *stores) {
			s.services.Delete(selectorless("byhand"))
			s.services.Add(selectorless("byhand", proxyName, "x"))
			s.slices.Delete(slice("byhand", "plain", ""))
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			inRequest, goOn := make(chan struct{}, 10), make(chan struct{})
			find := func(context.Context, []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error) {
				inRequest <- struct{}{}
				<-goOn
				return []*discoveryv1.EndpointSlice{slice("byhand", "plain", "10.0.0.1"), slice("byhand", "other", "10.0.0.3")}, nil
			}
			if strings.Contains(name, "service too") {
				// The answer to the second request does not contain the deleted slice.
				first := find
				find = func(ctx context.Context, keys []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error) {
					found, err := first(ctx, keys)
					if len(inRequest) > 0 {
						found = found[1:]
					}
					return found, err
				}
			}
			inSelection(t, find, func(s *stores, w *world) {
				s.services.Add(selectorless("byhand", proxyName, "x"))
				<-inRequest
				tc.change(s)
				close(goOn)
				synctest.Wait()
				w.expect(append(tc.want, "service default/byhand", "slice default/other 10.0.0.3")...)
			})
		})
	}
}

// A list of all slices that arrives during a request may be older or newer than the answer.
func TestListDuringRequestRepeatsIt(t *testing.T) {
	inRequest, goOn := make(chan struct{}, 10), make(chan struct{})
	inSelection(t, func(context.Context, []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error) {
		inRequest <- struct{}{}
		<-goOn
		return []*discoveryv1.EndpointSlice{slice("byhand", "plain", "10.0.0.1")}, nil
	}, func(s *stores, w *world) {
		s.services.Add(selectorless("byhand", proxyName, "x"))
		<-inRequest
		s.slices.Replace(nil, "1")
		close(goOn)
		w.advance(time.Minute)
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
		if len(inRequest) != 1 {
			t.Errorf("%d more requests, want 1", len(inRequest))
		}
	})
}

func TestSelectorsChange(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.Set(service("web", proxyName, "x"), slice("web", "web-1", "10.0.0.1", proxyName, "x"), slice("web", "byhand", "10.0.0.2"))
		w.start()
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
		w.Set(selectorless("web", proxyName, "x"))
		w.waitForLookUp()
		w.expect("service default/web", "slice default/web-1 10.0.0.1", "slice default/byhand 10.0.0.2")
		w.Set(service("web", proxyName, "x"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
		w.Set(selectorless("web", proxyName, "x"))
		w.waitForLookUp()
		w.expect("service default/web", "slice default/web-1 10.0.0.1", "slice default/byhand 10.0.0.2")
		w.Set(selectorless("web", proxyName, "y"))
		w.expect("slice default/web-1 10.0.0.1")
	})
}

// Objects change while the watches restart or fail.
func TestNothingIsLostWhileTheWatchChanges(t *testing.T) {
	for _, compacted := range []bool{false, true} {
		for _, toAll := range []bool{false, true} {
			t.Run(fmt.Sprintf("compacted=%t toAll=%t", compacted, toAll), func(t *testing.T) {
				inWorld(t, named("x"), func(w *world) {
					w.Set(service("web", proxyName, "x"), slice("web", "stays", "10.0.0.1", proxyName, "x"),
						slice("web", "goes", "10.0.0.2", proxyName, "x"), slice("byhand", "plain", "10.0.0.3"))
					if !toAll {
						w.Set(selectorless("byhand", proxyName, "x"))
					}
					w.start()
					w.advance(2 * time.Second)
					endOutage := w.away(func(r kubetest.Request) bool { return r.Resource == endpointSlices })
					if toAll {
						w.Set(selectorless("byhand", proxyName, "x"))
					} else {
						w.Delete(selectorless("byhand"))
					}
					w.advance(filteredAfter)
					w.Delete(slice("web", "goes", ""))
					w.Set(slice("web", "comes", "10.0.0.4", proxyName, "x"), slice("byhand", "later", "10.0.0.5"))
					// During the outage, the state must keep the labelled slices that it had before.
					for _, line := range []string{"slice default/stays 10.0.0.1", "slice default/goes 10.0.0.2"} {
						if !slices.Contains(w.dump(), line) {
							t.Errorf("lost %s", line)
						}
					}
					if compacted {
						w.Compact()
					}
					endOutage()
					want := []string{"service default/web", "slice default/stays 10.0.0.1", "slice default/comes 10.0.0.4"}
					if toAll {
						want = append(want, "service default/byhand", "slice default/plain 10.0.0.3", "slice default/later 10.0.0.5")
					}
					w.expect(want...)
					w.expectWatch(toAll)
				})
			})
		}
	}
}

// inSelection runs test in a synctest bubble, with the stores and the state of a named
// proxy whose watch of slices has no filter. The finder find answers requests for slices.
func inSelection(t *testing.T, find finder, test func(*stores, *world)) {
	synctest.Test(t, func(t *testing.T) {
		s, state := newTestSelection(t, find)
		state.SetSynced()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.selection.lookUps(ctx)
		}()
		test(s, &world{t: t, state: state})
		cancel()
		<-ended
	})
}

func newTestSelection(t *testing.T, find finder) (*stores, *cluster.State) {
	opts := named("x")
	converter, err := watcher.New(opts.Options)
	if err != nil {
		t.Fatal(err)
	}
	state := cluster.New(cluster.Options{})
	s := (&watch{opts: opts, state: state, converter: converter, unlisted: map[string]bool{nodes: true}}).newStores(find, 0)
	s.selection.begin(nil)
	return s, state
}

// findIn returns a finder that finds the given slices.
func findIn(slices *[]*discoveryv1.EndpointSlice) finder {
	return func(context.Context, []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error) {
		return *slices, nil
	}
}

// Each function in writes passes a reduced slice to a store, in a list or in an event.
var writes = map[string]func(*stores, any) error{
	"list":  func(s *stores, reduced any) error { return s.slices.Replace([]any{reduced}, "1") },
	"event": func(s *stores, reduced any) error { return s.slices.Update(reduced) },
}

// A slice is dropped when it is decoded, and its service becomes wanted before the slice is
// written. The look-up ends before or after that.
func TestDroppedSliceOfNewServiceIsFound(t *testing.T) {
	for name, write := range writes {
		for _, later := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, look-up later=%t", name, later), func(t *testing.T) {
				plain := slice("byhand", "plain", "10.0.0.1")
				server := []*discoveryv1.EndpointSlice{plain}
				inSelection(t, findIn(&server), func(s *stores, w *world) {
					dropped := reducedItem(s.slices, plain)
					s.services.Add(selectorless("byhand", proxyName, "x"))
					if !later {
						synctest.Wait()
					}
					if err := write(s, dropped); err != nil {
						t.Fatal(err)
					}
					w.expect("service default/byhand", "slice default/plain 10.0.0.1")
					server = nil
					s.slices.Delete(plain)
					w.expect("service default/byhand")
				})
			})
		}
	}
}

func TestSliceOfDeletedServiceIsDropped(t *testing.T) {
	for name, write := range writes {
		t.Run(name, func(t *testing.T) {
			inSelection(t, findIn(new([]*discoveryv1.EndpointSlice)), func(s *stores, w *world) {
				s.services.Add(selectorless("byhand", proxyName, "x"))
				kept := reducedItem(s.slices, slice("byhand", "plain", "10.0.0.1"))
				s.services.Add(service("byhand", proxyName, "x"))
				if err := write(s, kept); err != nil {
					t.Fatal(err)
				}
				w.expect("service default/byhand")
			})
		})
	}
}

// An EndpointSlice of the address type FQDN is selected, but cannot be converted.
func TestSliceOfHostNamesCausesNoRequest(t *testing.T) {
	requests := 0
	inSelection(t, func(context.Context, []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error) {
		requests++
		return nil, nil
	}, func(s *stores, w *world) {
		s.services.Add(selectorless("byhand", proxyName, "x"))
		synctest.Wait()
		requests = 0
		names := slice("byhand", "names", "10.0.0.1")
		names.AddressType = discoveryv1.AddressTypeFQDN
		for _, o := range []any{names, reducedItem(s.slices, names)} {
			err := s.slices.Update(o)
			if w.advance(time.Minute); err != nil || requests > 0 {
				t.Errorf("error %v, %d requests", err, requests)
			}
		}
	})
}

func TestForeignSlicesUseNoMemory(t *testing.T) {
	s, state := newTestSelection(t, findIn(new([]*discoveryv1.EndpointSlice)))
	s.services.Add(selectorless("byhand", proxyName, "x"))
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	const slices = 5000
	for i := range slices {
		other := slice("other", fmt.Sprintf("other-%d", i), "10.0.0.1")
		for range 6 {
			other.Endpoints = append(other.Endpoints, other.Endpoints...)
		}
		s.slices.Add(other)
	}
	// The selection must not keep the names of all slices, which would use about 200 KB.
	if kept := heap() - before; kept > 100_000 {
		t.Errorf("%d bytes are retained for %d slices", kept, slices)
	}
	runtime.KeepAlive(s)
	runtime.KeepAlive(state)
}

// A service whose slices have the label needs no request. Without a request, the
// selection must not record the slices that change.
func TestChangesAreRecordedOnlyDuringRequests(t *testing.T) {
	inSelection(t, findIn(new([]*discoveryv1.EndpointSlice)), func(s *stores, w *world) {
		s.services.Add(service("web", proxyName, "x"))
		s.slices.Add(slice("web", "web-1", "10.0.0.1", proxyName, "x"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
		w.advance(time.Minute)
		s.slices.Delete(slice("web", "web-1", ""))
		if n := len(s.selection.lookUp.changed); n > 0 {
			t.Errorf("%d changes are recorded without a request", n)
		}
	})
}

// TestSelectionConverges makes random changes and faults. When the EndpointSlice
// controller has labelled all slices, the state must equal the expected state.
func TestSelectionConverges(t *testing.T) {
	for seed := range uint64(100) {
		inWorld(t, named("x"), func(w *world) {
			w.OnlyJSON = seed%2 == 1
			r := rand.New(rand.NewPCG(seed, 3))
			count := 4
			if seed%5 == 0 {
				count = 45
			}
			proxy := func() []string {
				return [][]string{nil, {proxyName, "y"}, {proxyName, "x"}, {proxyName, "x"}}[r.IntN(4)]
			}
			exists := func(resource, name string) bool {
				w.Mu.Lock()
				defer w.Mu.Unlock()
				return w.Objects[resource+"/default/"+name] != nil
			}
			operate := func() {
				name, of := fmt.Sprintf("s%d", r.IntN(count)), fmt.Sprintf("sl%d", r.IntN(count*2))
				switch r.IntN(14) {
				case 0, 1:
					w.Set(service(name, proxy()...))
				case 2, 3:
					w.Set(selectorless(name, proxy()...))
				case 4:
					if exists(services, name) {
						w.Delete(service(name))
					}
				case 5:
					if exists(endpointSlices, of) {
						w.Delete(slice(name, of, "10.0.0.1"))
					}
				case 6, 7, 8:
					w.Set(managed(name, of, fmt.Sprintf("10.0.0.%d", 1+r.IntN(200)), proxy()...))
				default:
					w.Set(slice(name, of, fmt.Sprintf("10.0.0.%d", 1+r.IntN(200)), proxy()...))
				}
			}
			for range count * 3 {
				operate()
			}
			w.start()
			for range 25 {
				for range r.IntN(12) {
					operate()
				}
				switch r.IntN(8) {
				case 0:
					w.Drop(nil)
				case 1:
					w.Compact()
					w.Drop(nil)
				case 2:
					w.Drop(apierrors.NewResourceExpired("gone"))
				case 3:
					var n atomic.Int32
					w.Mu.Lock()
					w.Refuse = func(kubetest.Request) *apierrors.StatusError {
						if n.Add(1)%2 == 0 {
							return apierrors.NewTooManyRequests("slow down", 1)
						}
						return nil
					}
					w.Mu.Unlock()
				case 4:
					w.Mu.Lock()
					w.Refuse = nil
					w.Mu.Unlock()
				}
				if r.IntN(2) == 0 {
					w.advance(time.Duration(r.IntN(20_000)) * time.Millisecond)
				}
			}
			w.Mu.Lock()
			w.Refuse = nil
			var all []*discoveryv1.EndpointSlice
			own := map[string]*corev1.Service{}
			for _, o := range w.Objects {
				switch o := o.(type) {
				case *corev1.Service:
					own[o.Name] = o
				case *discoveryv1.EndpointSlice:
					all = append(all, o.DeepCopy())
				}
			}
			w.Mu.Unlock()
			var want []string
			for name, s := range own {
				if s.Labels[proxyName] == "x" {
					want = append(want, "service default/"+name)
				}
			}
			for _, s := range all {
				of := own[s.Labels[discoveryv1.LabelServiceName]]
				if of != nil && len(of.Spec.Selector) > 0 && s.Labels[discoveryv1.LabelManagedBy] == managedByController {
					delete(s.Labels, proxyName)
					if label, ok := of.Labels[proxyName]; ok {
						s.Labels[proxyName] = label
					}
					w.Set(s)
				}
				if s.Labels[proxyName] == "x" || of != nil && of.Labels[proxyName] == "x" && watcher.Selectorless(of) {
					want = append(want, "slice default/"+s.Name+" "+s.Endpoints[0].Addresses[0])
				}
			}
			w.advance(10 * time.Minute)
			slices.Sort(want)
			if diff := cmp.Diff(want, w.dump()); diff != "" {
				t.Errorf("seed %d (-want +got):\n%s", seed, diff)
			}
		})
	}
}

// reducedItem returns the item of a slice that was reduced when it was decoded.
func reducedItem(s *store[*discoveryv1.EndpointSlice, api.EndpointSlice], o *discoveryv1.EndpointSlice) *item[api.EndpointSlice] {
	i, err := s.item(o)
	if err != nil {
		panic(err)
	}
	return i
}
