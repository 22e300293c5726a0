// SPDX-License-Identifier: Apache-2.0

package scale_test

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/scale"
)

var update = flag.Bool("update", false, "write the computed tables into docs/operate/scale.md")

const path = "../../../docs/operate/scale.md"

// The assumptions of the page.
const (
	changes  = 10                    // changes of EndpointSlices per second
	services = 10_000                // each with 10 endpoints
	cores    = 4                     // of each server and relay
	network  = 1.25e9                // bytes per second that each can send
	gathered = 10 * time.Millisecond // the longest wait for further changes
)

var sizes = []struct{ nodes, relays int }{{5_000, 0}, {50_000, 10}, {130_000, 26}}

// The computed tables of docs/operate/scale.md follow from the measured tables on the page.
func TestPage(t *testing.T) {
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m := measured(t, string(page))
	for _, want := range []table{m.comparison(), m.load(), m.times(), m.relays()} {
		got, text := want.in(t, string(page)), want.String()
		if got == text {
			continue
		}
		if !*update {
			t.Errorf("a table of %s differs from the computation; run this test with -update. It has\n%s\nand should have\n%s", path, got, text)
		}
		page = []byte(strings.Replace(string(page), got, text, 1))
	}
	if *update {
		if err := os.WriteFile(path, page, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// costs are the measured costs.
type costs struct {
	apiserver map[string]reader // by the program that reads the API server
	// shared is the time of a stream if server and clients share two cores.
	shared, stream, relay, first, firstRelay, again time.Duration
	streamMemory, serverMemory, firstBytes          float64
	fanout                                          map[string]string // measured times by benchmark
}

type reader struct {
	event, start  time.Duration
	bytes, memory float64
}

// measured reads the costs from the tables of the page.
func measured(t *testing.T, page string) *costs {
	rows := map[string][]string{}
	for line := range strings.Lines(page) {
		if cells := strings.Split(line, " | "); len(cells) > 1 {
			last := len(cells) - 1
			cells[last] = strings.TrimSuffix(strings.TrimSpace(cells[last]), " |")
			rows[strings.TrimPrefix(cells[0], "| ")] = cells[1:]
		}
	}
	number := func(row string, column int) float64 {
		t.Helper()
		if len(rows[row]) <= column {
			t.Fatalf("%s has no row %q with %d values", path, row, column+1)
		}
		parts := value.FindStringSubmatch(rows[row][column])
		if parts == nil {
			t.Fatalf("row %q of %s has no number with a unit in column %d", row, path, column)
		}
		n, err := strconv.ParseFloat(strings.ReplaceAll(parts[1], ",", ""), 64)
		if err != nil {
			t.Fatal(err)
		}
		return n * units[parts[2]]
	}
	span := func(row string, column int) time.Duration { t.Helper(); return time.Duration(number(row, column)) }
	m := &costs{
		apiserver:    map[string]reader{},
		fanout:       map[string]string{},
		shared:       span("processor time for a change, clients on the same cores", 0),
		stream:       span("processor time for a change", 0),
		relay:        span("processor time for a change", 1),
		first:        span("processor time for a start with 10,000 services × 10", 0) + span("processor time for a TLS handshake", 0),
		firstRelay:   span("processor time for a start with 10,000 services × 10", 1) + span("processor time for a TLS handshake", 1),
		again:        span("processor time to continue at another server", 0) + span("processor time for a TLS handshake", 0),
		firstBytes:   number("bytes of a start with 10,000 services × 10", 0),
		streamMemory: number("memory of a stream with its connection", 0),
		serverMemory: number("memory of a server with 10,000 services × 10", 0),
	}
	for name, cells := range rows {
		m.fanout[name] = cells[len(cells)-1]
	}
	for i, name := range []string{"kube-proxy", "kpng"} {
		m.apiserver[name] = reader{
			event: span("processor time for an event", i), bytes: number("bytes of an event", i), memory: number("memory", i),
			start: span("processor time for a start with 200 services × 10", i) * services / 200,
		}
	}
	return m
}

// units has the value of each unit, in nanoseconds or bytes.
var units = map[string]float64{"µs": 1e3, "ms": 1e6, "s": 1e9, "B": 1, "KB": 1e3, "MB": 1e6, "MiB": 1 << 20}

var value = regexp.MustCompile(`^([\d,.]+) (µs|ms|s|B|KB|MB|MiB)\b`)

// comparison compares the simulation with measurements. The clients of the benchmarks share two
// cores with the servers.
func (m *costs) comparison() table {
	t := table{{"benchmark", "predicted", "measured"}}
	for _, r := range []struct {
		name  string
		nodes int
		tiers []scale.Tier
	}{
		{"1,000 nodes", 1_000, []scale.Tier{{Servers: 1, Cores: 2, Stream: m.shared}}},
		{"5,000 nodes", 5_000, []scale.Tier{{Servers: 1, Cores: 2, Stream: m.shared}}},
		{"5,000 nodes, 5 relays in the same process", 5_000, []scale.Tier{{Servers: 1, Cores: 2, Stream: m.shared}, {Servers: 5, Cores: 2, Stream: m.shared}}},
	} {
		t = append(t, []string{r.name, seconds(change(r.nodes, 0, r.tiers...)), m.fanout[r.name]})
	}
	return t
}

func (m *costs) load() table {
	t := newTable("load")
	row := func(name string, cell func(nodes, relays float64) string) {
		cells := []string{name}
		for _, s := range sizes {
			cells = append(cells, cell(float64(s.nodes), float64(s.relays)))
		}
		t = append(t, cells)
	}
	for _, name := range []string{"kube-proxy", "kpng"} {
		r := m.apiserver[name]
		row("API server, read by "+name+" on each node", func(n, _ float64) string {
			return fmt.Sprintf("%s, %s/s, %s", cpu(changes*n*r.event.Seconds()), size(changes*n*r.bytes), size(n*r.memory))
		})
	}
	row("API server, read by two kpng servers", func(_, _ float64) string {
		r := m.apiserver["kpng"]
		return fmt.Sprintf("%s, %s/s, %s", cpu(changes*2*r.event.Seconds()), size(changes*2*r.bytes), size(2*r.memory))
	})
	row("one tier: a server", func(n, _ float64) string {
		return cpu(changes*n*m.stream.Seconds()) + ", " + size(n*m.streamMemory+m.serverMemory)
	})
	row("two tiers: a server", func(_, r float64) string {
		if r == 0 {
			return "–"
		}
		return cpu(changes*r*m.relay.Seconds()) + ", " + size(r*m.streamMemory+m.serverMemory)
	})
	row("two tiers: each relay", func(n, r float64) string {
		if r == 0 {
			return "–"
		}
		return cpu(changes*n/r*m.stream.Seconds()) + ", " + size(n/r*m.streamMemory+m.serverMemory)
	})
	row("first sync: API server, read by kube-proxy", func(n, _ float64) string { return cpuTime(n * m.apiserver["kube-proxy"].start.Seconds()) })
	row("first sync: API server, read by kpng", func(n, _ float64) string { return cpuTime(n * m.apiserver["kpng"].start.Seconds()) })
	row("first sync: all kpng servers together", func(n, r float64) string { return cpuTime(n*m.first.Seconds() + r*m.firstRelay.Seconds()) })
	return t
}

func (m *costs) times() table {
	t := newTable("time until")
	row := func(name string, cell func(nodes, relays int) time.Duration) {
		cells := []string{name}
		for _, s := range sizes {
			cells = append(cells, seconds(cell(s.nodes, s.relays)))
		}
		t = append(t, cells)
	}
	row("all nodes have a change", func(n, r int) time.Duration { return change(n, gathered, m.tiers(m.relay, m.stream, r)...) })
	row("all nodes that start at the same time have the whole state", func(n, r int) time.Duration {
		return change(n, 0, m.tiers(m.firstRelay, m.sentFirst(), r)...)
	})
	row("all nodes of a killed relay continue at the others", func(n, r int) time.Duration {
		return median(func(random *rand.Rand) time.Duration {
			return scale.Loss(random, n, scale.Tier{Servers: max(r, 1) + 1, Cores: cores * float64(max(r, 1)+1), Stream: m.again})
		})
	})
	return t
}

// relays compares numbers of relays.
func (m *costs) relays() table {
	t := table{{"relays for 130,000 nodes"}, {"time of a change"}, {"memory of all relays"}, {"first sync"}}
	for _, relays := range []int{10, 26, 52, 130, 360} {
		t[0] = append(t[0], strconv.Itoa(relays))
		t[1] = append(t[1], seconds(change(130_000, gathered, m.tiers(m.relay, m.stream, relays)...)))
		t[2] = append(t[2], size(130_000*m.streamMemory+float64(relays)*m.serverMemory))
		t[3] = append(t[3], seconds(change(130_000, 0, m.tiers(m.firstRelay, m.sentFirst(), relays)...)))
	}
	return t
}

// sentFirst returns the longer of two times: the processor time of a node's start, and the time
// of all cores while the network sends the state.
func (m *costs) sentFirst() time.Duration {
	return max(m.first, time.Duration(cores*m.firstBytes/network*float64(time.Second)))
}

// tiers returns one server, or a server and relays.
func (m *costs) tiers(relay, stream time.Duration, relays int) []scale.Tier {
	last := scale.Tier{Servers: max(relays, 1), Cores: cores * float64(max(relays, 1)), Stream: stream}
	if relays == 0 {
		return []scale.Tier{last}
	}
	return []scale.Tier{{Servers: 1, Cores: cores, Stream: relay}, last}
}

// A third tier makes a change slower in the largest cluster.
func TestThirdTierIsSlower(t *testing.T) {
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m := measured(t, string(page))
	two := change(130_000, gathered, m.tiers(m.relay, m.stream, 130)...)
	for _, middle := range []int{3, 5, 10, 20} {
		three := change(130_000, gathered, scale.Tier{Servers: 1, Cores: cores, Stream: m.relay},
			scale.Tier{Servers: middle, Cores: cores * float64(middle), Stream: m.relay}, m.tiers(m.relay, m.stream, 130)[1])
		if three <= two {
			t.Errorf("130 relays behind %d others: %s; 130 relays: %s", middle, three, two)
		}
	}
}

func change(nodes int, wait time.Duration, tiers ...scale.Tier) time.Duration {
	return median(func(random *rand.Rand) time.Duration { return scale.Change(random, nodes, wait, tiers...) })
}

func median(simulate func(*rand.Rand) time.Duration) time.Duration {
	random := rand.New(rand.NewPCG(1, 2))
	var all []time.Duration
	for range 21 {
		all = append(all, simulate(random))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// table is a table in Markdown, of which the first row is the head.
type table [][]string

func newTable(name string) table {
	head := []string{name}
	for _, s := range sizes {
		head = append(head, thousands(float64(s.nodes))+" nodes")
	}
	return table{head}
}

func (t table) String() string {
	var b strings.Builder
	for i, row := range t {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			b.WriteString(strings.Repeat("|---", len(row)) + "|\n")
		}
	}
	return b.String()
}

// in returns the table of the page whose head has the same first cell as the head of t.
func (t table) in(test *testing.T, page string) string {
	_, rest, found := strings.Cut(page, "\n| "+t[0][0]+" |")
	if !found {
		test.Fatalf("%s has no table with the head %q", path, t[0][0])
	}
	rest = "| " + t[0][0] + " |" + rest
	end := strings.Index(rest+"\n\n", "\n\n") + 1
	return rest[:min(end, len(rest))]
}

// short returns n with two significant digits, or without a fraction.
func short(n float64) string {
	if n >= 9.95 {
		return thousands(n)
	}
	return strconv.FormatFloat(n, 'f', 1, 64)
}

// thousands returns n with a comma after thousands.
func thousands(n float64) string {
	if n < 999.5 {
		return strconv.Itoa(int(math.Round(n)))
	}
	whole := int(math.Round(n))
	return fmt.Sprintf("%s,%03d", thousands(float64(whole/1000)), whole%1000)
}

func cpu(cores float64) string {
	if cores < 0.095 {
		return short(1000*cores) + " ms/s"
	}
	return short(cores) + " cores"
}

func cpuTime(s float64) string {
	if s >= 7200 {
		return short(s/3600) + " h"
	}
	if s >= 120 {
		return short(s/60) + " min"
	}
	return short(s) + " s"
}

func seconds(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return short(d.Seconds()) + " s"
}

func size(bytes float64) string {
	for _, unit := range []string{"B", "KB", "MB"} {
		if bytes < 999.5 {
			return short(bytes) + " " + unit
		}
		bytes /= 1000
	}
	return short(bytes) + " GB"
}
