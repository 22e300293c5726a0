// SPDX-License-Identifier: Apache-2.0

package maglev_test

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/maglev"
)

// endpoints returns n endpoints with a weight.
func endpoints(n int, weight uint16) []maglev.Endpoint {
	out := make([]maglev.Endpoint, n)
	for i := range out {
		out[i] = maglev.Endpoint{Key: fmt.Sprintf("10.1.%d.%d:8080", i/250, i%250+1), Weight: weight}
	}
	return out
}

// clients yields the hashes of n connections, each with another address and port.
func clients(n int) iter.Seq[uint64] {
	return func(yield func(uint64) bool) {
		for i := range n {
			from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)}), uint16(32768+i/3))
			b, _ := from.MarshalBinary()
			if !yield(maglev.Hash(b)) {
				return
			}
		}
	}
}

func choose(table []uint16, hash uint64) int { return int(table[(hash>>32)*uint64(len(table))>>32]) }

func TestSharesFollowWeights(t *testing.T) {
	for _, test := range []struct {
		name      string
		endpoints []maglev.Endpoint
	}{
		{"100 equal weights", endpoints(100, 100)},
		{"3 endpoints, 1:2:7", []maglev.Endpoint{{"a", 1}, {"b", 2}, {"c", 7}}},
		{"the smallest beside the largest weight", []maglev.Endpoint{{"a", 1}, {"b", 65535}}},
		{"one without connections", []maglev.Endpoint{{"a", 0}, {"b", 5}, {"c", 5}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			table := maglev.Table(test.endpoints)
			entries, total := make([]int, len(test.endpoints)), 0
			for _, i := range table {
				entries[i]++
			}
			for _, e := range test.endpoints {
				total += int(e.Weight)
			}
			for i, e := range test.endpoints {
				want := float64(len(table)) * float64(e.Weight) / float64(total)
				if math.Abs(float64(entries[i])-want) > 2 {
					t.Errorf("%s with weight %d has %d entries, want %.1f", e.Key, e.Weight, entries[i], want)
				}
			}
		})
	}
}

// Each of 100 endpoints gets 1,000 of 100,000 connections on average. Any independent
// choice, such as random balancing, then has a standard deviation of 3.2 %. So the test
// limits the standard deviation to 5 %.
func TestConnectionsSpreadEvenly(t *testing.T) {
	const n, connections = 100, 100_000
	table := maglev.Table(endpoints(n, 100))
	var counts [n]int
	for hash := range clients(connections) {
		counts[choose(table, hash)]++
	}
	var squares, most float64
	for _, c := range counts {
		deviation := float64(c)/(connections/n) - 1
		squares += deviation * deviation
		most = max(most, math.Abs(deviation))
	}
	deviation := math.Sqrt(squares / n)
	t.Logf("standard deviation %.2f %%, maximum %.2f %%", 100*deviation, 100*most)
	if deviation > 0.05 || most > 0.16 { // five standard deviations of random balancing
		t.Errorf("standard deviation %.2f %%, maximum %.2f %%, want at most 5 %% and 16 %%", 100*deviation, 100*most)
	}
}

// TestChangesMoveFewEntries adds endpoints in a random order, and compares each table with the
// previous table. A table depends only on its endpoints, so a removal is the reverse of an
// addition.
func TestChangesMoveFewEntries(t *testing.T) {
	for name, test := range map[string]struct {
		endpoints int
		weight    func(i int) uint16
		limit     float64 // beside 1/n
	}{
		"equal weights":     {1000, func(int) uint16 { return 100 }, 0.01},
		"different weights": {200, func(i int) uint16 { return uint16(50 + i%3*50) }, 0.015},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			order := rand.Perm(test.endpoints)
			var all []maglev.Endpoint
			var before []uint16
			worst := 0.0
			for n, i := range order {
				all = append(all, maglev.Endpoint{Key: fmt.Sprintf("10.1.%d.%d:8080", i/250, i%250+1), Weight: test.weight(i)})
				if n > 200 && n%10 > 1 {
					continue // tables of many endpoints take long
				}
				table, others, moved := maglev.Table(all), 0, 0
				for entry, e := range table {
					if e == uint16(n) || n > 200 && n%10 == 0 {
						continue
					}
					others++
					if e != before[entry*len(before)/len(table)] {
						moved++
					}
				}
				limit := (1/float64(n+1) + test.limit) * float64(others)
				worst = max(worst, float64(moved)/max(limit, 1))
				if float64(moved) > limit {
					t.Errorf("%d of %d entries of others differ between %d and %d endpoints, want at most %.0f", moved, others, n, n+1, limit)
				}
				before = table
			}
			t.Logf("at most %.0f %% of the allowed entries moved", 100*worst)
		})
	}
}

// TestKeysAreNotUnlucky replaces the keys of endpoints by random ones, 1,000 times. Two
// keys must never prefer entries in a similar order, because otherwise many entries move.
func TestKeysAreNotUnlucky(t *testing.T) {
	const n = 12
	random := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		all := make([]maglev.Endpoint, n+1)
		for i := range all {
			all[i] = maglev.Endpoint{Key: fmt.Sprint(random.Uint64()), Weight: 100}
		}
		before, table, others, moved := maglev.Table(all[:n]), maglev.Table(all), 0, 0
		for entry, e := range table {
			if e != n {
				others++
				if e != before[entry] {
					moved++
				}
			}
		}
		// In such tables, fewer entries move than the 1/(n+1) + 1 % of larger tables.
		if moved > others/(n+1) {
			t.Errorf("%d of %d entries of others move with the keys %v", moved, others, all)
		}
	}
}

// Two processes must choose equally, so neither the order of the endpoints nor randomness
// may affect the table. The golden hash also finds a change between versions: nodes with
// different versions would choose differently.
func TestTablesDependOnEndpointsAlone(t *testing.T) {
	all := endpoints(50, 7)
	all[3].Weight, all[20].Weight = 0, 65535
	want := maglev.Table(all)
	for range 5 {
		shuffled := slices.Clone(all)
		rand.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		got := maglev.Table(shuffled)
		for i := range want {
			if shuffled[got[i]] != all[want[i]] {
				t.Fatalf("entry %d is %v, want %v", i, shuffled[got[i]], all[want[i]])
			}
		}
	}
	var content []byte
	for _, i := range maglev.Table(endpoints(10, 1)) {
		content = append(content, byte(i))
	}
	if got := maglev.Hash(content); got != golden {
		t.Errorf("the hash of the table is %#x, want %#x", got, uint64(golden))
	}
}

const golden = 0x6e531f6df7435c86

func TestSizesFollowTheNumberOfEndpoints(t *testing.T) {
	for n, want := range map[int]int{1: 1, 2: 2048, 16: 2048, 17: 65536, 70_000: 65536} {
		if got := len(maglev.Table(append(endpoints(n, 1), maglev.Endpoint{Key: "drains"}))); got != want {
			t.Errorf("the table of %d endpoints has %d entries, want %d", n, got, want)
		}
	}
	if maglev.Table(nil) != nil || maglev.Table(endpoints(3, 0)) != nil {
		t.Error("a table without weights is not nil")
	}
}

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{1, 10, 100, 1000, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			all := endpoints(n, 100)
			b.ReportAllocs()
			for b.Loop() {
				maglev.Table(all)
			}
		})
	}
}

// A random choice is the alternative to a lookup.
func BenchmarkLookup(b *testing.B) {
	table := maglev.Table(endpoints(100, 100))
	client := []byte{0: 10, 15: 1, 17: 80}
	b.Run("maglev", func(b *testing.B) {
		for b.Loop() {
			choose(table, maglev.Hash(client))
		}
	})
	b.Run("random", func(b *testing.B) {
		for b.Loop() {
			rand.IntN(100)
		}
	})
}
