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

// Tier is a set of servers that read from the tier above. Each server has an equal share
// of the streams to the tier below.
type Tier struct {
	Servers int
	// Cores is the number of cores that all servers of the tier have together.
	Cores float64
	// Stream is the processor time for one change on one stream.
	Stream time.Duration
}

const (
	// gather is the time for which a server gathers changes.
	gather = 10 * time.Millisecond
	// hop is the time for a message between two machines.
	hop = time.Millisecond / 2
)

// Change returns the time until the last node has received one change. Each server works on
// its streams in turn, so its last stream waits for all others. The order of the streams
// and the processor time of a stream, between half and one and a half of Tier.Stream, are
// random.
func Change(random *rand.Rand, nodes int, tiers ...Tier) time.Duration {
	arrived := []time.Duration{0} // at each server of the tier
	for i, tier := range tiers {
		below := nodes
		if i+1 < len(tiers) {
			below = tiers[i+1].Servers
		}
		var next []time.Duration
		for server, at := range arrived {
			streams := below*(server+1)/tier.Servers - below*server/tier.Servers
			at += gather + hop
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
