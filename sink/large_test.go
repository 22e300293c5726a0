// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sinkscript"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// largeRanges makes a service large.
var largeRanges = []api.SourceRanges{{Prefixes: make([]netip.Prefix, updates.LargeSize)}}

// large returns a view of a large service.
func large(key types.NamespacedName, endpoints ...byte) *api.View {
	v := view(key, endpoints...)
	v.Service.SourceRanges = largeRanges
	return v
}

// A large service changes, and has its old view again before it is delivered.
func TestLargeServiceChangesBack(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		w.src.Set(large(web, 1))
		w.src.MarkSynced()
		w.waitApplied()
		skip := len(w.rec.Syncs())
		release := make(chan struct{})
		w.script.Add(sinkscript.Block(release))
		w.src.Set(view(dns, 1))
		synctest.Wait()
		w.logged()
		w.src.Set(large(web, 2))
		w.src.Set(large(web, 1), view(dns, 2))
		close(release)
		w.waitApplied()
		w.expectDelivered(skip, "0s: dns none→[1]", "0s: dns [1]→[2]")
		for _, line := range w.logged() {
			if !strings.HasPrefix(line, `"Synced"`) {
				w.Errorf("the log has %s", line)
			}
		}
	})
}

func TestLargeServicesComeAfterOthers(t *testing.T) {
	slow := func(w *world) {
		w.script.Add(sinkscript.Repeat(20, func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
			time.Sleep(time.Second)
			return s.Sync(ctx, c)
		})...)
	}
	a, b, c, d := key("a"), key("b"), key("c"), key("d")
	cases := []struct {
		name string
		opts sink.Options
		test func(w *world)
		want []string
	}{{
		name: "in one update",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.src.Set(large(a, 2), large(b, 2), view(c, 2), view(d, 2))
		},
		want: []string{
			"0s: first c none→[1] d none→[1]", "0s: a none→[1] unsure", "0s: b none→[1] unsure", "0s: last",
			"0s: c [1]→[2] d [1]→[2]", "0s: a [1]→[2]", "0s: b [1]→[2]",
		},
	}, {
		name: "in a pass, after all batches",
		opts: sink.Options{BatchSize: 2},
		test: func(w *world) { w.src.MarkSynced() },
		want: []string{
			"0s: first c none→[1]", "0s: d none→[1] unsure", "0s: a none→[1] unsure", "0s: b none→[1] unsure", "0s: last",
		},
	}, {
		name: "if all change all the time, they take turns",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			slow(w)
			for n := byte(2); n < 8; n++ {
				w.src.Set(large(a, n), large(b, n), view(c, n))
				time.Sleep(time.Second)
				if n == 2 {
					time.Sleep(time.Second / 2) // the next changes come in the middle of a Sync
				}
			}
		},
		want: []string{
			"0s: first c none→[1] d none→[1]", "0s: a none→[1] unsure", "0s: b none→[1] unsure", "0s: last",
			"0s: c [1]→[2]", "1s: a [1]→[2]", "2s: c [2]→[3]", "3s: b [1]→[4]",
			"4s: c [3]→[5]", "5s: a [2]→[6]", "6s: c [5]→[7]", "7s: b [4]→[7]", "8s: a [6]→[7]",
		},
	}, {
		name: "a large service that changes back is not delivered",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			slow(w)
			w.src.Set(large(a, 2), view(c, 2))
			synctest.Wait()
			w.src.Set(large(a, 1))
		},
		want: []string{
			"0s: first c none→[1] d none→[1]", "0s: a none→[1] unsure", "0s: b none→[1] unsure", "0s: last", "0s: c [1]→[2]",
		},
	}, {
		name: "a small service takes an address from a large one, so the large one has no old view",
		test: func(w *world) {
			addressed := func(v *api.View, ip string) *api.View {
				v.Service.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr(ip))
				return v
			}
			w.src.Set(addressed(large(a, 1), "10.0.0.1"), addressed(view(c, 1), "10.0.0.2"))
			w.src.MarkSynced()
			w.waitApplied()
			w.src.Set(addressed(large(a, 1), "10.0.0.2"), addressed(view(c, 1), "10.0.0.1"))
		},
		want: []string{
			"0s: first c none→[1] d none→[1]", "0s: a none→[1] unsure", "0s: b none→[1] unsure", "0s: last",
			"0s: c [1]→[1]", "0s: a none→[1] unsure",
		},
	}, {
		name: "a large service that appears or changes after its delivery in a pass has a known old view",
		opts: sink.Options{BatchSize: 2},
		test: func(w *world) {
			w.script.Add(sinkscript.Repeat(4, func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
				time.Sleep(time.Second)
				return s.Sync(ctx, c)
			})...)
			w.src.MarkSynced()
			time.Sleep(3500 * time.Millisecond) // the service b is being delivered
			w.src.Set(large(a, 2))
			time.Sleep(time.Second)
			w.waitApplied()
			w.src.Set(large(key("e"), 1))
		},
		want: []string{
			"0s: first c none→[1]", "1s: d none→[1] unsure", "2s: a none→[1] unsure", "3s: b none→[1] unsure",
			"4s: last", "4s: a [1]→[2]", "4.5s: e none→[1]",
		},
	}, {
		name: "a large service that fails in the Sync of another one is repeated alone",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(sinkscript.FailServices(errBusy, a, c))
			w.src.Set(view(c, 2))
		},
		want: []string{
			"0s: first c none→[1] d none→[1]", "0s: a none→[1] unsure", "0s: b none→[1] unsure", "0s: last",
			"0s: c [1]→[2]: service default/a: dataplane is busy; service default/c: dataplane is busy",
			"100ms: c [1]→[2] unsure", "100ms: a [1]→[1] unsure",
		},
	}, {
		name: "a large service that fails is repeated alone",
		test: func(w *world) {
			w.src.MarkSynced()
			w.waitApplied()
			w.script.Add(sinkscript.FailServices(errBusy, a))
			w.src.Set(large(a, 2))
			time.Sleep(50 * time.Millisecond)
			w.script.Add(sinkscript.FailServices(errBusy, c))
			w.src.Set(view(c, 2))
			time.Sleep(30 * time.Millisecond)
			w.src.Set(view(c, 3))
		},
		want: []string{
			"0s: first c none→[1] d none→[1]", "0s: a none→[1] unsure", "0s: b none→[1] unsure", "0s: last",
			"0s: a [1]→[2]: service default/a: dataplane is busy", "50ms: c [1]→[2]: service default/c: dataplane is busy",
			"80ms: c [1]→[3] unsure", "100ms: a [1]→[2] unsure",
		},
	}}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			run(t, tc.opts, nil, func(w *world) {
				w.src.Delete(web)
				w.src.Set(large(a, 1), large(b, 1), view(c, 1), view(d, 1))
				tc.test(w)
				synctest.Wait()
				w.waitApplied()
				w.expectDelivered(0, tc.want...)
			})
		})
	}
}

// When the turn of a large service comes, it has its old view again, or its view cannot be
// computed. Then the same Sync delivers the other services, also failed services.
func TestTurnOfALargeServiceWithoutADelivery(t *testing.T) {
	a, c, x := key("a"), key("c"), key("x")
	for _, tc := range []struct {
		name  string
		again func(w *world)
		want  []string
	}{{
		name:  "the old view",
		again: func(w *world) { w.src.Set(large(a, 1), view(c, 3)) },
	}, {
		name: "no view",
		again: func(w *world) {
			w.src.PanicIn(a)
			w.src.Set(view(c, 3))
			time.AfterFunc(2100*time.Millisecond, func() { w.src.PanicIn(types.NamespacedName{}) })
		},
		want: []string{"2.2s: a [1]→[2] unsure"},
	}} {
		t.Run(tc.name, func(t *testing.T) {
			run(t, sink.Options{}, nil, func(w *world) {
				w.src.Delete(web)
				w.src.Set(large(a, 1), view(c, 1), view(x, 1))
				w.src.MarkSynced()
				w.waitApplied()
				skip := len(w.rec.Syncs())
				w.script.Add(sinkscript.FailServices(errBusy, x))
				w.script.Add(sinkscript.Repeat(2, func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
					time.Sleep(time.Second)
					return s.Sync(ctx, c)
				})...)
				w.src.Set(view(x, 2))
				synctest.Wait()
				w.src.Set(large(a, 2), view(c, 2))
				synctest.Wait()
				tc.again(w)
				time.Sleep(5 * time.Second)
				w.waitApplied()
				w.expectDelivered(skip, append([]string{
					"0s: x [1]→[2]: service default/x: dataplane is busy", "0s: c [1]→[2]", "1s: c [2]→[3] x [1]→[2] unsure",
				}, tc.want...)...)
			})
		})
	}
}

// A large service makes Syncs fail. It is isolated and retried with backoff.
func TestLargeServiceMakesSyncPanic(t *testing.T) {
	a := key("a")
	run(t, sink.Options{}, panicking(a), func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.src.Set(large(a, 1))
		time.Sleep(time.Hour)
		synctest.Wait()
		if n, failing := len(w.rec.Syncs()), w.driver.Status().Failing; n < 100 || n > 150 || len(failing) != 1 {
			t.Errorf("%d Syncs in an hour; failing: %v", n, failing)
		}
	})
}

// A pass ends although a large service changes during each Sync. It also ends if the large
// service fails.
func TestPassEndsWhileALargeServiceChanges(t *testing.T) {
	a := key("a")
	for _, tc := range []struct {
		name  string
		fails bool
		want  []string
	}{
		{"changes", false, []string{"0s: a none→[2] unsure", "0s: last", "0s: a [2]→[4]"}},
		{"fails", true, []string{"0s: a none→[2] unsure: service default/a: dataplane is busy", "0s: last failing [default/a]", "0s: a none→[4] unsure"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			run(t, sink.Options{}, nil, func(w *world) {
				n := byte(1)
				w.script.Add(sinkscript.Repeat(3, func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
					n++
					w.src.Set(large(a, n))
					for change := range c.Services {
						if tc.fails && change.Key == a {
							return &sink.Failed{a: errBusy}
						}
					}
					return s.Sync(ctx, c)
				})...)
				w.src.Set(large(a, 1))
				w.src.MarkSynced()
				synctest.Wait()
				w.waitApplied()
				w.expectDelivered(0, append([]string{"0s: first web none→[1]"}, tc.want...)...)
			})
		})
	}
}

// A pass ends while two large services change during each Sync.
func TestPassEndsWhileTwoLargeServicesChange(t *testing.T) {
	run(t, sink.Options{}, nil, func(w *world) {
		n := byte(1)
		w.script.Add(sinkscript.Repeat(20, func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
			time.Sleep(time.Second)
			n++
			w.src.Set(large(key("a"), n), large(key("b"), n))
			return s.Sync(ctx, c)
		})...)
		w.src.Set(large(key("a"), n), large(key("b"), n))
		w.src.MarkSynced()
		time.Sleep(10 * time.Second)
		if w.driver.Status().Passes == 0 {
			w.Error("no pass has ended after 10 Syncs")
		}
		time.Sleep(time.Minute) // the changes end
		w.waitApplied()
	})
}

// A small service gets an address before the delivery of the large service that loses this
// address. Even then, no two services in a FullState have the same claim.
func TestFullStateOfLargeServicesHasOneOwner(t *testing.T) {
	var calls [][]types.NamespacedName
	owners := sink.FullState(func(_ context.Context, services []*api.View) error {
		var at []types.NamespacedName
		for _, v := range services {
			if slices.Contains(v.Service.IPs.ClusterIPs.Family(api.IPv4), netip.MustParseAddr("10.0.0.1")) && len(v.Lost) == 0 {
				at = append(at, v.Key())
			}
		}
		calls = append(calls, at)
		return nil
	})
	a, b := large(key("a"), 1), view(key("b"), 1)
	a.Service.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.0.0.1"))
	run(t, sink.Options{}, owners, func(w *world) {
		w.src.Delete(web)
		w.src.Set(a, b)
		w.src.MarkSynced()
		w.waitApplied()
		without, with := large(key("a"), 1), view(key("b"), 1)
		with.Service.IPs = a.Service.IPs
		w.src.Set(without, with)
		w.waitApplied()
	})
	for i, at := range calls {
		if len(at) > 1 {
			t.Errorf("call %d: %v have the same address", i, at)
		}
	}
	if last := calls[len(calls)-1]; !slices.Equal(last, []types.NamespacedName{key("b")}) {
		t.Errorf("%v have the address, want b", last)
	}
}
