// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// listKey identifies a list of endpoints within its service. Frontends of several service
// ports may share a list. Its key has the protocol and port of the first of these service
// ports. The Local list and the Cluster list of a port are always two lists, even if
// their endpoints are equal for a time.
type listKey struct {
	family   api.Family
	local    bool
	protocol api.Protocol
	port     int32 // 0 for all-ports services
}

// list is a list of endpoints in the table.
type list struct {
	listKey
	name   string // of the service port
	number uint32
	class  class
	// shortcut is the number of the list for packets of this node, or 0 if these packets
	// use this list, too.
	shortcut uint32
	// lastNumber is the number of the most recently added endpoint, if endpoints have
	// numbers. It has only the bits of endpointMask.
	lastNumber uint16
	// slots has a record for each endpoint, in the order of the slots. Because there may be
	// a million endpoints, records are in one string.
	slots string
	// If endpoints have several slots, the field table has two octets for each slot: the
	// number of the slot's endpoint, see arrangeSlots. Otherwise, the field is empty.
	table string
}

// A record has the address and port of an endpoint, and two further octets. These have the
// number of the endpoint, or 0 in a list without numbers, and a bit that is set if the
// endpoint is on this node.
type record string

const localBit = 1 << 15

func recordLen(family api.Family) int { return nft.AddrLen(family) + 4 }

func appendRecord(b []byte, t *nodeview.Target) []byte {
	b = append(b, t.Addr.Unmap().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, uint16(t.Port))
	var flags uint16
	if t.Local {
		flags = localBit
	}
	return binary.NativeEndian.AppendUint16(b, flags)
}

// id returns the part of a record that identifies the endpoint within its list.
func (r record) id() record { return r[:len(r)-2] }

func (r record) addr() netip.Addr { return addrOf([]byte(r[:len(r)-4])) }

func (r record) port() int32 { return int32(binary.BigEndian.Uint16([]byte(r[len(r)-4:]))) }

func (r record) flags() uint16 { return binary.NativeEndian.Uint16([]byte(r[len(r)-2:])) }

func (r record) isLocal() bool { return r.flags()&localBit != 0 }

func (r record) number() uint32 { return uint32(r.flags() &^ localBit) }

// value returns the data of an element that leads to the endpoint, or zeros for the empty
// record.
func (r record) value() value {
	if r == "" {
		return value{}
	}
	return endpointValue(r.addr(), r.port())
}

func (l *list) len() int { return len(l.slots) / recordLen(l.family) }

// record returns the record of a slot, counted from 0, or "" if there is none.
func (l *list) record(slot int) record {
	n := recordLen(l.family)
	if (slot+1)*n > len(l.slots) {
		return ""
	}
	return record(l.slots[slot*n : (slot+1)*n])
}

// arrange sets the slots of l and the size of its class, so that l has the endpoints in
// targets. The argument before is the previous list. Its endpoints keep their numbers
// and, if possible, their slots. The slots of removed endpoints go first to the endpoints
// whose own slots are removed, and then to new endpoints.
func (l *list) arrange(before *list, targets []nodeview.Target) {
	l.arrangeRecords(before, targets)
	if isNumbered(l.number) {
		l.arrangeSlots(before, targets)
	}
	if l.class.verdict == nodeview.Forward {
		l.class.size = sizeOf(l.slotCount())
	}
}

func (l *list) arrangeRecords(before *list, targets []nodeview.Target) {
	numbered := isNumbered(l.number)
	n := recordLen(l.family)
	out := make([]byte, 0, n*len(targets))
	for i := range targets {
		out = appendRecord(out, &targets[i])
	}
	recordOf := func(target int) []byte { return out[target*n : (target+1)*n] }
	setNumber := func(target int, number uint32) {
		flags := recordOf(target)[n-2:]
		binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)&localBit|uint16(number))
	}
	l.lastNumber = before.lastNumber
	if before.len() == 0 {
		for i := range targets {
			if numbered {
				setNumber(i, l.nextNumber(nil))
			}
		}
		l.slots = string(out)
		return
	}

	index := make(map[record]int, len(targets))
	for i := range targets {
		index[record(recordOf(i)).id()] = i
	}
	kept := make([]bool, len(targets))
	slots := make([]byte, n*len(targets))
	free := make([]bool, len(targets))
	used := map[uint32]bool{}
	var moved []int // targets that need a slot
	for slot := range max(before.len(), len(targets)) {
		r := before.record(slot)
		i, isKept := -1, false
		if r != "" {
			i, isKept = index[r.id()]
			isKept = isKept && !kept[i] // another program may have repeated an endpoint
		}
		if slot < len(targets) {
			free[slot] = !isKept
		}
		if !isKept {
			continue
		}
		kept[i] = true
		setNumber(i, r.number())
		used[r.number()] = numbered
		if slot < len(targets) {
			copy(slots[slot*n:], recordOf(i))
		} else {
			moved = append(moved, i)
		}
	}
	for i := range targets {
		if kept[i] {
			continue
		}
		if numbered {
			setNumber(i, l.nextNumber(used))
		}
		moved = append(moved, i)
	}
	for slot, isFree := range free {
		if isFree {
			copy(slots[slot*n:], recordOf(moved[0]))
			moved = moved[1:]
		}
	}
	l.slots = string(slots)
}

// nextNumber returns a number for a new endpoint. It reuses a number only after it has used
// all others. The list must have fewer than maxNumberedEndpoints endpoints.
func (l *list) nextNumber(used map[uint32]bool) uint32 {
	for {
		l.lastNumber = l.lastNumber%maxNumberedEndpoints + 1
		if number := uint32(l.lastNumber); !used[number] {
			return number
		}
	}
}

// The IDs of the elements of a list.

func (l *list) id() elementID {
	e := elementID{m: mapID{kind: kindLists, family: l.family}}
	w := keyWriter{id: &e}
	w.number(l.number)
	return e
}

// classValue returns the value of the element of the list, or zeros for the zero list.
func (l *list) classValue() value {
	if l.number == 0 {
		return value{}
	}
	return numberValue(l.class.number())
}

func (l *list) shortcutID() elementID {
	e := l.id()
	e.m.kind = kindShortcuts
	return e
}

// slotID returns the ID of the element for a slot. Slots are counted from 0.
func (l *list) slotID(slot int) elementID {
	e := elementID{m: mapID{kind: kindSlots, family: l.family}}
	w := keyWriter{id: &e}
	w.number(l.number)
	if !isNumbered(l.number) {
		e.m = mapID{kindEndpoints, l.match(), l.family}
		w.protocolUnless(l.port == 0, l.protocol)
	}
	w.number(uint32(slot) + 1)
	return e
}

// slotValue returns the value of the element for a slot with the number of an endpoint, or
// zeros for the number 0.
func (l *list) slotValue(number uint32) value {
	if number == 0 {
		return value{}
	}
	return numberValue(l.number | number)
}

// numberID returns the ID of the element for the number of an endpoint.
func (l *list) numberID(number uint32) elementID {
	e := elementID{m: mapID{kindNumbers, l.match(), l.family}}
	w := keyWriter{id: &e}
	w.number(l.number | number)
	w.protocolUnless(l.port == 0, l.protocol)
	return e
}

func (l *list) match() match {
	if l.port == 0 {
		return matchAddress
	}
	return matchService
}

// hairpin returns the element that masquerades connections from an endpoint of this node to
// itself.
func (l *list) hairpin(r record) element {
	e := element{elementID: elementID{m: mapID{kindHairpins, l.match(), l.family}}}
	w := keyWriter{id: &e.elementID}
	w.addr(r.addr())
	w.addr(r.addr())
	if l.port != 0 {
		w.protocol(l.protocol)
		w.port(r.port())
	}
	return e
}

// planService adds the changes of a service to p. It returns the lists that the service
// then has. If only endpoints have changed, planService does not plan the frontends. The
// argument sources is the change of the lists of source ranges.
func (t *table) planService(ctx context.Context, p *patch, ch *sink.Change, sources *sourcelists.Change) ([]list, error) {
	before := newListSet(t.services[ch.Key])
	old, next := outlineOf(ch.Old, t.opts.Stats), outlineOf(ch.New, t.opts.Stats)
	if len(before.lists) > 0 && frontends.Same(ch.Old, ch.New) && old.sameUse(next) {
		next.setNumbers(before)
	} else {
		old.setNumbers(before)
		ignore := func(int, *elementID) error { return nil }
		if err := plan(ch.Old, old, ignore, t.presentSources(ch.Key), p.remove); err != nil {
			return nil, err
		}
		need := func(i int, frontend *elementID) error { return t.number(next, i, before, frontend) }
		err := plan(ch.New, next, need, sources.Number, func(e element) {
			if t.pass != nil {
				t.pass.claim(p, &e)
			}
			p.add(e)
		})
		if err != nil {
			return releasable(next), err
		}
		for _, r := range sources.Remove {
			p.remove(sourceElement(r))
		}
		for _, r := range sources.Add {
			p.add(sourceElement(r))
		}
	}

	var lists []list
	hashSlots, mayHave := 0, (t.opts.maxHashSlots-t.hashSlots+hashSlotsOf(before.lists))/4
	for i := range next.lists {
		if n := &next.lists[i]; n.number != 0 {
			l := n.newList(next)
			present := before.byNumber(n.family, n.number)
			switch {
			case present != nil:
				l.arrange(present, n.endpoints())
			case t.pass != nil:
				former, err := t.formerList(ctx, &l)
				if err != nil {
					t.pass.err = err
					return nil, err
				}
				l.arrange(&former, n.endpoints())
			default:
				l.arrange(&list{}, n.endpoints())
			}
			if hashSlots += l.hashSlots(); hashSlots > mayHave {
				return releasable(next), fmt.Errorf("stable hashing needs more than %d elements, a quarter of what other services leave; choose another algorithm, or fewer endpoints or ports", mayHave)
			}
			t.changeList(p, present, &l)
			lists = append(lists, l)
		}
	}
	for l := range before.without(lists) {
		t.changeList(p, l, nil)
	}
	return lists, nil
}

// listSet has the lists of a service.
type listSet struct {
	lists []list
	// keys and numbers are indexes of the lists. They are nil if there are only a few
	// lists.
	keys    map[listKey]*list
	numbers map[listNumber]*list
}

func newListSet(lists []list) *listSet {
	const few = 8
	s := &listSet{lists: lists}
	if len(lists) > few {
		s.keys, s.numbers = map[listKey]*list{}, map[listNumber]*list{}
		for i := range lists {
			l := &lists[i]
			s.keys[l.listKey], s.numbers[listNumber{l.family, l.number}] = l, l
		}
	}
	return s
}

// byKey returns the list with a key, or nil.
func (s *listSet) byKey(key listKey) *list {
	if s.keys != nil {
		return s.keys[key]
	}
	return s.find(func(l *list) bool { return l.listKey == key })
}

// byNumber returns the list with a number, or nil.
func (s *listSet) byNumber(family api.Family, number uint32) *list {
	if s.numbers != nil {
		return s.numbers[listNumber{family, number}]
	}
	return s.find(func(l *list) bool { return l.family == family && l.number == number })
}

func (s *listSet) find(f func(*list) bool) *list {
	if i := slices.IndexFunc(s.lists, func(l list) bool { return f(&l) }); i >= 0 {
		return &s.lists[i]
	}
	return nil
}

// without yields the lists of s whose numbers are not in others.
func (s *listSet) without(others []list) iter.Seq[*list] {
	index := newListSet(others)
	return func(yield func(*list) bool) {
		for i := range s.lists {
			if l := &s.lists[i]; index.byNumber(l.family, l.number) == nil && !yield(l) {
				return
			}
		}
	}
}

// releasable returns lists with the numbers of o, so that these numbers can be released.
func releasable(o *outline) (lists []list) {
	for i := range o.lists {
		if n := &o.lists[i]; n.number != 0 {
			lists = append(lists, n.newList(o))
		}
	}
	return lists
}

// number sets the number of the list with the index i in o, unless the list has a number.
// The argument frontend is the element that leads to the list. A list keeps its number.
// In a pass, it keeps the number that this element has in the table.
func (t *table) number(o *outline, i int, before *listSet, frontend *elementID) error {
	l := &o.lists[i]
	if l.number == 0 {
		if present := before.present(l); present != nil {
			l.number = present.number
		} else if t.pass != nil {
			l.number = t.adopt(t.pass.valueOf(frontend)&^handlingMask, l)
		}
	}
	if l.number == 0 {
		var err error
		if l.number, err = t.numbers.assign(l.family, l.numbered); err != nil {
			return err
		}
	}
	if l.shortcut < 0 || o.lists[l.shortcut].number != 0 {
		return nil
	}
	id := (&list{listKey: l.listKey, number: l.number}).shortcutID()
	return t.number(o, l.shortcut, before, &id)
}

// adopt returns the argument number if the table has a list with this number, and no
// other service or port uses the number. Otherwise, it returns 0.
func (t *table) adopt(number uint32, l *plannedList) uint32 {
	key := listNumber{l.family, number}
	if t.numbers.used[key] != inTable || !rangeOf(l.numbered).contains(number) {
		return 0
	}
	t.numbers.used[key] |= byService
	return number
}

// endpoints returns the endpoints of the list that get traffic.
func (n *plannedList) endpoints() []nodeview.Target { return limited(&n.traffic, n.numbered) }

// limited returns the endpoints in t, but not more than a list with or without numbers
// can have.
func limited(t *nodeview.Traffic, numbered bool) []nodeview.Target {
	limit := maxEndpoints
	if numbered {
		limit = maxNumberedEndpoints
	}
	return t.Endpoints[:min(len(t.Endpoints), limit)]
}

// newList returns the list, but not its endpoints and not the size of its class. The
// argument o is the outline with the list.
func (n *plannedList) newList(o *outline) list {
	l := list{listKey: n.listKey, name: n.name, number: n.number, class: class{family: n.family, verdict: n.traffic.Verdict}}
	if n.traffic.Verdict == nodeview.Forward {
		l.class.isAddress, l.class.numbered, l.class.timeout, l.class.algorithm = n.port == 0, n.numbered, n.affinity, n.algorithm
	}
	if n.shortcut >= 0 {
		l.shortcut = o.lists[n.shortcut].number
	}
	return l
}

// changeList adds to p the difference between two lists with the same number. Either list
// may be nil.
func (t *table) changeList(p *patch, old, next *list) {
	any := next
	if any == nil {
		any = old
	}
	change := func(id elementID, hasOld, hasNew bool, before, after value) {
		if hasOld == hasNew && before == after {
			return
		}
		o := p.own(op{elementID: id, hasOld: hasOld, hasNew: hasNew, old: before, new: after})
		if !hasOld && t.pass != nil {
			t.pass.claimFor(o)
		}
	}
	var a, b list // copies of old and next, empty if these are nil
	if old != nil {
		a = *old
	}
	if next != nil {
		b = *next
	}
	a.family, b.family = any.family, any.family

	change(any.id(), old != nil, next != nil, a.classValue(), b.classValue())
	change(any.shortcutID(), a.shortcut != 0, b.shortcut != 0, numberValue(a.shortcut), numberValue(b.shortcut))

	endpoint := func(r record) value {
		v := r.value()
		v.counted = t.opts.Stats && r != ""
		return v
	}
	var removed, added []record
	for slot := range max(a.len(), b.len()) {
		from, to := a.record(slot), b.record(slot)
		if from == to {
			continue
		}
		if from != "" {
			removed = append(removed, from)
			if from.isLocal() {
				p.remove(any.hairpin(from))
			}
		}
		if to != "" {
			added = append(added, to)
			if to.isLocal() {
				e := any.hairpin(to)
				if t.pass != nil {
					t.pass.claim(p, &e)
				}
				p.add(e)
			}
		}
		if !isNumbered(any.number) {
			change(any.slotID(slot), from != "", to != "", endpoint(from), endpoint(to))
		}
	}
	if !isNumbered(any.number) {
		return
	}
	for slot := range max(a.slotCount(), b.slotCount()) {
		if from, to := a.slotNumber(slot), b.slotNumber(slot); from != to {
			change(any.slotID(slot), from != 0, to != 0, any.slotValue(from), any.slotValue(to))
		}
	}
	numbers := map[uint32][2]record{} // the records of a number before and after
	for _, r := range removed {
		numbers[r.number()] = [2]record{r, ""}
	}
	for _, r := range added {
		numbers[r.number()] = [2]record{numbers[r.number()][0], r}
	}
	for _, r := range removed {
		pair := numbers[r.number()]
		change(any.numberID(r.number()), true, pair[1] != "", endpoint(pair[0]), endpoint(pair[1]))
	}
	for _, r := range added {
		if pair := numbers[r.number()]; pair[0] == "" {
			change(any.numberID(r.number()), false, true, value{}, endpoint(r))
		}
	}
}

// settle records that a service has the lists of the argument next, or has failed to get
// them. The field hashSlots already counts the slots of next.
func (t *table) settle(key types.NamespacedName, next []list, failed bool) {
	drop, keep := t.services[key], next
	if failed {
		drop, keep = keep, drop
		t.hashSlots += hashSlotsOf(keep) - hashSlotsOf(drop)
	}
	for l := range newListSet(drop).without(keep) {
		t.numbers.release(listNumber{l.family, l.number})
		t.staleClients = t.staleClients || isNumbered(l.number)
	}
	if !failed {
		t.services[key] = keep
		if len(keep) == 0 {
			delete(t.services, key)
		}
	}
}
