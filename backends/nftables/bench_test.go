// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"golang.org/x/sys/unix"
)

// manyServices returns the views of n services with m endpoints each.
func manyServices(n, m int) []sink.Change {
	list := make([]sink.Change, n)
	for i := range n {
		list[i] = sink.Change{New: numberedService(i, m)}
	}
	return list
}

// numberedService returns service number i with m endpoints.
func numberedService(i, m int) *api.View {
	ip := netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)})
	eps := make([]string, m)
	for e := range eps {
		n := i*16 + e
		eps[e] = netip.AddrFrom4([4]byte{11, byte(n >> 16), byte(n >> 8), byte(n)}).String()
	}
	return view(fmt.Sprintf("svc-%06d", i), []string{ip.String()}, eps, nil)
}

// splitPass divides a pass into batches of the driver's default size.
func splitPass(list []sink.Change) []*sink.Changes {
	var all []*sink.Changes
	for part := range slices.Chunk(list, 10_000/(1+len(list[0].New.Endpoints))) {
		all = append(all, batch(len(all) == 0, false, part...))
	}
	all[len(all)-1].Last = true
	return all
}

func BenchmarkLoad(b *testing.B) {
	for _, n := range []int{1_000, 10_000, 30_000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=10", n), func(b *testing.B) {
			all := splitPass(manyServices(n, 10))
			for b.Loop() {
				b.StopTimer()
				be, _ := start(b, Options{})
				b.StartTimer()
				mustSync(b, be, all...)
			}
		})
	}
}

// BenchmarkResync measures a restart with its first pass. No service has changed.
func BenchmarkResync(b *testing.B) {
	for _, n := range []int{1_000, 10_000, 30_000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=10", n), func(b *testing.B) {
			all := splitPass(manyServices(n, 10))
			be, ns := start(b, Options{})
			mustSync(b, be, all...)
			for b.Loop() {
				mustSync(b, startIn(b, ns, Options{}), all...)
			}
		})
	}
}

// BenchmarkChange measures changes of one of n services. The cases are: replace all
// endpoints; add and remove one endpoint; delete the service and add it again.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{1_000, 10_000, 100_000} {
		be, _ := start(b, Options{})
		list := manyServices(n, 10)
		mustSync(b, be, batchOf(true, list...))
		old := list[n/2].New
		replaced := view(old.Service.Name, []string{old.Service.IPs.ClusterIPs.Family(api.IPv4)[0].String()}, []string{"12.0.0.1", "12.0.0.2", "12.0.0.3", "12.0.0.4", "12.0.0.5", "12.0.0.6", "12.0.0.7", "12.0.0.8", "12.0.0.9", "12.0.0.10"}, nil)
		more := numberedService(n/2, 11)
		for _, kind := range []struct {
			name   string
			change *api.View
		}{{"all endpoints replaced", replaced}, {"endpoint added and removed", more}, {"service deleted and made", nil}} {
			b.Run(fmt.Sprintf("services=%d/%s", n, kind.name), func(b *testing.B) {
				for b.Loop() {
					key := old.Key()
					mustSync(b, be, batchOf(false, sink.Change{Key: key, Old: old, New: kind.change}))
					mustSync(b, be, batchOf(false, sink.Change{Key: key, Old: kind.change, New: old}))
				}
			})
		}
	}
}

// BenchmarkNewClass changes the affinity timeout of one of n services. No service had the
// new timeout before, so a class with a chain is needed. For a new chain, the kernel
// validates all verdicts of the table.
func BenchmarkNewClass(b *testing.B) {
	for _, n := range []int{1_000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			be, _ := start(b, Options{})
			list := manyServices(n, 10)
			mustSync(b, be, batchOf(true, list...))
			old := list[n/2].New
			for i := int32(1); b.Loop(); i++ {
				next := numberedService(n/2, 10)
				next.Service.AffinitySeconds = i%120 + 1
				mustSync(b, be, batchOf(false, sink.Change{Old: old, New: next}))
				old = next
			}
		})
	}
}

// BenchmarkLargeService programs, changes and deletes a service with 50 ports, 1,000
// external IPs and 100 endpoints. It measures only the backend, without connection tracking.
func BenchmarkLargeService(b *testing.B) {
	large, less := product(50, 1000, 100, nil), product(50, 1000, 99, nil)
	for _, bench := range []struct {
		name     string
		from, to *api.View
	}{{"service made and deleted", nil, large}, {"endpoint removed and added", large, less}} {
		b.Run(bench.name, func(b *testing.B) {
			be, _ := start(b, Options{})
			mustSync(b, be, batchOf(true))
			change := func(from, to *api.View) {
				if err := be.program(b.Context(), batchOf(false, sink.Change{Key: large.Key(), Old: from, New: to})); err != nil {
					b.Fatal(err)
				}
			}
			if bench.from != nil {
				change(nil, bench.from)
			}
			for b.Loop() {
				change(bench.from, bench.to)
				change(bench.to, bench.from)
			}
			b.ReportMetric(float64(be.table.state.elements()), "elements")
		})
	}
}

// BenchmarkAffinity adds and removes an endpoint of one of n services with session
// affinity. The metric s-to-load is the time to program all services.
func BenchmarkAffinity(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=3", n), func(b *testing.B) {
			be, _ := start(b, Options{})
			list := affineServices(n, 3)
			began := time.Now()
			mustSync(b, be, splitPass(list)...)
			b.ReportMetric(time.Since(began).Seconds(), "s-to-load")
			old, next := list[n/2].New, numberedService(n/2, 4)
			next.Service.AffinitySeconds = old.Service.AffinitySeconds
			for b.Loop() {
				mustSync(b, be, batchOf(false, sink.Change{Old: old, New: next}))
				mustSync(b, be, batchOf(false, sink.Change{Old: next, New: old}))
			}
		})
	}
}

// BenchmarkIdleVerify measures a Verify when no other program has changed any table since
// the last Verify. kpng calls Verify once a second.
func BenchmarkIdleVerify(b *testing.B) {
	be, _ := start(b, Options{})
	mustSync(b, be, splitPass(manyServices(10_000, 10))...)
	for b.Loop() {
		if err := be.Verify(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkConnect connects from the node to its own pods, through one service after the
// other. It reports the median time of a connection.
func BenchmarkConnect(b *testing.B) {
	for _, n := range []int{10, 1_000, 30_000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=10", n), func(b *testing.B) {
			be, ns := start(b, Options{})
			mustSync(b, be, batchOf(true, manyServices(n, 10)...))
			for _, network := range []string{"10.0.0.1/8", "11.0.0.1/8"} { // networks of the services and of the pods
				ns.Add(b, "lo", network)
			}
			serve(b, ns, "pod")
			times := make([]time.Duration, 0, b.N)
			err := ns.Do(func() error {
				for i := range b.N {
					to := &unix.SockaddrInet4{Port: 80, Addr: numberedService(i*7919%n, 0).Service.IPs.ClusterIPs.Family(api.IPv4)[0].As4()}
					took, err := netnstest.TimeConnect(to)
					if err != nil {
						return err
					}
					times = append(times, took)
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Nanoseconds())/1000, "µs-median")
		})
	}
}

// BenchmarkChangeDuringPass changes one service after the other during a pass. The
// benchmark reports the median and the longest time until a change is in the kernel. The
// longest time has four parts: in the driver, which waits for the batch before the
// change, at the lock of the backend, in transactions of the kernel, and in the backend.
// The benchmark also reports the longest CPU time of the process for a change. Other
// programs do not affect this time. The case "restart" is the first pass after a restart,
// when the table has already been read. The case "later" is a later pass, from the
// request for it, and "repair" is a pass after another program has deleted the table.
func BenchmarkChangeDuringPass(b *testing.B) {
	for _, n := range []int{1_000, 10_000, 30_000, 100_000} {
		src := sinktest.NewSource()
		for _, c := range manyServices(n, 10) {
			src.Set(c.New)
		}
		src.SetNode(node)
		src.MarkSynced()
		for _, kind := range []string{"restart", "later", "repair"} {
			b.Run(fmt.Sprintf("services=%d/endpoints=10/%s", n, kind), func(b *testing.B) {
				timed := &timedSink{done: make(chan changeTimes)}
				be, ns := start(b, Options{}, timed.use)
				timed.started = started{be.Sync, be}
				observer := newConn(ns.FD, be.opts.tables()[0])
				defer observer.Close()
				src.Reset()
				d, stop := drive(b, src, timed, 0)
				waitApplied(b, d, src)
				var changes []changeTimes
				for b.Loop() {
					before := d.Status().Passes
					switch kind {
					case "repair":
						if err := observer.Delete(b.Context()); err != nil {
							b.Fatal(err)
						}
						fallthrough
					case "later":
						d.StartOver()
					case "restart":
						b.StopTimer()
						stop()
						be = startIn(b, ns, Options{}, timed.use)
						waitReadAhead(be)
						timed.started = started{be.Sync, be}
						b.StartTimer()
						before = 0
						d, stop = drive(b, src, timed, 0)
						for d.Status().SyncingSince.IsZero() && d.Status().Passes == before {
							time.Sleep(10 * time.Microsecond)
						}
					}
					for d.Status().Passes == before {
						i := rand.IntN(n)
						changed := numberedService(i, 10)
						changed.Endpoints[0].Addr = netip.AddrFrom4([4]byte{12, 0, byte(len(changes) >> 8), byte(len(changes))})
						changes = append(changes, timed.deliver(b, src, changed))
						if !slices.ContainsFunc(endpointsOf(b, observer, i), func(e element) bool { return addrOf(e.data[:4]) == changed.Endpoints[0].Addr }) {
							b.Fatalf("the kernel does not have the change of service %d", i)
						}
					}
				}
				slices.SortFunc(changes, func(a, b changeTimes) int { return cmp.Compare(a.all, b.all) })
				report := func(d time.Duration, unit string) { b.ReportMetric(float64(d)/float64(time.Millisecond), unit) }
				worst := changes[len(changes)-1]
				report(changes[len(changes)/2].all, "ms-median-wait")
				report(changes[len(changes)*99/100].all, "ms-p99-wait")
				report(worst.all, "ms-worst-wait")
				report(worst.driver, "ms-worst-in-driver")
				report(worst.lock, "ms-worst-in-lock")
				report(worst.kernel, "ms-worst-in-kernel")
				b.ReportMetric(float64(len(changes)), "changes")
				report(slices.MaxFunc(changes, func(a, b changeTimes) int { return cmp.Compare(a.cpu, b.cpu) }).cpu, "cpu-ms-worst-wait")
			})
		}
	}
}

// changeTimes are the times of one change.
type changeTimes struct{ all, driver, lock, kernel, cpu time.Duration }

// timedSink measures the Sync of one service.
type timedSink struct {
	started
	service atomic.Pointer[api.View]
	began   time.Time
	done    chan changeTimes
	kernel  atomic.Int64 // the time of all transactions so far, in nanoseconds
}

// use makes s measure the transactions of a backend.
func (s *timedSink) use(o *options) {
	o.exchange = func(batch []byte, send func([]byte) error) error {
		begin := time.Now()
		defer func() { s.kernel.Add(int64(time.Since(begin))) }()
		return send(batch)
	}
}

// deliver changes a service in the source, waits until the kernel has the change, and
// returns the times of the change.
func (s *timedSink) deliver(b *testing.B, src *sinktest.Source, v *api.View) changeTimes {
	used := cpuTime(b)
	s.began = time.Now()
	s.service.Store(v)
	src.Set(v)
	times := <-s.done
	times.cpu = cpuTime(b) - used
	return times
}

func (s *timedSink) Sync(ctx context.Context, c *sink.Changes) error {
	begin, kernel := time.Now(), s.kernel.Load()
	s.backend.mu.Lock()
	lock := time.Since(begin)
	s.backend.mu.Unlock()
	err := s.started.Sync(ctx, c)
	end, v := time.Now(), s.service.Load()
	for ch := range c.Services {
		if v != nil && ch.Key == v.Key() && ch.New.Endpoints[0].Addr == v.Endpoints[0].Addr {
			s.service.Store(nil)
			s.done <- changeTimes{all: end.Sub(s.began), driver: begin.Sub(s.began), lock: lock, kernel: time.Duration(s.kernel.Load() - kernel)}
			break
		}
	}
	return err
}

// BenchmarkChurn changes services at random times. It reports the CPU time of the process
// for each change. In one case, the driver delivers changes immediately. In the other
// case, it gathers them. A benchmark of 1,000 changes takes 5 seconds at the lower rate:
// use -benchtime 1000x.
func BenchmarkChurn(b *testing.B) {
	const n = 10_000
	for _, rate := range []int{200, 2000} {
		for kind, interval := range map[string]time.Duration{"immediate": 1, "default": 0} {
			b.Run(fmt.Sprintf("services=%d/changes=%d/%s", n, rate, kind), func(b *testing.B) {
				src := sinktest.NewSource()
				for _, c := range manyServices(n, 10) {
					src.Set(c.New)
				}
				src.SetNode(node)
				src.MarkSynced()
				be, _ := start(b, Options{})
				d, stop := driveWith(b, src, sink.Func(be.Sync), sink.Options{MinInterval: interval})
				waitApplied(b, d, src)
				syncs, used := d.Status().Syncs, cpuTime(b)
				pause := func() time.Duration { return time.Duration(rand.ExpFloat64() * float64(time.Second) / float64(rate)) }
				for i := 0; b.Loop(); time.Sleep(pause()) {
					i++
					changed := numberedService(rand.IntN(n), 10)
					changed.Endpoints[0].Addr = netip.AddrFrom4([4]byte{12, 0, byte(i >> 8), byte(i)})
					src.Set(changed)
				}
				waitApplied(b, d, src)
				b.ReportMetric(float64((cpuTime(b)-used).Microseconds())/float64(b.N), "cpu-µs/change")
				b.ReportMetric(float64(b.N)/float64(d.Status().Syncs-syncs), "changes/sync")
				stop()
			})
		}
	}
}
