// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"bytes"
	"context"
	"encoding/binary"
	"iter"
	"time"
)

// snapshot has the elements of one map as the kernel returned them. Because a map may
// have hundreds of thousands of elements, a snapshot stores them as short records.
type snapshot struct {
	m mapID
	// A record has keyLen octets for the key, and dataLen octets for the data. If elements
	// can have counters, a further octet is 1 if the element has a counter, and otherwise
	// 0. If values have text, a record has a four-octet index into textValues instead of
	// the data.
	records    []string
	textValues []value
	// numbers maps a value to its index in textValues.
	numbers map[value]int
	// index maps a key to the number of its record. The keys are substrings of the records.
	index  map[string]int
	claims []claim
	// foreign has the encoding of each element that this package cannot have made.
	foreign [][]byte
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
	return &snapshot{m: m, numbers: map[value]int{}, index: map[string]int{}}
}

// readSnapshot reads a map. The kernel sends the elements in several messages. If it
// resizes the hash table between two messages, it sends some elements twice and omits as
// many others. So readSnapshot repeats a dump that has duplicates, and a dump during
// which elements were removed. The journal j may be nil.
func readSnapshot(ctx context.Context, c *conn, m mapID, j *journal) (*snapshot, error) {
	for attempt := 0; ; attempt++ {
		before := len(j.since(0))
		s, err := dumpSnapshot(ctx, c, m)
		if err != nil || len(s.index) == len(s.records) && !lost(j.since(before), m) {
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

// The method add adds an element that the kernel has.
func (s *snapshot) add(e *element) {
	b := append(make([]byte, 0, maxKey+len(e.data)+1), e.key[:s.m.keyLen()]...)
	switch {
	case s.m.hasText():
		number, ok := s.numbers[e.value]
		if !ok {
			number = len(s.textValues)
			s.numbers[e.value] = number
			s.textValues = append(s.textValues, e.value)
		}
		b = binary.NativeEndian.AppendUint32(b, uint32(number))
	case s.m.canCount() && e.counted:
		b = append(append(b, e.data[:s.m.dataLen()]...), 1)
	case s.m.canCount():
		b = append(append(b, e.data[:s.m.dataLen()]...), 0)
	default:
		b = append(b, e.data[:s.m.dataLen()]...)
	}
	record := string(b)
	s.index[record[:s.m.keyLen()]] = len(s.records)
	s.records = append(s.records, record)
	s.claims = append(s.claims, unclaimed)
}

// remove removes the element with this ID, and returns it. If there is no such element,
// ok is false.
func (s *snapshot) remove(id *elementID) (e element, ok bool) {
	i, ok := s.lookup(id)
	if !ok {
		return e, false
	}
	delete(s.index, string(id.key[:s.m.keyLen()]))
	s.claims[i] = removed
	return s.element(i), true
}

// lookup returns the number of the element's record. If there is no such record, ok is
// false.
func (s *snapshot) lookup(id *elementID) (i int, ok bool) {
	if len(s.index) == 0 {
		return 0, false
	}
	i, ok = s.index[string(id.key[:s.m.keyLen()])]
	return i, ok
}

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
	record := s.records[i]
	key, data := record[:s.m.keyLen()], record[s.m.keyLen():]
	copy(e.key[:], key)
	if s.m.hasText() {
		e.value = s.textValues[binary.NativeEndian.Uint32([]byte(data))]
	} else {
		copy(e.data[:], data[:s.m.dataLen()])
		e.counted = s.m.canCount() && data[s.m.dataLen()] == 1
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
