// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"iter"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// planService adds the changes of a service to p. It returns the lists that the service
// then has. If only endpoints have changed, planService takes no time for the frontends. The
// argument sources is the change of the lists of source ranges.
func (t *table) planService(p *patch, ch *sink.Change, sources *sourcelists.Change) ([]list, error) {
	before := newListSet(t.services[ch.Key])
	old, next := outlineOf(ch.Old), outlineOf(ch.New)
	if len(before.lists) > 0 && nodeview.SameFrontends(ch.Old, ch.New) && old.sameUse(next) {
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
	for i := range next.lists {
		if n := &next.lists[i]; n.number != 0 {
			l := n.newList(next)
			present := before.byNumber(n.family, n.number)
			switch {
			case present != nil:
				l.arrange(present, n.endpoints())
			case t.pass != nil:
				former := t.pass.formerList(&l)
				l.arrange(&former, n.endpoints())
			default:
				l.arrange(&list{}, n.endpoints())
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
	// keys and numbers find a list. They are nil if there are only a few lists.
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

// releasable returns lists with the numbers of o, so that they can be released.
func releasable(o *outline) (lists []list) {
	for i := range o.lists {
		if n := &o.lists[i]; n.number != 0 {
			lists = append(lists, n.newList(o))
		}
	}
	return lists
}

// number sets the number of the list with the index i in o, unless it is set. The argument
// frontend is the element that leads to the list. A list keeps its number. In a pass, it
// keeps the number that this element has in the table.
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
		if l.number, err = t.numbers.assign(l.family, l.affinity > 0); err != nil {
			return err
		}
	}
	if l.shortcut < 0 || o.lists[l.shortcut].number != 0 {
		return nil
	}
	id := (&list{listKey: l.listKey, number: l.number}).shortcutID()
	return t.number(o, l.shortcut, before, &id)
}

// adopt returns number if the table has a list with this number, and no other service or
// port uses it. Otherwise, it returns 0.
func (t *table) adopt(number uint32, l *plannedList) uint32 {
	key := listNumber{l.family, number}
	if t.numbers.used[key] != inTable || !rangeOf(l.affinity > 0).contains(number) {
		return 0
	}
	t.numbers.used[key] |= byService
	return number
}

// endpoints returns the endpoints of the list that get traffic.
func (n *plannedList) endpoints() []nodeview.Target { return limited(&n.traffic, n.affinity > 0) }

// limited returns the endpoints in t that a list with or without session affinity can have.
func limited(t *nodeview.Traffic, affine bool) []nodeview.Target {
	limit := maxEndpoints
	if affine {
		limit = maxAffineEndpoints
	}
	return t.Endpoints[:min(len(t.Endpoints), limit)]
}

// newList returns the list without its endpoints. The argument o is the outline with the
// list.
func (n *plannedList) newList(o *outline) list {
	l := list{listKey: n.listKey, number: n.number, class: class{family: n.family, verdict: n.traffic.Verdict}}
	if n.traffic.Verdict == nodeview.Forward {
		l.class.isAddress, l.class.size, l.class.timeout = n.port == 0, sizeOf(len(n.endpoints())), n.affinity
	}
	if n.shortcut >= 0 {
		l.shortcut = o.lists[n.shortcut].number
	}
	return l
}

// changeList adds the difference between two lists with the same number to p. Either list
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
	var a, b list // old and next, without elements if nil
	if old != nil {
		a = *old
	}
	if next != nil {
		b = *next
	}
	a.family, b.family = any.family, any.family

	change(any.id(), old != nil, next != nil, a.classValue(), b.classValue())
	change(any.shortcutID(), a.shortcut != 0, b.shortcut != 0, numberValue(a.shortcut), numberValue(b.shortcut))

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
		change(any.slotID(slot), from != "", to != "", any.slotValue(from), any.slotValue(to))
	}
	if !isAffine(any.number) {
		return
	}
	numbers := map[uint32][2]record{} // before and after
	for _, r := range removed {
		numbers[r.number()] = [2]record{r, ""}
	}
	for _, r := range added {
		numbers[r.number()] = [2]record{numbers[r.number()][0], r}
	}
	for _, r := range removed {
		pair := numbers[r.number()]
		change(any.numberID(r.number()), true, pair[1] != "", pair[0].value(), pair[1].value())
	}
	for _, r := range added {
		if pair := numbers[r.number()]; pair[0] == "" {
			change(any.numberID(r.number()), false, true, value{}, r.value())
		}
	}
}

// settle records that a service has the lists in next, or that it has failed to get them.
func (t *table) settle(key types.NamespacedName, next []list, failed bool) {
	drop, keep := t.services[key], next
	if failed {
		drop, keep = keep, drop
	}
	for l := range newListSet(drop).without(keep) {
		t.numbers.release(listNumber{l.family, l.number})
		t.staleClients = t.staleClients || isAffine(l.number)
	}
	if !failed {
		t.services[key] = keep
		if len(keep) == 0 {
			delete(t.services, key)
		}
	}
}
