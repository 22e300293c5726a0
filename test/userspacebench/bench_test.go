// SPDX-License-Identifier: Apache-2.0

//go:build linux

package userspacebench

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/cgroup"
)

func TestMain(m *testing.M) {
	if arg := os.Getenv("KPNG_BENCH_CLIENT"); arg != "" {
		client(arg)
		return
	}
	if os.Getenv("KPNG_BENCH_SERVER") != "" {
		server()
		return
	}
	if os.Getenv("KPNG_BENCH_CONTENT") != "" {
		content(os.Args[1:])
		return
	}
	os.Exit(m.Run())
}

const (
	each    = 1500 * time.Millisecond
	idlers  = 2000
	getters = 32
)

// sample contains the figures of a proxy in one round. A figure is 0 if the proxy does
// not support the figure's kind of load.
type sample map[string]float64

// columns contains the names of the figures, in the order of the columns of the printed
// table.
var columns = []string{
	"1 stream, Gbit/s", "16 streams, Gbit/s", "CPU s/GB", "connections/s", "CPU µs/connection",
	"latency p50, µs", "latency p99, µs", "KB/idle connection", "descriptors/idle connection", "datagrams/s",
}

// BenchmarkProxies prints a table of medians. Each round measures all proxies, so that
// slow changes of the machine's speed affect all proxies.
func BenchmarkProxies(b *testing.B) {
	w := newWorld(b)
	all := proxies(w)
	rounds := 3
	if testing.Short() {
		rounds = 1
	}
	samples := map[string][]sample{}
	for range rounds {
		for _, p := range all {
			samples[p.name] = append(samples[p.name], w.measure(p))
		}
	}
	table := "\n| | " + strings.Join(columns, " | ") + " |\n|---" + strings.Repeat("|---", len(columns)) + "|\n"
	for _, p := range all {
		table += "| " + p.name
		for _, c := range columns {
			table += " | " + spread(samples[p.name], c)
		}
		table += " |\n"
	}
	fmt.Println(table)
	b.ReportMetric(0, "ns/op") // hide the time per operation, which means nothing here
}

// spread returns the median, minimum and maximum of a figure.
func spread(samples []sample, column string) string {
	var values []float64
	for _, s := range samples {
		if v := s[column]; v != 0 {
			values = append(values, v)
		}
	}
	if len(values) == 0 {
		return "–"
	}
	slices.Sort(values)
	format := "%.0f"
	if values[len(values)/2] < 100 {
		format = "%.1f"
	}
	if values[len(values)/2] < 10 {
		format = "%.2f"
	}
	return fmt.Sprintf(format+" ("+format+"–"+format+")", values[len(values)/2], values[0], values[len(values)-1])
}

// measure runs each kind of load through a proxy.
func (w *world) measure(p *proxy) sample {
	server := w.start(w.server, nil, "env", "KPNG_BENCH_SERVER=1", os.Args[0])
	defer server.stop()
	w.waitServed(server, serverAddr, echoPort)
	var group *cgroup.Group
	if p.command != nil {
		if p.bound {
			w.proxy.Add(w, "lo", frontendAddr+"/32")
			defer w.proxy.Remove(w, "lo", frontendAddr+"/32")
		}
		group = cgroup.New(w)
		running := w.start(w.proxy, group, p.command...)
		// When kube-proxy ends, its rules remain. Delete them.
		defer w.proxy.Run(w, "iptables", "-t", "nat", "-F")
		defer running.stop()
		for _, port := range []int{httpPort, bulkPort, echoPort} {
			w.waitServed(running, frontendAddr, port)
		}
	}
	s := sample{}
	run := func(l load) result {
		l.Target, l.For = p.target(), each
		return w.load(l, nil)
	}
	// The following function runs a load. It returns the result and the proxy's CPU time.
	used := func(l load) (result, time.Duration) {
		if group == nil {
			return run(l), 0
		}
		before := group.CPU()
		r := run(l)
		return r, group.CPU() - before
	}
	s["1 stream, Gbit/s"] = run(load{Kind: "bulk", Clients: 1}).perSecond() * 8 / 1e9
	bulk, cpu := used(load{Kind: "bulk", Clients: 16})
	s["16 streams, Gbit/s"] = bulk.perSecond() * 8 / 1e9
	s["CPU s/GB"] = cpu.Seconds() / (float64(bulk.Count) / 1e9)
	http, cpu := used(load{Kind: "http", Clients: getters})
	s["connections/s"] = http.perSecond()
	s["CPU µs/connection"] = float64(cpu.Microseconds()) / float64(http.Count)
	if http.Errors > 0 {
		w.Logf("%s: %d of %d connections failed", p.name, http.Errors, http.Count)
	}
	echo := run(load{Kind: "echo", Clients: 1})
	s["latency p50, µs"] = float64(echo.P50.Microseconds())
	s["latency p99, µs"] = float64(echo.P99.Microseconds())
	if p.udp {
		s["datagrams/s"] = run(load{Kind: "udp", Clients: 16}).perSecond()
	}
	if group != nil {
		time.Sleep(500 * time.Millisecond) // let earlier connections end
		memoryBefore, filesBefore := group.Memory(), group.Descriptors()
		w.load(load{Kind: "idle", Target: p.target(), Clients: idlers}, func() {
			s["KB/idle connection"] = float64(group.Memory()-memoryBefore) / idlers / 1000
			s["descriptors/idle connection"] = float64(group.Descriptors()-filesBefore) / idlers
		})
	}
	return s
}
