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

// snapshot is what the kernel had in one of its maps when it was read. Hundreds of
// thousands of elements are common, so they are kept as records in one piece.
type snapshot struct {
	m mapID
	// records are of keyLen, one octet for a prefix, and then dataLen octets, or four
	// that say which of values it is.
	records string
	values  []value
	// index leads from a key to its record. Its keys are parts of records.
	index map[string]int
	// takenBits say which records have been taken.
	takenBits []uint64
	// foreign are elements that this package did not make.
	foreign []foreign
}

func (s *snapshot) keySize() int { return s.m.keyLen() + 1 }

func (s *snapshot) size() int {
	if s.m.leadsToChains() {
		return s.keySize() + 4
	}
	return s.keySize() + s.m.dataLen()
}

func (s *snapshot) len() int { return len(s.records) / s.size() }

// readSnapshot reads a map. The kernel tells a long one piece by piece and counts what
// it has told: if it moves the elements to a larger or smaller hash table meanwhile,
// some come twice and as many not at all.
func readSnapshot(ctx context.Context, c *conn, m mapID) (*snapshot, error) {
	for attempt := 0; ; attempt++ {
		s, err := readOnce(ctx, c, m)
		if err != nil || len(s.index) == s.len() || attempt == maxResizeAttempts {
			return s, err
		}
		if err := pause(ctx, attempt); err != nil {
			return nil, err
		}
	}
}

// maxResizeAttempts limits how often a map is read again that may have been read while the
// kernel made it larger or smaller.
const maxResizeAttempts = 6

// pause waits until such a thing may be over: 2 ms at first, 64 in the end.
func pause(ctx context.Context, attempt int) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(2 * time.Millisecond << attempt):
		return nil
	}
}

func readOnce(ctx context.Context, c *conn, m mapID) (*snapshot, error) {
	s := &snapshot{m: m}
	var records []byte
	numbers := map[value]int{}
	err := c.dump(ctx, m, func(e element, not foreign) {
		if not != nil {
			s.foreign = append(s.foreign, bytes.Clone(not))
			return
		}
		records = append(records, e.key[:m.keyLen()]...)
		records = append(records, e.key[maxKey-1])
		if !m.leadsToChains() {
			records = append(records, e.data[:m.dataLen()]...)
			return
		}
		number, ok := numbers[e.value]
		if !ok {
			number = len(s.values)
			numbers[e.value] = number
			s.values = append(s.values, e.value)
		}
		records = binary.NativeEndian.AppendUint32(records, uint32(number))
	})
	if err != nil {
		return nil, err
	}
	s.records = string(records)
	n := s.len()
	s.index = make(map[string]int, n)
	s.takenBits = make([]uint64, (n+63)/64)
	for i := range n {
		s.index[s.records[i*s.size():i*s.size()+s.keySize()]] = i
	}
	return s, nil
}

// lookup returns the record of an element.
func (s *snapshot) lookup(id *elementID) (i int, ok bool) {
	if len(s.index) == 0 {
		return 0, false
	}
	var key [maxKey]byte
	n := copy(key[:], id.key[:s.m.keyLen()])
	key[n] = id.key[maxKey-1]
	i, ok = s.index[string(key[:n+1])]
	return i, ok
}

// take returns the value of an element that was not taken before.
func (s *snapshot) take(id *elementID) (v value, ok bool) {
	i, ok := s.lookup(id)
	if !ok || s.isTaken(i) {
		return v, false
	}
	s.takenBits[i/64] |= 1 << (i % 64)
	return s.value(i), true
}

// taken reports whether an element was there and has been taken.
func (s *snapshot) taken(id *elementID) bool {
	i, ok := s.lookup(id)
	return ok && s.isTaken(i)
}

func (s *snapshot) isTaken(i int) bool { return s.takenBits[i/64]&(1<<(i%64)) != 0 }

func (s *snapshot) value(i int) (v value) {
	data := s.records[i*s.size()+s.keySize() : (i+1)*s.size()]
	if s.m.leadsToChains() {
		v = s.values[binary.NativeEndian.Uint32([]byte(data))]
	} else {
		copy(v.data[:], data)
	}
	return v
}

func (s *snapshot) element(i int) element {
	e := element{elementID: elementID{m: s.m}, value: s.value(i)}
	key := s.records[i*s.size() : i*s.size()+s.keySize()]
	copy(e.key[:], key[:len(key)-1])
	e.key[maxKey-1] = key[len(key)-1]
	return e
}

// all yields every element.
func (s *snapshot) all() iter.Seq[element] {
	return func(yield func(element) bool) {
		for i := range s.len() {
			if !yield(s.element(i)) {
				return
			}
		}
	}
}

// stale yields the elements that have not been taken.
func (s *snapshot) stale() iter.Seq[element] {
	return func(yield func(element) bool) {
		for i := range s.len() {
			if !s.isTaken(i) && !yield(s.element(i)) {
				return
			}
		}
	}
}
