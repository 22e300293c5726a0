// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"math/rand/v2"
	"time"
)

// backoff defines how long to wait after failures in a row. The wait is Initial after the
// first failure, and doubles with each further failure, up to Max.
type backoff struct {
	Initial, Max time.Duration
	// Jitter limits the random time that is added to a wait, as a fraction of the wait. It
	// keeps nodes from retrying at the same time. Services that fail in one Sync get the same
	// random time, so that they are retried in one Sync.
	Jitter float64
}

// defaultBackoff is the backoff of all drivers outside of tests. The package comment
// describes it.
var defaultBackoff = backoff{100 * time.Millisecond, 30 * time.Second, 0.1}

// wait returns the time to wait after a number of failures in a row. It consists of the
// backoff and the jitter. The jitter grows with the argument random, a number from 0 to 1.
func (b backoff) wait(failures int, random float64) time.Duration {
	d := b.Initial
	for i := 1; i < failures && d < b.Max; i++ {
		d += min(d, b.Max-d)
	}
	return d + time.Duration(b.Jitter*random*float64(d))
}

// draw returns a random number for backoff.wait.
func draw() float64 { return rand.Float64() }
