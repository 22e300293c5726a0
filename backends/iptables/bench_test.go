// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// many returns views of n services with ten endpoints each, in key order.
func many(n int) []*api.View {
	list := make([]*api.View, n)
	for i := range list {
		endpoints := ""
		for j := range 10 {
			endpoints += fmt.Sprintf("10.%d.%d.%d ", 1+j, i>>8, i&255)
		}
		list[i] = view(fmt.Sprintf("s%05d", i), fmt.Sprintf("10.96.%d.%d", i>>8, i&255), endpoints)
	}
	return list
}

// passOf returns a pass that delivers views. Its batches have the same size as a driver's
// batches.
func passOf(views []*api.View) (batches []*sink.Changes) {
	for some := range slices.Chunk(views, 10_000/11) {
		c := batch(some...)
		c.First, c.NodeChanged = len(batches) == 0, len(batches) == 0
		batches = append(batches, c)
	}
	batches[len(batches)-1].Last = true
	return batches
}

// cpu returns the CPU time of this process and of the programs that it ran.
func cpu(b *testing.B) (total time.Duration) {
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var usage unix.Rusage
		if err := unix.Getrusage(who, &usage); err != nil {
			b.Fatal(err)
		}
		total += time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	}
	return total
}

// measureCPU returns a function that reports the mean CPU time of an iteration. The time
// begins with the call of measureCPU.
func measureCPU(b *testing.B) (report func()) {
	begin := cpu(b)
	return func() { b.ReportMetric(float64((cpu(b)-begin).Milliseconds())/float64(b.N), "cpu-ms/op") }
}

// heapInUse returns the size of live objects in megabytes.
func heapInUse() float64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return float64(stats.HeapAlloc) / 1e6
}

func benchmark(b *testing.B, run func(b *testing.B, v variant, n int)) {
	for _, v := range []variant{{flavourNFT, false}, {flavourLegacy, false}} {
		for _, n := range []int{1000, 5000} {
			b.Run(fmt.Sprintf("%s/%d", v, n), func(b *testing.B) { run(b, v, n) })
		}
	}
}

// BenchmarkStart measures the first pass of services with ten endpoints each into an
// empty kernel.
func BenchmarkStart(b *testing.B) {
	benchmark(b, func(b *testing.B, v variant, n int) {
		views := many(n)
		heap, report := heapInUse(), measureCPU(b)
		var backends []*backend
		for b.Loop() {
			backend := start(b, netnstest.New(b), v)
			mustSync(b, backend, passOf(views)...)
			backends = append(backends, backend)
		}
		report()
		b.ReportMetric((heapInUse()-heap)/float64(b.N), "heap-MB/op")
		runtime.KeepAlive(backends)
	})
}

// BenchmarkRestart measures a pass that finds all rules in the kernel.
func BenchmarkRestart(b *testing.B) {
	benchmark(b, func(b *testing.B, v variant, n int) {
		views := many(n)
		backend := start(b, netnstest.New(b), v)
		mustSync(b, backend, passOf(views)...)
		report := measureCPU(b)
		for b.Loop() {
			mustSync(b, backend, passOf(views)...)
		}
		report()
	})
}

// BenchmarkEndpointChange measures a Sync in which one endpoint of one service changes.
func BenchmarkEndpointChange(b *testing.B) {
	benchmark(b, func(b *testing.B, v variant, n int) {
		lines := 0
		backend := start(b, netnstest.New(b), v, func(o *options) {
			o.Observer = &backendtest.Observer{OnWrote: func(n int, _ error) { lines += n }}
		})
		mustSync(b, backend, passOf(many(n))...)
		lines = 0
		report := measureCPU(b)
		for change := 0; b.Loop(); change++ {
			mustSync(b, backend, batch(view("s00007", "10.96.0.7", fmt.Sprintf("10.0.0.%d 10.0.1.1 10.0.1.2 10.0.1.3 10.0.1.4 10.0.1.5 10.0.1.6 10.0.1.7 10.0.1.8 10.0.1.9", change%250+1))))
		}
		report()
		b.ReportMetric(float64(lines)/float64(b.N), "lines/op")
	})
}

// BenchmarkVerify measures a comparison of all rules.
func BenchmarkVerify(b *testing.B) {
	benchmark(b, func(b *testing.B, v variant, n int) {
		backend := start(b, netnstest.New(b), v)
		mustSync(b, backend, passOf(many(n))...)
		report := measureCPU(b)
		for b.Loop() {
			forget(backend)
			if err := verify(b, backend); err != nil {
				b.Fatal(err)
			}
		}
		report()
	})
}

// BenchmarkLargeServices measures the CPU time and the lines for each change of a large
// service, and for a change of another service beside it.
func BenchmarkLargeServices(b *testing.B) {
	for _, c := range []struct {
		name  string
		shape shape
	}{
		{"2000 ports, 50 endpoints", shape{ports: 2000, endpoints: 50}},
		{"2000 target ports, 50 endpoints", shape{ports: 2000, endpoints: 50, target: otherPort}},
		{"50 ports, 200 IPs, 100 endpoints", shape{ports: 50, externalIPs: 200, endpoints: 100}},
		{"30 ports, 1000 ranges", shape{ports: 30, endpoints: 3, ranges: 1000}},
		{"1000 endpoints with affinity", shape{ports: 1, endpoints: 1000, affinity: true}},
	} {
		for _, v := range []variant{{flavourNFT, false}, {flavourLegacy, false}} {
			b.Run(fmt.Sprintf("%s/%s", c.name, v), func(b *testing.B) { benchmarkLarge(b, v, c.shape) })
		}
	}
}

func benchmarkLarge(b *testing.B, v variant, s shape) {
	lines := 0
	ns := netnstest.New(b)
	count := func(o *options) { o.Observer = &backendtest.Observer{OnWrote: func(n int, _ error) { lines += n }} }
	svc, others := s.service(), many(50)
	for n := 0; b.Loop(); n++ {
		backend := start(b, ns, v, count)
		measure := func(name string, all ...*sink.Changes) {
			begin, before := cpu(b), lines
			mustSync(b, backend, all...)
			b.ReportMetric(float64((cpu(b) - begin).Milliseconds()), name+"-ms")
			b.ReportMetric(float64(lines-before), name+"-lines")
		}
		mustSync(b, backend, passOf(others)...)
		measure("load", batch(s.view(svc, 0)))
		measure("endpoint", batch(s.view(svc)))
		measure("other", batch(view("s00003", "10.96.0.3", "10.9.0.1")))
		backend = start(b, ns, v, count)
		measure("restart", passOf(append([]*api.View{s.view(svc)}, others...))...)
		measure("delete", deletion(s.view(svc)))
	}
}
