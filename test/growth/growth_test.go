// SPDX-License-Identifier: Apache-2.0

package growth

import (
	"cmp"
	"flag"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	proxies = flag.String("proxies", "", "`list` of the proxies to measure (default: the backends of kpng, and for the benchmark also kube-proxy)")
	only    = flag.String("shapes", "", "measure only shapes whose names match this `expression`")
	scale   = flag.Int("scale", 0, "`factor` for all sizes (default: 1 for the test, 8 for the benchmark)")
)

const (
	defaultProxies = "core,nftables,iptables,ebpf,ovs,userspace"

	// maxExponent is the largest exponent of the growth of a cost.
	maxExponent = 1.25
	// maxWaits is the largest allowed ratio of the wait of an innocent change to its wait
	// without other changes.
	maxWaits = 10
	// rounds limits how often the test measures a shape. The test stops when the lowest
	// costs of all rounds keep the limits, because other programs and garbage collections
	// only add costs.
	rounds = 10
)

// withoutCollection makes costs of small sizes comparable. Otherwise some sizes need no
// garbage collection, and other sizes need several.
var withoutCollection = []string{"GOGC=off", "GOMEMLIMIT=1GiB"}

// Costs below these minima are not compared, because they vary too much.
const (
	minCPU    = 100 * time.Millisecond
	minWait   = 5 * time.Millisecond
	minMemory = 32 << 20
	minKernel = 4 << 20
)

// minCPUOf returns the least CPU time that the test compares. The limit is higher for
// iptables, because its small costs vary more. Its programs read all chains of a table in
// each call, and the kernel searches its lists of clients for each new rule with session
// affinity (docs/operate/iptables.md).
func minCPUOf(proxy string) time.Duration {
	if proxy == "iptables" {
		return 4 * minCPU
	}
	return minCPU
}

// sizes are the measured sizes, relative to shape.n.
var sizes = [...]int{1, 2, 4}

// results are the figures of a shape in all sizes.
type results []figures

// lower replaces each cost by the cost in o if the cost in o is lower.
func (r results) lower(o results) {
	for i := range r {
		a, b := &r[i], o[i]
		for p := range a.phases {
			a.phases[p].all = min(a.phases[p].all, b.phases[p].all)
			a.phases[p].wait.cpu = min(a.phases[p].wait.cpu, b.phases[p].wait.cpu)
		}
		a.memory, a.kernel = min(a.memory, b.memory), min(a.kernel, b.kernel)
	}
}

// problems describes the limits that the results of a proxy exceed.
func (r results) problems(proxy string) (list []string) {
	tooMuch := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	last := r[len(r)-1]
	for p, name := range phaseNames {
		cpu := func(f figures) float64 { return float64(f.phases[p].all) }
		if e := r.exponent(cpu); cpu(last) >= float64(minCPUOf(proxy)) && e > maxExponent {
			tooMuch("%s: CPU time %v grows with exponent %.2f", name, r.list(func(f figures) any { return f.phases[p].all.Round(time.Microsecond) }), e)
		}
		alone := max(last.alone.cpu, minWait)
		if w := last.phases[p].wait.cpu; last.phases[p].single && w > maxWaits*alone {
			tooMuch("%s: a change of another service waits for %v of CPU time, alone %v", name, w, last.alone.cpu)
		}
	}
	// Limit the costs of a restart and a deletion, relative to the load.
	loaded := max(last.phases[load].all, minCPU)
	for name, used := range map[string]time.Duration{"restart": last.phases[restart].all - last.start.all, "delete": last.phases[remove].all} {
		if used > 3*loaded {
			tooMuch("%s: CPU time %v, and only %v to load", name, used, last.phases[load].all)
		}
	}
	if e := r.exponent(func(f figures) float64 { return float64(f.memory) }); last.memory >= minMemory && e > maxExponent {
		tooMuch("peak memory %v bytes grows with exponent %.2f", r.list(func(f figures) any { return f.memory }), e)
	}
	if e := r.exponent(func(f figures) float64 { return float64(f.kernel) }); last.kernel >= minKernel && e > maxExponent {
		tooMuch("kernel memory %v bytes grows with exponent %.2f", r.list(func(f figures) any { return f.kernel }), e)
	}
	return list
}

func (r results) list(of func(figures) any) (list []any) {
	for _, f := range r {
		list = append(list, of(f))
	}
	return list
}

// exponent returns the exponent of the growth of a cost in the last doubling of the size.
func (r results) exponent(cost func(figures) float64) float64 {
	return math.Log2(max(cost(r[len(r)-1]), 1) / max(cost(r[len(r)-2]), 1))
}

// measureAll measures a shape in all sizes.
func (h *harness) measureAll(s *shape, scale int) (r results, ok bool) {
	h.Helper()
	for _, size := range sizes {
		f, ok := h.measure(s, s.n*size*scale)
		if !ok {
			return nil, false
		}
		r = append(r, f)
	}
	return r, true
}

// check measures a shape in small sizes, and returns the problems that remain in the minima
// of all rounds.
func (h *harness) check(s *shape, rounds int) (problems []string) {
	h.Helper()
	var best results
	for round := range rounds {
		r, ok := h.measureAll(s, max(*scale, 1))
		if !ok {
			return []string{"it is not programmed"}
		}
		if round > 0 {
			r.lower(best)
		}
		best = r
		if problems = best.problems(h.proxy); len(problems) == 0 {
			break
		}
	}
	return problems
}

// selected returns the shapes that the flag -shapes selects.
func selected(t testing.TB, shapes []shape) (list []*shape) {
	t.Helper()
	expression, err := regexp.Compile(*only)
	if err != nil {
		t.Fatal(err)
	}
	for i := range shapes {
		if expression.MatchString(shapes[i].name) {
			list = append(list, &shapes[i])
		}
	}
	return list
}

func TestCostsGrowWithSize(t *testing.T) {
	for _, proxy := range parseProxies(t, cmp.Or(*proxies, defaultProxies)) {
		t.Run(proxy, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, proxy, withoutCollection...)
			for _, s := range selected(t, shapes) {
				begin := time.Now()
				for _, problem := range h.check(s, rounds) {
					t.Errorf("%s: %s", s.name, problem)
				}
				t.Logf("%s: %v", s.name, time.Since(begin).Round(time.Millisecond))
			}
		})
	}
}

func TestQuadraticCostsAreFound(t *testing.T) {
	h := newHarness(t, "quadratic", withoutCollection...)
	i := slices.IndexFunc(shapes, func(s shape) bool { return s.name == "endpoints, with 20 ports" })
	problems := strings.Join(h.check(&shapes[i], 1), "\n")
	for _, want := range []string{
		"load: CPU time", "load: a change of another service waits", "changes: CPU time", "changes: a change of another service waits",
	} {
		if !strings.Contains(problems, want) {
			t.Errorf("the quadratic sink has no problem %q, only:\n%s", want, problems)
		}
	}
}

// BenchmarkGrowth prints a table with the costs of all shapes.
func BenchmarkGrowth(b *testing.B) {
	scale := cmp.Or(*scale, 8)
	table(b, shapes, func(h *harness, s *shape) (results, bool) { return h.measureAll(s, scale) })
}

// BenchmarkFigures prints a table with the costs of a few large objects.
func BenchmarkFigures(b *testing.B) {
	table(b, large, func(h *harness, s *shape) (results, bool) {
		f, ok := h.measure(s, s.n)
		return results{f}, ok
	})
}

// table prints a table with the results of measure for each shape and each proxy.
func table(b *testing.B, shapes []shape, measure func(*harness, *shape) (results, bool)) {
	names := cmp.Or(*proxies, defaultProxies+",kube-proxy,kube-proxy-iptables")
	fmt.Printf("\n| | proxy | load | changes | restart | delete | memory | kernel memory | wait alone | load | changes | delete |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, s := range selected(b, shapes) {
		for _, proxy := range parseProxies(b, names) {
			if s.kpngOnly && strings.HasPrefix(proxy, "kube-proxy") {
				continue
			}
			b.Run(strings.ReplaceAll(s.name, " ", "-")+"/"+proxy, func(b *testing.B) {
				r, ok := measure(newHarness(b, proxy), s)
				cells := []string{"not programmed"}
				if ok {
					cells = r.cells()
				}
				fmt.Printf("| %s | %s | %s |\n", s.name, proxy, strings.Join(cells, " | "))
				b.ReportMetric(0, "ns/op") // hide the time per operation, which means nothing here
			})
		}
	}
}

// cells returns the cells of a row of the table: the costs of the largest size and, if
// there are several sizes, exponents.
func (r results) cells() (cells []string) {
	cell := func(format string, args ...any) { cells = append(cells, fmt.Sprintf(format, args...)) }
	growth := func(cost func(figures) float64) string {
		if len(r) < 2 {
			return ""
		}
		return fmt.Sprintf(" ^%.2f", r.exponent(cost))
	}
	last := r[len(r)-1]
	for p := range phases {
		used := last.phases[p].usage
		if p == restart {
			used = usage{used.all - last.start.all, used.kernel - last.start.kernel}
		}
		cell("%.0f (%.0f) ms%s", milliseconds(used.all), milliseconds(used.kernel),
			growth(func(f figures) float64 { return float64(f.phases[p].all) }))
	}
	cell("%.1f MB%s", float64(last.memory)/1e6, growth(func(f figures) float64 { return float64(f.memory) }))
	cell("%.1f MB%s", float64(last.kernel)/1e6, growth(func(f figures) float64 { return float64(f.kernel) }))
	cell("%.1f ms", milliseconds(last.alone.time))
	for _, p := range []int{load, changes, remove} {
		cell("%.0f ms", milliseconds(last.phases[p].wait.time))
	}
	return cells
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
