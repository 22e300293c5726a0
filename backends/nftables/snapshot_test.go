// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
)

// keysWithEqualHashes returns pairs of numbers. As keys of the map m, the numbers of a
// pair have equal hashes.
func keysWithEqualHashes(m mapID, pairs int) (keys []uint32) {
	byHash := map[uint32]uint32{}
	for i := uint32(0); len(keys) < 2*pairs; i++ {
		id := elementID{m: m}
		binary.NativeEndian.PutUint32(id.key[:], i)
		hash := hashOfKey(id.key[:m.keyLen()])
		if other, ok := byHash[hash]; ok {
			keys = append(keys, other, i)
		}
		byHash[hash] = i
	}
	return keys
}

// TestSnapshotAgainstMaps compares snapshots with Go maps. Some keys have equal hashes.
func TestSnapshotAgainstMaps(t *testing.T) {
	for _, m := range []mapID{
		{kind: kindEndpoints, family: api.IPv6},
		{kind: kindFrontends, family: api.IPv4},
		{kind: kindClusterIPs, family: api.IPv4},
	} {
		t.Run(m.name(), func(t *testing.T) {
			keys := keysWithEqualHashes(m, 3)
			for range 1000 {
				keys = append(keys, rand.Uint32())
			}
			slices.Sort(keys)
			keys = slices.Compact(keys)
			keys, missing := keys[:900], keys[900:]
			s, want := newSnapshot(m), map[elementID]value{}
			newElement := func(key, data uint32) (e element) {
				e.m = m
				binary.NativeEndian.PutUint32(e.key[:], key)
				if m.dataLen() > 0 {
					binary.NativeEndian.PutUint32(e.data[:], data)
				}
				e.counted = m.canCount() && data%2 == 1
				if m.hasText() {
					e.text = e.m.name() + string(rune('a'+data%26))
				}
				return e
			}
			for _, key := range keys {
				e := newElement(key, rand.Uint32())
				s.add(&e)
				want[e.elementID] = e.value
			}
			if s.repeated {
				t.Error("an element counts as repeated")
			}
			for _, key := range keys {
				switch e := newElement(key, rand.Uint32()); rand.IntN(3) {
				case 0:
					if old, ok := s.remove(&e.elementID); !ok || old != (element{e.elementID, want[e.elementID]}) {
						t.Fatalf("removed %v, %v", old, ok)
					}
					delete(want, e.elementID)
				case 1:
					s.remove(&e.elementID)
					s.add(&e)
					want[e.elementID] = e.value
				}
			}
			if len(s.claims) != len(keys) {
				t.Errorf("there are %d records of %d keys", len(s.claims), len(keys))
			}
			for i, key := range slices.Concat(keys, missing) {
				e := newElement(key, 0)
				wanted, exists := want[e.elementID]
				if v, ok := s.get(&e.elementID); ok != exists || v != wanted {
					t.Fatalf("element %d is %v, %v, want %v, %v", i, v, ok, wanted, exists)
				}
				if s.has(&e.elementID) != exists {
					t.Fatalf("has of element %d differs from get", i)
				}
				if key%2 == 1 {
					continue
				}
				if v, ok := s.claim(&e.elementID); ok != exists || v != wanted {
					t.Fatalf("claim of element %d returned %v, %v, want %v, %v", i, v, ok, wanted, exists)
				}
				if _, ok := s.claim(&e.elementID); ok {
					t.Fatalf("element %d was claimed twice", i)
				}
				if key%4 == 0 {
					s.giveBack(&e.elementID)
				}
			}
			for limit := unclaimed; limit <= claimed; limit++ {
				got := map[elementID]value{}
				for e := range s.upTo(limit) {
					got[e.elementID] = e.value
				}
				for id, v := range want {
					c := unclaimed
					switch i := id.number(); {
					case i%4 == 0:
						c = givenBack
					case i%2 == 0:
						c = claimed
					}
					if g, ok := got[id]; ok != (c <= limit) || ok && g != v {
						t.Fatalf("up to %d, element %v is %v, %v, want %v", limit, id, g, ok, v)
					}
					delete(got, id)
				}
				if len(got) > 0 {
					t.Fatalf("up to %d, there are %d unwanted elements", limit, len(got))
				}
			}
		})
	}
}

func TestSnapshotKnowsRepeatedElements(t *testing.T) {
	s := newSnapshot(mapID{kind: kindLists, family: api.IPv4})
	first, second := (&list{number: 1}).id(), (&list{number: 2}).id()
	s.add(&element{first, numberValue(7)})
	s.add(&element{second, numberValue(7)})
	if s.repeated {
		t.Error("different elements count as repeated")
	}
	s.add(&element{first, numberValue(8)})
	if v, _ := s.get(&first); !s.repeated || v.number() != 7 {
		t.Errorf("repeated is %v, and the value %d, want true and 7", s.repeated, v.number())
	}
}

// BenchmarkSnapshot fills a snapshot with the endpoints of 10,000 services, and claims
// them.
func BenchmarkSnapshot(b *testing.B) {
	m := mapID{kind: kindEndpoints, family: api.IPv4}
	b.ReportAllocs()
	for b.Loop() {
		s := newSnapshot(m)
		var e element
		e.m = m
		for i := range uint32(100_000) {
			binary.NativeEndian.PutUint32(e.key[:], i)
			s.add(&e)
		}
		for i := range uint32(100_000) {
			binary.NativeEndian.PutUint32(e.key[:], i)
			if _, ok := s.claim(&e.elementID); !ok {
				b.Fatal("element does not exist")
			}
		}
	}
}
