// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// While a version of an object is converted, several events arrive. Only the last event of
// each object is converted, and the objects keep their order.
func TestWaitingEventsOfAnObjectCostOneConversion(t *testing.T) {
	web := func(version int) *discoveryv1.EndpointSlice {
		s := slice("web", "web-1", fmt.Sprintf("10.0.0.%d", version))
		s.ResourceVersion = fmt.Sprint(version)
		return s
	}
	other := slice("other", "other-1", "10.0.0.1")
	other.ResourceVersion = "50"
	protobuf := func(o *discoveryv1.EndpointSlice) []byte {
		message, err := o.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		return message
	}
	for _, test := range []struct {
		name   string
		object func(to objectStore, o *discoveryv1.EndpointSlice) any
	}{
		{"in protobuf", func(to objectStore, o *discoveryv1.EndpointSlice) any { return to.postpone(protobuf(o)) }},
		{"in JSON", func(to objectStore, o *discoveryv1.EndpointSlice) any { return to.postponeObject(o) }},
		{"of informers", func(_ objectStore, o *discoveryv1.EndpointSlice) any { return o }},
	} {
		for _, ending := range []struct {
			name        string
			events      func(q *queue, object func(*discoveryv1.EndpointSlice) any)
			conversions string
			want        string // the address of the slice web-1
		}{
			{"an update", func(q *queue, object func(*discoveryv1.EndpointSlice) any) {}, "[1 99 50]", "10.0.0.99"},
			{"a deletion", func(q *queue, object func(*discoveryv1.EndpointSlice) any) {
				q.Delete(object(web(100)))
			}, "[1 50]", ""},
			{"a deletion that the informer missed", func(q *queue, object func(*discoveryv1.EndpointSlice) any) {
				q.Delete(cache.DeletedFinalStateUnknown{Key: "default/web-1", Obj: web(99)})
			}, "[1 50]", ""},
			{"a deletion and a new object", func(q *queue, object func(*discoveryv1.EndpointSlice) any) {
				q.Delete(object(web(100)))
				q.Add(object(web(101)))
			}, "[1 101 50]", "10.0.0.101"},
		} {
			t.Run(test.name+"/"+ending.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					converter, err := watcher.New(watcher.Options{})
					if err != nil {
						t.Fatal(err)
					}
					state := cluster.New(cluster.Options{})
					s := (&watch{state: state, converter: converter, unlisted: map[string]bool{nodes: true}}).newStores(nil, 0).slices
					var converted []string
					proceed := make(chan struct{})
					reduce := s.reduce
					s.reduce = func(o *discoveryv1.EndpointSlice, i *item[api.EndpointSlice]) {
						converted = append(converted, o.ResourceVersion)
						<-proceed
						reduce(o, i)
					}
					q := newQueue(s)
					go q.run(t.Context())
					object := func(o *discoveryv1.EndpointSlice) any { return test.object(s, o) }
					for version := 1; version < 100; version++ {
						if err := q.Update(object(web(version))); err != nil {
							t.Fatal(err)
						}
						if version == 1 {
							synctest.Wait()
						}
						if version == 2 {
							q.Add(object(other))
						}
					}
					ending.events(q, object)
					synctest.Wait()
					close(proceed)
					synctest.Wait()
					if got := fmt.Sprint(converted); got != ending.conversions {
						t.Errorf("converted versions %s, want %s", got, ending.conversions)
					}
					got := ""
					if state, _ := state.Snapshot().States.Get(types.NamespacedName{Namespace: "default", Name: "web"}); state != nil {
						got = state.Slices[0].Endpoints[0].Addr.String()
					}
					if got != ending.want {
						t.Errorf("the slice has the address %q, want %q", got, ending.want)
					}
				})
			})
		}
	}
}

func TestQueueRefusesObjectsOfAnotherKind(t *testing.T) {
	q := newQueue((&watch{}).newStores(nil, 0).slices)
	for _, o := range []any{service("web"), "text", nil} {
		if q.Update(o) == nil || q.Delete(o) == nil {
			t.Errorf("no error for an object of type %T", o)
		}
	}
	if q.writeNext() {
		t.Error("an object was queued")
	}
}

// A listing is newer than the waiting events.
func TestListingReplacesWaitingEvents(t *testing.T) {
	s, state := newTestSelection(t, findIn(new([]*discoveryv1.EndpointSlice)))
	q := newQueue(s.services)
	q.Add(service("gone", proxyName, "x"))
	q.Add(service("web", proxyName, "x"))
	if err := q.Replace([]any{service("listed", proxyName, "x")}, "2"); err != nil {
		t.Fatal(err)
	}
	if q.writeNext() {
		t.Error("an event still waits")
	}
	for key := range state.Snapshot().States.All() {
		if key.Name != "listed" {
			t.Errorf("the state has service %s", key)
		}
	}
}
