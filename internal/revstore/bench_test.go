// SPDX-License-Identifier: Apache-2.0

package revstore

import (
	"cmp"
	"fmt"
	"iter"
	"math/rand/v2"
	"runtime"
	"testing"
)

// A key has 32 bytes, like an object key that consists of two strings.
type key [4]uint64

func compareKeys(a, b key) int {
	for i := range a {
		if c := cmp.Compare(a[i], b[i]); c != 0 {
			return c
		}
	}
	return 0
}

func newKeys() *Store[key, uint64] {
	return New(Options[key, uint64]{Compare: compareKeys, Equal: func(a, b uint64) bool { return a == b }})
}

func ascending(n int) iter.Seq2[key, uint64] {
	return func(yield func(key, uint64) bool) {
		for i := range uint64(n) {
			if !yield(key{i}, i) {
				return
			}
		}
	}
}

func filled(n int) *Store[key, uint64] {
	s := newKeys()
	for k, v := range ascending(n) {
		s.Set(k, v)
	}
	return s
}

// reportEach reports the time per call of Set, for iterations with n calls each.
func reportEach(b *testing.B, n int) {
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/set")
}

func BenchmarkSetAscending(b *testing.B) {
	for _, n := range []int{1_000, 50_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				filled(n)
			}
			reportEach(b, n)
		})
	}
}

func BenchmarkSetRandom(b *testing.B) {
	for _, n := range []int{1_000, 50_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			order := rand.New(rand.NewPCG(1, 2)).Perm(n)
			b.ReportAllocs()
			for b.Loop() {
				s := newKeys()
				for _, i := range order {
					s.Set(key{uint64(i)}, uint64(i))
				}
			}
			reportEach(b, n)
		})
	}
}

// BenchmarkOneChange measures the cost of one change among n keys: the write after a
// snapshot, the new snapshot, and the reader's search for the change.
func BenchmarkOneChange(b *testing.B) {
	for _, n := range []int{1_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := filled(n)
			c := s.NewCursor()
			c.Advance(s.Snapshot())
			random := rand.New(rand.NewPCG(1, 2))
			value := uint64(n)
			b.ReportAllocs()
			for b.Loop() {
				value++
				s.Set(key{random.Uint64N(uint64(n))}, value)
				delta := c.Until(s.Snapshot())
				found := 0
				for range delta.Changes() {
					found++
				}
				if found != 1 {
					b.Fatalf("found %d changes", found)
				}
				c.Advance(delta.New)
			}
		})
	}
}

// BenchmarkFindOneChange measures only the method Since.
func BenchmarkFindOneChange(b *testing.B) {
	for _, n := range []int{1_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := filled(n)
			before := s.Snapshot().Revision()
			s.Set(key{uint64(n / 2)}, 0)
			snapshot := s.Snapshot()
			b.ReportAllocs()
			for b.Loop() {
				changes, _ := snapshot.Since(before)
				found := 0
				for range changes {
					found++
				}
				if found != 1 {
					b.Fatalf("found %d changes", found)
				}
			}
		})
	}
}

func BenchmarkReplaceEqual(b *testing.B) {
	const n = 50_000
	s := filled(n)
	b.ReportAllocs()
	for b.Loop() {
		if recorded := s.Replace(ascending(n)); recorded != 0 {
			b.Fatalf("recorded %d changes", recorded)
		}
	}
}

func BenchmarkDelete(b *testing.B) {
	const n = 50_000
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		s := filled(n)
		b.StartTimer()
		for k := range ascending(n) {
			s.Delete(k)
		}
	}
	reportEach(b, n)
}

func BenchmarkSnapshot(b *testing.B) {
	s := filled(1_000_000)
	b.Run("cached", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			s.Snapshot()
		}
	})
	b.Run("new", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			s.cached.Store(nil)
			s.Snapshot()
		}
	})
}

func BenchmarkGet(b *testing.B) {
	const n = 50_000
	snapshot := filled(n).Snapshot()
	random := rand.New(rand.NewPCG(1, 2))
	b.ReportAllocs()
	for b.Loop() {
		snapshot.Get(key{random.Uint64N(n)})
	}
}

// BenchmarkRetained reports the memory of an entry, including key and value.
func BenchmarkRetained(b *testing.B) {
	const n = 1_000_000
	for b.Loop() {
		before := heap()
		s := filled(n)
		b.ReportMetric(float64(heap()-before)/n, "B/entry")
		runtime.KeepAlive(s)
	}
}

func heap() uint64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}
