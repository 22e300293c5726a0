// SPDX-License-Identifier: Apache-2.0

package sink

import "time"

type Backoff = backoff

// SetBackoff replaces the backoff of a driver that does not run.
func (d *Driver) SetBackoff(b Backoff) { d.backoff = b }

// SetImmediate makes a driver that does not run deliver changes without gathering them.
func (d *Driver) SetImmediate() { d.immediate = true }

// SetVerifyInterval replaces the interval between calls of Verify of a driver that does not
// run.
func (d *Driver) SetVerifyInterval(interval time.Duration) { d.verifyInterval = interval }
