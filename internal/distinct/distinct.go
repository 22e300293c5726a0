// SPDX-License-Identifier: Apache-2.0

// Package distinct finds duplicates in lists that usually are short.
package distinct

// few is a number of keys. Up to this number, a linear search is cheaper than a map.
const few = 8

// Set is a set of keys. A set with few keys allocates no memory. The zero value is empty.
type Set[K comparable] struct {
	small [few]K
	n     int
	large map[K]struct{} // if not nil, the map has all keys
}

// Has reports whether the set has a key.
func (s *Set[K]) Has(k K) bool {
	if s.large != nil {
		_, ok := s.large[k]
		return ok
	}
	for i := range s.n {
		if s.small[i] == k {
			return true
		}
	}
	return false
}

// Add adds a key, and reports whether the set did not have it before.
func (s *Set[K]) Add(k K) bool {
	if s.large != nil {
		n := len(s.large)
		s.large[k] = struct{}{}
		return len(s.large) > n
	}
	if s.Has(k) {
		return false
	}
	if s.n < few {
		s.small[s.n] = k
		s.n++
		return true
	}
	s.large = make(map[K]struct{}, 2*few)
	for _, o := range s.small {
		s.large[o] = struct{}{}
	}
	s.large[k] = struct{}{}
	return true
}
