// SPDX-License-Identifier: Apache-2.0

package diffstore

import "iter"

// replace compares first and writes then, so that a key that is listed twice is recorded once or, if its last value is the
// one it has, not at all.
func (s *Store[K, V]) replace(scope Scope, listing iter.Seq2[K, V]) int {
	before := s.recorded
	s.listings++

	different := newKeyTree[K, V](s.options.Compare)
	for key, value := range listing {
		e, ok := s.find(key)
		if ok {
			e.seen = s.listings
			s.scopes.move(e, scope)
		}
		if !ok || !s.options.Equal(e.value, value) {
			different.ReplaceOrInsert(&entry[K, V]{key: key, value: value, scope: scope})
		} else if different.Len() > 0 {
			different.Delete(e)
		}
	}

	var gone []*entry[K, V]
	collect := func(e *entry[K, V]) bool {
		if e.scope == scope && e.seen != s.listings {
			gone = append(gone, e)
		}
		return true
	}
	if scope == 0 {
		s.byKey.Ascend(collect)
	} else if written, ok := s.scopes.entries[scope]; ok {
		written.Ascend(collect)
	}

	for _, e := range gone {
		s.remove(e)
	}
	different.Ascend(func(e *entry[K, V]) bool {
		s.put(e)
		return true
	})
	return int(s.recorded - before)
}
