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
	// maxWaits is the largest wait of an innocent change relative to its wait alone.
	maxWaits = 10
	// rounds is how often the test measures a shape until the minima of all rounds keep the
	// limits. Other programs and garbage collections only add costs.
	rounds = 5
)

// withoutCollection makes costs of small sizes comparable. Otherwise some sizes need no
// garbage collection, and others several.
var withoutCollection = []string{"GOGC=off", "GOMEMLIMIT=1GiB"}

// Lesser costs are not compared, because the noise is too large.
const (
	minCPU    = 100 * time.Millisecond
	minWait   = 5 * time.Millisecond
	minMemory = 8 << 20
	minKernel = 1 << 20
)

// sizes are the measured sizes, relative to shape.n.
var sizes = [...]int{1, 2, 4}

// results are the figures of a shape in all sizes.
type results [len(sizes)]figures

// lesser returns the minima of two results.
func (r results) lesser(o results) results {
	for i := range r {
		a, b := &r[i], o[i]
		for p := range a.phases {
			a.phases[p].all = min(a.phases[p].all, b.phases[p].all)
			a.phases[p].wait.cpu = min(a.phases[p].wait.cpu, b.phases[p].wait.cpu)
		}
		a.memory, a.kernel = min(a.memory, b.memory), min(a.kernel, b.kernel)
	}
	return r
}

// problems describes the limits that the results exceed.
func (r results) problems() (list []string) {
	tooMuch := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	last := r[len(r)-1]
	for p, name := range phaseNames {
		cpu := func(f figures) float64 { return float64(f.phases[p].all) }
		if e := r.exponent(cpu); cpu(last) >= float64(minCPU) && e > maxExponent {
			tooMuch("%s: CPU time %v grows with exponent %.2f", name, r.list(func(f figures) any { return f.phases[p].all.Round(time.Microsecond) }), e)
		}
		alone := max(last.alone.cpu, minWait)
		if w := last.phases[p].wait.cpu; last.phases[p].single && w > maxWaits*alone {
			tooMuch("%s: a change of another service waits for %v of CPU time, alone %v", name, w, last.alone.cpu)
		}
	}
	// What a restart and a deletion may cost, relative to the load.
	loaded := max(last.phases[load].all, minCPU)
	for _, p := range []int{restart, remove} {
		if used := last.phases[p].all; used > 3*loaded {
			tooMuch("%s: CPU time %v, and only %v to load", phaseNames[p], used, last.phases[load].all)
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

// exponent returns the exponent of the growth of a cost in the last doubling.
func (r results) exponent(cost func(figures) float64) float64 {
	return math.Log2(max(cost(r[len(r)-1]), 1) / max(cost(r[len(r)-2]), 1))
}

// measureAll measures a shape in all sizes.
func (h *harness) measureAll(s *shape, scale int) (r results, ok bool) {
	h.Helper()
	for i, size := range sizes {
		if r[i], ok = h.measure(s, s.n*size*scale); !ok {
			return r, false
		}
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
			r = r.lesser(best)
		}
		best = r
		if problems = best.problems(); len(problems) == 0 {
			break
		}
	}
	return problems
}

func selected(t testing.TB) (list []*shape) {
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
	names := *proxies
	if names == "" {
		names = defaultProxies
	}
	for _, proxy := range parseProxies(t, names) {
		t.Run(proxy, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, proxy, withoutCollection...)
			for _, s := range selected(t) {
				if slices.Contains(s.except, proxy) {
					continue
				}
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
	for _, s := range shapes {
		if s.name != "endpoints, with 20 ports" {
			continue
		}
		problems := strings.Join(h.check(&s, 1), "\n")
		for _, want := range []string{
			"load: CPU time", "load: a change of another service waits", "changes: CPU time", "changes: a change of another service waits",
		} {
			if !strings.Contains(problems, want) {
				t.Errorf("the quadratic sink has no problem %q, only:\n%s", want, problems)
			}
		}
		return
	}
}

// BenchmarkGrowth prints a table.
func BenchmarkGrowth(b *testing.B) {
	names := *proxies
	if names == "" {
		names = defaultProxies + ",kube-proxy,kube-proxy-iptables"
	}
	fmt.Printf("| shape, sizes | proxy | load | changes | restart | delete | memory | kernel memory | wait alone | load | changes | delete |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, s := range selected(b) {
		for _, proxy := range parseProxies(b, names) {
			if s.kpngOnly && strings.HasPrefix(proxy, "kube-proxy") {
				continue
			}
			b.Run(strings.ReplaceAll(s.name, " ", "-")+"/"+proxy, func(b *testing.B) {
				h := newHarness(b, proxy)
				r, ok := h.measureAll(s, cmp.Or(*scale, 8))
				fmt.Println(r.row(s, proxy, cmp.Or(*scale, 8), ok))
				b.ReportMetric(0, "ns/op") // hide the time per operation, which means nothing here
			})
		}
	}
}

// row returns a row of the benchmark's table.
func (r results) row(s *shape, proxy string, scale int, ok bool) string {
	var cells []string
	cell := func(format string, args ...any) { cells = append(cells, fmt.Sprintf(format, args...)) }
	cell("%s, %d–%d", s.name, s.n*scale*sizes[0], s.n*scale*sizes[len(sizes)-1])
	cell("%s", proxy)
	last := r[len(r)-1]
	if !ok {
		cell("not programmed")
	} else {
		for p := range phases {
			cell("%.0f (%.0f) ms ^%.2f", milliseconds(last.phases[p].all), milliseconds(last.phases[p].kernel), r.exponent(func(f figures) float64 { return float64(f.phases[p].all) }))
		}
		cell("%.1f MB ^%.2f", float64(last.memory)/1e6, r.exponent(func(f figures) float64 { return float64(f.memory) }))
		cell("%.1f MB ^%.2f", float64(last.kernel)/1e6, r.exponent(func(f figures) float64 { return float64(f.kernel) }))
		cell("%.1f ms", milliseconds(last.alone.time))
		for _, p := range []int{load, changes, remove} {
			cell("%.0f ms", milliseconds(last.phases[p].wait.time))
		}
	}
	return "| " + strings.Join(cells, " | ") + " |"
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
