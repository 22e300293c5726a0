// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

func TestFullStateCallsWithEverythingInOrder(t *testing.T) {
	type state = []*api.ServiceEndpoints
	var calls []state
	s := sink.FullState(func(_ context.Context, services []*api.ServiceEndpoints) error {
		calls = append(calls, services)
		return nil
	})
	a, b, c := key("a"), key("b"), key("c")
	run(t, sink.Options{}, s, func(w *world) {
		step := func(what string, change func(), want ...*api.ServiceEndpoints) {
			w.Helper()
			change()
			w.waitApplied()
			if diff := cmp.Diff(want, calls[len(calls)-1], compare...); diff != "" {
				w.Errorf("%s: the state (-want +got):\n%s", what, diff)
			}
		}
		step("full", w.src.MarkSynced, view(web, 1))
		step("one added before", func() { w.src.Set(view(b)) }, view(b), view(web, 1))
		step("one changed, others added around", func() { w.src.Set(view(b, 2), view(a), view(c), view(key("zoo"))) },
			view(a), view(b, 2), view(c), view(web, 1), view(key("zoo")))
		step("some deleted", func() { w.src.Delete(a, c, key("zoo")) }, view(b, 2), view(web, 1))
		step("failed and deleted", func() {
			w.rec.Script(sinktest.FailServices(errBusy, a))
			w.src.Set(view(a))
			synctest.Wait()
			w.src.Delete(a)
		}, view(b, 2), view(web, 1))
		step("full again", func() { w.src.Lag(); w.src.Delete(b) }, view(web, 1))

		var names []string
		for _, v := range calls[2] {
			names = append(names, v.Service.Name)
		}
		if want := []string{"a", "b", "c", "web", "zoo"}; !slices.Equal(names, want) {
			w.Errorf("a state that was kept became %v, want %v", names, want)
		}
	})
}

// BenchmarkFullState measures what the adapter adds to a sync of one change.
func BenchmarkFullState(b *testing.B) {
	s := sink.FullState(func(context.Context, []*api.ServiceEndpoints) error { return nil })
	views := manyViews(50_000)
	full := func(yield func(sink.Change) bool) {
		for _, v := range views {
			if !yield(sink.Change{Key: v.Key(), New: v}) {
				return
			}
		}
	}
	if err := s.Sync(b.Context(), &sink.Changes{First: true, Last: true, Services: full}); err != nil {
		b.Fatal(err)
	}
	one := &sink.Changes{Services: slices.Values([]sink.Change{{Key: views[0].Key(), New: views[0]}})}
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Sync(b.Context(), one); err != nil {
			b.Fatal(err)
		}
	}
}

// manyViews returns n views in order of their keys.
func manyViews(n int) []*api.ServiceEndpoints {
	views := make([]*api.ServiceEndpoints, n)
	for i := range views {
		views[i] = view(types.NamespacedName{Namespace: "default", Name: string([]byte{
			byte('a' + i/26/26/26%26), byte('a' + i/26/26%26), byte('a' + i/26%26), byte('a' + i%26)})}, 1)
	}
	return views
}
