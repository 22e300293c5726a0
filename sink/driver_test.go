// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

var (
	errBusy = errors.New("dataplane is busy")
	web     = key("web")
	dns     = key("dns")
)

func key(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

// view returns a view of the service with this key. Each number n in endpoints stands for
// an endpoint 10.0.0.n.
func view(key types.NamespacedName, endpoints ...byte) *api.View {
	words := ""
	for _, n := range endpoints {
		words += fmt.Sprint(" 10.0.0.", n)
	}
	svc := sinktest.Service(key.String(), "80>8080")
	svc.IPFamilies = []api.Family{api.IPv4}
	return sinktest.View(nil, svc, words)
}

// world is a running driver with its source and a recorder.
type world struct {
	*testing.T
	src    *sinkscript.Source
	script *sinkscript.Sink // between rec and the sink
	rec    *sinktest.Recorder
	driver *sink.Driver
	start  time.Time
	cancel context.CancelFunc
	ended  chan error

	mu  sync.Mutex
	log []string
}

// logged returns the lines of the log since the last call, without levels.
func (w *world) logged() []string {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	lines := w.log
	w.log = nil
	return lines
}

// run starts a driver in a synctest bubble, with the options opts and the sink s, and
// then calls test. The sink may be nil. The source has the service web with endpoint 1,
// and is not synced. There is no jitter and no Verify.
func run(t *testing.T, opts sink.Options, s sink.Sink, test func(w *world)) {
	t.Helper()
	runWith(t, opts, func(*sink.Driver) {}, s, test)
}

// runWith is like run, but first calls configure, which may change the driver.
func runWith(t *testing.T, opts sink.Options, configure func(*sink.Driver), s sink.Sink, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t, start: time.Now(), src: sinkscript.NewSource(), ended: make(chan error, 1)}
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), funcr.New(func(_, args string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			_, line, _ := strings.Cut(args, `"msg"=`)
			w.log = append(w.log, line)
		}, funcr.Options{Verbosity: 4})))
		script := sinkscript.New(s)
		w.script, w.rec, w.cancel = script, sinktest.NewRecorder(t, script), cancel
		w.src.Set(view(web, 1))
		w.driver = sink.NewDriver(w.src, w.rec, opts)
		w.driver.SetVerifyInterval(-1)
		w.driver.SetImmediate()
		backoff(100*time.Millisecond, 30*time.Second)(w.driver)
		configure(w.driver)
		go func() { w.ended <- w.driver.Run(ctx) }()
		synctest.Wait()
		test(w)
		cancel()
		synctest.Wait()
	})
}

// backoff returns a function that sets the backoff of a driver, without jitter.
func backoff(initial, max time.Duration) func(*sink.Driver) {
	return func(d *sink.Driver) { d.SetBackoff(sink.Backoff{Initial: initial, Max: max}) }
}

// everyMinute makes a driver call Verify each minute.
func everyMinute(d *sink.Driver) { d.SetVerifyInterval(time.Minute) }

// refusesNode is a sink that fails each Sync with a Node.
var refusesNode = sink.Func(func(_ context.Context, c *sink.Changes) error {
	if c.Node != nil {
		return errBusy
	}
	return nil
})

// waitApplied waits until the sink has acknowledged the source's state.
func (w *world) waitApplied() {
	w.Helper()
	if err := w.driver.WaitApplied(w.Context(), w.src.Revision()); err != nil {
		w.Fatal(err)
	}
	if diff := cmp.Diff(w.src.Views(), w.rec.Views(), compare...); diff != "" {
		w.Errorf("the applied state differs from the source (-source +applied):\n%s", diff)
	}
}

// delivered describes the recorded Syncs in one line each. It omits the oldest Syncs; the
// argument skip is the number of these Syncs.
func (w *world) delivered(skip int) string {
	var b strings.Builder
	times := w.script.Times()[skip:]
	for i, s := range w.rec.Syncs()[skip:] {
		fmt.Fprintf(&b, "%v:", times[i].Began.Sub(w.start))
		switch {
		case s.First && s.Last:
			b.WriteString(" full")
		case s.First:
			b.WriteString(" first")
		case s.Last:
			b.WriteString(" last")
		}
		for c := range s.Services {
			fmt.Fprintf(&b, " %s %s→%s", c.Key.Name, describe(c.Old), describe(c.New))
			if c.Unsure && !s.First {
				b.WriteString(" unsure")
			}
		}
		if len(s.Failing) > 0 {
			fmt.Fprintf(&b, " failing %v", s.Failing)
		}
		if s.NodeChanged && !s.First {
			b.WriteString(" node")
		}
		if s.Err != nil {
			fmt.Fprintf(&b, ": %v", s.Err)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// describe returns the last byte of the address of each endpoint.
func describe(v *api.View) string {
	if v == nil {
		return "none"
	}
	var n []byte
	for _, e := range v.Endpoints {
		n = append(n, e.Addr.AsSlice()[3])
	}
	return fmt.Sprint(n)
}

func (w *world) expectDelivered(skip int, lines ...string) {
	w.Helper()
	want := strings.Join(lines, "\n") + "\n"
	if diff := cmp.Diff(want, w.delivered(skip)); diff != "" {
		w.Errorf("deliveries differ (-want +got):\n%s", diff)
	}
}

var compare = []cmp.Option{cmp.Comparer(func(a, b *api.View) bool { return a.Equal(b) })}

func TestDriver(t *testing.T) {
	failing := func(keys ...types.NamespacedName) sinkscript.Step { return sinkscript.FailServices(errBusy, keys...) }
	cases := []struct {
		name string
		opts sink.Options
		test func(w *world)
		want []string
	}{{
		name: "nothing is delivered before the source has synced",
		test: func(w *world) { time.Sleep(time.Hour) },
	}, {
		name: "a pass comes first",
		test: func(w *world) { w.src.Set(view(dns)); w.src.MarkSynced() },
		want: []string{"0s: full dns none→[] web none→[1]"},
	}, {
		name: "a cluster without services gets a pass too",
		test: func(w *world) { w.src.Delete(web); w.src.MarkSynced() },
		want: []string{"0s: full"},
	}, {
		name: "a change is delivered with the old view",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.src.Set(view(web, 1, 2))
		},
		want: []string{"0s: full web none→[1]", "0s: web [1]→[1 2]"},
	}, {
		name: "the minimum interval counts from the end of a sync",
		opts: sink.Options{MinInterval: time.Second},
		test: func(w *world) {
			release := make(chan struct{})
			w.script.Add(sinkscript.Block(release))
			w.src.MarkSynced()
			time.Sleep(10 * time.Second)
			w.src.Set(view(web, 2))
			close(release)
			time.Sleep(time.Second / 2)
			w.src.Set(view(dns))
		},
		want: []string{"0s: full web none→[1]", "11s: dns none→[] web [1]→[2]"},
	}, {
		name: "after a slow Sync, one Sync has all changes, each service once",
		test: func(w *world) {
			release := make(chan struct{})
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(sinkscript.Block(release))
			for n := byte(2); n <= 11; n++ {
				w.src.Set(view(web, n), view(dns, n))
				time.Sleep(time.Second)
			}
			w.src.Set(view(key("api"), 1))
			w.src.Delete(key("api"))
			w.src.Delete(dns)
			close(release)
		},
		want: []string{"0s: full web none→[1]", "0s: dns none→[2] web [1]→[2]", "10s: dns [2]→none web [2]→[11]"},
	}, {
		name: "a failed pass is retried with backoff",
		test: func(w *world) {
			w.script.Add(sinkscript.Repeat(3, sinkscript.Fail(errBusy))...)
			w.src.MarkSynced()
		},
		want: []string{
			"0s: full web none→[1]: dataplane is busy", "100ms: full web none→[1]: dataplane is busy",
			"300ms: first: dataplane is busy", "700ms: first", "700ms: web none→[1] unsure", "700ms: last",
		},
	}, {
		name: "services of a failed Sync are delivered again, merged with later changes",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(sinkscript.Repeat(2, sinkscript.Fail(errBusy))...)
			w.src.Set(view(web, 2), view(key("x")))
			synctest.Wait()
			w.src.Set(view(web, 3), view(dns))
			w.src.Delete(key("x"))
		},
		want: []string{
			"0s: full web none→[1]", "0s: web [1]→[2] x none→[]: dataplane is busy",
			"100ms: dns none→[] web [1]→[3] unsure x none→none unsure: dataplane is busy",
			"200ms: dns none→[] unsure", "200ms: web [1]→[3] unsure x none→none unsure",
		},
	}, {
		name: "a panic is an error",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(sinkscript.Panic("oops"))
			w.src.Set(view(web, 2))
		},
		want: []string{"0s: full web none→[1]", "0s: web [1]→[2]: sink panicked", "100ms: web [1]→[2] unsure"},
	}, {
		name: "each failed service is retried with its own backoff",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(failing(dns), failing(dns, web))
			w.src.Set(view(dns))
			synctest.Wait()
			time.Sleep(50 * time.Millisecond)
			w.src.Set(view(dns, 2), view(web, 2), view(key("x")))
		},
		want: []string{
			"0s: full web none→[1]", "0s: dns none→[]: service default/dns: dataplane is busy",
			"50ms: dns none→[2] unsure web [1]→[2] x none→[]: service default/dns: dataplane is busy; service default/web: dataplane is busy",
			"150ms: web [1]→[2] unsure", "250ms: dns none→[2] unsure",
		},
	}, {
		name: "a failed service in a failed Sync is delivered in the next one",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(failing(web), failing(web), failing(web), sinkscript.Fail(errBusy))
			for n := byte(2); n < 6; n++ {
				w.src.Set(view(web, n))
				synctest.Wait()
			}
		},
		want: []string{
			"0s: full web none→[1]", "0s: web [1]→[2]: service default/web: dataplane is busy",
			"0s: web [1]→[3] unsure: service default/web: dataplane is busy",
			"0s: web [1]→[4] unsure: service default/web: dataplane is busy",
			"0s: web [1]→[5] unsure: dataplane is busy", "100ms: web [1]→[5] unsure",
		},
	}, {
		name: "a failed and deleted service is deleted",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(failing(dns, web))
			w.src.Set(view(dns), view(web, 2))
			synctest.Wait()
			w.src.Delete(dns, web)
		},
		want: []string{
			"0s: full web none→[1]",
			"0s: dns none→[] web [1]→[2]: service default/dns: dataplane is busy; service default/web: dataplane is busy",
			"0s: dns none→none unsure web [1]→none unsure",
		},
	}, {
		name: "a failed service with its old view again is delivered as unsure",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(failing(web))
			w.src.Set(view(web, 2))
			synctest.Wait()
			w.src.Set(view(web, 1))
		},
		want: []string{
			"0s: full web none→[1]", "0s: web [1]→[2]: service default/web: dataplane is busy", "0s: web [1]→[1] unsure",
		},
	}, {
		name: "services that fail in a pass are pending without an old view",
		test: func(w *world) {
			w.script.Add(failing(web))
			w.src.Set(view(dns))
			w.src.MarkSynced()
		},
		want: []string{
			"0s: full dns none→[] web none→[1]: service default/web: dataplane is busy", "100ms: web none→[1] unsure",
		},
	}, {
		name: "a service that a pass failed to prune is deleted",
		test: func(w *world) {
			w.script.Add(failing(key("stale")))
			w.src.MarkSynced()
		},
		want: []string{
			"0s: full web none→[1]: service default/stale: dataplane is busy", "100ms: stale none→none unsure",
		},
	}, {
		name: "a failed service that was not delivered is delivered",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(failing(web))
			w.src.Set(view(dns))
		},
		want: []string{
			"0s: full web none→[1]", "0s: dns none→[]: service default/web: dataplane is busy", "100ms: web [1]→[1] unsure",
		},
	}, {
		name: "a reader with an old position gets a pass that includes pending services",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(failing(web))
			w.src.Set(view(web, 2))
			synctest.Wait()
			w.src.Reset()
			time.Sleep(time.Minute)
			w.src.Set(view(web, 3))
		},
		want: []string{
			"0s: full web none→[1]", "0s: web [1]→[2]: service default/web: dataplane is busy",
			"0s: full web none→[2]", "1m0s: web [2]→[3]",
		},
	}, {
		name: "a sink that starts over gets a pass after a backoff",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(failing(dns), sinkscript.Fail(fmt.Errorf("lost track: %w", sink.ErrStartOver)))
			w.src.Set(view(dns))
			synctest.Wait()
			w.src.Set(view(web, 2))
		},
		want: []string{
			"0s: full web none→[1]", "0s: dns none→[]: service default/dns: dataplane is busy",
			"0s: web [1]→[2]: lost track: sink starts over", "100ms: full dns none→[] web none→[2]",
		},
	}, {
		name: "ErrStartOver counts even in the error of one service",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(sinkscript.FailServices(sink.ErrStartOver, web))
			w.src.Set(view(web, 2))
		},
		want: []string{
			"0s: full web none→[1]", "0s: web [1]→[2]: service default/web: sink starts over", "100ms: full web none→[2]",
		},
	}, {
		name: "changes that cancel each other out are not delivered",
		opts: sink.Options{MinInterval: time.Second},
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.src.Set(view(web, 2), view(dns))
			w.src.Set(view(web, 1))
			w.src.Delete(dns)
			w.waitApplied()
		},
		want: []string{"0s: full web none→[1]"},
	}, {
		name: "a changed node is delivered, and again after a failure",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(sinkscript.Fail(errBusy))
			w.src.SetNode(&api.Node{Name: "n1"})
		},
		want: []string{"0s: full web none→[1]", "0s: node: dataplane is busy", "100ms: node"},
	}, {
		name: "the node is acknowledged even if services fail",
		// One Sync delivers both changes.
		opts: sink.Options{MinInterval: time.Second},
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(failing(web))
			w.src.SetNode(&api.Node{Name: "n1"})
			w.src.Set(view(web, 2))
		},
		want: []string{
			"0s: full web none→[1]", "1s: web [1]→[2] node: service default/web: dataplane is busy", "2s: web [1]→[2] unsure",
		},
	}, {
		name: "a failed source is read again",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.src.Fail(errors.New("bad stream"))
			w.src.Set(view(web, 2))
			synctest.Wait()
			w.src.Fail(nil)
		},
		want: []string{"0s: full web none→[1]", "100ms: web [1]→[2]"},
	}, {
		name: "an empty Failed acknowledges everything",
		test: func(w *world) {
			w.script.Add(sinkscript.Fail(&sink.Failed{}))
			w.src.MarkSynced()
		},
		want: []string{"0s: full web none→[1]: "},
	}}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			run(t, tc.opts, nil, func(w *world) {
				tc.test(w)
				synctest.Wait()
				if len(tc.want) == 0 {
					if got := w.delivered(0); got != "" {
						w.Errorf("deliveries:\n%s", got)
					}
					return
				}
				w.waitApplied()
				w.expectDelivered(0, tc.want...)
				if s := w.driver.Status(); !s.WaitingSince.IsZero() || s.Err != nil {
					w.Errorf("nothing waits, but the status is %+v", s)
				}
			})
		})
	}
}

// When a failing service changes, it is delivered immediately. If it fails again, its
// backoff still grows.
func TestBackoffOfServiceGrowsThroughChanges(t *testing.T) {
	broken := sink.Func(func(_ context.Context, c *sink.Changes) error {
		var failed sink.Failed
		for s := range c.Services {
			if s.Key == web {
				failed.Add(web, errBusy)
			}
		}
		return failed.Err()
	})
	runWith(t, sink.Options{}, backoff(time.Second, 5*time.Second), broken, func(w *world) {
		w.src.MarkSynced()
		for n := byte(2); n < 5; n++ {
			synctest.Wait()
			w.src.Set(view(web, n))
		}
		synctest.Wait()
		got := w.driver.Status().Failing
		want := []sink.FailingService{{Key: web, Err: errBusy, Failures: 4, NextRetry: w.start.Add(5 * time.Second)}}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b error) bool { return a == b })); diff != "" {
			w.Errorf("failing services (-want +got):\n%s", diff)
		}
	})
}

// Failures of a service in a pass also count for its backoff.
func TestBackoffOfServiceGrowsThroughFullSyncs(t *testing.T) {
	runWith(t, sink.Options{}, backoff(time.Minute, time.Hour), nil, func(w *world) {
		w.script.Add(sinkscript.Repeat(3, sinkscript.FailServices(errBusy, web))...)
		w.src.MarkSynced()
		for range 2 {
			synctest.Wait()
			w.src.Reset()
		}
		w.waitApplied()
		w.expectDelivered(3, "4m0s: web none→[1] unsure")
	})
}

// A service fails, works in a pass, and fails again later in the same pass. Only the failure
// after the success counts.
func TestBackoffOfServiceBeginsAgainWithinAPass(t *testing.T) {
	a, b := key("a"), key("b")
	run(t, sink.Options{BatchSize: 1}, nil, func(w *world) {
		w.src.Delete(web)
		w.src.Set(view(a, 1), view(b, 1), view(key("c"), 1))
		w.src.MarkSynced()
		w.waitApplied()
		w.script.Add(sinkscript.Repeat(5, sinkscript.FailServices(errBusy, a))...)
		w.src.Set(view(a, 2))
		time.Sleep(2 * time.Second)
		if failing := w.driver.Status().Failing; len(failing) != 1 || failing[0].Failures != 5 {
			t.Fatalf("failing: %v", failing)
		}
		release := make(chan struct{})
		w.driver.StartOver()
		w.script.Add(func(_ context.Context, c *sink.Changes, s sink.Sink) error { return nil }, sinkscript.Block(release), sinkscript.FailServices(errBusy, a))
		synctest.Wait()
		w.src.Set(view(a, 3))
		close(release)
		synctest.Wait()
		if failing := w.driver.Status().Failing; len(failing) != 1 || failing[0].Failures != 1 {
			t.Errorf("failing: %v", failing)
		}
	})
}

// The latency of a failed service counts from its oldest unacknowledged change.
func TestLatencyCountsFromOldestChangeNotAcknowledged(t *testing.T) {
	var latencies []time.Duration
	opts := sink.Options{Observer: sink.Observer{Applied: func(l time.Duration) { latencies = append(latencies, l) }}}
	run(t, opts, nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.script.Add(sinkscript.Repeat(3, sinkscript.FailServices(errBusy, web))...)
		w.src.Set(view(web, 2))
		synctest.Wait()
		for n := byte(3); n < 5; n++ {
			w.src.SetTriggered(time.Now(), view(web, n))
			synctest.Wait()
			time.Sleep(10 * time.Millisecond)
		}
		w.waitApplied()
		w.cancel()
		<-w.ended
		// The third failure is at 10 ms, and the next delivery 400 ms later.
		if want := []time.Duration{410 * time.Millisecond}; !slices.Equal(latencies, want) {
			w.Errorf("latencies %v, want %v", latencies, want)
		}
	})
}

// Services that fail together have the same jitter, so they are retried together.
func TestRetriesOfOneSyncStayTogether(t *testing.T) {
	jitter := func(d *sink.Driver) {
		d.SetBackoff(sink.Backoff{Initial: 100 * time.Millisecond, Max: 30 * time.Second, Jitter: 1})
	}
	runWith(t, sink.Options{}, jitter, nil, func(w *world) {
		w.script.Add(sinkscript.FailServices(errBusy, web, dns))
		w.src.Set(view(dns))
		w.src.MarkSynced()
		w.waitApplied()
		syncs := w.rec.Syncs()
		if len(syncs) != 2 || len(slices.Collect(syncs[1].Services)) != 2 {
			w.Errorf("deliveries:\n%s", w.delivered(0))
		}
		times := w.script.Times()
		if wait := times[1].Began.Sub(times[0].Ended); wait < 100*time.Millisecond || wait > 200*time.Millisecond {
			w.Errorf("retry after %v, want 100 to 200 ms", wait)
		}
	})
}

func TestOnceEndsWhenEverythingIsApplied(t *testing.T) {
	run(t, sink.Options{Once: true}, nil, func(w *world) {
		w.script.Add(sinkscript.Fail(errBusy), sinkscript.FailServices(errBusy, web))
		w.src.MarkSynced()
		if err := <-w.ended; err != nil {
			w.Errorf("Run: %v", err)
		}
		w.expectDelivered(0,
			"0s: full web none→[1]: dataplane is busy",
			"100ms: full web none→[1]: service default/web: dataplane is busy",
			"200ms: web none→[1] unsure")
		if err := w.driver.WaitApplied(w.Context(), w.src.Revision()); err != nil {
			w.Errorf("everything was applied, but Run returned: %v", err)
		}
		if err := w.driver.WaitApplied(w.Context(), w.src.Revision()+1); err == nil {
			w.Errorf("WaitApplied for a revision after the end returned nil")
		}
	})
}

func TestOnceWaitsForEachBatchAndTheNode(t *testing.T) {
	run(t, sink.Options{Once: true, BatchSize: 1}, nil, func(w *world) {
		w.src.Set(manyViews(3)...)
		w.src.MarkSynced()
		if err := <-w.ended; err != nil || len(w.rec.Views()) != 4 {
			w.Errorf("Run returned %v after %d services, want 4", err, len(w.rec.Views()))
		}
	})
	var good atomic.Bool
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		if c.Node != nil && !good.Load() {
			return errBusy
		}
		return nil
	})
	run(t, sink.Options{Once: true}, s, func(w *world) {
		w.src.SetNode(&api.Node{Name: "n"})
		w.src.MarkSynced()
		time.Sleep(time.Minute)
		select {
		case err := <-w.ended:
			w.Fatalf("Run returned %v, but the sink refuses the Node", err)
		default:
		}
		good.Store(true)
		if err := <-w.ended; err != nil || w.rec.Node() == nil {
			w.Errorf("Run returned %v, the sink has the Node %v", err, w.rec.Node())
		}
	})
}

// A source may be used again after the end of a driver. The next sink gets all services.
func TestSourceIsUsedAgain(t *testing.T) {
	src := sinktest.NewSource()
	src.Set(view(web, 1), view(dns, 2))
	src.MarkSynced()
	for range 2 {
		rec := sinktest.NewRecorder(t, nil)
		if err := sink.Run(t.Context(), src, rec, sink.Options{Once: true}); err != nil || len(rec.Views()) != 2 {
			t.Errorf("Run returned %v, and the sink has %d services", err, len(rec.Views()))
		}
	}
}

func TestWaitApplied(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		applied := func(revision uint64) bool {
			ctx, cancel := context.WithCancel(w.Context())
			cancel()
			return w.driver.WaitApplied(ctx, revision) == nil
		}
		if applied(0) {
			w.Error("revision 0 counts as applied before the first sync")
		}
		w.src.MarkSynced()
		w.waitApplied()

		before := w.src.Revision()
		w.script.Add(sinkscript.FailServices(errBusy, web))
		w.src.Set(view(web, 2), view(dns))
		synctest.Wait()
		if !applied(before) || applied(before+1) || applied(w.src.Revision()) {
			w.Error("a service that fails does not hold the revision back")
		}
		w.src.Set(view(dns, 2))
		synctest.Wait()
		if got := w.driver.Status().Revision; got != before {
			w.Errorf("status has revision %d while a service has failed since %d", got, before)
		}
		w.waitApplied()

		w.script.Add(sinkscript.Fail(sink.ErrStartOver))
		w.src.Set(view(dns, 3))
		synctest.Wait()
		if applied(before) || w.driver.Status().Revision != 0 {
			w.Error("WaitApplied returned while the sink starts over")
		}
		w.waitApplied()

		waiting := make(chan error)
		go func() { waiting <- w.driver.WaitApplied(context.Background(), w.src.Revision()+1) }()
		synctest.Wait()
		w.cancel()
		if err := <-waiting; !errors.Is(err, context.Canceled) {
			w.Errorf("WaitApplied returned %v when the driver ended", err)
		}
	})
}

// An error names at most five services, and counts only others.
func TestWaitErrorNamesAllOfFiveServices(t *testing.T) {
	runWith(t, sink.Options{}, backoff(time.Hour, time.Hour), nil, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.script.Add(sinkscript.FailServices(errBusy, names(5)...))
		var views []*api.View
		for _, name := range names(5) {
			views = append(views, view(name))
		}
		w.src.Set(views...)
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		if err := w.driver.WaitApplied(ctx, w.src.Revision()); err == nil || !strings.HasSuffix(err.Error(), "; service default/e: dataplane is busy)") {
			w.Errorf("got %v, want an error that ends with the fifth service", err)
		}
	})
}

func TestWaitErrorsNameTheSinkAndTheServices(t *testing.T) {
	runWith(t, sink.Options{Name: "nft"}, backoff(time.Hour, time.Hour), nil, func(w *world) {
		wait := func(wait func(context.Context) error) string {
			ctx, cancel := context.WithTimeout(w.Context(), time.Second)
			defer cancel()
			err := wait(ctx)
			if !errors.Is(err, context.DeadlineExceeded) {
				w.Errorf("got %v, want an error of the context", err)
			}
			return err.Error()
		}
		applied := func(ctx context.Context) error { return w.driver.WaitApplied(ctx, w.src.Revision()) }
		expect := func(got, want string) {
			w.Helper()
			if got != want {
				w.Errorf("got  %s\nwant %s", got, want)
			}
		}
		expect(wait(w.driver.WaitSynced), "sink nft: wait for a pass: context deadline exceeded (the source has provided no services yet)")
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		w.src.MarkSynced()
		expect(wait(applied), "sink nft: wait for revision 1: context deadline exceeded (Sync has not returned for 1s; a pass has delivered 0 services)")
		close(release)
		w.waitApplied()
		w.script.Add(sinkscript.FailServices(errBusy, web))
		w.src.Set(view(web, 2))
		expect(wait(applied), "sink nft: wait for revision 2: context deadline exceeded (service default/web: dataplane is busy)")
		w.script.Add(sinkscript.Fail(errBusy))
		w.src.Set(view(dns))
		expect(wait(applied), "sink nft: wait for revision 3: context deadline exceeded "+
			"(1 failures in a row, the last: dataplane is busy; service default/web: dataplane is busy; service default/dns is not acknowledged)")
		time.Sleep(2 * time.Hour)
		w.waitApplied()
		next := func(ctx context.Context) error { return w.driver.WaitApplied(ctx, w.src.Revision()+1) }
		expect(wait(next), "sink nft: wait for revision 4: context deadline exceeded")

		w.script.Add(sinkscript.FailServices(errBusy, names(8)...), sinkscript.FailServices(errBusy, key("g")), sinkscript.Fail(errors.New("unknown zone")))
		var views []*api.View
		for _, name := range names(8) {
			views = append(views, view(name))
		}
		w.src.Set(views...)
		synctest.Wait()
		w.src.Set(view(key("g"), 2))
		synctest.Wait()
		w.src.SetNode(&api.Node{Name: "bad"})
		expect(wait(applied), "sink nft: wait for revision 13: context deadline exceeded ("+
			"1 failures in a row, the last: unknown zone; the sink refuses the Node: unknown zone; service default/g: dataplane is busy; "+
			"service default/a: dataplane is busy; service default/b: dataplane is busy; service default/c: dataplane is busy; "+
			"service default/d: dataplane is busy; 3 more services)")
	})
}

// A Node that the sink refuses must not delay services.
func TestRefusedNodeDoesNotDelayServices(t *testing.T) {
	for _, tc := range []struct {
		name   string
		bad    func(*world)
		sinkUp time.Duration // until then, the sink fails
	}{
		{name: "in the first pass", bad: func(w *world) { w.src.SetNode(&api.Node{Name: "bad"}); w.src.MarkSynced() }},
		{name: "in the first pass of a dataplane that is down at first", sinkUp: time.Minute,
			bad: func(w *world) { w.src.SetNode(&api.Node{Name: "bad"}); w.src.MarkSynced() }},
		{name: "after the first pass", bad: func(w *world) { w.src.MarkSynced(); w.waitApplied(); w.src.SetNode(&api.Node{Name: "bad"}) }},
		{name: "in a later pass", bad: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.src.SetNode(&api.Node{Name: "bad"})
			w.driver.StartOver()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var begin time.Time
			services, nodes := map[string]int{}, 0
			s := sink.Func(func(_ context.Context, c *sink.Changes) error {
				if time.Since(begin) < tc.sinkUp {
					return errBusy
				}
				if c.Node != nil && c.Node.Name == "bad" { // also if NodeChanged is false
					nodes++
					return errors.New("cannot use this node")
				}
				for s := range c.Services {
					services[s.Key.Name]++
				}
				return nil
			})
			run(t, sink.Options{}, s, func(w *world) {
				begin = w.start
				w.src.Set(manyViews(10)...)
				tc.bad(w)
				time.Sleep(2 * time.Minute)
				for _, name := range []string{"a", "b", "c"} {
					w.src.Set(view(key(name)))
					synctest.Wait()
					if services[name] == 0 {
						t.Errorf("service %s is not programmed immediately", name)
					}
					time.Sleep(time.Minute)
				}
				status := w.driver.Status()
				if len(services) != 14 || nodes < 5 || nodes > 50 || status.NodeErr == nil || status.Pending != 0 || status.StuckFor(time.Now()) > 0 {
					t.Errorf("%d services, %d Syncs with the node, status %+v", len(services), nodes, status)
				}
				if err := w.driver.WaitSynced(w.Context()); err != nil {
					t.Error(err)
				}
				changed := time.Now()
				w.src.SetNode(&api.Node{Name: "good"})
				w.waitApplied()
				if waited := time.Since(changed); waited > 0 {
					t.Errorf("the changed Node waited for %v", waited)
				}
				if !w.rec.Node().Equal(w.src.Node()) || w.driver.Status().NodeErr != nil {
					t.Errorf("node %v, status %+v", w.rec.Node(), w.driver.Status())
				}
			})
		})
	}
}

// While the sink refuses the Node, no revision since the first change of the Node counts as
// applied.
func TestRefusedNodeHoldsTheRevisionBack(t *testing.T) {
	run(t, sink.Options{}, refusesNode, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		before := w.src.Revision()
		for i := range 3 {
			w.src.SetNode(&api.Node{Name: fmt.Sprint(i)})
			time.Sleep(time.Minute)
			w.src.Set(view(web, byte(i+2)))
			synctest.Wait()
			if got := w.driver.Status().Revision; got != before {
				w.Errorf("revision %d counts as applied, want %d", got, before)
			}
		}
	})
}

// sizedSink is a sink that chooses the size of its batches.
type sizedSink struct{ sink.Func }

func (sizedSink) BatchSize() int { return 1 }

func TestBatchSizeOfTheSink(t *testing.T) {
	for option, want := range map[int]int{0: 4, 1000: 1} {
		s := sizedSink{func(context.Context, *sink.Changes) error { return nil }}
		run(t, sink.Options{BatchSize: option}, s, func(w *world) {
			w.src.Set(manyViews(3)...)
			w.src.MarkSynced()
			w.waitApplied()
			if got := len(w.rec.Syncs()); got != want {
				w.Errorf("option %d: %d Syncs in a pass, want %d", option, got, want)
			}
		})
	}
}

// The sink refuses a Node, and a pass delivers the previous Node. If the source then
// has the previous Node again, the driver delivers it only if the sink has refused the
// other Node after the pass.
func TestPreviousNodeIsNotDeliveredTwice(t *testing.T) {
	good, bad := &api.Node{Name: "good"}, &api.Node{Name: "bad"}
	const duringPass = -1
	for _, after := range []time.Duration{duringPass, 0, time.Minute} {
		var w *world
		s := sink.Func(func(_ context.Context, c *sink.Changes) error {
			switch {
			case c.Node.Equal(bad):
				return errBusy
			case c.First && w.driver.Status().Passes > 0 && after == duringPass:
				w.src.SetNode(good)
			}
			return nil
		})
		run(t, sink.Options{}, s, func(started *world) {
			w = started
			w.src.SetNode(good)
			w.src.MarkSynced()
			w.waitApplied()
			w.src.SetNode(bad)
			w.src.Set(view(dns))
			time.Sleep(10 * time.Second)
			w.driver.StartOver()
			synctest.Wait()
			time.Sleep(after)
			syncs := len(w.rec.Syncs())
			w.src.SetNode(good)
			w.waitApplied()
			time.Sleep(time.Hour)
			if more := len(w.rec.Syncs()) > syncs; more != (after > 0) || !w.rec.Node().Equal(good) {
				t.Errorf("after %v; deliveries:\n%s", after, w.delivered(0))
			}
			if s := w.driver.Status(); s.NodeErr != nil || s.Err != nil || s.Revision != w.src.Revision() {
				t.Errorf("after %v; status %+v", after, s)
			}
		})
	}
}

// A service that fails alone becomes due at the same time as the Node changes.
func TestFailingServiceIsNoFailureOfTheNode(t *testing.T) {
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		for s := range c.Services {
			switch s.Key.Name {
			case "bad":
				return errBusy
			case "slow":
				time.Sleep(time.Minute)
			}
		}
		return nil
	})
	run(t, sink.Options{}, s, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.Set(view(key("bad")))
		time.Sleep(time.Minute)
		before := w.driver.Status().Failing
		w.src.Set(view(key("slow")))
		synctest.Wait()
		w.src.SetNode(&api.Node{Name: "n"})
		time.Sleep(time.Minute)
		synctest.Wait()
		status := w.driver.Status()
		if status.NodeErr != nil || !w.rec.Node().Equal(w.src.Node()) {
			t.Errorf("the sink has node %v, error of the node %v", w.rec.Node(), status.NodeErr)
		}
		if len(before) != 1 || len(status.Failing) != 1 || status.Failing[0].Failures <= before[0].Failures {
			t.Errorf("failing services %+v, before %+v", status.Failing, before)
		}
	})
}

// When a dataplane that was down works again, the sink receives the waiting Node in the
// first Sync after that, or earlier.
func TestNodeIsDeliveredWhenTheDataplaneWorksAgain(t *testing.T) {
	var begin time.Time
	s := sink.Func(func(context.Context, *sink.Changes) error {
		if time.Since(begin) < 90*time.Second {
			return errBusy
		}
		return nil
	})
	run(t, sink.Options{}, s, func(w *world) {
		begin = w.start
		w.src.SetNode(&api.Node{Name: "n"})
		w.src.MarkSynced()
		w.waitApplied()
		for i, s := range w.rec.Syncs() {
			if s.Err == nil && s.Node == nil && (len(slices.Collect(s.Services)) > 0 || !w.rec.Syncs()[i+1].NodeChanged) {
				t.Errorf("Sync %d of %d has no Node", i, len(w.rec.Syncs()))
			}
		}
	})
}

// The first Sync that succeeds after a failure makes the driver deliver a refused Node again.
func TestRefusedNodeIsRetriedWhenTheDataplaneWorksAgain(t *testing.T) {
	var refuses atomic.Bool
	refuses.Store(true)
	s := sink.Func(func(_ context.Context, c *sink.Changes) error {
		if c.Node != nil && refuses.Load() {
			return errBusy
		}
		return nil
	})
	runWith(t, sink.Options{}, backoff(time.Minute, time.Hour), s, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.SetNode(&api.Node{Name: "n"})
		time.Sleep(20 * time.Minute)
		w.script.Add(sinkscript.Fail(errBusy))
		w.src.Set(view(web, 2))
		synctest.Wait()
		refuses.Store(false)
		if w.driver.Status().NodeErr == nil {
			t.Fatal("the sink does not refuse the Node")
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if status := w.driver.Status(); status.Pending != 0 || status.NodeErr != nil {
			t.Errorf("status %+v", status)
		}
	})
}

func TestStatusListsFailingServicesInOrder(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		var keys []types.NamespacedName
		for i := range 20 {
			keys = append(keys, types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("s%02d", i)})
			w.src.Set(view(keys[i]))
		}
		w.script.Add(sinkscript.FailServices(errBusy, keys...))
		w.src.MarkSynced()
		synctest.Wait()
		var got []types.NamespacedName
		for _, f := range w.driver.Status().Failing {
			got = append(got, f.Key)
		}
		if !slices.Equal(got, keys) {
			t.Errorf("failing: %v", got)
		}
		w.waitApplied()
	})
}

func TestStatus(t *testing.T) {
	run(t, sink.Options{Name: "test", MinInterval: time.Second}, nil, func(w *world) {
		expect := func(when string, want sink.Status) {
			w.Helper()
			synctest.Wait()
			want.Name = "test"
			if diff := cmp.Diff(want, w.driver.Status(), cmp.Comparer(func(a, b error) bool { return errors.Is(a, b) || errors.Is(b, a) })); diff != "" {
				w.Errorf("status %s (-want +got):\n%s", when, diff)
			}
		}
		at := func(d time.Duration) time.Time { return w.start.Add(d) }
		expect("before the source has synced", sink.Status{})

		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		w.src.MarkSynced()
		time.Sleep(10 * time.Second)
		expect("in a sync", sink.Status{WaitingSince: at(0), SyncingSince: at(0), LastProgress: at(0)})

		close(release)
		expect("after a full sync", sink.Status{Revision: 1, Passes: 1, Syncs: 1, LastPass: at(10 * time.Second), LastSync: at(10 * time.Second), LastProgress: at(10 * time.Second)})

		w.script.Add(sinkscript.Fail(errBusy))
		w.src.Set(view(dns))
		expect("in the minimum interval", sink.Status{
			Revision: 1, Passes: 1, Syncs: 1,
			LastPass: at(10 * time.Second), LastSync: at(10 * time.Second), LastProgress: at(10 * time.Second),
		})
		time.Sleep(time.Second)
		expect("after a failed sync", sink.Status{
			Revision: 1, Passes: 1, Syncs: 1, WaitingSince: at(11 * time.Second),
			LastPass: at(10 * time.Second), LastSync: at(10 * time.Second), LastProgress: at(11 * time.Second),
			Err: errBusy, Failures: 1, NextAttempt: at(12 * time.Second), Pending: 1, PendingServices: []types.NamespacedName{dns},
		})
		time.Sleep(time.Second - 1)
		expect("in the backoff", sink.Status{
			Revision: 1, Passes: 1, Syncs: 1, WaitingSince: at(11 * time.Second),
			LastPass: at(10 * time.Second), LastSync: at(10 * time.Second), LastProgress: at(11 * time.Second),
			Err: errBusy, Failures: 1, NextAttempt: at(12 * time.Second), Pending: 1, PendingServices: []types.NamespacedName{dns},
		})
		w.script.Add(sinkscript.FailServices(errBusy, dns))
		time.Sleep(time.Nanosecond)
		expect("while a service fails", sink.Status{
			Revision: 1, Passes: 1, Syncs: 2,
			LastPass: at(10 * time.Second), LastSync: at(12 * time.Second), LastProgress: at(12 * time.Second), Pending: 1, PendingServices: []types.NamespacedName{dns},
			Failing: []sink.FailingService{{Key: dns, Err: errBusy, Failures: 1, NextRetry: at(12*time.Second + 100*time.Millisecond)}},
		})
		w.waitApplied()
		expect("after recovery", sink.Status{
			Revision: 2, Passes: 1, Syncs: 3,
			LastPass: at(10 * time.Second), LastSync: at(13 * time.Second), LastProgress: at(13 * time.Second),
		})
	})
}

func TestObserver(t *testing.T) {
	var seen []string
	see := func(format string, args ...any) { seen = append(seen, fmt.Sprintf(format, args...)) }
	opts := sink.Options{Observer: sink.Observer{
		Queued:  func(time.Time) { see("queued") },
		Pending: func(n int) { see("pending %d", n) },
		Synced: func(r sink.SyncResult) {
			see("synced passed=%t services=%d took=%v failing=%d err=%v", r.Passed, r.Services, r.Duration, r.Failing, r.Err)
		},
		Applied: func(latency time.Duration) { see("applied after %v", latency) },
	}}
	run(t, opts, nil, func(w *world) {
		w.src.SetTriggered(time.Now(), view(web, 2))
		// The service x is deleted before the driver can see it.
		w.src.SetTriggered(time.Now(), view(key("x")))
		w.src.Delete(key("x"))
		w.src.MarkSynced()
		w.waitApplied()
		w.script.Add(sinkscript.FailServices(errBusy, dns))
		w.src.SetTriggered(time.Now().Add(-time.Second), view(dns), view(web, 3))
		synctest.Wait()
		w.waitApplied()
		w.cancel()
		<-w.ended
		want := []string{
			"queued",
			"pending 1",
			"synced passed=true services=1 took=0s failing=0 err=<nil>",
			"pending 0",
			"queued",
			"pending 2",
			"applied after 1s",
			"synced passed=false services=2 took=0s failing=1 err=service default/dns: dataplane is busy",
			"pending 1",
			"pending 1",
			"applied after 1.1s",
			"synced passed=false services=1 took=0s failing=0 err=<nil>",
			"pending 0",
		}
		if diff := cmp.Diff(want, seen); diff != "" {
			w.Errorf("calls of the observer (-want +got):\n%s", diff)
		}
	})
}

// If the sink acknowledges services, the reported error is nil or a *Failed, even if the sink
// returns an error that wraps a *Failed. The end of a Sync is progress, also if the Sync reads
// no service and fails.
func TestResultsOfSyncs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := sinktest.NewSource()
		src.MarkSynced()
		var results []error
		var result atomic.Pointer[error]
		result.Store(new(error))
		s := sink.Func(func(context.Context, *sink.Changes) error {
			time.Sleep(time.Second)
			return *result.Load()
		})
		d := sink.NewDriver(src, s, sink.Options{Observer: sink.Observer{Synced: func(r sink.SyncResult) { results = append(results, r.Err) }}})
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		change := func(n byte, err error) error {
			results = nil
			result.Store(&err)
			src.Set(view(web, n))
			time.Sleep(1010 * time.Millisecond)
			synctest.Wait()
			if s := d.Status(); len(results) != 1 || !s.SyncingSince.IsZero() || time.Since(s.LastProgress) != 10*time.Millisecond {
				t.Fatalf("%d Syncs, the last progress was %v ago", len(results), time.Since(s.LastProgress))
			}
			return results[0]
		}
		if err := change(1, &sink.Failed{web: nil}); err != nil {
			t.Errorf("a *Failed with a nil error: %v", err)
		}
		if err, ok := change(2, fmt.Errorf("write: %w", &sink.Failed{web: errBusy})).(*sink.Failed); !ok || len(*err) != 1 {
			t.Errorf("a wrapped *Failed: %v", err)
		}
		result.Store(new(error))
		time.Sleep(time.Minute)
		synctest.Wait()
		if err := change(3, errBusy); !errors.Is(err, errBusy) {
			t.Errorf("another error: %v", err)
		}
		cancel()
		<-ended
	})
}

func TestRunEndsWithCauseOfContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := sinktest.NewSource()
		src.MarkSynced()
		script := sinkscript.New(nil)
		rec := sinktest.NewRecorder(t, script)
		script.Add(sinkscript.Block(nil))
		cause := errors.New("node is drained")
		ctx, cancel := context.WithCancelCause(t.Context())
		d := sink.NewDriver(src, rec, sink.Options{})
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		synctest.Wait()
		cancel(cause)
		if err := <-ended; err != cause {
			t.Errorf("Run returned %v, want the cause of its context", err)
		}
		if err := d.Run(t.Context()); err == nil {
			t.Error("a driver ran twice")
		}
	})
}

func TestRunEndsWithCauseOfContextDuringStart(t *testing.T) {
	cause := errors.New("node is drained")
	ctx, cancel := context.WithCancelCause(t.Context())
	s := &starter{start: func(ctx context.Context) error {
		cancel(cause)
		return ctx.Err()
	}}
	if err := sink.Run(ctx, sinktest.NewSource(), s, sink.Options{}); err != cause {
		t.Errorf("Run returned %v, want the cause of its context", err)
	}
}

type starter struct {
	sink.Func
	start func(context.Context) error
}

func (s *starter) Start(ctx context.Context) error { return s.start(ctx) }

// stages is a sink with the methods Start, Stop and Verify.
type stages struct {
	sink.Sink
	log             []string
	startErr        error
	stopErr         error
	verify          func(ctx context.Context) error
	deadlineOfStop  time.Duration
	startPanicsWith any
}

func (s *stages) Start(context.Context) error {
	s.log = append(s.log, "start")
	if s.startPanicsWith != nil {
		panic(s.startPanicsWith)
	}
	return s.startErr
}

func (s *stages) Sync(context.Context, *sink.Changes) error {
	s.log = append(s.log, "sync")
	return nil
}

func (s *stages) Stop(ctx context.Context) error {
	s.log = append(s.log, "stop")
	if deadline, ok := ctx.Deadline(); ok && ctx.Err() == nil {
		s.deadlineOfStop = time.Until(deadline)
	}
	return s.stopErr
}

func (s *stages) Verify(ctx context.Context) error { return s.verify(ctx) }

func TestOptionalMethodsOfSink(t *testing.T) {
	errStart, errStop := errors.New("no netlink"), errors.New("address in use")
	cases := []struct {
		name     string
		sink     *stages
		opts     sink.Options
		wantLog  []string
		wantErrs []error
		wantText string
	}{{
		name:     "a sink is started, synced and stopped",
		sink:     &stages{},
		wantLog:  []string{"start", "sync", "stop"},
		wantErrs: []error{context.Canceled},
	}, {
		name:     "a sink that cannot start is neither synced nor stopped",
		sink:     &stages{startErr: errStart},
		wantLog:  []string{"start"},
		wantErrs: []error{errStart},
	}, {
		name:     "a sink that panics in Start cannot start",
		sink:     &stages{startPanicsWith: "oops"},
		wantLog:  []string{"start"},
		wantText: "start sink: panic in Start: oops",
	}, {
		name:     "the error of Start has the name of the sink",
		sink:     &stages{startErr: errStart},
		opts:     sink.Options{Name: "nft"},
		wantLog:  []string{"start"},
		wantText: "start sink nft: no netlink",
	}, {
		name:     "the error of Stop has the name of the sink",
		sink:     &stages{stopErr: errStop},
		opts:     sink.Options{Name: "nft"},
		wantLog:  []string{"start", "sync", "stop"},
		wantText: "stop sink nft: address in use",
	}, {
		name:     "the error of Stop is joined with the error of the context",
		sink:     &stages{stopErr: errStop},
		wantLog:  []string{"start", "sync", "stop"},
		wantErrs: []error{context.Canceled, errStop},
	}}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			run(t, tc.opts, tc.sink, func(w *world) {
				w.src.MarkSynced()
				synctest.Wait()
				w.cancel()
				err := <-w.ended
				for _, want := range tc.wantErrs {
					if !errors.Is(err, want) {
						w.Errorf("Run returned %v, want %v in it", err, want)
					}
				}
				if !strings.Contains(err.Error(), tc.wantText) {
					w.Errorf("Run returned %v, want %q in it", err, tc.wantText)
				}
				if diff := cmp.Diff(tc.wantLog, tc.sink.log); diff != "" {
					w.Errorf("calls (-want +got):\n%s", diff)
				}
				if slices.Contains(tc.wantLog, "stop") && tc.sink.deadlineOfStop != 10*time.Second {
					w.Errorf("Stop had %v, want a live context that ends in ten seconds", tc.sink.deadlineOfStop)
				}
			})
		})
	}
}

type drainer struct {
	stages
	timeout time.Duration
}

func (d *drainer) StopTimeout() time.Duration { return d.timeout }

func TestStopTimeout(t *testing.T) {
	for _, tc := range []struct {
		name        string
		sinks, want time.Duration
	}{
		{"the sink sets no timeout", 0, 10 * time.Second},
		{"the sink sets a timeout", time.Hour, time.Hour},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &drainer{timeout: tc.sinks}
			run(t, sink.Options{}, s, func(w *world) {
				w.src.MarkSynced()
				synctest.Wait()
				w.cancel()
				<-w.ended
				if s.deadlineOfStop != tc.want {
					w.Errorf("Stop had %v, want %v", s.deadlineOfStop, tc.want)
				}
			})
		})
	}
}

// verified is a sink that chooses the interval of Verify.
type verified struct {
	stages
	interval time.Duration
}

func (v *verified) VerifyInterval() time.Duration { return v.interval }

func TestVerifyIntervalOfTheSink(t *testing.T) {
	for _, tc := range []struct {
		sinks time.Duration
		want  int // the number of calls in ten minutes
	}{{0, 9}, {20 * time.Second, 29}, {-1, 0}} {
		synctest.Test(t, func(t *testing.T) {
			calls := 0
			s := &verified{stages{verify: func(context.Context) error { calls++; return nil }}, tc.sinks}
			src := sinktest.NewSource()
			src.MarkSynced()
			ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), klog.Logger{}), 10*time.Minute-time.Second)
			defer cancel()
			_ = sink.Run(ctx, src, s, sink.Options{})
			if calls != tc.want {
				t.Errorf("interval %v: %d calls of Verify, want %d", tc.sinks, calls, tc.want)
			}
		})
	}
}

func TestVerify(t *testing.T) {
	t.Run("runs a minute after the first pass, and also if passes follow often", func(t *testing.T) {
		var at []time.Duration
		var begin time.Time
		s := &stages{verify: func(context.Context) error {
			at = append(at, time.Since(begin))
			return nil
		}}
		runWith(t, sink.Options{BatchSize: 1}, everyMinute, s, func(w *world) {
			begin = w.start
			w.script.Add(sinkscript.Repeat(4, func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
				time.Sleep(10 * time.Second)
				return s.Sync(ctx, c)
			})...)
			w.src.Set(manyViews(3)...)
			w.src.MarkSynced()
			for range 10 {
				time.Sleep(24 * time.Second) // never when Verify is due
				w.driver.StartOver()
			}
			synctest.Wait()
			if diff := cmp.Diff([]time.Duration{100 * time.Second, 160 * time.Second, 220 * time.Second}, at); diff != "" {
				w.Errorf("calls of Verify (-want +got):\n%s", diff)
			}
		})
	})
	t.Run("does not run during a backoff", func(t *testing.T) {
		var calls atomic.Int32
		s := &stages{verify: func(context.Context) error { calls.Add(1); return nil }}
		runWith(t, sink.Options{}, func(d *sink.Driver) {
			backoff(time.Hour, time.Hour)(d)
			everyMinute(d)
		}, s, func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(sinkscript.Fail(errBusy))
			w.src.Set(view(web, 2))
			time.Sleep(time.Hour - time.Second)
			synctest.Wait()
			if calls.Load() > 0 {
				w.Errorf("%d calls of Verify", calls.Load())
			}
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			if calls.Load() == 0 {
				w.Error("Verify is not called after the backoff")
			}
		})
	})
	t.Run("runs at its interval when the driver is idle", func(t *testing.T) {
		var at []time.Time
		s := &stages{verify: func(context.Context) error {
			at = append(at, time.Now())
			time.Sleep(time.Second)
			return nil
		}}
		runWith(t, sink.Options{}, everyMinute, s, func(w *world) {
			time.Sleep(time.Hour)
			w.src.MarkSynced()
			time.Sleep(2*time.Minute + time.Second)
			want := []time.Time{w.start.Add(time.Hour + time.Minute), w.start.Add(time.Hour + 2*time.Minute + time.Second)}
			synctest.Wait()
			if diff := cmp.Diff(want, at); diff != "" {
				w.Errorf("calls of Verify (-want +got):\n%s", diff)
			}
			time.Sleep(time.Second)
		})
	})
	t.Run("ends when a change arrives", func(t *testing.T) {
		s := &stages{verify: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
		runWith(t, sink.Options{}, everyMinute, s, func(w *world) {
			w.src.MarkSynced()
			time.Sleep(61 * time.Second)
			w.src.Set(view(web, 2))
			w.waitApplied()
			w.expectDelivered(1, "1m1s: web [1]→[2]")
		})
	})
	t.Run("runs again sooner after an interruption", func(t *testing.T) {
		var at []time.Duration
		var begin time.Time
		s := &stages{verify: func(ctx context.Context) error {
			at = append(at, time.Since(begin))
			if len(at) == 1 {
				<-ctx.Done()
			}
			return ctx.Err()
		}}
		runWith(t, sink.Options{}, everyMinute, s, func(w *world) {
			begin = w.start
			w.src.MarkSynced()
			time.Sleep(62 * time.Second)
			w.src.Set(view(web, 2))
			w.waitApplied()
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			if diff := cmp.Diff([]time.Duration{60 * time.Second, 77 * time.Second, 137 * time.Second}, at); diff != "" {
				w.Errorf("calls of Verify (-want +got):\n%s", diff)
			}
		})
	})
	t.Run("a hanging Verify counts as stuck as soon as work waits", func(t *testing.T) {
		for _, tc := range []struct {
			name     string
			what     func(w *world)
			opts     sink.Options
			retry    time.Duration // backoff of a service; 0 if none fails
			waiting  time.Duration
			queued   time.Duration
			observed int
		}{
			{"a change", func(w *world) { w.src.Set(view(web, 2)) }, sink.Options{}, 0, 90 * time.Second, 90 * time.Second, 2},
			{"a change in the minimum interval", func(w *world) { w.src.Set(view(web, 2)) },
				sink.Options{MinInterval: 2 * time.Minute}, 0, 2 * time.Minute, 90 * time.Second, 2},
			{"a service that is due", func(*world) {}, sink.Options{}, 95 * time.Second, 95 * time.Second, 0, 1},
		} {
			t.Run(tc.name, func(t *testing.T) {
				var release chan struct{}
				observed, queued := 0, time.Time{}
				s := &stages{verify: func(context.Context) error { <-release; return nil }}
				opts := tc.opts
				opts.Observer.Queued = func(at time.Time) { observed, queued = observed+1, at }
				configure := func(d *sink.Driver) {
					everyMinute(d)
					backoff(tc.retry, time.Hour)(d)
				}
				runWith(t, opts, configure, s, func(w *world) {
					release = make(chan struct{})
					if tc.retry > 0 {
						w.script.Add(sinkscript.FailServices(errBusy, web))
					}
					w.src.MarkSynced()
					time.Sleep(90 * time.Second)
					tc.what(w)
					synctest.Wait()
					time.Sleep(time.Hour)
					got := w.driver.Status()
					if want := w.start.Add(tc.waiting); !got.WaitingSince.Equal(want) {
						w.Errorf("waiting since %v, want %v", got.WaitingSince, want)
					}
					close(release)
					w.waitApplied()
					synctest.Wait()
					if got := w.driver.Status().WaitingSince; !got.IsZero() || observed != tc.observed {
						w.Errorf("afterwards: waiting since %v, queued %d times, want zero and %d", got, observed, tc.observed)
					}
					if want := w.start.Add(tc.queued); !queued.Equal(want) {
						w.Errorf("last queued %v, want %v", queued, want)
					}
				})
			})
		}
	})
	t.Run("ends when a service is due", func(t *testing.T) {
		s := &stages{verify: func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
		configure := func(d *sink.Driver) {
			everyMinute(d)
			backoff(time.Hour, time.Hour)(d)
		}
		runWith(t, sink.Options{}, configure, s, func(w *world) {
			w.script.Add(sinkscript.FailServices(errBusy, web))
			w.src.MarkSynced()
			w.waitApplied()
			w.expectDelivered(1, "1h0m0s: web none→[1] unsure")
		})
	})
	t.Run("may start over", func(t *testing.T) {
		s := &stages{verify: func(context.Context) error { return fmt.Errorf("table is gone: %w", sink.ErrStartOver) }}
		runWith(t, sink.Options{}, everyMinute, s, func(w *world) {
			w.src.MarkSynced()
			time.Sleep(time.Minute)
			synctest.Wait()
			w.waitApplied()
			w.expectDelivered(0, "0s: full web none→[1]", "1m0s: full web none→[1]")
		})
	})
	t.Run("may fail or panic", func(t *testing.T) {
		calls := 0
		s := &stages{verify: func(context.Context) error {
			if calls++; calls > 1 {
				panic("oops")
			}
			return errBusy
		}}
		var errs []error
		opts := sink.Options{Observer: sink.Observer{Verified: func(err error) { errs = append(errs, err) }}}
		runWith(t, opts, everyMinute, s, func(w *world) {
			w.src.MarkSynced()
			time.Sleep(2*time.Minute + time.Second)
			w.src.Set(view(web, 2))
			synctest.Wait()
			w.waitApplied()
			if len(errs) != 2 || errs[0] != errBusy || errs[1] == nil {
				w.Errorf("Verify reported %v", errs)
			}
		})
	})
}

// TestAFailingVerifyIsLoggedOnce lets Verify fail with the same error for some time, and
// then with another error. The driver logs each of the errors once, and the recovery.
func TestAFailingVerifyIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		src := sinktest.NewSource()
		src.MarkSynced()
		calls := 0
		s := &stages{verify: func(context.Context) error {
			if calls++; calls > 20 {
				return nil
			}
			return fmt.Errorf("cause %d", calls/10)
		}}
		ended := make(chan error)
		d := sink.NewDriver(src, s, sink.Options{})
		d.SetVerifyInterval(time.Second)
		go func() { ended <- d.Run(ctx) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
		for text, want := range map[string]int{"cause 0": 1, "cause 1": 1, "cause 2": 1, "Verify failed": 3, "Verify works again": 1} {
			if n := strings.Count(log, text); n != want {
				t.Errorf("%q is logged %d times, want %d", text, n, want)
			}
		}
		cancel()
		<-ended
	})
}

func TestRecoveryIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		src := sinktest.NewSource()
		src.Set(view(web, 1), view(dns, 1))
		src.MarkSynced()
		sinkFails := true
		var webFails atomic.Bool
		webFails.Store(true)
		s := sink.Func(func(_ context.Context, c *sink.Changes) error {
			var failed sink.Failed
			for c := range c.Services {
				if c.Key == web && webFails.Load() {
					failed.Add(web, errBusy)
				}
			}
			if sinkFails {
				sinkFails = false
				return errBusy
			}
			return failed.Err()
		})
		ended := make(chan error)
		go func() { ended <- sink.Run(ctx, src, s, sink.Options{}) }()
		logged := func(text string) int {
			synctest.Wait()
			return strings.Count(logger.GetSink().(ktesting.Underlier).GetBuffer().String(), text)
		}
		time.Sleep(time.Minute)
		if n := logged("Sync works again"); n != 1 {
			t.Errorf("the recovery of the sink is logged %d times", n)
		}
		if n := logged("Service works again"); n != 0 {
			t.Errorf("the recovery of a failing service is logged %d times", n)
		}
		webFails.Store(false)
		time.Sleep(10 * time.Minute)
		if n, ofWeb := logged("Service works again"), logged(`Service works again service="default/web"`); n != 1 || ofWeb != 1 {
			t.Errorf("the recovery of a service is logged %d times, that of the failed service %d times", n, ofWeb)
		}
		cancel()
		<-ended
	})
}

// A service fails in a batch of a pass, and works in a later batch.
func TestRecoveryWithinAPassIsLogged(t *testing.T) {
	a, b, c := key("a"), key("b"), key("c")
	run(t, sink.Options{BatchSize: 1}, nil, func(w *world) {
		w.src.Delete(web)
		w.src.Set(view(a, 1), view(b, 1), view(c, 1))
		w.script.Add(sinkscript.FailServices(errBusy, a))
		w.script.Add(sinkscript.Repeat(2, func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
			time.Sleep(time.Second)
			return s.Sync(ctx, c)
		})...)
		w.src.MarkSynced()
		time.Sleep(5 * time.Second)
		w.waitApplied()
		n := 0
		for _, line := range w.logged() {
			if strings.HasPrefix(line, `"Service works again"`) {
				n++
				if !strings.Contains(line, `"name"="a"`) || !strings.Contains(line, `"failures"=1`) {
					t.Error(line)
				}
			}
		}
		if n != 1 {
			t.Errorf("%d recoveries are logged", n)
		}
	})
}

func TestLog(t *testing.T) {
	for _, tc := range []struct {
		name string
		opts sink.Options
		test func(w *world) // after the first pass
		want []string
	}{{
		name: "the sink fails, and a part of the services succeeds first",
		test: func(w *world) {
			w.script.Add(sinkscript.Repeat(2, sinkscript.Fail(errBusy))...)
			w.src.Set(view(web, 2), view(dns, 2))
		},
		want: []string{
			`"Sync failed; retrying" "error"="dataplane is busy" "pass"=false "services"=2 "failures"=1`,
			`"Sync failed; retrying" "error"="dataplane is busy" "pass"=false "services"=2 "failures"=2`,
			`"Synced" "pass"=false "services"=1 "revision"=3 "took"="0s"`,
			`"Synced" "pass"=false "services"=1 "revision"=3 "took"="0s"`,
			`"Sync works again" "failures"=2`,
		},
	}, {
		name: "the sink fails, and then a service fails",
		test: func(w *world) {
			w.script.Add(sinkscript.Fail(errBusy), sinkscript.FailServices(errBusy, web))
			w.src.Set(view(web, 2))
		},
		want: []string{
			`"Sync failed; retrying" "error"="dataplane is busy" "pass"=false "services"=1 "failures"=1`,
			`"Service failed; retrying" "error"="dataplane is busy" "service"={"name"="web" "namespace"="default"}`,
			`"Sync works again" "failures"=1`,
			`"Service works again" "service"={"name"="web" "namespace"="default"} "failures"=1`,
			`"Synced" "pass"=false "services"=1 "revision"=2 "took"="0s"`,
		},
	}, {
		name: "a service fails in the Sync of another service", // as with FullState
		test: func(w *world) {
			w.script.Add(sinkscript.FailServices(errBusy, web))
			w.src.Set(view(dns, 2))
		},
		want: []string{
			`"Service failed; retrying" "error"="dataplane is busy" "service"={"name"="web" "namespace"="default"}`,
			`"Service works again" "service"={"name"="web" "namespace"="default"} "failures"=1`,
			`"Synced" "pass"=false "services"=1 "revision"=2 "took"="0s"`,
		},
	}, {
		name: "the sink fails in a pass",
		opts: sink.Options{BatchSize: 1},
		test: func(w *world) {
			w.src.Set(view(dns, 2))
			w.waitApplied()
			w.logged()
			w.script.Add(sinkscript.Fail(errBusy))
			w.driver.StartOver()
		},
		want: []string{
			`"Sync failed; retrying" "error"="dataplane is busy" "pass"=true "services"=1 "failures"=1`,
			`"Synced" "pass"=true "services"=1 "revision"=2 "took"="0s"`,
			`"Synced" "pass"=true "services"=1 "revision"=2 "took"="0s"`,
			`"Sync works again" "failures"=1`,
			`"Delivered all services" "failing"=0 "duration"="100ms"`,
		},
	}, {
		name: "a service works again in a pass",
		test: func(w *world) {
			w.script.Add(sinkscript.FailServices(errBusy, web))
			w.src.Set(view(web, 2))
			synctest.Wait()
			w.driver.StartOver()
		},
		want: []string{
			`"Service failed; retrying" "error"="dataplane is busy" "service"={"name"="web" "namespace"="default"}`,
			`"Service works again" "service"={"name"="web" "namespace"="default"} "failures"=1`,
			`"Synced" "pass"=true "services"=1 "revision"=2 "took"="0s"`,
			`"Delivered all services" "failing"=0 "duration"="0s"`,
		},
	}, {
		name: "a service that failed is deleted",
		test: func(w *world) {
			w.script.Add(sinkscript.FailServices(errBusy, web))
			w.src.Set(view(web, 2))
			synctest.Wait()
			w.src.Delete(web)
		},
		want: []string{
			`"Service failed; retrying" "error"="dataplane is busy" "service"={"name"="web" "namespace"="default"}`,
			`"Synced" "pass"=false "services"=1 "revision"=3 "took"="0s"`,
		},
	}, {
		name: "the sink starts over",
		test: func(w *world) {
			w.script.Add(sinkscript.Fail(sink.ErrStartOver))
			w.src.Set(view(web, 2))
		},
		want: []string{
			`"Sync failed; retrying" "error"="sink starts over" "pass"=false "services"=1 "failures"=1`,
			`"Synced" "pass"=true "services"=1 "revision"=2 "took"="0s"`,
			`"Sync works again" "failures"=1`,
			`"Delivered all services" "failing"=0 "duration"="0s"`,
		},
	}} {
		t.Run(tc.name, func(t *testing.T) {
			run(t, tc.opts, nil, func(w *world) {
				w.src.MarkSynced()
				w.waitApplied()
				w.logged()
				tc.test(w)
				time.Sleep(time.Minute)
				if diff := cmp.Diff(tc.want, w.logged()); diff != "" {
					t.Errorf("log (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// The log names ten services of a Sync that work again.
func TestManyRecoveriesAreLogged(t *testing.T) {
	for _, n := range []int{10, 12} {
		run(t, sink.Options{}, nil, func(w *world) {
			w.src.Set(manyViews(n)...)
			var keys []types.NamespacedName
			for _, v := range w.src.Views() {
				if v.Key() != web {
					keys = append(keys, v.Key())
				}
			}
			w.script.Add(sinkscript.FailServices(errBusy, keys...))
			w.src.MarkSynced()
			w.waitApplied()
			log := strings.Join(w.logged(), "\n")
			more := strings.Contains(log, `"More services work again" "services"=2`)
			if named := strings.Count(log, `"Service works again"`); named != 10 || more != (n == 12) || strings.Contains(log, "More services work again") != more {
				t.Errorf("%d services work again, and the log names %d:\n%s", n, named, log)
			}
		})
	}
}

// TestLongPassIsLogged runs passes of ten Syncs.
func TestLongPassIsLogged(t *testing.T) {
	testLongPass(t, 2*time.Second, "3 6 9")
	testLongPass(t, 5*time.Second, "1 2 3 4 5 6 7 8 9")
}

func testLongPass(t *testing.T, took time.Duration, want string) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
		src := sinktest.NewSource()
		for i := range 10 {
			src.Set(view(key(fmt.Sprint("s", i)), 1))
		}
		src.MarkSynced()
		slow := sink.Func(func(_ context.Context, c *sink.Changes) error {
			for range c.Services {
				time.Sleep(took)
			}
			return nil
		})
		d := sink.NewDriver(src, slow, sink.Options{BatchSize: 1})
		go d.Run(ctx)
		if err := d.WaitSynced(ctx); err != nil {
			t.Fatal(err)
		}
		cancel()
		synctest.Wait()
		log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
		var counts []string
		for _, m := range regexp.MustCompile(`Delivering all services"? delivered=(\d+)`).FindAllStringSubmatch(log, -1) {
			counts = append(counts, m[1])
		}
		if got := strings.Join(counts, " "); got != want {
			t.Errorf("the log has progress after %q services, want %q:\n%s", got, want, log)
		}
	})
}

// The sink fails all services. The status names the first 100 that are pending.
func TestStatusListsPendingServices(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		for i := range 200 {
			w.src.Set(view(key(fmt.Sprintf("s%03d", i)), 1))
		}
		w.script.Add(sinkscript.Fail(errBusy))
		w.src.MarkSynced()
		synctest.Wait()
		s := w.driver.Status()
		if n := len(s.PendingServices); n != 100 || s.Pending != 201 {
			t.Fatalf("%d of %d pending services are listed, want 100 of 201", n, s.Pending)
		}
		if first := s.PendingServices[0].Name; first != "s000" {
			t.Errorf("the first pending service is %s", first)
		}
	})
}
