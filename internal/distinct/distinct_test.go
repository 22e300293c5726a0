// SPDX-License-Identifier: Apache-2.0

package distinct

import "testing"

func TestKeysAreAddedOnce(t *testing.T) {
	for _, n := range []int{0, 1, few, few + 1, 1000} {
		var s Set[int]
		for i := range n {
			if !s.Add(i) {
				t.Errorf("%d keys: %d is not new", n, i)
			}
		}
		for i := range n {
			if s.Add(i) {
				t.Errorf("%d keys: %d is new again", n, i)
			}
		}
	}
}
