// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
)

// forOwn says whether r is for the slices of one service.
func forOwn(r request) bool { return strings.Contains(r.Labels, discoveryv1.LabelServiceName) }

// forShared says whether r is for the unlabelled slices of all services.
func forShared(r request) bool { return r.Labels == proxyName+"!=x" }

// forCommon says whether r is for the slices that bear the proxy's label.
func forCommon(r request) bool { return r.Resource == endpointSlices && r.Labels == proxyName+"=x" }

// block makes the server not answer requests that match until the returned
// function is called.
func (w *world) block(match func(request) bool) (unblock func()) {
	gate := make(chan struct{})
	w.refuse = func(r request) *apierrors.StatusError {
		if match(r) {
			<-gate
		}
		return nil
	}
	return func() {
		close(gate)
		synctest.Wait()
	}
}

func TestUnlabelledSlicesOfServicesWithoutSelectorAreServed(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.set(
			selectorless("byhand", proxyName, "x"),
			slice("byhand", "plain", "10.0.0.1"),
			slice("byhand", "labelled", "10.0.0.2", proxyName, "x"),
			slice("byhand", "mislabelled", "10.0.0.3", proxyName, "y"),
			slice("stranger", "stranger-1", "10.0.0.4"),
			service("web", proxyName, "x"), slice("web", "not-relabelled-yet", "10.0.0.5"),
		)
		w.start()
		w.expect("service default/byhand", "service default/web",
			"slice default/plain 10.0.0.1", "slice default/labelled 10.0.0.2", "slice default/mislabelled 10.0.0.3")

		own := w.seen(forOwn)
		if len(own) != 1 {
			t.Fatalf("%d requests for the slices of single services, want 1", len(own))
		}
		got := own[0].Namespace + " " + own[0].Labels
		want := "default kubernetes.io/service-name=byhand,service.kubernetes.io/service-proxy-name!=x"
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("own watch (-want +got):\n%s", diff)
		}

		w.set(slice("byhand", "plain", "10.0.0.11"), slice("byhand", "another", "10.0.0.6"))
		w.delete(slice("byhand", "mislabelled", ""))
		w.expect("service default/byhand", "service default/web",
			"slice default/plain 10.0.0.11", "slice default/labelled 10.0.0.2", "slice default/another 10.0.0.6")
	})
}

func TestGeneralProxyNeedsNoOwnWatches(t *testing.T) {
	inWorld(t, Options{}, func(w *world) {
		w.set(selectorless("byhand"), slice("byhand", "plain", "10.0.0.1"))
		w.start()
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
		if own := w.seen(forOwn); len(own) > 0 {
			t.Errorf("own watches: %+v", own)
		}
	})
}

func TestFirstSyncWaitsForOwnLists(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		unblock := w.block(forOwn)
		w.set(selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.0.0.1"))
		w.start()
		w.advance(time.Minute)
		if w.state.IsSynced() {
			t.Error("synced before the slices were listed")
		}
		unblock()
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
	})
}

func TestFirstSyncDoesNotWaitForTheListOfADeletedService(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		unblock := w.block(forOwn)
		w.set(selectorless("byhand", proxyName, "x"))
		w.start()
		w.delete(selectorless("byhand"))
		w.expect()
		unblock()
	})
}

func TestLaterServiceIsPublishedWithItsSlices(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.start()
		unblock := w.block(forOwn)
		w.set(slice("byhand", "plain", "10.0.0.1"), selectorless("byhand", proxyName, "x"))
		w.advance(holdTimeout - time.Millisecond)
		w.expect()
		changed := selectorless("byhand", proxyName, "x")
		changed.Spec.Ports[0].Port = 81
		w.set(changed)
		w.expect()
		before := w.state.Snapshot().Revision
		unblock()
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
		changes, _ := w.state.Snapshot().States.Since(before)
		for _, state := range changes {
			if state.Service.Ports[0].Port != 81 || len(state.Slices) != 1 {
				t.Errorf("published as %+v", state)
			}
		}
		w.advance(2 * holdTimeout)
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
	})
}

func TestLaterServiceIsPublishedWithoutItsSlicesAfterAWhile(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.start()
		unblock := w.block(forOwn)
		w.set(slice("byhand", "plain", "10.0.0.1"), selectorless("byhand", proxyName, "x"))
		w.advance(holdTimeout)
		w.expect("service default/byhand")
		unblock()
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
	})
}

func TestServiceDeletedWhileItWaitsIsNeverPublished(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.start()
		unblock := w.block(forOwn)
		w.set(selectorless("byhand", proxyName, "x"))
		synctest.Wait()
		w.delete(selectorless("byhand"))
		w.advance(2 * holdTimeout)
		unblock()
		w.expect()
	})
}

func TestServiceThatWaitsIsPublishedAtOnceWhenItGetsASelector(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.start()
		unblock := w.block(forOwn)
		w.set(selectorless("byhand", proxyName, "x"))
		w.expect()
		w.set(service("byhand", proxyName, "x"))
		w.expect("service default/byhand")
		unblock()
	})
}

func TestRelistHoldsNewServicesBackToo(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.set(service("web", proxyName, "x"))
		w.start()
		w.listener.unplug(true)
		w.set(selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.0.0.1"))
		w.delete(service("web"))
		w.compact()
		unblock := w.block(forOwn)
		w.listener.unplug(false)
		for i := 0; len(w.dump()) > 0 && i < 1000; i++ {
			w.advance(100 * time.Millisecond) // until the reflector has reconnected
		}
		w.expect()
		unblock()
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
	})
}

func TestOwnWatchEndsWithItsReason(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  func(*world)
		want []string
	}{
		{"the service is deleted", func(w *world) { w.delete(selectorless("byhand")) }, nil},
		{"the service gets a selector", func(w *world) { w.set(service("byhand", proxyName, "x")) }, []string{"service default/byhand"}},
		{"the service gets another label", func(w *world) { w.set(selectorless("byhand", proxyName, "y")) }, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inWorld(t, named("x"), func(w *world) {
				w.set(selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.0.0.1"))
				w.start()
				w.expect("service default/byhand", "slice default/plain 10.0.0.1")
				tc.end(w)
				w.expect(tc.want...)
				w.set(slice("byhand", "plain", "10.0.0.2"))
				w.expect(tc.want...)
				w.set(selectorless("byhand", proxyName, "x"))
				w.expect("service default/byhand", "slice default/plain 10.0.0.2")
			})
		})
	}
}

func TestPublishedServiceThatLosesItsSelectorStays(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.set(service("web", proxyName, "x"), slice("web", "web-1", "10.0.0.1", proxyName, "x"))
		w.start()
		unblock := w.block(forOwn)
		w.set(selectorless("web", proxyName, "x"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1")
		unblock()
		w.set(slice("web", "byhand", "10.0.0.2"))
		w.expect("service default/web", "slice default/web-1 10.0.0.1", "slice default/byhand 10.0.0.2")
	})
}

func TestSliceThatChangesItsLabelMovesBetweenWatches(t *testing.T) {
	for _, services := range []int{1, maxOwnWatches + 1} {
		t.Run(fmt.Sprintf("with %d services", services), func(t *testing.T) {
			inWorld(t, named("x"), func(w *world) {
				want := w.crowd(services - 1)
				w.set(selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.1.0.1"))
				w.start()
				w.set(slice("byhand", "plain", "10.1.0.2", proxyName, "x"))
				w.expect(append(want, "service default/byhand", "slice default/plain 10.1.0.2")...)
				w.set(slice("byhand", "plain", "10.1.0.3"))
				w.expect(append(want, "service default/byhand", "slice default/plain 10.1.0.3")...)
				w.delete(slice("byhand", "plain", ""))
				w.expect(append(want, "service default/byhand")...)
			})
		})
	}
}

// away makes the server refuse requests that match, and ends all watches, as on
// its restart, until the returned function is called.
func (w *world) away(match func(request) bool) (back func()) {
	var refusing atomic.Bool
	refusing.Store(true)
	w.mu.Lock()
	w.refuse = func(r request) *apierrors.StatusError {
		if refusing.Load() && match(r) {
			return apierrors.NewTooManyRequests("later", 1)
		}
		return nil
	}
	w.mu.Unlock()
	w.drop(nil)
	return func() {
		refusing.Store(false)
		w.advance(10 * time.Minute)
	}
}

// A watch that lags shows a slice as it was before it went to another watch, and
// then that it is gone.
func TestWatchThatLagsDoesNotUndoWhatAnotherBrought(t *testing.T) {
	const labelled, plain = true, false
	for _, tc := range []struct {
		name    string
		crowd   int
		lagging func(request) bool
		before  bool
	}{
		{"the service's own watch lags behind the common one", 0, forOwn, plain},
		{"the common watch lags behind the service's own", 0, forCommon, labelled},
		{"the watch for all services lags behind the common one", maxOwnWatches, forShared, plain},
		{"the common watch lags behind the one for all services", maxOwnWatches, forCommon, labelled},
	} {
		for _, compacted := range []bool{false, true} {
			for _, end := range []string{"stays", "is deleted", "returns"} {
				t.Run(fmt.Sprintf("%s, compacted=%t, the slice %s", tc.name, compacted, end), func(t *testing.T) {
					inWorld(t, named("x"), func(w *world) {
						set := func(addr string, labelled bool) {
							s := slice("byhand", "byhand-1", addr)
							if labelled {
								s.Labels[proxyName] = "x"
							}
							w.set(s)
						}
						want := append(w.crowd(tc.crowd), "service default/byhand")
						w.set(selectorless("byhand", proxyName, "x"))
						set("10.1.0.1", tc.before)
						w.start()
						w.expect(append(want, "slice default/byhand-1 10.1.0.1")...)
						w.advance(2 * time.Second)

						back := w.away(tc.lagging)
						set("10.1.0.2", tc.before)
						set("10.1.0.3", !tc.before)
						w.advance(5 * time.Second)
						w.expect(append(want, "slice default/byhand-1 10.1.0.3")...)
						switch end {
						case "stays":
							want = append(want, "slice default/byhand-1 10.1.0.3")
						case "is deleted":
							w.delete(slice("byhand", "byhand-1", ""))
							w.expect(want...)
						case "returns":
							set("10.1.0.4", tc.before)
							want = append(want, "slice default/byhand-1 10.1.0.4")
						}
						if compacted {
							w.compact()
						}
						back()
						w.expect(want...)
						w.delete(slice("byhand", "byhand-1", ""))
						w.advance(time.Minute)
						w.expect(slices.DeleteFunc(want, func(line string) bool { return strings.HasPrefix(line, "slice default/byhand-1") })...)
					})
				})
			}
		}
	}
}

func TestSliceMovesBetweenServicesWithoutSelectorWhoseWatchesLag(t *testing.T) {
	for _, lagging := range []string{"from", "to"} {
		t.Run(lagging, func(t *testing.T) {
			inWorld(t, named("x"), func(w *world) {
				w.set(selectorless("from", proxyName, "x"), selectorless("to", proxyName, "x"), slice("from", "moves", "10.1.0.1"))
				w.start()
				w.advance(2 * time.Second)
				back := w.away(func(r request) bool { return strings.Contains(r.Labels, discoveryv1.LabelServiceName+"="+lagging) })
				w.set(slice("from", "moves", "10.1.0.2"), slice("to", "moves", "10.1.0.3"), slice("to", "moves", "10.1.0.4"))
				w.advance(5 * time.Second)
				back()
				w.expect("service default/from", "service default/to", "slice default/moves 10.1.0.4")
			})
		})
	}
}

// newTestMerger returns a merger without watches: tests deliver in their place.
func newTestMerger(t *testing.T) *merger {
	opts := named("x")
	converter, err := watcher.New(opts.Options)
	if err != nil {
		t.Fatal(err)
	}
	state := cluster.New(cluster.Options{Resumable: true})
	m := newMerger(&watch{opts: opts, state: state, converter: converter, gate: gate{open: state.SetSynced}})
	m.startOwn = func(types.NamespacedName, viewWriter) context.CancelFunc { return func() {} }
	m.startShared = func(viewWriter) {}
	return m
}

// at returns a slice in a version of the server.
func at(revision string, s *discoveryv1.EndpointSlice) any {
	s.ResourceVersion = revision
	return s
}

// addresses returns those of all slices in the state.
func (m *merger) addresses() (addrs []string) {
	for _, s := range m.state.Snapshot().Slices.All() {
		addrs = append(addrs, s.Endpoints[0].Addr.String())
	}
	return addrs
}

func (m *merger) expect(t *testing.T, when string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, m.addresses()); diff != "" {
		t.Errorf("addresses %s (-want +got):\n%s", when, diff)
	}
}

// An etcd that is restored from a backup counts on from there.
func TestResourceVersionsMayStartOverWithARelist(t *testing.T) {
	m := newTestMerger(t)
	common, shared := m.sliceStore(viewWriter{m, m.newView()}), m.sliceStore(viewWriter{m, m.newView()})
	m.add(keyOf("default", "byhand"), nil)
	common.Replace([]any{at("1000", slice("byhand", "moves", "10.1.0.1", proxyName, "x"))}, "1000")
	shared.Replace([]any{at("500", slice("byhand", "moves", "10.1.0.2"))}, "600")
	common.Replace(nil, "600")
	m.expect(t, "after both relists", "10.1.0.2")
}

func TestListOfTheSharedWatchMayBeOlderThanWhatOwnWatchesBrought(t *testing.T) {
	key := keyOf("default", "byhand")
	m := newTestMerger(t)
	own := m.sliceStore(viewWriter{m, m.add(key, nil).view})
	own.Replace([]any{at("5", slice("byhand", "byhand-1", "10.1.0.5")), at("7", slice("byhand", "byhand-2", "10.1.0.7"))}, "7")
	own.Update(at("9", slice("byhand", "byhand-1", "10.1.0.9")))

	v := m.newView()
	v.listed = m.sharedListed
	shared := m.sliceStore(viewWriter{m, v})
	shared.Replace([]any{at("5", slice("byhand", "byhand-1", "10.1.0.5"))}, "6")
	m.expect(t, "after the old list", "10.1.0.9", "10.1.0.7")
	own.Delete(at("11", slice("byhand", "byhand-1", "10.1.0.9")))
	m.expect(t, "after a deletion that the shared watch is yet to deliver", "10.1.0.7")
	shared.Add(at("7", slice("byhand", "byhand-2", "10.1.0.7")))
	shared.Update(at("9", slice("byhand", "byhand-1", "10.1.0.9")))
	shared.Delete(at("11", slice("byhand", "byhand-1", "10.1.0.9")))
	m.expect(t, "when the shared watch has caught up", "10.1.0.7")
	m.drop(key)
	m.commit(nil)
	m.expect(t, "without the service")
}

func TestVersionsThatCannotBeComparedAreServed(t *testing.T) {
	m := newTestMerger(t)
	common, shared := m.sliceStore(viewWriter{m, m.newView()}), m.sliceStore(viewWriter{m, m.newView()})
	m.add(keyOf("default", "byhand"), nil)
	shared.Add(at("", slice("byhand", "moves", "10.1.0.1")))
	common.Add(at("b", slice("byhand", "moves", "10.1.0.2", proxyName, "x")))
	shared.Delete(at("", slice("byhand", "moves", "10.1.0.1")))
	m.expect(t, "when one of the views is left", "10.1.0.2")
}

func TestServiceThatComesOrGoesTouchesItsOwnSlicesOnly(t *testing.T) {
	m := newTestMerger(t)
	m.shared, m.listed = true, true
	store := m.sliceStore(viewWriter{m, m.newView()})
	for i := range 100 {
		store.Add(at("1", slice(fmt.Sprintf("service-%d", i%50), fmt.Sprintf("slice-%d", i), "10.1.0.1")))
	}
	for _, change := range []func(types.NamespacedName){
		func(key types.NamespacedName) { m.add(key, nil) },
		m.drop,
	} {
		change(keyOf("default", "service-7"))
		slices.SortFunc(m.touched, api.CompareKeys)
		want := []types.NamespacedName{keyOf("default", "slice-57"), keyOf("default", "slice-7")}
		if diff := cmp.Diff(want, m.touched); diff != "" {
			t.Errorf("slices to be written (-want +got):\n%s", diff)
		}
		m.commit(nil)
	}
}

func TestSlicesThatTheControllerLeftBehindAreServed(t *testing.T) {
	for _, services := range []int{1, maxOwnWatches + 1} {
		t.Run(fmt.Sprintf("with %d services", services), func(t *testing.T) {
			inWorld(t, named("x"), func(w *world) {
				want := w.crowd(services - 1)
				w.set(selectorless("was", proxyName, "x"), slice("was", "was-1", "10.9.0.1", discoveryv1.LabelManagedBy, controller))
				w.start()
				w.expect(append(want, "service default/was", "slice default/was-1 10.9.0.1")...)
			})
		})
	}
}

// controller is what the label says of slices that the endpoint-slice controller
// makes.
const controller = "endpointslice-controller.k8s.io"

// crowd makes n services without selector, with a slice each, and returns what
// they add to the state.
func (w *world) crowd(n int) (want []string) {
	for i := range n {
		name, addr := fmt.Sprintf("crowd-%d", i), fmt.Sprintf("10.0.1.%d", i)
		w.set(slice(name, name, addr), selectorless(name, proxyName, "x"))
		want = append(want, "service default/"+name, "slice default/"+name+" "+addr)
	}
	return want
}

func TestManyServicesShareOneWatch(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		want := w.crowd(maxOwnWatches + 8)
		w.set(
			slice("later", "later-1", "10.0.2.1"),
			slice("controlled", "controlled-1", "10.0.2.2", discoveryv1.LabelManagedBy, controller),
		)
		w.start()
		w.expect(want...)
		own, shared := 0, 0
		for _, r := range w.seen(func(request) bool { return true }) {
			if forOwn(r) {
				own++
			}
			if forShared(r) {
				shared++
			}
		}
		if own != 0 || shared != 1 {
			t.Errorf("%d own watches and %d for all, want 0 and 1", own, shared)
		}

		w.set(selectorless("later", proxyName, "x"))
		want = append(want, "service default/later", "slice default/later-1 10.0.2.1")
		w.expect(want...)
		w.set(slice("later", "later-1", "10.0.2.3"), slice("crowd-0", "crowd-0", "10.0.2.4"))
		want[1], want[len(want)-1] = "slice default/crowd-0 10.0.2.4", "slice default/later-1 10.0.2.3"
		w.expect(want...)

		w.set(slice("nobody", "crowd-0", "10.0.2.4")) // the service-name label can change
		w.expect(append([]string{want[0]}, want[2:]...)...)
		w.delete(selectorless("crowd-0"))
		w.expect(want[2:]...)
		w.delete(slice("crowd-1", "crowd-1", ""))
		w.expect(append([]string{want[2]}, want[4:]...)...)
	})
}

func TestOneWatchTakesOverFromMany(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		want := w.crowd(maxOwnWatches)
		w.start()
		w.expect(want...)
		before := w.state.Snapshot().Revision
		w.set(slice("last", "last-1", "10.0.2.1"), selectorless("last", proxyName, "x"))
		w.expect(append(want, "service default/last", "slice default/last-1 10.0.2.1")...)
		changes, _ := w.state.Snapshot().States.Since(before)
		for key := range changes {
			if key.Name != "last" {
				t.Errorf("the change of watches changed %s", key)
			}
		}
		w.delete(slice("crowd-3", "crowd-3", ""))
		w.set(slice("crowd-4", "crowd-4", "10.0.2.2"))
		want[7], want[9] = "service default/last", "slice default/crowd-4 10.0.2.2"
		w.expect(append(want, "slice default/last-1 10.0.2.1")...)
	})
}
