// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/sink"
)

// numbered returns the view of the service web-<number> with this number of endpoints.
// The argument last is the last octet of the last endpoint's address.
func numbered(number, endpoints int, last byte) *api.View {
	var all []string
	for i := range endpoints {
		octet := byte(i + 1)
		if i == endpoints-1 {
			octet = last
		}
		all = append(all, netip.AddrFrom4([4]byte{11, byte(number >> 8), byte(number), octet}).String())
	}
	ip := netip.AddrFrom4([4]byte{10, 96, byte(number >> 8), byte(number)}).String()
	return view("web-"+strconv.Itoa(number), ip, all)
}

// BenchmarkServices measures the first pass over services with ten endpoints each, then
// changes of one endpoint, and a pass that finds nothing to do. It also measures the heap
// after the first pass, and how long ovs-ofctl takes to write the same flows and groups to an empty bridge.
func BenchmarkServices(b *testing.B) {
	for _, services := range []int{500, 5000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			for b.Loop() {
				benchmarkServices(b, services)
			}
		})
	}
}

func benchmarkServices(b *testing.B, services int) {
	const endpoints, changes = 10, 1000
	n := newNode(b)
	defer n.Kill()
	var views []*api.View
	for i := range services {
		views = append(views, numbered(i, endpoints, endpoints))
	}
	measure := func(name string, count int, f func()) {
		start, own, daemon := time.Now(), cpuTime(b), n.daemonCPUTime()
		f()
		b.ReportMetric(float64(time.Since(start).Microseconds())/1000/float64(count), name+"-ms")
		b.ReportMetric(float64((cpuTime(b)-own).Microseconds())/1000/float64(count), name+"-cpu-ms")
		b.ReportMetric(float64((n.daemonCPUTime()-daemon).Microseconds())/1000/float64(count), name+"-vswitchd-cpu-ms")
	}
	measure("start", 1, func() { n.mustPass(views...) })
	runtime.GC()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	b.ReportMetric(float64(memory.HeapAlloc)/1e6, "heap-MB")
	measure("change", changes, func() {
		for i := range changes {
			n.mustSync(numbered(i%services, endpoints, byte(100+i/services%2)))
		}
	})
	measure("resync", 1, func() { n.mustPass(views...) })

	groups := withoutHeaders(n.Ofctl(b, "dump-groups"))
	flows := withoutHeaders(n.Flows(b))
	n.Ofctl(b, "del-flows")
	n.Ofctl(b, "del-groups")
	measure("ofctl", 1, func() {
		n.OfctlWith(b, groups, "add-groups", "-")
		n.OfctlWith(b, flows, "add-flows", "-")
	})
}

// withoutHeaders returns the flows or groups in an output of ovs-ofctl.
func withoutHeaders(output string) string {
	lines := slices.DeleteFunc(strings.SplitAfter(output, "\n"), func(line string) bool { return strings.HasPrefix(line, "OFPST_") })
	return strings.Join(lines, "")
}

// cpuTime returns the CPU time of this process.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// daemonCPUTime returns the CPU time of ovs-vswitchd.
func (n *testNode) daemonCPUTime() time.Duration {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.Daemon.Pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(stat)[strings.LastIndexByte(string(stat), ')')+1:])
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	const ticks = 100 // per second
	return time.Duration(user+system) * time.Second / ticks
}

// BenchmarkLargeService measures a service of many ports, addresses, endpoints or source
// ranges: loading it, the loss of one endpoint, and its deletion.
func BenchmarkLargeService(b *testing.B) {
	for name, s := range map[string]shape{
		"50 ports, 1000 addresses, 100 endpoints": {ports: 50, addresses: 1000, endpoints: 100},
		"50 ports, 100 endpoints, affinity":       {ports: 50, endpoints: 100, affinity: true},
		"30 ports, 1000 ranges":                   {ports: 30, addresses: 1, endpoints: 2, ranges: 1000},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				benchmarkLargeService(b, s)
			}
		})
	}
}

func benchmarkLargeService(b *testing.B, s shape) {
	n := newNode(b)
	defer n.Kill()
	n.mustPass()
	measure := func(name string, f func()) {
		start, own, daemon := time.Now(), cpuTime(b), n.daemonCPUTime()
		f()
		b.ReportMetric(float64(time.Since(start).Milliseconds()), name+"-ms")
		b.ReportMetric(float64((cpuTime(b) - own).Milliseconds()), name+"-cpu-ms")
		b.ReportMetric(float64((n.daemonCPUTime() - daemon).Milliseconds()), name+"-vswitchd-cpu-ms")
	}
	large := s.view("large")
	s.endpoints--
	smaller := s.view("large")
	measure("load", func() { n.mustSync(large) })
	b.ReportMetric(float64(n.backend.dataplane.flows), "flows")
	measure("change", func() { n.mustSync(smaller) })
	measure("delete", func() {
		if err := n.sync(sink.Changes{}, "large"); err != nil {
			b.Fatal(err)
		}
	})
}

// BenchmarkStats reads the counters of 10,000 services with ten endpoints each. Half of the
// runs are for services with session affinity, whose flows are the counters.
func BenchmarkStats(b *testing.B) {
	for _, affinity := range []bool{false, true} {
		b.Run(fmt.Sprintf("affinity=%t", affinity), func(b *testing.B) {
			const services, endpoints = 10_000, 10
			n := newNode(b, counting)
			var views []*api.View
			for i := range services {
				v := numbered(i, endpoints, endpoints)
				if affinity {
					withAffinity(v.Service)
				}
				views = append(views, v)
			}
			n.mustPass(views...)
			own, daemon := cpuTime(b), n.daemonCPUTime()
			for b.Loop() {
				counters := 0
				if err := n.backend.Stats(b.Context(), func(backends.Stats) bool { counters++; return true }); err != nil || counters != services*endpoints {
					b.Fatalf("%d counters, error %v", counters, err)
				}
			}
			b.ReportMetric(float64((cpuTime(b)-own).Microseconds())/1000/float64(b.N), "cpu-ms/op")
			b.ReportMetric(float64((n.daemonCPUTime()-daemon).Microseconds())/1000/float64(b.N), "vswitchd-cpu-ms/op")
		})
	}
}
