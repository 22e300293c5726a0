// SPDX-License-Identifier: Apache-2.0

package sinktest_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sinkscript"
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

// view returns a view of the service with this key. Views with different versions differ.
func view(key types.NamespacedName, version string) *api.View {
	return &api.View{Service: &api.Service{
		Namespace: key.Namespace, Name: key.Name, Labels: map[string]string{"version": version},
	}}
}

func full(services ...sink.Change) *sink.Changes {
	for i := range services {
		services[i].Unsure = true
	}
	return &sink.Changes{First: true, Last: true, Revision: 1, NodeChanged: true, Services: slices.Values(services)}
}

func partial(services ...sink.Change) *sink.Changes {
	return &sink.Changes{Revision: 2, Services: slices.Values(services)}
}

func set(old, new *api.View) sink.Change {
	return sink.Change{Key: new.Key(), Old: old, New: new}
}

func again(c sink.Change) sink.Change {
	c.Unsure = true
	return c
}

const first, last = 1, 2

// pass returns a batch of a pass. The argument flags is 0, or the constant first for the
// first batch, or the constant last for the last batch.
func pass(flags int, services ...sink.Change) *sink.Changes {
	return &sink.Changes{
		First: flags == first, Last: flags == last, Revision: 2, NodeChanged: flags == first, Services: slices.Values(services),
	}
}

func failing(c *sink.Changes, keys ...types.NamespacedName) *sink.Changes {
	c.Failing = keys
	return c
}

// at1 returns the view v with the cluster IP 10.96.0.1.
func at1(v *api.View) *api.View {
	svc := *v.Service
	svc.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.96.0.1"))
	svc.Ports = []api.PortMapping{{Protocol: api.TCP, Port: 80}}
	return &api.View{Service: &svc}
}

// complaints is a testing.TB that records errors.
type complaints struct {
	testing.TB
	lines []string
}

func (c *complaints) Errorf(format string, args ...any) {
	c.lines = append(c.lines, fmt.Sprintf(format, args...))
}

func TestRecorderChecksTheDriver(t *testing.T) {
	a1, a2, b1 := view(a, "1"), view(a, "2"), view(b, "1")
	fail := sinkscript.Fail(errBusy)
	cases := []struct {
		name  string
		steps []sinkscript.Step
		calls []*sink.Changes
		want  []string // errors that the recorder reports for the last call
	}{{
		name:  "a pass, a change, an addition and a deletion are valid",
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(a1, a2)), partial(set(nil, b1)), partial(sink.Change{Key: a, Old: a2})},
	}, {
		name:  "the first Sync must begin a pass",
		calls: []*sink.Changes{partial(set(nil, a1))},
		want:  []string{"Sync 0 (first: false, last: false, revision 2): should begin a pass"},
	}, {
		name:  "a pass that failed at its start begins again",
		steps: []sinkscript.Step{fail},
		calls: []*sink.Changes{full(set(nil, a1)), partial(again(set(nil, a1)))},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): should begin a pass"},
	}, {
		name:  "a pass follows ErrStartOver",
		steps: []sinkscript.Step{sinkscript.Fail(nil), sinkscript.Fail(sink.ErrStartOver)},
		calls: []*sink.Changes{full(), partial(set(nil, a1)), partial(set(nil, a1))},
		want:  []string{"Sync 2 (first: false, last: false, revision 2): should begin a pass"},
	}, {
		name:  "a pass has a node and no old views",
		calls: []*sink.Changes{{First: true, Last: true, Services: slices.Values([]sink.Change{set(a1, a2)})}},
		want: []string{
			"Sync 0 (first: true, last: true, revision 0): begins a pass and says that the node has not changed",
			"Sync 0 (first: true, last: true, revision 0): service default/a is not marked as unsure",
		},
	}, {
		name:  "services come in order, each once",
		calls: []*sink.Changes{full(set(nil, b1), set(nil, a1), set(nil, a1))},
		want: []string{
			"Sync 0 (first: true, last: true, revision 1): service default/a comes after default/b",
			"Sync 0 (first: true, last: true, revision 1): service default/a comes after default/a",
		},
	}, {
		name:  "a change has the key of its view",
		calls: []*sink.Changes{full(sink.Change{Key: a, New: b1})},
		want:  []string{"Sync 0 (first: true, last: true, revision 1): service default/a has the view of default/b"},
	}, {
		name:  "old is the acknowledged view",
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(nil, a2))},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): service default/a: old is missing"},
	}, {
		name:  "acknowledged services are not delivered again",
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(a1, a1))},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): service default/a was acknowledged as it is"},
	}, {
		name:  "failed services are delivered again with the acknowledged view",
		steps: []sinkscript.Step{sinkscript.Fail(nil), sinkscript.FailServices(errBusy, a)},
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(a1, a2)), partial(again(set(a1, a1)))},
	}, {
		name:  "services of a failed Sync are delivered again",
		steps: []sinkscript.Step{sinkscript.Fail(nil), fail},
		calls: []*sink.Changes{full(), partial(set(nil, a1)), partial(again(sink.Change{Key: a}))},
	}, {
		name:  "a retry is marked as unsure",
		steps: []sinkscript.Step{sinkscript.FailServices(errBusy, a)},
		calls: []*sink.Changes{full(set(nil, a1)), partial(set(nil, a1))},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): service default/a is not marked as unsure"},
	}, {
		name: "a pass has batches and names failed services",
		calls: []*sink.Changes{
			pass(first, again(set(nil, a1))), pass(0, again(set(nil, b1))), pass(last),
		},
	}, {
		name:  "a pass may begin again",
		calls: []*sink.Changes{pass(first, again(set(nil, a1))), pass(first), pass(last, again(set(nil, a1)))},
	}, {
		name:  "a new pass resets acknowledgements",
		calls: []*sink.Changes{pass(first, again(set(nil, a1))), pass(first), pass(last, set(a1, a2))},
		want: []string{
			"Sync 2 (first: false, last: true, revision 2): service default/a is not marked as unsure",
		},
	}, {
		name:  "a pass does not end twice",
		calls: []*sink.Changes{full(), pass(last)},
		want:  []string{"Sync 1 (first: false, last: true, revision 2): ends a pass that was not begun"},
	}, {
		name:  "in a pass all services are unsure until they are acknowledged",
		calls: []*sink.Changes{pass(first), pass(0, set(nil, a1))},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): service default/a is not marked as unsure"},
	}, {
		name:  "failing services are named at the end of a pass",
		steps: []sinkscript.Step{sinkscript.FailServices(errBusy, a)},
		calls: []*sink.Changes{pass(first, again(set(nil, a1))), failing(pass(last), a)},
	}, {
		name:  "the end of a pass names all failing services",
		steps: []sinkscript.Step{sinkscript.FailServices(errBusy, a)},
		calls: []*sink.Changes{pass(first, again(set(nil, a1))), pass(last)},
		want:  []string{"Sync 1 (first: false, last: true, revision 2): does not name service default/a as failing"},
	}, {
		name:  "services that do not fail are not named",
		calls: []*sink.Changes{pass(first, again(set(nil, a1))), failing(pass(last), a)},
		want:  []string{"Sync 1 (first: false, last: true, revision 2): names service default/a as failing"},
	}, {
		name:  "failing services are named at the end only",
		calls: []*sink.Changes{full(), failing(partial(set(nil, a1)), b)},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): names failing services and does not end a pass"},
	}, {
		name:  "old has no claim that another service was acknowledged with",
		steps: []sinkscript.Step{sinkscript.Fail(nil), sinkscript.FailServices(errBusy, a)},
		calls: []*sink.Changes{
			full(set(nil, at1(a1))), partial(set(at1(a1), a2)), partial(set(nil, at1(b1))), partial(again(set(at1(a1), a2))),
		},
		want: []string{"Sync 3 (first: false, last: false, revision 2): service default/a: old has a claim that another service has now"},
	}, {
		name:  "an old view with such a claim is omitted",
		steps: []sinkscript.Step{sinkscript.Fail(nil), sinkscript.FailServices(errBusy, a)},
		calls: []*sink.Changes{
			full(set(nil, at1(a1))), partial(set(at1(a1), a2)), partial(set(nil, at1(b1))), partial(again(set(nil, a2))),
		},
	}, {
		name:  "revisions do not go back",
		calls: []*sink.Changes{full(), partial(set(nil, a1)), {Revision: 1, Services: slices.Values([]sink.Change{set(a1, a2)})}},
		want:  []string{"Sync 2 (first: false, last: false, revision 1): was at revision 2 already"},
	}, {
		name:  "a Sync is not empty",
		calls: []*sink.Changes{full(), partial()},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): has nothing to deliver"},
	}, {
		name:  "a changed node is reported",
		calls: []*sink.Changes{full(), {Revision: 2, Services: slices.Values([]sink.Change{set(nil, a1)}), Node: &api.Node{Name: "n"}}},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): does not say that the node changed"},
	}, {
		name:  "an unchanged node is not reported",
		calls: []*sink.Changes{full(), {Revision: 2, Services: slices.Values([]sink.Change{set(nil, a1)}), NodeChanged: true}},
		want:  []string{"Sync 1 (first: false, last: false, revision 2): says that the node changed, which was acknowledged as it is"},
	}}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			got := &complaints{TB: t}
			script := sinkscript.New(nil)
			rec := sinktest.NewRecorder(got, script)
			script.Add(tc.steps...)
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

func TestRecorderReportsOverlappingSyncs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := &complaints{TB: t}
		script := sinkscript.New(nil)
		rec := sinktest.NewRecorder(got, script)
		release := make(chan struct{})
		script.Add(sinkscript.Block(release), sinkscript.Fail(nil))
		go func() { _ = rec.Sync(t.Context(), full()) }()
		synctest.Wait()
		_ = rec.Sync(t.Context(), full())
		close(release)
		if want := []string{"Sync at revision 1 overlaps another call"}; !slices.Equal(got.lines, want) {
			t.Errorf("complaints %q, want %q", got.lines, want)
		}
	})
}

func TestRecorderPassesOnToItsSink(t *testing.T) {
	calls := 0
	script := sinkscript.New(sink.Func(func(context.Context, *sink.Changes) error {
		calls++
		return (&sink.Failed{b: errBusy}).Err()
	}))
	rec := sinktest.NewRecorder(t, script)
	errOther := errors.New("other")
	script.Add(sinkscript.Fail(errOther), sinkscript.FailServices(errOther, a))

	if err := rec.Sync(t.Context(), full(set(nil, view(a, "1")))); err != errOther || calls != 0 {
		t.Errorf("a failing step: %v after %d calls of the sink", err, calls)
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
	done := func(syncs []sinktest.Sync) bool { return len(syncs) > 0 }
	if err := rec.Wait(ctx, done); err != context.Canceled {
		t.Errorf("got %v", err)
	}
	_ = rec.Sync(t.Context(), full())
	if err := rec.Wait(ctx, done); err != nil {
		t.Errorf("got %v", err)
	}
}
