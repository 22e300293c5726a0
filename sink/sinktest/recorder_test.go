// SPDX-License-Identifier: Apache-2.0

package sinktest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/types"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	a, b    = key("a"), key("b")
	errBusy = errors.New("busy")
)

func key(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

// view returns a view of the service key that tells version from others.
func view(key types.NamespacedName, version string) *api.ServiceEndpoints {
	return &api.ServiceEndpoints{Service: &api.Service{
		Namespace: key.Namespace, Name: key.Name, Labels: map[string]string{"version": version},
	}}
}

func full(services ...sink.Change) *sink.Changes {
	return &sink.Changes{Full: true, Revision: 1, NodeChanged: true, Services: slices.Values(services)}
}

func partial(services ...sink.Change) *sink.Changes {
	return &sink.Changes{Revision: 2, Services: slices.Values(services)}
}

func set(old, new *api.ServiceEndpoints) sink.Change {
	return sink.Change{Key: new.Key(), Old: old, New: new}
}

func again(c sink.Change) sink.Change {
	c.Retry = true
	return c
}

// complaints is a test that takes down what it is told.
type complaints struct {
	testing.TB
	lines []string
}

func (c *complaints) Errorf(format string, args ...any) {
	c.lines = append(c.lines, fmt.Sprintf(format, args...))
}

func TestRecorderChecksTheDriver(t *testing.T) {
	a1, a2, b1 := view(a, "1"), view(a, "2"), view(b, "1")
	fail := sinktest.Fail(errBusy)
	cases := []struct {
		name  string
		steps []sinktest.Step
		calls []*sink.Changes
		want  []string // what is wrong with the last call
	}{{
		name:  "a full one, a change, an addition and a deletion are fine",
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(a1, a2)), partial(set(nil, b1)), partial(sink.Change{Key: a, Old: a2})},
	}, {
		name:  "the first one should be full",
		calls: []*sink.Changes{partial(set(nil, a1))},
		want:  []string{"Sync 0 (full: false, revision 2): should be full"},
	}, {
		name:  "after a full one that failed comes a full one",
		steps: []sinktest.Step{fail},
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(nil, a1))},
		want:  []string{"Sync 1 (full: false, revision 2): should be full"},
	}, {
		name:  "after a sink wanted to start over comes a full one",
		steps: []sinktest.Step{sinktest.Fail(nil), sinktest.Fail(sink.ErrStartOver)},
		calls: []*sink.Changes{full(), partial(set(nil, a1)), partial(set(nil, a1))},
		want:  []string{"Sync 2 (full: false, revision 2): should be full"},
	}, {
		name:  "a full one has a node, and no old views",
		calls: []*sink.Changes{{Full: true, Services: slices.Values([]sink.Change{set(a1, a2)})}},
		want: []string{
			"Sync 0 (full: true, revision 0): is full and says that the node has not changed",
			"Sync 0 (full: true, revision 0): service default/a: new: true, old: true, retry: false in a full one",
		},
	}, {
		name:  "services come in order, each once",
		calls: []*sink.Changes{full(set(nil, b1), set(nil, a1), set(nil, a1))},
		want: []string{
			"Sync 0 (full: true, revision 1): service default/a comes after default/b",
			"Sync 0 (full: true, revision 1): service default/a comes after default/a",
		},
	}, {
		name:  "a key is that of its view",
		calls: []*sink.Changes{full(sink.Change{Key: a, New: b1})},
		want:  []string{"Sync 0 (full: true, revision 1): service default/a has the view of default/b"},
	}, {
		name:  "old is what was acknowledged",
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(nil, a2))},
		want:  []string{"Sync 1 (full: false, revision 2): service default/a: old is not what was acknowledged"},
	}, {
		name:  "what was acknowledged is not told again",
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(a1, a1))},
		want:  []string{"Sync 1 (full: false, revision 2): service default/a was acknowledged as it is"},
	}, {
		name:  "what failed is told again, from what was acknowledged before",
		steps: []sinktest.Step{sinktest.Fail(nil), sinktest.FailServices(errBusy, a)},
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(a1, a2)), partial(again(set(a1, a1)))},
	}, {
		name:  "what took part in a sync that failed is told again",
		steps: []sinktest.Step{sinktest.Fail(nil), fail},
		calls: []*sink.Changes{full(), partial(set(nil, a1)), partial(again(sink.Change{Key: a}))},
	}, {
		name:  "a retry is marked",
		steps: []sinktest.Step{sinktest.FailServices(errBusy, a)},
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(nil, a1))},
		want:  []string{"Sync 1 (full: false, revision 2): service default/a: retry is false"},
	}, {
		name:  "what is no retry is not marked",
		calls: []*sink.Changes{full(), partial(again(set(nil, a1)))},
		want:  []string{"Sync 1 (full: false, revision 2): service default/a: retry is true"},
	}, {
		name:  "revisions do not go back",
		calls: []*sink.Changes{full(), partial(set(nil, a1)), {Revision: 1, Services: slices.Values([]sink.Change{set(a1, a2)})}},
		want:  []string{"Sync 2 (full: false, revision 1): was at revision 2 already"},
	}, {
		name:  "there is something to say",
		calls: []*sink.Changes{full(), partial()},
		want:  []string{"Sync 1 (full: false, revision 2): has nothing to say"},
	}, {
		name:  "a node that changed is said to",
		calls: []*sink.Changes{full(), {Revision: 2, Services: slices.Values([]sink.Change{set(nil, a1)}), Node: &api.Node{Name: "n"}}},
		want:  []string{"Sync 1 (full: false, revision 2): does not say that the node changed"},
	}, {
		name:  "a node that did not change is not said to",
		calls: []*sink.Changes{full(), {Revision: 2, Services: slices.Values([]sink.Change{set(nil, a1)}), NodeChanged: true}},
		want:  []string{"Sync 1 (full: false, revision 2): says that the node changed, which was acknowledged as it is"},
	}}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			got := &complaints{TB: t}
			rec := sinktest.NewRecorder(got, nil)
			rec.Script(tc.steps...)
			for i, c := range tc.calls {
				if len(got.lines) > 0 {
					t.Errorf("call %d: %v", i-1, got.lines)
				}
				_ = rec.Sync(t.Context(), c)
			}
			if diff := cmp.Diff(tc.want, got.lines); diff != "" {
				t.Errorf("complaints (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRecorderComplainsOfTwoSyncsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := &complaints{TB: t}
		rec := sinktest.NewRecorder(got, nil)
		release := make(chan struct{})
		rec.Script(sinktest.Block(release), sinktest.Fail(nil))
		go func() { _ = rec.Sync(t.Context(), full()) }()
		synctest.Wait()
		_ = rec.Sync(t.Context(), full())
		close(release)
		if want := []string{"Sync at revision 1 is called while another one runs"}; !slices.Equal(got.lines, want) {
			t.Errorf("complaints %q, want %q", got.lines, want)
		}
	})
}

func TestRecorderPassesOnToItsSink(t *testing.T) {
	calls := 0
	rec := sinktest.NewRecorder(t, sink.Func(func(context.Context, *sink.Changes) error {
		calls++
		return (&sink.Failed{b: errBusy}).Err()
	}))
	errOther := errors.New("other")
	rec.Script(sinktest.Fail(errOther), sinktest.FailServices(errOther, a))

	if err := rec.Sync(t.Context(), full(set(nil, view(a, "1")))); err != errOther || calls != 0 {
		t.Errorf("a step that fails: %v after %d calls of the sink", err, calls)
	}
	err := rec.Sync(t.Context(), full(set(nil, view(a, "1"))))
	if want := "service default/a: other; service default/b: busy"; err == nil || err.Error() != want || calls != 1 {
		t.Errorf("a step that fails services: %v after %d calls of the sink, want %s", err, calls, want)
	}
	if views := rec.Views(); len(views) != 0 {
		t.Errorf("views that failed count as acknowledged: %v", views)
	}
	if err := rec.Sync(t.Context(), partial(again(set(nil, view(a, "1"))))); err == nil || calls != 2 {
		t.Errorf("after the script: %v after %d calls of the sink", err, calls)
	}
	if views := rec.Views(); len(views) != 1 || views[0].Key() != a {
		t.Errorf("acknowledged: %v", views)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	rec := sinktest.NewRecorder(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := rec.WaitSyncs(ctx, 1); err != context.Canceled {
		t.Errorf("got %v", err)
	}
	_ = rec.Sync(t.Context(), full())
	if err := rec.WaitSyncs(ctx, 1); err != nil {
		t.Errorf("got %v", err)
	}
}
