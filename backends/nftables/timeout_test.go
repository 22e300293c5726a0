// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"testing"
	"time"
)

// TestTimeoutsAreRoundedUp encodes every timeout that the API accepts. Kubernetes' own
// tests need a timeout of 125 s, and wait for 130 s.
func TestTimeoutsAreRoundedUp(t *testing.T) {
	for timeout := time.Second; timeout <= 24*time.Hour; timeout += time.Second {
		step := time.Second
		if timeout > 10*time.Minute {
			step = time.Minute
		} else if timeout > 2*time.Minute {
			step = 5 * time.Second
		}
		bits := timeoutBits(timeout)
		if want := (timeout + step - 1) / step * step; timeoutOf(bits) != want || bits >= 1<<11 {
			t.Fatalf("timeout of %v: number %d, which means %v, want %v", timeout, bits, timeoutOf(bits), want)
		}
	}
}
