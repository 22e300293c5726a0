// SPDX-License-Identifier: Apache-2.0

package scale_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kpng-project/kpng/test/internal/scale"
)

// The table of docs/operate/scale.md. The first three rows are for the benchmarks, in
// which server and clients share two cores. Their processor time per stream comes from
// BenchmarkFanout/nodes=1000, the other rows use the time of a server alone.
func Example() {
	const shared, alone = 81 * time.Microsecond, 44 * time.Microsecond
	for _, c := range []struct {
		name  string
		nodes int
		tiers []scale.Tier
	}{
		{"benchmark, 1,000 nodes", 1_000, []scale.Tier{{1, 2, shared}}},
		{"benchmark, 5,000 nodes", 5_000, []scale.Tier{{1, 2, shared}}},
		{"benchmark, 5,000 nodes, 5 relays", 5_000, []scale.Tier{{1, 2, shared}, {5, 2, shared}}},
		{"5,000 nodes, 1 server", 5_000, []scale.Tier{{1, 4, alone}}},
		{"5,000 nodes, 5 relays", 5_000, []scale.Tier{{1, 4, alone}, {5, 20, alone}}},
		{"50,000 nodes, 1 server", 50_000, []scale.Tier{{1, 4, alone}}},
		{"50,000 nodes, 10 relays", 50_000, []scale.Tier{{1, 4, alone}, {10, 40, alone}}},
		{"50,000 nodes, 50 relays", 50_000, []scale.Tier{{1, 4, alone}, {50, 200, alone}}},
	} {
		random := rand.New(rand.NewPCG(1, 2))
		var last []time.Duration
		for range 21 {
			last = append(last, scale.Change(random, c.nodes, c.tiers...))
		}
		slices.Sort(last)
		fmt.Printf("%s: %d ms\n", c.name, last[10].Milliseconds())
	}
	// Output:
	// benchmark, 1,000 nodes: 51 ms
	// benchmark, 5,000 nodes: 213 ms
	// benchmark, 5,000 nodes, 5 relays: 226 ms
	// 5,000 nodes, 1 server: 65 ms
	// 5,000 nodes, 5 relays: 32 ms
	// 50,000 nodes, 1 server: 560 ms
	// 50,000 nodes, 10 relays: 76 ms
	// 50,000 nodes, 50 relays: 32 ms
}
