// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"bytes"
	"context"
	"hash/maphash"
	"iter"
	"time"
)

// snapshot has the elements of one map as the kernel returned them. Because a map may
// have hundreds of thousands of elements, a snapshot stores them as short records.
type snapshot struct {
	m mapID
	// A record has the key, the data, and an octet that is 1 if the element has a counter.
	// All records of a map have the same length.
	records []byte
	texts   []string // the text of each record, if the map has text
	claims  []claim  // the claim of each record
	// index has the numbers of the records. The number of a key's record is at the hash of
	// the key, or at one of the next places, if other records have those before.
	index map[uint32]uint32
	// foreign has the encoding of each element that this package cannot have made.
	foreign [][]byte
	// repeated is true if the kernel returned an element twice.
	repeated bool
	// unsure is true if elements may be missing.
	unsure bool
}

// claim says whether services need an element that existed before the pass.
type claim uint8

const (
	// unclaimed means that no service has needed the element so far.
	unclaimed claim = iota
	// givenBack means that a service claimed the element but then failed, or was deleted. A
	// service that failed still has the elements from before the pass.
	givenBack
	// claimed means that a service or keepOfFailed has claimed the element.
	claimed
	// removed means that the table no longer has the element.
	removed
)

func newSnapshot(m mapID) *snapshot {
	return &snapshot{m: m, index: map[uint32]uint32{}}
}

// readSnapshot reads a map. The kernel sends the elements in several messages. If it
// resizes the hash table between two messages, it sends some elements twice and omits as
// many others. So readSnapshot repeats a dump that has duplicates, and a dump during
// which elements were removed. The journal j may be nil.
func readSnapshot(ctx context.Context, c *conn, m mapID, j *journal) (*snapshot, error) {
	for attempt := 0; ; attempt++ {
		before := len(j.since(0))
		s, err := dumpSnapshot(ctx, c, m)
		if err != nil || !s.repeated && !lost(j.since(before), m) {
			return s, err
		}
		if attempt == maxDumpRetries {
			s.unsure = true
			return s, nil
		}
		if err := waitForResize(ctx, attempt); err != nil {
			return nil, err
		}
	}
}

// maxDumpRetries limits retries of a dump that raced with a hash-table resize.
const maxDumpRetries = 6

// waitForResize waits before a dump is repeated. The wait is 2 ms for attempt 0, and
// doubles with each attempt.
func waitForResize(ctx context.Context, attempt int) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(2 * time.Millisecond << attempt):
		return nil
	}
}

func dumpSnapshot(ctx context.Context, c *conn, m mapID) (*snapshot, error) {
	s := newSnapshot(m)
	err := c.dump(ctx, m, func(e element, foreign []byte) {
		if foreign != nil {
			s.foreign = append(s.foreign, bytes.Clone(foreign))
		} else {
			s.add(&e)
		}
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// The method add adds an element that the kernel has. If the snapshot already has an
// element with this ID, that element stays.
func (s *snapshot) add(e *element) {
	i, place, ok := s.find(e.key[:s.m.keyLen()])
	switch {
	case !ok:
		i = len(s.claims)
		s.index[place] = uint32(i)
		s.records = append(s.records, make([]byte, s.recordLen())...)
		s.claims = append(s.claims, unclaimed)
		if s.m.hasText() {
			s.texts = append(s.texts, "")
		}
	case s.claims[i] != removed:
		s.repeated = true
		return
	}
	record := s.record(i)
	data := record[copy(record, e.key[:s.m.keyLen()]):]
	counted := &data[copy(data, e.data[:s.m.dataLen()])]
	if *counted = 0; e.counted {
		*counted = 1
	}
	if s.m.hasText() {
		s.texts[i] = e.text
	}
	s.claims[i] = unclaimed
}

// remove removes the element with this ID, and returns it. If there is no such element,
// ok is false.
func (s *snapshot) remove(id *elementID) (e element, ok bool) {
	i, ok := s.lookup(id)
	if !ok {
		return e, false
	}
	s.claims[i] = removed
	return s.element(i), true
}

// lookup returns the number of the element's record. If the table does not have the
// element, ok is false.
func (s *snapshot) lookup(id *elementID) (i int, ok bool) {
	if len(s.claims) == 0 {
		return 0, false
	}
	i, _, ok = s.find(id.key[:s.m.keyLen()])
	return i, ok && s.claims[i] != removed
}

// find returns the number of the record with a key, also if the element was removed. If
// there is no such record, ok is false, and place is the free place in the index for it.
func (s *snapshot) find(key []byte) (i int, place uint32, ok bool) {
	for place = hashOfKey(key); ; place++ {
		n, taken := s.index[place]
		if !taken {
			return 0, place, false
		}
		if i = int(n); bytes.Equal(s.record(i)[:len(key)], key) {
			return i, place, true
		}
	}
}

// keySeed is random, so that a user cannot choose keys with equal hashes.
var keySeed = maphash.MakeSeed()

func hashOfKey(key []byte) uint32 { return uint32(maphash.Bytes(keySeed, key)) }

func (s *snapshot) recordLen() int { return s.m.keyLen() + s.m.dataLen() + 1 }

func (s *snapshot) record(i int) []byte { return s.records[i*s.recordLen():][:s.recordLen()] }

// has reports whether the snapshot has the element.
func (s *snapshot) has(id *elementID) bool {
	_, ok := s.lookup(id)
	return ok
}

// get returns the value of an element. If there is no such element, ok is false.
func (s *snapshot) get(id *elementID) (v value, ok bool) {
	i, ok := s.lookup(id)
	if !ok {
		return v, false
	}
	return s.element(i).value, true
}

// claim marks an element as claimed and returns its value. If the element does not exist
// or was already claimed, ok is false.
func (s *snapshot) claim(id *elementID) (v value, ok bool) {
	i, ok := s.lookup(id)
	if !ok || s.claims[i] == claimed {
		return v, false
	}
	s.claims[i] = claimed
	return s.element(i).value, true
}

// giveBack records that the service that claimed an element has failed or was deleted.
func (s *snapshot) giveBack(id *elementID) {
	if i, ok := s.lookup(id); ok {
		s.claims[i] = givenBack
	}
}

func (s *snapshot) element(i int) element {
	e := element{elementID: elementID{m: s.m}}
	record := s.record(i)
	data := record[copy(e.key[:s.m.keyLen()], record):]
	e.counted = data[copy(e.data[:s.m.dataLen()], data)] == 1
	if s.m.hasText() {
		e.text = s.texts[i]
	}
	return e
}

// upTo yields the elements whose claim is not greater than limit. If limit is unclaimed,
// upTo yields only unclaimed elements. If limit is givenBack, it also yields elements
// that failed services needed. If limit is claimed, it yields all elements that the table
// has.
func (s *snapshot) upTo(limit claim) iter.Seq[element] {
	return func(yield func(element) bool) {
		for i := range s.claims {
			if s.claims[i] <= limit && !yield(s.element(i)) {
				return
			}
		}
	}
}

func (s *snapshot) all() iter.Seq[element] { return s.upTo(claimed) }
