// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
)

// formerList returns the list l with the endpoints that it has in the table. The numbers of
// new endpoints follow the numbers of these endpoints.
func (t *table) formerList(ctx context.Context, l *list) (list, error) {
	ps := t.pass
	if ps.onDemand && t.numbers.used[listNumber{l.family, l.number}]&inTable != 0 {
		if _, err := ps.readList(ctx, t.conn, l, false); err != nil {
			return list{}, err
		}
	}
	former := list{listKey: l.listKey, number: l.number}
	var slots, table []byte
	seen := map[uint32]bool{}
	for slot := 0; ; slot++ {
		id := l.slotID(slot)
		v, ok := ps.snapshots[id.m].get(&id)
		if !ok {
			break
		}
		var number uint32
		if isNumbered(l.number) {
			number = v.number() & endpointMask
			table = appendNumber(table, number)
			if seen[number] {
				continue
			}
			seen[number] = true
			id = l.numberID(number)
			if v, ok = ps.snapshots[id.m].get(&id); !ok {
				number = 0
			}
		}
		slots = append(slots, v.data[:nft.AddrLen(l.family)+2]...) // for all-ports services, the port is 0
		slots = binary.NativeEndian.AppendUint16(slots, uint16(number))
		former.lastNumber = max(former.lastNumber, uint16(number))
	}
	former.slots, former.table = string(slots), string(table)
	return former, nil
}

// A pass stops reading a list after maxGaps missing elements. If another program has
// deleted more elements, the pass does not find the elements after the gap. These
// elements make the kernel refuse a change of the list, and then checkPart reads them.
const maxGaps = 16

// readList adds the elements of a list to the snapshots. It reads the slots in order,
// until maxGaps slots were missing. If the list is not stale, readList also ends at a
// missing slot that the smallest list of the class does not have. readList reports
// whether it has found an endpoint.
func (ps *pass) readList(ctx context.Context, c *conn, l *list, stale bool) (found bool, err error) {
	slots, expected, gaps := maxEndpoints, 0, 0
	if v, ok := ps.snapshots[l.id().m].get(ptr(l.id())); ok {
		if c, ok := classOf(l.family, v.number()); ok {
			slots, expected = 1<<c.size, 1<<c.size/2+1
		}
	}
	var numbers []uint32
	seen := map[uint32]bool{}
	slot := func(i int) elementID { return l.slotID(i) }
	err = c.get(ctx, slot(0).m, slots, slot, func(i int, e element, ok bool) bool {
		if !ok {
			gaps++
			return (stale || i < expected) && gaps < maxGaps
		}
		ps.found(&e)
		if !isNumbered(l.number) {
			found = true
		} else if number := e.value.number() & endpointMask; !seen[number] {
			seen[number] = true
			numbers = append(numbers, number)
		}
		return true
	})
	if err != nil || len(numbers) == 0 {
		return found, err
	}
	number := func(i int) elementID { return l.numberID(numbers[i]) }
	err = c.get(ctx, number(0).m, len(numbers), number, func(_ int, e element, ok bool) bool {
		if ok {
			ps.found(&e)
			found = true
		}
		return true
	})
	return found, err
}

// found records that the kernel has an element that the pass did not read at its beginning.
func (ps *pass) found(e *element) {
	if s := ps.snapshots[e.m]; !s.has(&e.elementID) {
		s.add(e)
		ps.state.count(&e.elementID, &e.value, 1)
	}
}

// readStaleLists reads the lists that no service has, but that the table had when the
// pass began.
func (t *table) readStaleLists(ctx context.Context, ps *pass) error {
	if !ps.onDemand {
		return nil
	}
	for number, use := range t.numbers.used {
		if use != inTable {
			continue
		}
		l := list{listKey: listKey{family: number.family, port: 1}, number: number.number}
		// The number of a list does not determine the protocol in its keys.
		for _, l.protocol = range []api.Protocol{api.TCP, api.UDP, api.SCTP, 0} {
			if l.protocol == 0 {
				l.port = 0
			}
			if found, err := ps.readList(ctx, t.conn, &l, true); err != nil {
				return err
			} else if found {
				break
			}
		}
	}
	return nil
}

// forgetClaimed removes from the snapshots the elements of lists that services have
// claimed. So a pass does not keep all endpoints in memory.
func (ps *pass) forgetClaimed() {
	if !ps.onDemand {
		return
	}
	for m, s := range ps.snapshots {
		if !m.readOnDemand() || len(s.claims) == 0 {
			continue
		}
		rest := newSnapshot(m)
		for i, c := range s.claims {
			if c < claimed {
				rest.add(ptr(s.element(i)))
				rest.claims[len(rest.claims)-1] = c
			}
		}
		ps.snapshots[m] = rest
	}
}

func ptr[T any](v T) *T { return &v }
