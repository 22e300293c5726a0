// SPDX-License-Identifier: Apache-2.0

// Package scale simulates how a change reaches the nodes of a large cluster through tiers
// of kpng servers. docs/operate/scale.md describes the model and compares it with
// measurements.
package scale

import (
	"math/rand/v2"
	"slices"
	"time"
)

// Tier is a set of servers that read from the tier above. The streams of the tier below
// spread at random over these servers.
type Tier struct {
	Servers int
	// Cores is the number of cores that all servers of the tier have together.
	Cores float64
	// Stream is the processor time for one answer on one stream.
	Stream time.Duration
}

// hop is the time for a message between two machines.
const hop = time.Millisecond / 2

// Change returns the time until the last node has received one answer: a change, or the
// whole state if Tier.Stream is the time for the whole state. Each server waits first,
// because it may gather changes. Then it works on its streams in turn, so its last stream
// waits for all others. The order of the streams is random. The processor time of a stream
// is random, too, between 0.5 and 1.5 times Tier.Stream.
func Change(random *rand.Rand, nodes int, wait time.Duration, tiers ...Tier) time.Duration {
	arrived := []time.Duration{0} // at each server of the tier
	for i, tier := range tiers {
		below := nodes
		if i+1 < len(tiers) {
			below = tiers[i+1].Servers
		}
		var next []time.Duration
		for server, streams := range spread(random, below, tier.Servers) {
			at := arrived[server] + wait + hop
			for range streams {
				at += time.Duration((0.5 + random.Float64()) * float64(tier.Stream) / (tier.Cores / float64(tier.Servers)))
				next = append(next, at)
			}
		}
		random.Shuffle(len(next), func(i, j int) { next[i], next[j] = next[j], next[i] })
		arrived = next
	}
	return slices.Max(arrived)
}

// Loss returns the time after the end of a server of the last tier until its nodes have
// continued at the other servers. Tier.Stream is the processor time for one node.
func Loss(random *rand.Rand, nodes int, tier Tier) time.Duration {
	lost := spread(random, nodes, tier.Servers)[0]
	tier.Cores -= tier.Cores / float64(tier.Servers)
	tier.Servers--
	most := slices.Max(spread(random, lost, tier.Servers))
	return time.Duration(float64(most) * float64(tier.Stream) / (tier.Cores / float64(tier.Servers)))
}

// spread returns the number of streams of each server, if each stream chooses a server at
// random.
func spread(random *rand.Rand, streams, servers int) []int {
	counts := make([]int, servers)
	for range streams {
		counts[random.IntN(servers)]++
	}
	return counts
}
