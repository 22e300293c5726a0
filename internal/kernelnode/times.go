// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernelnode

import "time"

// PauseFactor times the duration of a comparison with the kernel is the pause after it.
// Therefore comparisons use at most 2 % of a CPU.
const PauseFactor = 50

// Leftovers records whether the last pass kept rules because services failed. Only
// another pass can find and remove the stale rules of these services. This is so even if
// the services succeed later.
type Leftovers struct {
	Exist bool
	// PassAt is the time of the next pass if leftovers exist: the end of the last pass plus
	// the backoff.
	PassAt  time.Time
	backoff time.Duration
}

const (
	minLeftoversWait = time.Minute
	maxLeftoversWait = time.Hour
)

// RecordPass records that a pass has ended, and whether services failed in it.
func (l *Leftovers) RecordPass(now time.Time, failed bool) {
	l.backoff = min(max(2*l.backoff, minLeftoversWait), maxLeftoversWait)
	if !failed {
		l.backoff = 0
	}
	l.PassAt = now.Add(l.backoff)
}

// Due reports whether a pass is due because of leftovers.
func (l *Leftovers) Due(now time.Time) bool { return l.Exist && !now.Before(l.PassAt) }

// DriftPause computes the pause before a backend searches again for changes by other
// programs. The pause grows while the backend finds such changes. So a program that
// constantly changes the rules does not cause constant passes.
type DriftPause struct {
	foundAt time.Time
	pause   time.Duration
}

// maxDriftPause limits the pause.
const maxDriftPause = time.Minute

// Found records that the backend found a change. It returns the time until which the
// backend must not search for further changes.
func (p *DriftPause) Found(now time.Time) (until time.Time) {
	if now.Sub(p.foundAt) > 2*maxDriftPause { // the changes do not recur: this time is longer than any pause
		p.pause = 0
	} else {
		p.pause = min(2*p.pause+time.Second, maxDriftPause)
	}
	p.foundAt = now
	return now.Add(p.pause)
}
