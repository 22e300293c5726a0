// SPDX-License-Identifier: Apache-2.0

package sink

import "time"

type Backoff = backoff

// SetBackoff replaces the backoff of a driver that does not run.
func (d *Driver) SetBackoff(b Backoff) { d.backoff = b }

// SetImmediate makes a driver deliver changes without gathering them. The driver must not
// run.
func (d *Driver) SetImmediate() { d.immediate = true }

// SetVerifyInterval replaces a driver's interval between calls of Verify. The driver must
// not run.
func (d *Driver) SetVerifyInterval(interval time.Duration) { d.verifyInterval = interval }
