// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// forOwn says whether r is for the slices of one service.
func forOwn(r request) bool { return strings.Contains(r.Labels, discoveryv1.LabelServiceName) }

// forSingle says whether r is for the handmade slices of all services.
func forSingle(r request) bool { return strings.Contains(r.Labels, discoveryv1.LabelManagedBy) }

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
		w.advance(HoldTimeout - time.Millisecond)
		w.expect()
		changed := selectorless("byhand", proxyName, "x")
		changed.Spec.Ports[0].Port = 81
		w.set(changed)
		w.expect()
		before := w.state.Snapshot().Revision
		unblock()
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
		changes, _ := w.state.Snapshot().States.Since(before)
		for c := range changes {
			if c.Value.Service.Ports[0].Port != 81 || len(c.Value.Slices) != 1 {
				t.Errorf("published as %+v", c.Value)
			}
		}
		w.advance(2 * HoldTimeout)
		w.expect("service default/byhand", "slice default/plain 10.0.0.1")
	})
}

func TestLaterServiceIsPublishedWithoutItsSlicesAfterAWhile(t *testing.T) {
	inWorld(t, named("x"), func(w *world) {
		w.start()
		unblock := w.block(forOwn)
		w.set(slice("byhand", "plain", "10.0.0.1"), selectorless("byhand", proxyName, "x"))
		w.advance(HoldTimeout)
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
		w.advance(2 * HoldTimeout)
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
	for _, services := range []int{1, MaxOwnWatches + 1} {
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
		want := w.crowd(MaxOwnWatches + 8)
		w.set(
			slice("later", "later-1", "10.0.2.1"),
			slice("controlled", "controlled-1", "10.0.2.2", discoveryv1.LabelManagedBy, endpointSliceController),
		)
		w.start()
		w.expect(want...)
		own, single := 0, 0
		for _, r := range w.seen(func(request) bool { return true }) {
			if forOwn(r) {
				own++
			}
			if forSingle(r) {
				single++
			}
		}
		if own != 0 || single != 1 {
			t.Errorf("%d own watches and %d for all, want 0 and 1", own, single)
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
		want := w.crowd(MaxOwnWatches)
		w.start()
		w.expect(want...)
		before := w.state.Snapshot().Revision
		w.set(slice("last", "last-1", "10.0.2.1"), selectorless("last", proxyName, "x"))
		w.expect(append(want, "service default/last", "slice default/last-1 10.0.2.1")...)
		changes, _ := w.state.Snapshot().States.Since(before)
		for c := range changes {
			if c.Key.Name != "last" {
				t.Errorf("the change of watches changed %s", c.Key)
			}
		}
		w.delete(slice("crowd-3", "crowd-3", ""))
		w.set(slice("crowd-4", "crowd-4", "10.0.2.2"))
		want[7], want[9] = "service default/last", "slice default/crowd-4 10.0.2.2"
		w.expect(append(want, "slice default/last-1 10.0.2.1")...)
	})
}
