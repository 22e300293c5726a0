// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernelnode

import (
	"testing"
	"time"
)

// TestDriftPauseGrowsWhileChangesRecur checks the length of consecutive pauses if the
// backend finds a change soon after each pause.
func TestDriftPauseGrowsWhileChangesRecur(t *testing.T) {
	var p DriftPause
	now := time.Unix(1_000_000, 0)
	for i, want := range []time.Duration{0, 1, 3, 7, 15, 31, 60, 60, 60} {
		until := p.Found(now)
		if got := until.Sub(now); got != want*time.Second {
			t.Errorf("change %d: pause %v, want %v", i, got, want*time.Second)
		}
		now = until.Add(10 * time.Second) // 10 s after the pause, a search finds the next change
	}
	now = now.Add(2 * maxDriftPause)
	if until := p.Found(now); until != now {
		t.Errorf("after a long time without changes: pause %v, want none", until.Sub(now))
	}
}
