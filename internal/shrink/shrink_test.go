// SPDX-License-Identifier: Apache-2.0

package shrink

import (
	"maps"
	"runtime"
	"testing"
)

func TestMemoryOfMapFollowsItsSize(t *testing.T) {
	const n = 1 << 17
	var size Size
	m := map[int]int{}
	before := heap()
	for i := range n {
		m[i] = i
		m = Map(m, &size)
	}
	full := heap() - before
	for i := range n - 1 {
		delete(m, i)
		m = Map(m, &size)
	}
	if rest := heap() - before; rest > full/20 {
		t.Errorf("%d B remain of %d", rest, full)
	}
	if want := map[int]int{n - 1: n - 1}; !maps.Equal(m, want) {
		t.Errorf("%d entries, want %v", len(m), want)
	}
}

func TestClearedMapIsEmpty(t *testing.T) {
	for _, n := range []int{10, 1 << 17} {
		before := heap()
		m := map[int]int{}
		for i := range n {
			m[i] = i
		}
		m = Cleared(m)
		if rest := heap() - before; rest > 1<<16 {
			t.Errorf("%d B remain of %d entries", rest, n)
		}
		if len(m) > 0 {
			t.Errorf("%d entries remain", len(m))
		}
	}
}

func heap() int {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return int(stats.HeapAlloc)
}
