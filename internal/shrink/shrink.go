// SPDX-License-Identifier: Apache-2.0

// Package shrink returns the memory of maps whose entries were deleted. Go's maps never
// shrink.
package shrink

import "maps"

// kept is the minimum size of maps that are copied. Smaller maps need little memory.
const kept = 1024

// Size remembers the largest size of a map. The zero value is ready to use.
type Size int

// Map returns m. If m was four times as large in an earlier call with the same argument size,
// Map returns a copy instead. The caller uses the result in place of m. Even if a program
// calls Map after each of many deletions, all copies together take less time than the
// deletions.
func Map[K comparable, V any](m map[K]V, size *Size) map[K]V {
	*size = max(*size, Size(len(m)))
	if *size < kept || Size(len(m)) > *size/4 {
		return m
	}
	*size = Size(len(m))
	small := make(map[K]V, len(m))
	maps.Copy(small, m)
	return small
}

// Cleared returns m without entries, or a new map if m is large.
func Cleared[K comparable, V any](m map[K]V) map[K]V {
	if len(m) >= kept {
		return map[K]V{}
	}
	clear(m)
	return m
}
