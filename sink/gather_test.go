// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// change makes n services, one after the other, and calls the function pause before each of
// them. Each Sync calls the function work. The results are the number of Syncs and the longest
// time until a service was programmed.
func change(t testing.TB, n int, opts sink.Options, pause, work func()) (syncs int, longest time.Duration) {
	var mu sync.Mutex
	made := map[types.NamespacedName]time.Time{}
	src := sinktest.NewSource()
	src.MarkSynced()
	d := sink.NewDriver(src, sink.Func(func(_ context.Context, c *sink.Changes) error {
		work()
		mu.Lock()
		defer mu.Unlock()
		syncs++
		for s := range c.Services {
			longest = max(longest, time.Since(made[s.Key]))
		}
		return nil
	}), opts)
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	if err := d.WaitSynced(ctx); err != nil {
		t.Fatal(err)
	}
	syncs = 0
	for i := range n {
		pause()
		key := types.NamespacedName{Namespace: "default", Name: fmt.Sprint("svc-", i)}
		mu.Lock()
		made[key] = time.Now()
		mu.Unlock()
		src.Set(view(key, 1))
	}
	if err := d.WaitApplied(ctx, src.Revision()); err != nil {
		t.Fatal(err)
	}
	cancel()
	<-ended
	return syncs, longest
}

// randomly returns a function that sleeps for a random time, so that it is called about rate
// times a second.
func randomly(rate int) func() {
	return func() { time.Sleep(time.Duration(rand.ExpFloat64() * float64(time.Second) / float64(rate))) }
}

// TestManyChangesAreGathered checks that the driver gathers frequent changes, and that
// a change waits for at most one pause and two Syncs.
func TestManyChangesAreGathered(t *testing.T) {
	const ms = time.Millisecond
	for _, tc := range []struct {
		name               string
		rate               int
		sync               time.Duration
		opts               sink.Options
		minSyncs, maxSyncs int // for 1,000 changes
		longest            time.Duration
	}{
		{"rare", 5, ms, sink.Options{}, 970, 1000, 7 * ms},
		{"200 a second", 200, 2 * ms, sink.Options{}, 450, 850, 6 * ms},
		{"2,000 a second", 2000, 2 * ms, sink.Options{}, 100, 160, 6 * ms},
		{"slow syncs", 200, 50 * ms, sink.Options{}, 50, 80, 120 * ms},
		{"an interval", 200, ms, sink.Options{MinInterval: time.Second}, 4, 8, 1002 * ms},
		{"no gathering", 200, 2 * ms, sink.Options{MinInterval: 1}, 650, 980, 4*ms + 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				syncs, longest := change(t, 1000, tc.opts, randomly(tc.rate), func() { time.Sleep(tc.sync) })
				if syncs < tc.minSyncs || syncs > tc.maxSyncs || longest > tc.longest {
					t.Errorf("%d Syncs, and a change waited for %v; want %d to %d, and at most %v", syncs, longest, tc.minSyncs, tc.maxSyncs, tc.longest)
				}
			})
		})
	}
}

// TestChangesOneAfterTheOtherAreNotGathered makes each change after the previous change
// was programmed.
func TestChangesOneAfterTheOtherAreNotGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		syncs, longest := change(t, 100, sink.Options{}, func() { time.Sleep(2 * time.Millisecond) }, func() { time.Sleep(2*time.Millisecond - 1) })
		if syncs != 100 || longest > 2*time.Millisecond {
			t.Errorf("%d Syncs, and a change waited for %v", syncs, longest)
		}
	})
}

// TestPausesAfterChangesAtTheSameTime makes each change immediately after the previous Sync.
// Each Sync takes 10 ms. Pauses begin after a Sync with two changes, or with one change while
// another change waits. A pause also follows each of the next 15 Syncs. No pause follows a
// pass.
func TestPausesAfterChangesAtTheSameTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const took = 10 * time.Millisecond
		var began time.Time
		src := sinktest.NewSource()
		src.Set(manyViews(10)...)
		src.MarkSynced()
		d := sink.NewDriver(src, sink.Func(func(context.Context, *sink.Changes) error {
			began = time.Now()
			time.Sleep(took)
			return nil
		}), sink.Options{})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		if err := d.WaitSynced(ctx); err != nil {
			t.Fatal(err)
		}
		n := byte(0)
		change := func(what string, want time.Duration, keys ...types.NamespacedName) {
			t.Helper()
			at := time.Now()
			n++
			var views []*api.View
			for _, k := range keys {
				views = append(views, view(k, n))
			}
			src.Set(views...)
			if err := d.WaitApplied(ctx, src.Revision()); err != nil {
				t.Fatal(err)
			}
			if got := began.Sub(at); got != want {
				t.Errorf("%s: the change waits for %v, want %v", what, got, want)
			}
		}
		change("after a pass", 0, web)
		change("after one change", 0, web, dns)
		for range 16 {
			change("after two changes at the same time", took, web)
		}
		change("after 16 single changes", 0, web)
		src.Set(view(web, n+1))
		synctest.Wait()
		n++
		change("during a Sync", 2*took, dns)
		cancel()
		<-ended
	})
}

// TestFirstChangeDoesNotWaitForTheInterval checks Options.MinInterval: the first change after a
// quiet time is delivered immediately, and the next changes together after the interval.
func TestFirstChangeDoesNotWaitForTheInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		waits := []time.Duration{time.Minute, 0, time.Millisecond, time.Millisecond}
		syncs, longest := change(t, len(waits), sink.Options{MinInterval: time.Second}, func() {
			synctest.Wait()
			time.Sleep(waits[0])
			waits = waits[1:]
		}, func() {})
		if syncs != 2 || longest != time.Second {
			t.Errorf("%d Syncs, and a change waited for %v; want 2 and 1s", syncs, longest)
		}
	})
}

// preparing is a sink that is prepared for a pass when ready is closed.
type preparing struct {
	sink.Func
	ready              chan struct{}
	panics             bool
	prepared, verified int // the numbers of calls
}

func (p *preparing) PreparePass(context.Context) <-chan struct{} {
	p.prepared++
	if p.panics {
		panic("no memory")
	}
	return p.ready
}

func (p *preparing) Verify(context.Context) error { p.verified++; return nil }

// TestPreparationOfAPass checks that a pass begins as soon as the sink is prepared, even in
// the minimum interval, and that the sink is not verified before the pass.
func TestPreparationOfAPass(t *testing.T) {
	s := &preparing{Func: func(context.Context, *sink.Changes) error { return nil }}
	runWith(t, sink.Options{MinInterval: time.Hour}, func(d *sink.Driver) { d.SetVerifyInterval(time.Second) }, s, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		s.ready = make(chan struct{})
		w.driver.StartOver()
		synctest.Wait()
		before := s.verified
		time.Sleep(2 * time.Hour)
		w.src.Set(view(web, 2))
		synctest.Wait()
		if s.verified != before || s.prepared != 1 || w.driver.Status().Passes != 1 || len(w.rec.Syncs()) != 2 {
			t.Errorf("before the pass: %d calls of Verify and %d of PreparePass, status %+v", s.verified-before, s.prepared, w.driver.Status())
		}
		close(s.ready)
		synctest.Wait()
		if w.driver.Status().Passes != 2 {
			t.Errorf("after the preparation: status %+v", w.driver.Status())
		}
		time.Sleep(time.Minute)
		s.panics = true // so there is no preparation
		w.driver.StartOver()
		synctest.Wait()
		if w.driver.Status().Passes != 3 || s.prepared != 2 {
			t.Errorf("after a panic of PreparePass: %d calls, status %+v", s.prepared, w.driver.Status())
		}
	})
}

// TestChangesBeforeAPassIsPrepared checks that the driver delivers changes until the sink is
// prepared for the pass that StartOver requests.
func TestChangesBeforeAPassIsPrepared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := sinktest.NewSource()
		src.MarkSynced()
		var syncs []string
		s := &preparing{ready: make(chan struct{})}
		s.Func = func(_ context.Context, c *sink.Changes) error {
			for range c.Services {
				syncs = append(syncs, fmt.Sprintf("first=%t", c.First))
			}
			return nil
		}
		d := sink.NewDriver(src, s, sink.Options{})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		synctest.Wait() // the first pass needs no preparation
		d.StartOver()
		synctest.Wait()
		for i := range 3 {
			src.Set(view(types.NamespacedName{Namespace: "default", Name: "web"}, byte(i+1)))
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if got := fmt.Sprint(syncs); got != "[first=false first=false first=false]" || d.Status().Passes != 1 {
			t.Errorf("before the pass: %s after %d passes", got, d.Status().Passes)
		}
		close(s.ready)
		synctest.Wait()
		if got := fmt.Sprint(syncs[3:]); got != "[first=true]" || d.Status().Passes != 2 {
			t.Errorf("after the preparation: %s, %d passes", got, d.Status().Passes)
		}
		s.ready = nil // the next pass needs no preparation
		d.StartOver()
		time.Sleep(time.Second)
		synctest.Wait()
		if got := fmt.Sprint(syncs[4:]); got != "[first=true]" || d.Status().Passes != 3 {
			t.Errorf("without a preparation: %s, %d passes", got, d.Status().Passes)
		}
		cancel()
		<-ended
	})
}

// The source loses changes during a pass. So the next pass does not wait for a preparation.
func TestPassAfterLostChangesIsNotPrepared(t *testing.T) {
	s := &preparing{ready: make(chan struct{})}
	s.Func = func(context.Context, *sink.Changes) error { return nil }
	run(t, sink.Options{}, s, func(w *world) {
		w.script.Add(sinkscript.Fail(errBusy))
		w.src.MarkSynced()
		synctest.Wait()
		w.src.Reset()
		time.Sleep(time.Second)
		synctest.Wait()
		if passes := w.driver.Status().Passes; passes != 2 || s.prepared != 0 {
			t.Errorf("%d passes after %d preparations, want 2 and none", passes, s.prepared)
		}
	})
}
