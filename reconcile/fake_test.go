// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// fake is a dataplane in memory. The value of a flow ("f…") names a group ("g…"), which
// must exist. List does not emit virtual objects ("v…").
type fake struct {
	plans   map[*api.View][]string
	objects map[string]string
	// The objects in bad cannot be set, and the objects in stuck cannot be deleted. If
	// atomic is true, one such object makes Apply refuse all operations.
	bad, stuck map[string]bool
	atomic     bool
	// After the number of operations in broken, Apply fails and the state of the
	// dataplane is unknown.
	broken int
	// unlisted makes List fail after some objects.
	unlisted bool
	listed   func()
	calls    []string
	// opServices has the service of the last operation for each object.
	opServices map[string]string
	// faults has the violations of the contract.
	faults []string
}

var errBad, errBroken = errors.New("bad object"), errors.New("connection lost")

func newFake() *fake {
	return &fake{plans: map[*api.View][]string{}, objects: map[string]string{}, bad: map[string]bool{}, stuck: map[string]bool{}, opServices: map[string]string{}, broken: -1}
}

// view returns a view. Its plan has the given objects, each in the form key=value. For
// a text without "=", the plan is an error with this text.
func (f *fake) view(name string, objects ...string) *api.View {
	v := &api.View{Service: &api.Service{Namespace: "default", Name: name}}
	f.plans[v] = objects
	return v
}

func (f *fake) Plan(view *api.View, emit func(k, v string)) error {
	for _, o := range f.plans[view] {
		k, v, ok := strings.Cut(o, "=")
		if !ok {
			return errors.New(o)
		}
		emit(k, v)
	}
	return nil
}

func (f *fake) List(_ context.Context, emit func(k, v string)) error {
	if f.listed != nil {
		f.listed()
	}
	n := 0
	for k, v := range f.objects {
		if k[0] == 'v' {
			continue
		}
		if n++; f.unlisted && n > 2 {
			break
		}
		emit(k, v)
	}
	if f.unlisted {
		return errBroken
	}
	return nil
}

func (f *fake) fault(format string, args ...any) {
	f.faults = append(f.faults, fmt.Sprintf(format, args...))
}

func (f *fake) Apply(_ context.Context, ops []Op[string, string]) error {
	var text []string
	for _, op := range ops {
		f.opServices[op.Key] = op.Service.Name
		old, ok := f.objects[op.Key]
		if (op.Old != nil) != ok || ok && *op.Old != old {
			f.fault("%s: the old value is wrong, the dataplane has %q", op.Key, old)
		}
		switch {
		case op.New == nil:
			text = append(text, "-"+op.Key)
		case ok && *op.New == old:
			f.fault("%s: the value %s is written again", op.Key, old)
		default:
			text = append(text, op.Key+"="+*op.New)
		}
	}
	f.calls = append(f.calls, strings.Join(text, " "))
	if f.atomic {
		for _, op := range ops {
			if op.New != nil && f.bad[op.Key] || op.New == nil && f.stuck[op.Key] {
				return Refused(errBad)
			}
		}
	}
	failed := Failed[string]{}
	for i, op := range ops {
		if i == f.broken {
			return errBroken
		}
		switch {
		case op.New != nil && f.bad[op.Key], op.New == nil && f.stuck[op.Key]:
			failed[op.Key] = errBad
		case op.New != nil && f.dangles(op.Key, *op.New), op.New == nil && f.used(op.Key):
			failed[op.Key] = errBad
			if len(failed) == 1 {
				f.fault("%q of %v is in the wrong order", op.Key, text)
			}
		case op.New == nil:
			delete(f.objects, op.Key)
		default:
			f.objects[op.Key] = *op.New
		}
	}
	if len(failed) > 0 {
		return &failed
	}
	return nil
}

func (f *fake) dangles(k, v string) bool {
	_, ok := f.objects[v]
	return k[0] == 'f' && !ok
}

func (f *fake) used(group string) bool {
	for k, v := range f.objects {
		if k[0] == 'f' && v == group {
			return true
		}
	}
	return false
}

func depth(k string) int {
	if k[0] == 'g' {
		return 1
	}
	return 0
}

// world is a Reconciler with a fake.
type world struct {
	testing.TB
	*fake
	*reconciler[string, string]
	opts Options[string, string]
}

func newWorld(t testing.TB) *world {
	w := &world{TB: t, fake: newFake(), opts: Options[string, string]{Depth: depth, Virtual: func(k string) bool { return k[0] == 'v' }}}
	w.restart()
	t.Cleanup(func() {
		if len(w.faults) > 0 {
			t.Errorf("%q", w.faults)
		}
	})
	return w
}

func (w *world) restart() {
	w.reconciler = New(w.fake, w.opts).(*reconciler[string, string])
}

func key(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

// sync delivers views. An argument of type string is the name of a deleted service.
func (w *world) sync(c sink.Changes, services ...any) error {
	return w.syncWith(w.Context(), c, services...)
}

func (w *world) syncWith(ctx context.Context, c sink.Changes, services ...any) error {
	var changes []sink.Change
	for _, s := range services {
		switch s := s.(type) {
		case string:
			changes = append(changes, sink.Change{Key: key(s), Unsure: true})
		case *api.View:
			changes = append(changes, sink.Change{Key: s.Key(), New: s, Unsure: true})
		}
	}
	c.Services = slices.Values(changes)
	w.calls = nil
	return w.Sync(ctx, &c)
}

var pass = sink.Changes{First: true, Last: true}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) mustFail(err error, names ...string) {
	w.Helper()
	failed, ok := sink.Acknowledged(err)
	var got []string
	for k := range failed {
		got = append(got, k.Name)
	}
	slices.Sort(got)
	if !ok || !slices.Equal(got, names) {
		w.Fatalf("error %v, want that only %v fail", err, names)
	}
}

func (w *world) mustStartOver(err error) {
	w.Helper()
	if !errors.Is(err, sink.ErrStartOver) {
		w.Errorf("error %v, want ErrStartOver", err)
	}
}

func (w *world) mustHave(want ...string) {
	w.Helper()
	var got []string
	for k, v := range w.fake.objects {
		got = append(got, k+"="+v)
	}
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		w.Fatalf("objects (-want +got):\n%s", diff)
	}
}

func (w *world) mustCall(want ...string) {
	w.Helper()
	if diff := cmp.Diff(want, w.calls); diff != "" {
		w.Fatalf("calls of Apply (-want +got):\n%s", diff)
	}
}
