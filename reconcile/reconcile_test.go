// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

func TestPassWritesDifferencesInOrder(t *testing.T) {
	w := newWorld(t)
	w.fake.objects = map[string]string{"g1": "x", "f1": "g1", "gOld": "y", "fOld": "gOld"}
	w.must(w.sync(sink.Changes{First: true}, w.view("a", "f1=g1", "g1=x", "f2=g2", "g2=y")))
	w.mustCall("g2=y f2=g2")
	w.must(w.sync(sink.Changes{Last: true}))
	w.mustCall("-fOld", "-gOld")
	w.must(w.sync(sink.Changes{}, w.view("a", "g2=z", "f2=g2")))
	w.mustCall("g2=z -f1 -g1")
	w.restart()
	w.must(w.sync(pass, w.view("a", "g2=z", "f2=g2")))
	w.mustCall()
	w.must(w.sync(sink.Changes{}, "a"))
	w.mustHave()
}

func TestOperationsHaveTheirService(t *testing.T) {
	w := newWorld(t)
	check := func(want string) {
		t.Helper()
		if got := w.opServices["k"]; got != want {
			t.Errorf("the operation for k is of service %q, want %q", got, want)
		}
	}
	w.must(w.sync(pass, w.view("a", "k=1"), w.view("b", "other=1")))
	check("a")
	w.must(w.sync(sink.Changes{}, w.view("a", "k=2")))
	check("a")
	w.must(w.sync(sink.Changes{}, w.view("b", "k=3")))
	check("b")
	w.must(w.sync(sink.Changes{}, "a"))
	w.must(w.sync(sink.Changes{}, "b"))
	check("b")
	w.mustHave()
	// When service c no longer needs the object, the only user is service b, and b fails.
	w.mustFail(w.sync(sink.Changes{}, w.view("b", "k=b", "error")), "b")
	w.must(w.sync(sink.Changes{}, w.view("c", "k=c")))
	w.must(w.sync(sink.Changes{}, "c"))
	check("b")
	w.mustHave()
	if err := w.faults; err != nil {
		t.Error(err)
	}
}

func TestServicesSwapObjectsInOnePart(t *testing.T) {
	for _, atomic := range []bool{true, false} {
		w := newWorld(t)
		w.atomic = atomic
		w.must(w.sync(pass, w.view("a", "k1=a"), w.view("b", "k2=b"), w.view("c", "k3=c")))
		w.bad["k1"] = true
		err := w.sync(sink.Changes{}, w.view("a", "k2=a"), w.view("b", "k1=b"), w.view("c", "k3=c2"))
		w.mustFail(err, "a", "b")
		if atomic {
			w.mustHave("k1=a", "k2=b", "k3=c2")
		} else {
			w.mustHave("k1=a", "k2=a", "k3=c2")
		}
		w.bad["k1"] = false
		w.must(w.sync(sink.Changes{}, w.view("a", "k2=a"), w.view("b", "k1=b")))
		w.mustHave("k1=b", "k2=a", "k3=c2")
	}
}

// A failed Cleanup returns an error, and may be repeated. A pass after it writes all
// objects.
func TestCleanupFails(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k=1")))
	w.unlisted = true
	if err := w.reconciler.Cleanup(t.Context()); !errors.Is(err, errBroken) || !strings.Contains(err.Error(), "list the dataplane: ") {
		t.Errorf("List fails: error %v", err)
	}
	if err := w.sync(sink.Changes{First: true}); !errors.Is(err, errBroken) {
		t.Errorf("List fails at the begin of a pass: error %v", err)
	}
	w.unlisted = false
	w.stuck["k"] = true
	if err := w.reconciler.Cleanup(t.Context()); !errors.Is(err, errBad) {
		t.Errorf("an object cannot be deleted: error %v", err)
	}
	w.mustHave("k=1")
	w.stuck["k"] = false
	w.must(w.reconciler.Cleanup(t.Context()))
	w.mustHave()
	w.must(w.sync(pass, w.view("a", "k=1")))
	w.mustHave("k=1")
}

func TestErrorsOfOperations(t *testing.T) {
	failed := Failed[string]{"k1": errBad, "k2": errBad}
	if got := failed.Error(); !strings.HasPrefix(got, "2 operations failed: ") || !strings.Contains(got, errBad.Error()) {
		t.Errorf("the text is %q", got)
	}
	if err := Refused(errBad); !errors.Is(err, errBad) {
		t.Errorf("%v does not wrap the dataplane's error", err)
	}
}

func TestAddressMovesInAnyOrder(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k=a")))
	w.must(w.sync(sink.Changes{}, w.view("b", "k=b")))
	w.must(w.sync(sink.Changes{}, "a"))
	w.mustHave("k=b")
}

func TestFormerOwnerLeavesAfterAFailedTakeover(t *testing.T) {
	for _, atomic := range []bool{true, false} {
		w := newWorld(t)
		w.atomic = atomic
		w.must(w.sync(pass, w.view("a", "gA=x", "f1=gA")))
		w.bad["gB"] = true
		b := w.view("b", "gB=y", "f1=gB")
		w.mustFail(w.sync(sink.Changes{}, b), "b")
		w.mustHave("f1=gA", "gA=x")
		w.must(w.sync(sink.Changes{}, w.view("a", "k=a")))
		w.mustHave("k=a")
		w.bad["gB"] = false
		w.must(w.sync(sink.Changes{}, b))
		w.mustHave("f1=gB", "gB=y", "k=a")
	}
}

func TestOnlyRefusedServicesFail(t *testing.T) {
	w := newWorld(t)
	w.atomic = true
	w.bad["k3"] = true
	var views []any
	for i := range 8 {
		views = append(views, w.view(fmt.Sprint("s", i), fmt.Sprintf("k%d=x", i)))
	}
	w.mustFail(w.sync(pass, views...), "s3")
	w.mustHave("k0=x", "k1=x", "k2=x", "k4=x", "k5=x", "k6=x", "k7=x")
	if len(w.calls) != 7 { // 8, 4 (refused), 2, 2 (refused), 1, 1 (refused), 4
		t.Errorf("calls of Apply: %q", w.calls)
	}
}

func TestFailingServiceKeepsItsObjects(t *testing.T) {
	for _, atomic := range []bool{true, false} {
		w := newWorld(t)
		w.atomic = atomic
		w.must(w.sync(pass, w.view("a", "g1=x", "f1=g1")))
		w.bad["g2"] = true
		moved := w.view("a", "g2=y", "f1=g2")
		w.mustFail(w.sync(sink.Changes{}, moved), "a")
		w.mustHave("f1=g1", "g1=x")
		// A restart does not prune them either.
		w.fake.objects["gStale"] = "z"
		w.restart()
		w.mustFail(w.sync(pass, moved, w.view("b", "k=b")), "a")
		w.mustHave("f1=g1", "g1=x", "gStale=z", "k=b")
		w.must(w.Verify(t.Context()))
		w.bad["g2"] = false
		w.must(w.sync(sink.Changes{}, moved))
		w.mustHave("f1=g2", "g2=y", "k=b")
	}
}

func TestDeletionOfAFailingServiceLeavesNothing(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k1=x", "k2=x")))
	w.bad["k3"] = true
	w.mustFail(w.sync(sink.Changes{}, w.view("a", "k3=x", "k4=x")), "a")
	w.must(w.sync(sink.Changes{}, "a"))
	w.mustHave()
}

func TestConflictingValues(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k=a"), w.view("b", "k=b")))
	w.mustHave("k=b")
	w.must(w.sync(sink.Changes{}, w.view("b")))
	w.mustHave("k=a")
}

func TestUnknownOutcomeStartsOver(t *testing.T) {
	w := newWorld(t)
	w.broken = 1
	a := w.view("a", "k1=a", "k2=a")
	if err := w.sync(pass, a); !errors.Is(err, errBroken) || !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("error %v", err)
	}
	if err := w.sync(sink.Changes{}, a); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("error %v", err)
	}
	if err := w.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("error %v", err)
	}
	w.broken = -1
	w.must(w.sync(pass, a))
	w.mustCall("k2=a")
}

func TestPlanErrorFailsOneService(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k1=a"), w.view("b", "k2=b")))
	w.mustFail(w.sync(sink.Changes{}, w.view("a", "unknown protocol"), w.view("b", "k2=b2")), "a")
	w.mustHave("k1=a", "k2=b2")
}

func TestLargeSyncIsDivided(t *testing.T) {
	w := newWorld(t)
	w.opts.MaxOps = 2
	w.restart()
	w.must(w.sync(pass, w.view("a", "k1=a"), w.view("b", "k2=b", "k3=b"), w.view("c", "k4=c", "k5=c", "k6=c"), w.view("d", "k7=d"), w.view("e", "k8=e"), w.view("f", "k9=f")))
	w.mustCall("k1=a", "k2=b k3=b", "k4=c k5=c k6=c", "k7=d k8=e", "k9=f")
}

func TestVerifyRepairsOnlyDifferences(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		var drifted []bool
		w.opts.Drifted = func(now bool) { drifted = append(drifted, now) }
		w.opts.Base = func(emit func(k, v string)) { emit("base", "1") }
		w.restart()
		w.must(w.sync(pass, w.view("a", "g1=x", "f1=g1"), w.view("b", "g2=x", "f2=g2"), w.view("c", "k=c")))
		w.calls = nil
		w.must(w.Verify(t.Context()))
		w.mustCall()
		delete(w.fake.objects, "f1")
		delete(w.fake.objects, "base")
		w.fake.objects["g2"] = "y"
		w.fake.objects["extra"] = "z"
		w.must(w.Verify(t.Context())) // during the pause
		w.mustCall()
		time.Sleep(5 * time.Second)
		w.must(w.Verify(t.Context()))
		w.mustHave("base=1", "f1=g1", "f2=g2", "g1=x", "g2=x", "k=c")
		if !slices.Equal(drifted, []bool{false, false, true, false}) || len(w.calls) != 2 {
			t.Errorf("drift %v, calls %q", drifted, w.calls)
		}
	})
}

func TestPauseGrowsWithTheCostAndWithRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.must(w.sync(pass, w.view("a", "k=a")))
		pause := func() time.Duration {
			begin, lists := time.Now(), 0
			w.listed = func() { lists++ }
			for lists == 0 {
				time.Sleep(100 * time.Millisecond)
				w.must(w.Verify(t.Context()))
			}
			return time.Since(begin).Round(time.Second)
		}
		pause()
		if d := pause(); d != 5*time.Second {
			t.Errorf("pause %v", d)
		}
		for _, want := range []int{5, 5, 10, 20, 40, 60, 60} {
			w.fake.objects["k"] = "other"
			if d := pause(); d != time.Duration(want)*time.Second {
				t.Errorf("pause %v, want %d s", d, want)
			}
		}
		w.listed = func() { time.Sleep(time.Second) }
		time.Sleep(time.Minute)
		w.must(w.Verify(t.Context()))
		if d := pause(); d != 51*time.Second && d != 50*time.Second {
			t.Errorf("pause %v after a comparison of one second", d)
		}
	})
}

func TestComparisonIgnoresTheThirdInterruption(t *testing.T) {
	w := newWorld(t)
	w.opts.VerifyInterval = -1
	w.restart()
	w.must(w.sync(pass, w.view("a", "k=a")))
	delete(w.fake.objects, "k")
	w.fake.objects["x"] = ""
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 {
		if err := w.Verify(ctx); !errors.Is(err, context.Canceled) {
			t.Fatalf("error %v", err)
		}
	}
	w.must(w.Verify(ctx))
	w.mustHave("k=a")
	if err := w.Verify(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v of the first interruption after a comparison", err)
	}
}

func TestCleanup(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass))
	w.fake.objects = map[string]string{"g1": "x", "f1": "g1"}
	w.must(w.reconciler.Cleanup(t.Context()))
	w.mustHave()
	w.mustStartOver(w.sync(sink.Changes{}, w.view("a", "k=a")))
}

// capable is a dataplane with optional methods.
type capable struct{ *fake }

func (capable) Start(context.Context) error     { return errBad }
func (capable) StopTimeout() time.Duration      { return time.Hour }
func (capable) VerifyInterval() time.Duration   { return time.Hour }
func (c capable) Cleanup(context.Context) error { c.objects["cleaned"] = "up"; return errBroken }

func TestOptionalMethodsOfTheDataplaneWork(t *testing.T) {
	w := newWorld(t)
	r := New(capable{w.fake}, Options[string, string]{})
	if s, ok := sink.As[sink.Starter](r); !ok || s.Start(t.Context()) != errBad {
		t.Error("Start is not that of the dataplane")
	}
	if s, ok := sink.As[interface{ StopTimeout() time.Duration }](r); !ok || s.StopTimeout() != time.Hour {
		t.Error("StopTimeout is not that of the dataplane")
	}
	if s, ok := sink.As[interface{ VerifyInterval() time.Duration }](r); !ok || s.VerifyInterval() != 5*time.Second {
		t.Error("VerifyInterval is not that of the Reconciler")
	}
	w.must(r.Sync(t.Context(), &sink.Changes{First: true, Last: true, Services: slices.Values[[]sink.Change](nil)}))
	if err := r.Cleanup(t.Context()); err != errBroken {
		t.Errorf("error %v, want the one of the dataplane's Cleanup", err)
	}
	w.mustHave("cleaned=up")
	w.mustStartOver(r.Sync(t.Context(), &sink.Changes{Services: slices.Values[[]sink.Change](nil)}))
}

func TestApplyMayChangeValues(t *testing.T) {
	w := newWorld(t)
	d := &digests{fake: w.fake}
	w.opts.Equal = func(is, want string) bool { return digest(is) == digest(want) }
	w.reconciler = New[string, string](d, w.opts).(*reconciler[string, string])
	w.must(w.sync(pass, w.view("a", "k1=x", "k2=xx")))
	w.must(w.sync(sink.Changes{}, w.view("a", "k1=x", "k2=xxx")))
	w.fake.objects["k1"] = "#7"
	w.must(w.Verify(t.Context()))
	w.mustHave("k1=#1", "k2=#3")
	w.must(w.sync(pass, w.view("a", "k1=x", "k2=xxx")))
	w.mustCall()
}

// digests is a dataplane that stores the length of a value instead of the value.
type digests struct{ *fake }

func (d *digests) Apply(ctx context.Context, ops []Op[string, string]) error {
	for i := range ops {
		if ops[i].New != nil {
			v := digest(*ops[i].New)
			ops[i].New = &v
		}
	}
	return d.fake.Apply(ctx, ops)
}

func digest(v string) string {
	if v[0] == '#' {
		return v
	}
	return fmt.Sprint("#", len(v))
}

func TestNewNeedsEqual(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("New accepts values that are not comparable")
		}
	}()
	New(Dataplane[string, []int](nil), Options[string, []int]{})
}

// TestServicesThatFailForLong checks that stale objects of other services wait at most
// ten minutes for a failing service.
func TestServicesThatFailForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.fake.objects = map[string]string{"g1": "x", "f1": "g1", "gStale": "y", "fStale": "gStale"}
		w.bad["g2"] = true
		w.mustFail(w.sync(pass, w.view("a", "g2=x", "f1=g2")), "a")
		time.Sleep(9 * time.Minute)
		w.must(w.Verify(t.Context()))
		w.mustHave("f1=g1", "fStale=gStale", "g1=x", "gStale=y")
		time.Sleep(time.Minute)
		w.must(w.sync(sink.Changes{}, w.view("b"))) // a change does not prune
		w.mustHave("f1=g1", "fStale=gStale", "g1=x", "gStale=y")
		w.must(w.Verify(t.Context()))
		w.mustHave("f1=g1", "g1=x", "gStale=y")
		w.bad["g2"] = false
		w.must(w.sync(sink.Changes{}, w.view("a", "g2=x", "f1=g2")))
		w.mustHave("f1=g2", "g2=x")
	})
}

// TestFailingServiceThatWasProgrammedDelaysNothing checks that a pass prunes stale
// objects although a service fails. The Reconciler knows the objects of this service.
func TestFailingServiceThatWasProgrammedDelaysNothing(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "f1=g1", "g1=x"), w.view("gone", "k=x")))
	w.fake.objects["extra"] = "y"
	w.bad["g2"] = true
	w.mustFail(w.sync(pass, w.view("a", "f1=g2", "g2=x")), "a")
	w.mustHave("f1=g1", "g1=x")
}

func TestSuspectShortensThePause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.must(w.sync(pass, w.view("a", "k=a")))
		w.must(w.Verify(t.Context()))
		delete(w.fake.objects, "k")
		w.must(w.Verify(t.Context()))
		w.mustHave()
		w.Suspect()
		w.unlisted = true
		if err := w.Verify(t.Context()); !errors.Is(err, errBroken) {
			t.Errorf("error %v", err)
		}
		w.unlisted = false
		w.must(w.Verify(t.Context())) // the dataplane is still suspect
		w.mustHave("k=a")
		delete(w.fake.objects, "k")
		w.Suspect()
		time.Sleep(time.Second)
		w.must(w.Verify(t.Context())) // Verify pauses after drift
		w.mustHave()
		time.Sleep(4 * time.Second)
		w.must(w.Verify(t.Context()))
		w.mustHave("k=a")
		time.Sleep(10 * time.Second)
		lists := 0
		w.listed = func() { lists++ }
		w.Suspect()
		w.must(w.Verify(t.Context()))
		w.must(w.Verify(t.Context())) // it is no longer suspect
		if lists != 1 {
			t.Errorf("compared %d times after one suspicion", lists)
		}
	})
}

// panics is a dataplane whose Apply panics.
type panics struct{ *fake }

func (panics) Apply(context.Context, []Op[string, string]) error { panic("no more memory") }

func TestPanicsMakeTheStateUnknown(t *testing.T) {
	w := newWorld(t)
	panicking := func(call func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Error("the call did not panic")
			}
		}()
		call()
	}
	w.must(w.sync(pass, w.view("a", "k=a")))
	for name, call := range map[string]func(){
		"Verify": func() { _ = w.Verify(t.Context()) },
		"pass":   func() { _ = w.sync(pass, w.view("a", "k=a")) },
	} {
		w.listed = func() { panic("no more memory") }
		panicking(call)
		w.listed = nil
		t.Log("List panics in", name)
		w.mustStartOver(w.sync(sink.Changes{}, "a"))
		w.must(w.sync(pass, w.view("a", "k=a")))
	}
	w.reconciler = New[string, string](panics{w.fake}, w.opts).(*reconciler[string, string])
	panicking(func() { _ = w.sync(pass, w.view("a", "k=b")) })
	w.mustStartOver(w.sync(sink.Changes{}, "a"))
}

func TestUnknownOutcomeOfARepairStartsOver(t *testing.T) {
	w := newWorld(t)
	w.opts.VerifyInterval = -1
	w.restart()
	w.must(w.sync(pass, w.view("a", "k=a")))
	delete(w.fake.objects, "k")
	w.broken = 0
	w.mustStartOver(w.Verify(t.Context()))
	w.mustStartOver(w.sync(sink.Changes{}, "a"))
	w.broken = -1
	w.must(w.sync(pass, w.view("a", "k=a")))
	w.fake.objects["extra"] = ""
	w.broken = 0 // for the deletion
	w.mustStartOver(w.Verify(t.Context()))
	w.mustStartOver(w.sync(sink.Changes{}, "a"))
}

// TestRepairWritesInOrder repairs missing flows and groups in several calls of Apply.
func TestRepairWritesInOrder(t *testing.T) {
	w := newWorld(t)
	w.opts.MaxOps = 4
	w.restart()
	var views []any
	for i := range 8 {
		views = append(views, w.view(fmt.Sprint("s", i), fmt.Sprintf("f%d=g%d", i, i), fmt.Sprintf("g%d=x", i)))
	}
	w.must(w.sync(pass, views...))
	clear(w.fake.objects)
	w.must(w.Verify(t.Context()))
	if len(w.fake.objects) != 16 || len(w.calls) != 8 {
		t.Errorf("objects %v after calls %v", w.fake.objects, w.calls)
	}
}

// startsOver is a dataplane with special errors: they name the failed operations, but
// also say that the state is unknown.
type startsOver struct{ *fake }

func (d startsOver) Apply(ctx context.Context, ops []Op[string, string]) error {
	if err := d.fake.Apply(ctx, ops); err != nil {
		return errors.Join(err, sink.ErrStartOver)
	}
	return nil
}

func TestStartOverPrevailsOverFailedOperations(t *testing.T) {
	w := newWorld(t)
	w.reconciler = New[string, string](startsOver{w.fake}, w.opts).(*reconciler[string, string])
	w.bad["k"] = true
	w.mustStartOver(w.sync(pass, w.view("a", "k=a")))
}

// TestDriftedIsCalledWithFalse checks that Drifted is called with false after a pass
// without failing services.
func TestDriftedIsCalledWithFalse(t *testing.T) {
	w := newWorld(t)
	var calls []bool
	w.opts.Drifted = func(now bool) { calls = append(calls, now) }
	w.restart()
	check := func(want ...bool) {
		t.Helper()
		if !slices.Equal(calls, want) {
			t.Errorf("calls %v, want %v", calls, want)
		}
		calls = nil
	}
	w.bad["g"] = true
	a, b := w.view("a", "g=a"), w.view("b", "k2=b")
	w.mustFail(w.sync(pass, a, b), "a")
	check()
	w.must(w.Verify(t.Context())) // the object that service a fails to set is no drift
	check()
	failing := sink.Changes{First: true, Last: true, Failing: []types.NamespacedName{key("c")}}
	w.mustFail(w.sync(failing, a, b), "a")
	check()
	w.bad["g"] = false
	w.must(w.sync(failing, a, b))
	check()
	w.must(w.sync(sink.Changes{}, b))
	check()
	w.must(w.sync(pass, a, b))
	check(false)
	w.must(w.sync(sink.Changes{}, a))
	check()
}

// TestStuckStaleObjectsAreNotRetriedWithEachChange checks that a change does not search
// for stale objects, because the search reads all objects.
func TestStuckStaleObjectsAreNotRetriedWithEachChange(t *testing.T) {
	w := newWorld(t)
	w.fake.objects["stale"] = ""
	w.stuck["stale"] = true
	w.must(w.sync(pass, w.view("a", "k=a")))
	w.mustCall("k=a", "-stale")
	w.must(w.sync(sink.Changes{}, w.view("a", "k=b")))
	w.mustCall("k=b")
	w.stuck["stale"] = false
	w.must(w.Verify(t.Context()))
	w.mustHave("k=b")
}

// TestDefaultOptions has no Depth: all objects are at depth 0, so an object that only a
// failing service needs is deleted.
func TestDefaultOptions(t *testing.T) {
	w := newWorld(t)
	w.opts = Options[string, string]{}
	w.restart()
	w.must(w.sync(pass, w.view("a", "k=a")))
	w.mustFail(w.sync(sink.Changes{}, w.view("b", "k=b", "error")), "b")
	w.must(w.sync(sink.Changes{}, w.view("c", "k=c")))
	w.must(w.sync(sink.Changes{}, "a"))
	w.must(w.sync(sink.Changes{}, "c"))
	w.mustHave()
}

// TestLastUsersOfAnObjectFail deletes a service. Afterwards, only a failing service needs
// its object.
func TestLastUsersOfAnObjectFail(t *testing.T) {
	for _, c := range []struct {
		name    string
		c, b    string
		then    []string
		missing bool
		want    []string
	}{
		{name: "flows and the like are deleted, because b sets its value when it succeeds", c: "k=c", b: "k=b"},
		{name: "groups stay, because b's flows may refer to them", c: "g=c", b: "g=b", want: []string{"g=c"}},
		{name: "an object with b's value is b's", c: "k=b", b: "k=b", want: []string{"k=b"}},
		{name: "b no longer needs the object, whose value is empty", c: "k=", b: "k=b", then: []string{"j=b", "error"}, want: []string{"j=b"}},
		{name: "the object does not exist", c: "k=c", b: "k=b", missing: true},
		{name: "the object does not exist, and b needs an empty value", c: "k=", b: "k=", missing: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.must(w.sync(pass))
			w.mustFail(w.sync(sink.Changes{}, w.view("b", c.b, "error")), "b")
			w.must(w.sync(sink.Changes{}, w.view("c", c.c)))
			if c.then != nil {
				w.mustFail(w.sync(sink.Changes{}, w.view("b", c.then...)), "b")
			}
			if c.missing {
				clear(w.fake.objects)
				w.must(w.sync(sink.Changes{First: true, Last: true, Failing: []types.NamespacedName{key("b")}}))
			} else {
				w.must(w.sync(sink.Changes{}, "c"))
			}
			w.mustHave(c.want...)
		})
	}
}

// TestOldObjectStaysOldWhenItChanges uses a stale flow that waits for the failing service
// b. The flow refers to a group. Another program changes this group, and service a
// releases it.
func TestOldObjectStaysOldWhenItChanges(t *testing.T) {
	w := newWorld(t)
	w.fake.objects = map[string]string{"g1": "x", "fStale": "g1"}
	w.bad["gB"] = true
	b := w.view("b", "gB=b")
	w.mustFail(w.sync(pass, w.view("a", "g1=x"), b), "b")
	w.fake.objects["g1"] = "y"
	w.must(w.Verify(t.Context()))
	w.mustHave("fStale=g1", "g1=x")
	w.must(w.sync(sink.Changes{}, "a"))
	w.mustHave("fStale=g1", "g1=x")
	w.bad["gB"] = false
	w.must(w.sync(sink.Changes{}, b))
	w.mustHave("gB=b")
}

// TestRepairedObjectBelongsToItsValue uses a failing owner b, so that the repair uses the
// value of another user.
func TestRepairedObjectBelongsToItsValue(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k=a")))
	w.mustFail(w.sync(sink.Changes{}, w.view("b", "k=b", "error")), "b")
	w.mustHave("k=b")
	delete(w.fake.objects, "k")
	w.must(w.Verify(t.Context()))
	w.mustHave("k=a")
	w.must(w.sync(sink.Changes{}, "a"))
	w.mustHave()
}

// TestInheritedObjectBelongsToItsValue is similar: service a inherits an object, because
// service b fails.
func TestInheritedObjectBelongsToItsValue(t *testing.T) {
	for _, failing := range []string{"b", "0"} { // in both orders of names
		w := newWorld(t)
		w.must(w.sync(pass, w.view("a", "k=a")))
		w.mustFail(w.sync(sink.Changes{}, w.view(failing, "k=b", "error")), failing)
		w.must(w.sync(sink.Changes{}, w.view("c", "k=c")))
		w.must(w.sync(sink.Changes{}, "c"))
		w.mustHave("k=a")
		w.must(w.sync(sink.Changes{}, "a"))
		w.mustHave()
	}
}

// TestHalfProgrammedServiceKeepsDeepObjects uses a group that could not be changed. So a
// flow refers to the old group.
func TestHalfProgrammedServiceKeepsDeepObjects(t *testing.T) {
	w := newWorld(t)
	w.fake.objects = map[string]string{"g1": "x"}
	w.bad["g1"], w.bad["g2"] = true, true
	w.mustFail(w.sync(pass, w.view("a", "g2=a"), w.view("b", "k=b")), "a")
	w.mustFail(w.sync(sink.Changes{}, w.view("b", "g1=y", "f1=g1")), "b")
	w.mustHave("f1=g1", "g1=x")
	w.bad["g2"] = false
	w.must(w.sync(sink.Changes{}, w.view("a", "g2=a")))
	w.mustHave("f1=g1", "g1=x", "g2=a")
}

// TestEmptyValues uses empty values. A missing object has the same value.
func TestEmptyValues(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k=")))
	delete(w.fake.objects, "k")
	w.must(w.sync(pass, w.view("a", "k=")))
	w.mustHave("k=")
	w.bad["g"] = true
	w.mustFail(w.sync(sink.Changes{}, w.view("b", "g=")), "b")
	w.fake.objects["g"] = ""
	w.Suspect()
	w.must(w.Verify(t.Context()))
	w.must(w.sync(sink.Changes{}, w.view("b", "g=")))
	w.mustHave("g=", "k=")
}

// TestFailingServicesAreNotStale uses a failing service. A pass does not deliver this
// service, because the driver delivers it alone.
func TestFailingServicesAreNotStale(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k=a")))
	last := sink.Changes{First: true, Last: true, Failing: []types.NamespacedName{key("a")}}
	w.must(w.sync(last, w.view("b", "k2=b")))
	w.mustHave("k2=b", "k=a")
	w.restart()
	w.must(w.sync(last, w.view("b", "k2=b")))
	w.mustHave("k2=b", "k=a")
	w.must(w.sync(sink.Changes{}, "a"))
	w.mustHave("k2=b")
}

// TestFailingServiceDoesNotOwnWhatAnotherServiceHasTaken deletes a service after it has
// taken an object of a failing service.
func TestFailingServiceDoesNotOwnWhatAnotherServiceHasTaken(t *testing.T) {
	w := newWorld(t)
	w.must(w.sync(pass, w.view("a", "k=a")))
	w.must(w.sync(sink.Changes{}, w.view("b", "k=b")))
	w.bad["k2"] = true
	w.mustFail(w.sync(sink.Changes{}, w.view("a", "k2=a")), "a")
	w.mustHave("k=b")
	w.must(w.sync(sink.Changes{}, "b"))
	w.mustHave()
}
