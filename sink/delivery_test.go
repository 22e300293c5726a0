// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// names returns the keys of n services named a, b, c and so on.
func names(n int) []types.NamespacedName {
	keys := make([]types.NamespacedName, n)
	for i := range keys {
		keys[i] = key(string(rune('a' + i)))
	}
	return keys
}

// panicking returns a sink that panics when it reads one of the given services.
func panicking(bad ...types.NamespacedName) sink.Sink {
	return sink.Func(func(_ context.Context, c *sink.Changes) error {
		for s := range c.Services {
			if slices.Contains(bad, s.Key) {
				panic("index out of range")
			}
		}
		return nil
	})
}

func TestPasses(t *testing.T) {
	slow := func(w *world) {
		w.script.Add(sinkscript.Repeat(20, func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
			time.Sleep(time.Second)
			return s.Sync(ctx, c)
		})...)
		w.src.MarkSynced()
		synctest.Wait()
	}
	cases := []struct {
		name string
		sink sink.Sink
		opts sink.Options
		test func(w *world)
		want []string
		// retry is the first wait of the backoff. Default: 100 ms.
		retry time.Duration
	}{{
		name: "BatchSize limits services and endpoints of a batch",
		test: func(w *world) { w.src.MarkSynced() },
		want: []string{"0s: first a none→[1] b none→[1]", "0s: c none→[1] unsure d none→[1] unsure", "0s: last e none→[1] unsure"},
	}, {
		name: "a larger service has its own batch",
		test: func(w *world) { w.src.Set(view(key("b"), 1, 2, 3, 4, 5)); w.src.MarkSynced() },
		want: []string{
			"0s: first a none→[1]", "0s: b none→[1 2 3 4 5] unsure",
			"0s: c none→[1] unsure d none→[1] unsure", "0s: last e none→[1] unsure",
		},
	}, {
		name: "the minimum interval does not delay a pass",
		opts: sink.Options{MinInterval: time.Minute},
		test: func(w *world) { w.src.MarkSynced(); w.waitApplied(); w.src.Set(view(key("a"), 2)) },
		want: []string{
			"0s: first a none→[1] b none→[1]", "0s: c none→[1] unsure d none→[1] unsure", "0s: last e none→[1] unsure",
			"1m0s: a [1]→[2]",
		},
	}, {
		name: "changes are delivered before the next batch, and the pass does not repeat them",
		test: func(w *world) {
			slow(w)
			w.src.Set(view(key("a"), 2), view(key("e"), 2))
			w.src.Delete(key("b"), key("d"))
			time.Sleep(1500 * time.Millisecond)
			w.src.Set(view(key("b"), 3), view(key("e"), 3))
		},
		want: []string{
			"0s: first a none→[1] b none→[1]",
			"1s: a [1]→[2] b [1]→none d none→none unsure e none→[2] unsure",
			"2s: last b none→[3] unsure c none→[1] unsure e [2]→[3]",
		},
	}, {
		name: "endless changes do not delay the pass",
		test: func(w *world) {
			slow(w)
			time.Sleep(time.Second / 2)
			for n := byte(2); n < 8; n++ {
				w.src.Set(view(key("a"), n))
				time.Sleep(time.Second)
			}
		},
		want: []string{
			"0s: first a none→[1] b none→[1]", "1s: a [1]→[2]", "2s: a [2]→[3] c none→[1] unsure",
			"3s: a [3]→[4]", "4s: a [4]→[5] d none→[1] unsure", "5s: a [5]→[6]", "6s: last a [6]→[7] e none→[1] unsure",
		},
	}, {
		name: "changes that exceed a batch are left to the pass",
		test: func(w *world) {
			slow(w)
			w.src.Set(view(key("c"), 2), view(key("d"), 2), view(key("e"), 2))
		},
		want: []string{
			"0s: first a none→[1] b none→[1]", "1s: c none→[2] unsure d none→[2] unsure", "2s: last e none→[2] unsure",
		},
	}, {
		name: "a pass continues when the source has lost the position, and another one follows",
		test: func(w *world) {
			slow(w)
			time.Sleep(1500 * time.Millisecond)
			w.src.Delete(key("a"))
			w.src.Reset()
		},
		want: []string{
			"0s: first a none→[1] b none→[1]", "1s: c none→[1] unsure d none→[1] unsure", "2s: last e none→[1] unsure",
			"3s: first b none→[1] c none→[1]", "4s: last d none→[1] unsure e none→[1] unsure",
		},
	}, {
		name: "a pass continues after StartOver without old views, and another one follows",
		test: func(w *world) {
			slow(w)
			time.Sleep(1500 * time.Millisecond)
			w.driver.StartOver()
			w.src.Set(view(key("a"), 2))
		},
		want: []string{
			"0s: first a none→[1] b none→[1]", "1s: c none→[1] unsure d none→[1] unsure", "2s: a none→[2] unsure",
			"3s: last e none→[1] unsure", "4s: first a none→[2] b none→[1]", "5s: c none→[1] unsure d none→[1] unsure",
			"6s: last e none→[1] unsure",
		},
	}, {
		name:  "StartOver before the first Sync of a pass requests no further pass",
		retry: time.Second,
		test: func(w *world) {
			w.script.Add(sinkscript.Fail(sink.ErrStartOver))
			w.src.MarkSynced()
			time.Sleep(time.Second / 2)
			w.driver.StartOver()
		},
		want: []string{
			"0s: first a none→[1] b none→[1]: sink starts over", "500ms: first a none→[1] b none→[1]",
			"500ms: c none→[1] unsure d none→[1] unsure", "500ms: last e none→[1] unsure",
		},
	}, {
		name: "the node changes during a pass",
		test: func(w *world) {
			slow(w)
			w.src.SetNode(&api.Node{Name: "n1"})
		},
		want: []string{
			"0s: first a none→[1] b none→[1]", "1s: c none→[1] unsure d none→[1] unsure node", "2s: last e none→[1] unsure",
		},
	}, {
		name: "the end of a pass names failed services",
		test: func(w *world) {
			w.script.Add(sinkscript.FailServices(errBusy, key("a")), sinkscript.FailServices(errBusy, key("d")))
			w.src.MarkSynced()
		},
		want: []string{
			"0s: first a none→[1] b none→[1]: service default/a: dataplane is busy",
			"0s: c none→[1] unsure d none→[1] unsure: service default/d: dataplane is busy",
			"0s: last e none→[1] unsure failing [default/a default/d]",
			"100ms: a none→[1] unsure d none→[1] unsure",
		},
	}, {
		name: "a service that makes Sync panic is found and isolated",
		sink: panicking(key("c")),
		test: func(w *world) {
			w.src.MarkSynced()
			time.Sleep(time.Second)
			w.src.Set(view(key("a"), 2), view(key("c"), 2))
			time.Sleep(100 * time.Millisecond)
			w.src.Set(view(key("a"), 3))
		},
		want: []string{
			"0s: first a none→[1] b none→[1]",
			"0s: c none→[1] unsure d none→[1] unsure: sink panicked",
			"100ms: c none→[1] unsure d none→[1] unsure: sink panicked",
			"200ms: c none→[1] unsure: sink panicked",
			"300ms: d none→[1] unsure",
			"300ms: c none→[1] unsure: sink panicked",
			"300ms: last e none→[1] unsure failing [default/c]",
			"500ms: c none→[1] unsure: sink panicked",
			"900ms: c none→[1] unsure: sink panicked",
			"1s: a [1]→[2]",
			"1s: c none→[2] unsure: sink panicked",
			"1.1s: a [2]→[3]",
		},
	}}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			tc.opts.BatchSize = 4
			runWith(t, tc.opts, backoff(cmp.Or(tc.retry, 100*time.Millisecond), 30*time.Second), tc.sink, func(w *world) {
				w.src.Delete(web)
				for _, k := range names(5) {
					w.src.Set(view(k, 1))
				}
				tc.test(w)
				synctest.Wait()
				if tc.sink == nil {
					w.waitApplied()
				}
				w.expectDelivered(0, tc.want...)
			})
		})
	}
}

// slowSink programs a dataplane that needs time for each service.
type slowSink struct {
	pass     sink.Pass
	mu       sync.Mutex
	services map[types.NamespacedName]*api.View
	perSync  func()
}

func (s *slowSink) Sync(ctx context.Context, c *sink.Changes) error {
	s.pass.Begin(c)
	for ch := range c.Services {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
		s.mu.Lock()
		if ch.New == nil {
			delete(s.services, ch.Key)
		} else {
			s.services[ch.Key] = ch.New
		}
		s.mu.Unlock()
	}
	if s.perSync != nil {
		s.perSync()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.services {
		if s.pass.Stale(key) {
			delete(s.services, key)
		}
	}
	return nil
}

// get returns the view that the sink has programmed for a service.
func (s *slowSink) get(key types.NamespacedName) *api.View {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.services[key]
}

// A pass takes more than four minutes: 50 ms for each of 5,000 services.
func TestPassOfASlowSink(t *testing.T) {
	const stale = 100
	views := manyViews(5000)
	for i, v := range views {
		views[i] = view(v.Key(), 1, 2, 3, 4, 5, 6, 7, 8, 9)
	}
	s := &slowSink{services: map[types.NamespacedName]*api.View{}}
	for i := range stale { // add services of an earlier process
		k := key(fmt.Sprint("stale-", i))
		s.services[k] = view(k, 1)
	}
	staleLeft := func() (n int) {
		for k := range s.services {
			if k.Name[0] == 's' && len(k.Name) > 4 {
				n++
			}
		}
		return n
	}

	t.Run("it is killed in the middle", func(t *testing.T) {
		run(t, sink.Options{}, s, func(w *world) {
			w.src.Delete(web)
			w.src.Set(views...)
			w.src.MarkSynced()
			time.Sleep(2 * time.Minute)
		})
		if n := len(s.services); n < 2000 || n > 3000 {
			t.Errorf("%d services in the middle of the pass", n)
		}
	})
	t.Run("it starts again", func(t *testing.T) {
		run(t, sink.Options{}, s, func(w *world) {
			s.perSync = func() {
				if n := staleLeft(); w.driver.Status().Passes == 0 && n != stale {
					t.Errorf("%d stale services remain before the pass is complete", n)
				}
			}
			w.src.Delete(web)
			w.src.Set(views[50:]...)
			w.src.MarkSynced()
			const batch = 1000 * 50 * time.Millisecond
			first := views[50].Key()
			var changed time.Time
			for w.driver.Status().Passes == 0 {
				time.Sleep(time.Second)
				if stuck := w.driver.Status().StuckFor(time.Now()); stuck > time.Second {
					t.Fatalf("the sink looks stuck for %v", stuck)
				}
				if changed.IsZero() && time.Since(w.start) > 70*time.Second { // the sink is programming the second batch
					changed = time.Now()
					w.src.Set(view(first, 7))
				}
				if !changed.IsZero() && len(s.get(first).Endpoints) != 1 && time.Since(changed) > batch+time.Second {
					t.Fatalf("the change of a delivered service is not programmed after %v", time.Since(changed))
				}
			}
			w.waitApplied()
			if n := staleLeft(); n != 0 || len(s.services) != len(views)-50 {
				t.Errorf("%d services after the pass, %d of them stale", len(s.services), n)
			}
		})
	})
}

// The sink hangs while it programs the service web.
func TestSinkHangingInOneServiceIsStuck(t *testing.T) {
	var hang chan struct{}
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		for s := range c.Services {
			if s.Key == web {
				<-hang
			}
			time.Sleep(time.Minute)
		}
		return nil
	})
	run(t, sink.Options{}, s, func(w *world) {
		hang = make(chan struct{})
		w.src.Set(view(key("a")), view(key("b")), view(key("c")))
		w.src.MarkSynced()
		time.Sleep(170 * time.Second)
		if stuck := w.driver.Status().StuckFor(time.Now()); stuck > time.Minute {
			t.Errorf("a sink that makes progress looks stuck for %v", stuck)
		}
		time.Sleep(10 * time.Minute)
		if stuck := w.driver.Status().StuckFor(time.Now()); stuck < 9*time.Minute {
			t.Errorf("a sink that hangs looks stuck for %v", stuck)
		}
		close(hang)
		w.waitApplied()
		if stuck := w.driver.Status().StuckFor(time.Now()); stuck != 0 {
			t.Errorf("afterwards the sink looks stuck for %v", stuck)
		}
	})
}

// Every Sync fails. The driver soon stops its search for a service that is the cause, and
// the sink counts as stuck.
func TestFailingDataplaneIsRetriedWithBackoff(t *testing.T) {
	calls := 0
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		calls++
		for range c.Services {
		}
		return errBusy
	})
	run(t, sink.Options{}, s, func(w *world) {
		w.src.Set(manyViews(10_000)...)
		w.src.MarkSynced()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if calls > 60 {
			t.Errorf("%d calls in ten minutes", calls)
		}
		if stuck := w.driver.Status().StuckFor(time.Now()); stuck < 9*time.Minute {
			t.Errorf("the sink looks stuck only for %v", stuck)
		}
	})
}

// Only one service of ten thousand makes Sync panic.
func TestOneServiceOfManyMakesSyncPanic(t *testing.T) {
	views := manyViews(10_000)
	bad := views[7_777].Key()
	programmed := map[types.NamespacedName]bool{}
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		for s := range c.Services {
			if s.Key == bad {
				panic("index out of range")
			}
			programmed[s.Key] = true
		}
		return nil
	})
	run(t, sink.Options{}, s, func(w *world) {
		w.src.Delete(web)
		w.src.Set(views...)
		w.src.MarkSynced()
		if err := w.driver.WaitSynced(w.Context()); err != nil {
			t.Fatal(err)
		}
		t.Logf("the pass took %v and %d syncs", time.Since(w.start), len(w.rec.Syncs()))
		if took := time.Since(w.start); took > 10*time.Second {
			t.Errorf("the pass took %v", took)
		}
		if len(programmed) != len(views)-1 {
			t.Errorf("%d services of %d are programmed", len(programmed), len(views))
		}
		failures := 0
		for range 5 {
			status := w.driver.Status()
			if len(status.Failing) != 1 || status.Failing[0].Key != bad || status.Failing[0].Failures <= failures || status.Pending != 1 {
				t.Fatalf("after %d failures the status is %+v", failures, status)
			}
			failing := status.Failing[0]
			failures = failing.Failures
			time.Sleep(time.Until(failing.NextRetry))
			synctest.Wait()
		}
		before := len(w.rec.Syncs())
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if n := len(w.rec.Syncs()) - before; n > 30 {
			t.Errorf("the service was delivered %d times in ten minutes", n)
		}
		w.src.Set(view(views[0].Key(), 9))
		synctest.Wait()
		last := w.rec.Syncs()[len(w.rec.Syncs())-1]
		if services := slices.Collect(last.Services); len(services) != 1 || services[0].Key != views[0].Key() || last.Err != nil {
			t.Errorf("a change of another service: %+v", last)
		}
	})
}

// Many services make Sync panic. All other services must be programmed.
func TestManyServicesMakeSyncPanic(t *testing.T) {
	views := manyViews(2_000)
	var bad []types.NamespacedName
	for i, v := range views {
		if i%100 == 3 {
			bad = append(bad, v.Key())
		}
	}
	run(t, sink.Options{}, panicking(bad...), func(w *world) {
		w.src.Delete(web)
		w.src.Set(views...)
		w.src.MarkSynced()
		if err := w.driver.WaitSynced(w.Context()); err != nil {
			t.Fatal(err)
		}
		t.Logf("the pass took %v and %d syncs", time.Since(w.start), len(w.rec.Syncs()))
		if n := len(w.driver.Status().Failing); n != len(bad) || len(w.rec.Views()) != len(views)-len(bad) {
			t.Errorf("%d services fail and %d are programmed, of %d", n, len(w.rec.Views()), len(views))
		}
	})
}

// One service makes Sync panic. Services that change later must not be delayed.
func TestOnePanicDoesNotHoldUpLaterChanges(t *testing.T) {
	run(t, sink.Options{}, panicking(key("poison")), func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.Set(view(key("poison")))
		time.Sleep(time.Minute)
		w.src.Set(view(key("z")))
		synctest.Wait()
		if views := w.rec.Views(); len(views) != 2 || views[1].Key() != key("z") {
			t.Errorf("the sink has %v", views)
		}
	})
}

// The sink reports that p, q and r failed. But q and r never exist, and p exists only at
// times.
func TestFailuresOfUnknownServicesEnd(t *testing.T) {
	s := sink.Func(func(context.Context, *sink.Changes) error {
		if time.Now().Second()%3 == 0 {
			return nil
		}
		return (&sink.Failed{key("p"): errBusy, key("q"): errBusy, key("r"): errBusy}).Err()
	})
	run(t, sink.Options{}, s, func(w *world) {
		w.src.MarkSynced()
		for i := range 50 {
			time.Sleep(time.Second)
			if i%2 == 0 {
				w.src.Set(view(key("p")))
			} else {
				w.src.Delete(key("p"))
			}
		}
		time.Sleep(5 * time.Minute)
		if s := w.driver.Status(); s.Pending != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// If the sink fails to prune a service at the end of a pass, WaitApplied has to wait.
func TestWaitAppliedWaitsForPrune(t *testing.T) {
	run(t, sink.Options{BatchSize: 2}, nil, func(w *world) {
		w.src.Set(view(dns, 1))
		w.script.Add(sinkscript.FailServices(nil), sinkscript.FailServices(errBusy, key("stale")))
		w.src.MarkSynced()
		w.waitApplied()
		w.expectDelivered(0, "0s: first dns none→[1]", "0s: last web none→[1] unsure: service default/stale: dataplane is busy",
			"100ms: stale none→none unsure")
	})
}

func TestStartOver(t *testing.T) {
	t.Run("begins a pass during any wait of the driver", func(t *testing.T) {
		runWith(t, sink.Options{MinInterval: time.Hour}, backoff(time.Hour, time.Hour), nil, func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			time.Sleep(time.Minute)
			w.driver.StartOver() // during the minimum interval
			w.waitApplied()
			w.script.Add(sinkscript.Fail(errBusy))
			time.Sleep(time.Hour)
			w.src.Set(view(web, 2))
			time.Sleep(time.Minute)
			w.driver.StartOver() // during the backoff
			w.waitApplied()
			w.expectDelivered(0, "0s: full web none→[1]", "1m0s: full web none→[1]",
				"1h1m0s: web [1]→[2]: dataplane is busy", "1h2m0s: full web none→[2]")
		})
	})
	t.Run("during a Sync begins a pass after it", func(t *testing.T) {
		run(t, sink.Options{}, nil, func(w *world) {
			release := make(chan struct{})
			w.script.Add(sinkscript.Block(release))
			w.src.MarkSynced()
			time.Sleep(time.Second)
			w.driver.StartOver()
			close(release)
			w.waitApplied()
			w.expectDelivered(0, "0s: full web none→[1]", "1s: full web none→[1]")
		})
	})
	t.Run("interrupts Verify", func(t *testing.T) {
		s := &stages{verify: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
		runWith(t, sink.Options{}, everyMinute, s, func(w *world) {
			w.src.MarkSynced()
			time.Sleep(90 * time.Second)
			w.driver.StartOver()
			w.waitApplied()
			w.expectDelivered(0, "0s: full web none→[1]", "1m30s: full web none→[1]")
		})
	})
	t.Run("has no effect before Run and before the source has synced", func(t *testing.T) {
		run(t, sink.Options{}, nil, func(w *world) {
			w.driver.StartOver()
			synctest.Wait()
			w.src.MarkSynced()
			w.waitApplied()
			w.expectDelivered(0, "0s: full web none→[1]")
		})
	})
}

// A pass takes 10 s, and StartOver is called each second.
func TestPassesEndUnderAnyRateOfStartOver(t *testing.T) {
	delivered := map[types.NamespacedName]int{}
	slow := sink.Func(func(ctx context.Context, c *sink.Changes) error {
		for s := range c.Services {
			delivered[s.Key]++
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
		return nil
	})
	run(t, sink.Options{BatchSize: 20}, slow, func(w *world) {
		w.src.Delete(web)
		w.src.Set(manyViews(100)...)
		w.src.MarkSynced()
		synctest.Wait()
		w.driver.StartOver()
		waits := make(chan error)
		before := w.src.Revision()
		go func() { waits <- w.driver.WaitSynced(w.Context()) }()
		go func() { waits <- w.driver.WaitApplied(w.Context(), before) }()
		for range 600 {
			time.Sleep(time.Second)
			w.driver.StartOver()
			if n := w.driver.Status().Passes; n == 2 && waits != nil {
				for range 2 {
					if err := <-waits; err != nil {
						t.Error(err)
					}
				}
				waits = nil
			}
		}
		synctest.Wait()
		if s := w.driver.Status(); s.Passes < 55 || waits != nil || len(delivered) != 100 {
			t.Errorf("%d passes in ten minutes, %d services, waits ended: %t", s.Passes, len(delivered), waits == nil)
		}
	})
}

// An update changes two failing services. Both are in one Sync, whatever the size of a batch.
func TestFailingServicesThatChangeTogether(t *testing.T) {
	run(t, sink.Options{BatchSize: 1}, nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		skip := len(w.rec.Syncs())
		w.script.Add(sinkscript.FailServices(errBusy, web, dns))
		w.src.Set(view(web, 2), view(dns, 2))
		synctest.Wait()
		w.src.Set(view(web, 3), view(dns, 3))
		w.waitApplied()
		w.expectDelivered(skip,
			"0s: dns none→[2] web [1]→[2]: service default/dns: dataplane is busy; service default/web: dataplane is busy",
			"0s: dns none→[3] unsure web [1]→[3] unsure")
	})
}

// BatchSize limits the retries in one Sync; the earliest come first. A failing service that has
// changed since its failure does not count as a retry.
func TestRetriesAreLimitedByBatchSize(t *testing.T) {
	a, b, c, d, e := key("a"), key("b"), key("c"), key("d"), key("e")
	run(t, sink.Options{BatchSize: 5}, nil, func(w *world) { // two services with an endpoint, not three
		w.src.MarkSynced()
		w.waitApplied()
		skip := len(w.rec.Syncs())
		w.script.Add(sinkscript.FailServices(errBusy, a, b, c, d, e))
		w.src.Set(view(a, 1), view(b, 1), view(c, 1), view(d), view(e, 1))
		synctest.Wait()
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		w.src.Set(view(web, 2))
		synctest.Wait()
		w.src.Set(view(e, 2))
		time.Sleep(200 * time.Millisecond)
		close(release)
		w.waitApplied()
		busy := func(name string) string { return "service default/" + name + ": dataplane is busy" }
		w.expectDelivered(skip,
			"0s: a none→[1] b none→[1] c none→[1] d none→[] e none→[1]: "+
				strings.Join([]string{busy("a"), busy("b"), busy("c"), busy("d"), busy("e")}, "; "),
			"0s: web [1]→[2]",
			"200ms: a none→[1] unsure b none→[1] unsure e none→[2] unsure",
			"200ms: c none→[1] unsure d none→[] unsure")
	})
}

// A service appears and disappears during a search. It is never delivered, and its
// changes are no fault of the source.
func TestServiceThatDisappearsDuringASearch(t *testing.T) {
	a, b, z := key("a"), key("b"), key("z")
	run(t, sink.Options{}, panicking(a), func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		skip := len(w.rec.Syncs())
		waitForSyncs := func(n int) {
			for len(w.rec.Syncs()) < skip+n {
				time.Sleep(time.Millisecond)
				synctest.Wait()
			}
		}
		w.src.Set(view(a, 1), view(b, 1))
		waitForSyncs(2)
		w.src.Set(view(z, 1))
		waitForSyncs(3)
		w.src.Delete(z)
		waitForSyncs(4)
		status := w.driver.Status()
		if len(status.PendingServices) != 1 || status.PendingServices[0] != a {
			t.Errorf("pending services: %v", status.PendingServices)
		}
		if status.Err != nil {
			t.Error(status.Err)
		}
		for _, line := range w.logged() {
			if strings.Contains(line, "No update") {
				t.Error(line)
			}
		}
		if got := w.delivered(skip); strings.Contains(got, " z ") {
			t.Errorf("the service was delivered:\n%s", got)
		}
	})
}

// A pass does not begin with an isolated service, which may fail again.
func TestIsolatedServiceDoesNotBeginAPass(t *testing.T) {
	poison := key("poison")
	run(t, sink.Options{}, panicking(poison), func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.Set(view(poison, 1))
		time.Sleep(time.Minute)
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		w.src.Set(view(web, 2))
		time.Sleep(time.Minute) // the isolated service is due
		skip := len(w.rec.Syncs())
		w.driver.StartOver()
		close(release)
		synctest.Wait()
		w.expectDelivered(skip,
			"1m0s: web [1]→[2]",
			"2m0s: full web none→[2] failing [default/poison]",
			"2m0s: poison none→[1] unsure: sink panicked")
	})
}

// If a Sync of a search fails, it is not repeated: the next Sync has half of its services. The
// search ends when the faulty service is found, or when StartOver is called.
func TestSearchHalvesBatches(t *testing.T) {
	all := []*api.View{view(key("a"), 1), view(key("b"), 1), view(key("c"), 1), view(key("d"), 1)}
	broken := false
	plane := sink.Func(func(_ context.Context, c *sink.Changes) (err error) {
		for s := range c.Services {
			if broken && s.Key == key("d") {
				err = errBusy
			}
		}
		return err
	})
	searches := func(t *testing.T, test func(w *world)) {
		broken = false
		run(t, sink.Options{}, plane, func(w *world) {
			w.src.Delete(web)
			w.src.MarkSynced()
			w.waitApplied()
			broken = true
			w.src.Set(all...)
			test(w)
		})
	}
	t.Run("search", func(t *testing.T) {
		searches(t, func(w *world) {
			time.Sleep(700 * time.Millisecond)
			w.expectDelivered(1, "0s: a none→[1] b none→[1] c none→[1] d none→[1]: dataplane is busy",
				"100ms: a none→[1] unsure b none→[1] unsure c none→[1] unsure d none→[1] unsure: dataplane is busy",
				"200ms: a none→[1] unsure b none→[1] unsure",
				"200ms: c none→[1] unsure d none→[1] unsure: dataplane is busy",
				"300ms: c none→[1] unsure",
				"300ms: d none→[1] unsure: dataplane is busy",
				"400ms: d none→[1] unsure: dataplane is busy",
				"600ms: d none→[1] unsure: dataplane is busy")
		})
	})
	t.Run("later changes are in one Sync", func(t *testing.T) {
		searches(t, func(w *world) {
			time.Sleep(700 * time.Millisecond)
			syncs := len(w.rec.Syncs())
			w.src.Set(view(key("a"), 2), view(key("b"), 2))
			synctest.Wait()
			w.expectDelivered(syncs, "700ms: a [1]→[2] b [1]→[2]")
		})
	})
	t.Run("StartOver", func(t *testing.T) {
		searches(t, func(w *world) {
			time.Sleep(150 * time.Millisecond)
			w.driver.StartOver()
			synctest.Wait()
			w.expectDelivered(1, "0s: a none→[1] b none→[1] c none→[1] d none→[1]: dataplane is busy",
				"100ms: a none→[1] unsure b none→[1] unsure c none→[1] unsure d none→[1] unsure: dataplane is busy",
				"150ms: full a none→[1] b none→[1] c none→[1] d none→[1]: dataplane is busy")
		})
	})
}

// A service fails. Then another pass replaces a pass that has not reached the service. The
// backoff of the service continues to grow.
func TestBackoffOfServiceGrowsThroughIncompletePasses(t *testing.T) {
	run(t, sink.Options{BatchSize: 1}, nil, func(w *world) {
		w.src.Set(view(key("a"), 1))
		w.src.MarkSynced()
		w.waitApplied()
		w.script.Add(sinkscript.Repeat(3, sinkscript.FailServices(errBusy, web))...)
		w.src.Set(view(web, 2))
		time.Sleep(500 * time.Millisecond)
		if failing := w.driver.Status().Failing; len(failing) != 1 || failing[0].Failures != 3 {
			t.Fatalf("failing: %v", failing)
		}
		w.script.Add(sinkscript.Fail(sink.ErrStartOver), sinkscript.FailServices(errBusy), sinkscript.FailServices(errBusy, web))
		w.driver.StartOver()
		time.Sleep(500 * time.Millisecond)
		if failing := w.driver.Status().Failing; len(failing) != 1 || failing[0].Failures != 4 {
			t.Errorf("failing: %v\n%s", failing, w.delivered(0))
		}
	})
}

// While the driver searches for a faulty service, changes of other services wait. So the
// search does not take longer.
func TestChangesDuringASearch(t *testing.T) {
	run(t, sink.Options{}, panicking(key("b")), func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		skip := len(w.rec.Syncs())
		w.src.Set(view(key("a"), 1), view(key("b"), 1), view(key("c"), 1), view(key("d"), 1))
		synctest.Wait()
		time.Sleep(150 * time.Millisecond) // the batch failed twice
		w.src.Set(view(key("z"), 1))
		time.Sleep(time.Second)
		synctest.Wait()
		for _, s := range w.rec.Syncs()[skip+2:] {
			n := 0
			for range s.Services {
				n++
			}
			if n > 2 {
				t.Errorf("a Sync of the search has %d services", n)
			}
		}
		if _, ok := w.viewOf(key("z")); !ok || len(w.rec.Views()) != 5 {
			t.Errorf("the sink has %v", w.rec.Views())
		}
	})
}

func (w *world) viewOf(key types.NamespacedName) (*api.View, bool) {
	i, ok := slices.BinarySearchFunc(w.rec.Views(), key, func(v *api.View, key types.NamespacedName) int { return ordering.Keys(v.Key(), key) })
	if !ok {
		return nil, false
	}
	return w.rec.Views()[i], true
}

// A service changes at the moment when an isolated service is due.
func TestChangeWhenAnIsolatedServiceIsDue(t *testing.T) {
	poison := key("poison")
	run(t, sink.Options{}, panicking(poison), func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.Set(view(poison))
		time.Sleep(time.Minute)
		for n := range byte(20) {
			due := w.driver.Status().Failing[0].NextRetry
			time.Sleep(time.Until(due))
			w.src.Set(view(web, n+2))
			synctest.Wait()
			if v, _ := w.viewOf(web); describe(v) != fmt.Sprint([]byte{n + 2}) {
				t.Errorf("the sink has %s, want endpoint %d", describe(v), n+2)
			}
		}
	})
}

// Many isolated services work again, and each of their Syncs takes a second. A change waits
// for at most one of these Syncs.
func TestChangesComeBetweenIsolatedServices(t *testing.T) {
	var broken atomic.Bool
	broken.Store(true)
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		for s := range c.Services {
			if s.Key != web && broken.Load() {
				return errBusy
			}
		}
		if !broken.Load() {
			time.Sleep(time.Second)
		}
		return nil
	})
	run(t, sink.Options{}, s, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.Set(manyViews(12)...)
		time.Sleep(5 * time.Minute)
		if n := len(w.driver.Status().Failing); n != 12 {
			t.Fatalf("%d services are failing", n)
		}
		broken.Store(false)
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		w.src.Set(view(web, 2))
		time.Sleep(5 * time.Minute) // all isolated services are due
		close(release)
		time.Sleep(1500 * time.Millisecond)
		for n := byte(3); n < 7; n++ {
			w.src.Set(view(web, n))
			time.Sleep(2*time.Second + time.Millisecond)
			synctest.Wait()
			if v, _ := w.viewOf(web); describe(v) != fmt.Sprint([]byte{n}) {
				t.Errorf("after two seconds, the sink has %s, want endpoint %d", describe(v), n)
			}
			if len(w.driver.Status().Failing) == 0 {
				t.Error("no isolated service waits, so this test cannot fail")
			}
		}
		w.waitApplied()
	})
}

// Changes of services do not repeat a refused Node. Only the first successful Sync after a
// failure repeats it, because the dataplane may have been the cause.
func TestChangesDoNotRepeatARefusedNode(t *testing.T) {
	var nodes atomic.Int32
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		if c.Node != nil {
			nodes.Add(1)
			return errBusy
		}
		return nil
	})
	runWith(t, sink.Options{}, backoff(time.Minute, time.Hour), s, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.SetNode(&api.Node{Name: "n"})
		time.Sleep(20 * time.Minute)
		before := nodes.Load()
		for n := range byte(10) {
			w.src.Set(view(web, n+2))
			synctest.Wait()
		}
		if after := nodes.Load(); after > before+1 {
			t.Errorf("%d further attempts", after-before)
		}
	})
}

// A sink starts over in each second Sync of a pass.
func TestStartOverInPassesIsLimited(t *testing.T) {
	var calls atomic.Int32
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		if calls.Add(1); !c.First {
			return sink.ErrStartOver
		}
		return nil
	})
	run(t, sink.Options{BatchSize: 1}, s, func(w *world) {
		w.src.Set(manyViews(3)...)
		w.src.MarkSynced()
		time.Sleep(10 * time.Minute)
		if n := calls.Load(); n < 20 || n > 80 {
			t.Errorf("%d Syncs in ten minutes", n)
		}
	})
}

// A Sync that hangs in a pass counts as stuck, even if nothing has changed.
func TestSinkHangingInAPassIsStuck(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		time.Sleep(time.Minute)
		w.driver.StartOver()
		time.Sleep(time.Minute)
		if stuck := w.driver.Status().StuckFor(time.Now()); stuck != time.Minute {
			t.Errorf("stuck for %v, want a minute", stuck)
		}
		close(release)
		w.waitApplied()
		if stuck := w.driver.Status().StuckFor(time.Now()); stuck != 0 {
			t.Errorf("stuck for %v after the Sync", stuck)
		}
	})
}

func TestSyncsHaveTheRevision(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		w.src.MarkSynced()
		for i := range byte(3) {
			w.src.Set(view(web, i+2))
			w.waitApplied()
			if got := w.rec.Syncs()[len(w.rec.Syncs())-1].Revision; got != w.src.Revision() {
				t.Errorf("a Sync has revision %d, want %d", got, w.src.Revision())
			}
		}
	})
}

// A second pass is requested while a pass runs. If a wait began earlier, it ends
// with the first pass. The second pass does not wait for MinInterval.
func TestWaitAppliedEndsWithItsPass(t *testing.T) {
	run(t, sink.Options{MinInterval: time.Minute}, nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		time.Sleep(time.Minute)
		first, second := make(chan struct{}), make(chan struct{})
		w.script.Add(sinkscript.Block(first), sinkscript.Block(second))
		w.driver.StartOver()
		waited := make(chan error, 1)
		go func() { waited <- w.driver.WaitApplied(w.Context(), w.src.Revision()) }()
		synctest.Wait()
		w.driver.StartOver()
		close(first)
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		if s := w.driver.Status(); len(waited) != 1 || s.Passes != 2 || s.SyncingSince.IsZero() {
			t.Errorf("ended: %t, %d passes, the second one runs: %t", len(waited) == 1, s.Passes, !s.SyncingSince.IsZero())
		}
		close(second)
	})
}

// A sink reports a failure of a service that the pass has not reached. The retry delivers it,
// and the pass does not deliver it again.
func TestFailureOfAServiceThatThePassHasNotReached(t *testing.T) {
	run(t, sink.Options{BatchSize: 1}, nil, func(w *world) {
		w.src.Delete(web)
		w.src.Set(view(key("a"), 1), view(key("b"), 1), view(key("c"), 1), view(key("d"), 1))
		w.script.Add(sinkscript.FailServices(errBusy, key("c")), func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
			time.Sleep(time.Second)
			return s.Sync(ctx, c)
		})
		w.src.MarkSynced()
		w.waitApplied()
		w.expectDelivered(0, "0s: first a none→[1]: service default/c: dataplane is busy", "0s: b none→[1] unsure", "1s: last c none→[1] unsure d none→[1] unsure")
	})
}

// A Sync fails as a whole, and its changes are acknowledged later. A service that changes after
// the failure delays only the later revision.
func TestRevisionAfterAFailedSync(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.script.Add(sinkscript.Fail(errBusy), sinkscript.FailServices(errBusy, dns))
		w.src.Set(view(web, 2))
		revision := w.src.Revision()
		synctest.Wait()
		w.src.Set(view(dns, 1))
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		if s := w.driver.Status(); s.Revision != revision || len(s.Failing) != 1 {
			t.Errorf("revision %d, want %d; failing %v", s.Revision, revision, s.Failing)
		}
	})
}

// The dataplane fails for an hour while there are several isolated services. Together they
// make one attempt in each interval of the backoff.
func TestIsolatedServicesWaitTogether(t *testing.T) {
	broken := false
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		if broken {
			return errBusy
		}
		return nil
	})
	run(t, sink.Options{}, s, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		broken = true
		w.src.Set(manyViews(12)...)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		before := len(w.rec.Syncs())
		time.Sleep(50 * time.Minute)
		synctest.Wait()
		s := w.driver.Status()
		if n := len(w.rec.Syncs()) - before; n < 90 || n > 101 || len(s.Failing) != 12 || s.Err == nil {
			t.Errorf("%d attempts, %d services are failing, error %v", n, len(s.Failing), s.Err)
		}
	})
}

// The Node, or the end of a pass, makes Syncs with one service fail. The service is not isolated.
func TestServiceIsNotIsolatedBecauseOfOtherCauses(t *testing.T) {
	for name, fails := range map[string]func(c *sink.Changes) bool{
		"the Node":          func(c *sink.Changes) bool { return c.Node != nil },
		"the end of a pass": func(c *sink.Changes) bool { return c.Last },
	} {
		t.Run(name, func(t *testing.T) {
			broken := false
			s := sink.Func(func(_ context.Context, c *sink.Changes) error {
				if broken && fails(c) {
					return errBusy
				}
				return nil
			})
			run(t, sink.Options{BatchSize: 1}, s, func(w *world) {
				w.src.Set(view(dns, 1))
				w.src.MarkSynced()
				w.waitApplied()
				w.script.Add(func(context.Context, *sink.Changes, sink.Sink) error {
					broken = true
					w.src.SetNode(&api.Node{Name: "n"})
					w.src.Set(view(web, 2))
					return nil
				})
				w.src.Set(view(dns, 2))
				synctest.Wait()
				w.driver.StartOver()
				for range 100 {
					time.Sleep(10 * time.Millisecond)
					synctest.Wait()
					if failing := w.driver.Status().Failing; len(failing) > 0 {
						t.Fatalf("failing: %v", failing)
					}
				}
				if s := w.driver.Status(); s.Pending > 0 || s.Err == nil && s.NodeErr == nil {
					t.Errorf("status %+v", s)
				}
			})
		})
	}
}

// Services change when a refused Node is due. They are delivered after the Node.
func TestChangeWhenARefusedNodeIsDue(t *testing.T) {
	run(t, sink.Options{}, refusesNode, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.SetNode(&api.Node{Name: "n"})
		time.Sleep(time.Minute)
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		w.src.Set(view(web, 2))
		time.Sleep(time.Minute)
		w.src.Set(view(dns, 1))
		before := len(w.rec.Syncs())
		close(release)
		synctest.Wait()
		if v, _ := w.viewOf(dns); describe(v) != "[1]" || len(w.rec.Syncs()) != before+3 {
			t.Errorf("dns has %s after %d Syncs", describe(v), len(w.rec.Syncs())-before)
		}
	})
}

// A Sync has changes and at least one retry, even if the retry is larger than BatchSize.
func TestChangesDoNotDelayALargerRetry(t *testing.T) {
	run(t, sink.Options{BatchSize: 1}, nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		skip := len(w.rec.Syncs())
		release := make(chan struct{})
		w.script.Add(sinkscript.FailServices(errBusy, dns), sinkscript.Block(release))
		w.src.Set(view(dns, 1))
		synctest.Wait()
		w.src.Set(view(web, 2))
		time.Sleep(200 * time.Millisecond)
		w.src.Set(view(web, 3))
		close(release)
		w.waitApplied()
		w.expectDelivered(skip, "0s: dns none→[1]: service default/dns: dataplane is busy", "0s: web [1]→[2]", "200ms: dns none→[1] unsure web [2]→[3]")
	})
}

// The sink refuses the Node, and later a Sync fails once. The retry of this Sync does not wait
// for the retry of the Node. If the end of a pass fails, that is no failure of the Node.
func TestRefusedNodeBesideOtherFailures(t *testing.T) {
	errNode := errors.New("cannot use this node")
	lastFails := false
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		switch {
		case c.Node != nil:
			return errNode
		case c.Last && lastFails:
			return errBusy
		}
		return nil
	})
	runWith(t, sink.Options{}, backoff(time.Minute, time.Hour), s, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.SetNode(&api.Node{Name: "n"})
		time.Sleep(20 * time.Minute)
		w.src.Set(view(web, 2)) // ends the failures in a row
		time.Sleep(5 * time.Minute)
		w.script.Add(sinkscript.Fail(errBusy))
		w.src.Set(view(web, 3))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if v, _ := w.viewOf(web); describe(v) != "[3]" {
			t.Errorf("web has %s", describe(v))
		}
		lastFails = true
		w.driver.StartOver()
		for range 60 {
			time.Sleep(time.Minute)
			synctest.Wait()
			if err := w.driver.Status().NodeErr; !errors.Is(err, errNode) {
				t.Fatalf("the error of the Node is %v", err)
			}
		}
		if w.driver.Status().Passes != 1 {
			t.Error("the pass has ended")
		}
	})
}

// A service and the Node change in one update, and the service makes Syncs fail.
func TestNodeIsNotRefusedBecauseOfAService(t *testing.T) {
	poison := key("poison")
	run(t, sink.Options{}, panicking(poison), func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.script.Add(func(context.Context, *sink.Changes, sink.Sink) error {
			w.src.SetNode(&api.Node{Name: "n"})
			w.src.Set(view(poison, 1), view(dns, 1))
			return nil
		})
		w.src.Set(view(web, 2))
		for range 100 {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			if err := w.driver.Status().NodeErr; err != nil {
				t.Fatal(err)
			}
		}
		if v, _ := w.viewOf(dns); describe(v) != "[1]" || !w.rec.Node().Equal(w.src.Node()) {
			t.Errorf("dns has %s, node %v", describe(v), w.rec.Node())
		}
	})
}

// Each time that a sink starts over, the backoff begins again.
func TestStartOverAfterACompletePassIsNotDelayed(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		for n := range byte(8) {
			w.script.Add(sinkscript.Fail(sink.ErrStartOver))
			begin := time.Now()
			w.src.Set(view(web, n+2))
			w.waitApplied()
			if took := time.Since(begin); took > 100*time.Millisecond {
				t.Errorf("a change is applied after %v", took)
			}
			time.Sleep(time.Hour)
		}
	})
}

// A sink that calls StartOver in each Sync gets about ten passes in a second.
func TestStartOverInEachSyncIsLimited(t *testing.T) {
	for _, err := range []error{nil, errBusy} {
		t.Run(fmt.Sprint(err), func(t *testing.T) {
			var w *world
			calls := 0
			s := sink.Func(func(context.Context, *sink.Changes) error {
				calls++
				w.driver.StartOver()
				return err
			})
			run(t, sink.Options{}, s, func(started *world) {
				w = started
				w.src.MarkSynced()
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if calls < 5 || calls > 110 {
					t.Errorf("%d calls in ten seconds", calls)
				}
			})
		})
	}
}

func TestWaitSyncedWaitsForTheRequestedPass(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release), sinkscript.FailServices(errBusy, web))
		w.src.Set(view(dns))
		synctest.Wait()
		w.driver.StartOver()
		waited := make(chan error, 1)
		go func() { waited <- w.driver.WaitSynced(w.Context()) }()
		time.Sleep(time.Minute)
		if len(waited) > 0 {
			t.Error("WaitSynced returned before the requested pass")
		}
		close(release)
		if err := <-waited; err != nil {
			t.Error(err)
		}
		w.expectDelivered(1, "0s: dns none→[]", "1m0s: full dns none→[] web none→[1]: service default/web: dataplane is busy")
	})
}

func TestWaitSyncedDoesNotWaitForServicesThatFail(t *testing.T) {
	runWith(t, sink.Options{}, backoff(time.Hour, time.Hour), nil, func(w *world) {
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		if err := w.driver.WaitSynced(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("before the first pass: %v", err)
		}
		w.script.Add(sinkscript.FailServices(errBusy, web))
		w.src.MarkSynced()
		if err := w.driver.WaitSynced(w.Context()); err != nil {
			t.Error(err)
		}
		ctx, cancel = context.WithTimeout(w.Context(), time.Minute)
		defer cancel()
		if err := w.driver.WaitApplied(ctx, w.src.Revision()); err == nil {
			t.Error("a service that fails does not hold up WaitApplied")
		}
	})
}

// brokenSource signals changes although nothing changes. If panics is true, Next panics.
type brokenSource struct {
	sink.Source
	calls int
	next  func() (*updates.Update, error) // used after the first call; if nil, Source.Next is used
}

func (s *brokenSource) Changed() <-chan struct{} {
	changed := make(chan struct{})
	close(changed)
	return changed
}

func (s *brokenSource) Next() (*updates.Update, error) {
	s.calls++
	if s.next != nil && s.calls > 1 {
		return s.next()
	}
	return s.Source.Next()
}

func TestFailedSourceIsRetriedWithBackoff(t *testing.T) {
	for _, c := range []struct {
		name  string
		next  func() (*updates.Update, error)
		error string
	}{
		{"the same update again", nil, "get update from source: source signals a change but its update is empty"},
		{"no update", func() (*updates.Update, error) { return nil, nil }, "get update from source: source signals a change but returns no update"},
		{"error", func() (*updates.Update, error) { return nil, errBusy }, "get update from source: " + errBusy.Error()},
		{"panic", func() (*updates.Update, error) { panic("oops") }, "get update from source: panic in source: oops"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				src := &brokenSource{Source: sinktest.NewSource(), next: c.next}
				src.Source.(*sinktest.Source).MarkSynced()
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
				d := sink.NewDriver(src, sinktest.NewRecorder(t, nil), sink.Options{})
				ended := make(chan error)
				go func() { ended <- d.Run(ctx) }()
				time.Sleep(10 * time.Minute)
				synctest.Wait()
				if src.calls > 50 {
					t.Errorf("the source was read %d times in ten minutes", src.calls)
				}
				if err := fmt.Sprint(d.Status().Err); err != c.error {
					t.Errorf("error %q, want %q", err, c.error)
				}
				cancel()
				<-ended
			})
		})
	}
}

// A claim moves from a failing service to another service. After that, the old view of
// the failing service must not be delivered, because this view still has the claim.
func TestOldNamesNoClaimOfAnotherService(t *testing.T) {
	a, b := key("a"), key("b")
	run(t, sink.Options{}, nil, func(w *world) {
		w.src.Delete(web)
		w.src.Set(withIP(1, view(a, 1)))
		w.src.MarkSynced()
		w.waitApplied()
		w.script.Add(sinkscript.FailServices(errBusy, a))
		w.src.Set(withIP(2, view(a, 2)))
		synctest.Wait()
		w.src.Set(withIP(1, view(b, 3)))
		w.waitApplied()
		w.expectDelivered(0, "0s: full a none→[1]", "0s: a [1]→[2]: service default/a: dataplane is busy",
			"0s: b none→[3]", "100ms: a none→[2] unsure")
	})
}
