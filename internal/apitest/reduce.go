// SPDX-License-Identifier: Apache-2.0

package apitest

import "slices"

// Reduce drops steps of a history while the history still fails. It never drops the first
// step.
func Reduce[S any](steps []S, fails func([]S) bool) []S {
	for n := len(steps) / 2; n > 0; {
		dropped := false
		for i := len(steps) - n; i > 0; i -= n {
			if fewer := slices.Delete(slices.Clone(steps), i, i+n); fails(fewer) {
				steps, dropped = fewer, true
			}
		}
		if !dropped || n > len(steps)/2 {
			n /= 2
		}
	}
	return steps
}
