// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package sourcelists numbers the lists of source ranges in the table of a backend, and
// makes the rules that look up a source in a list.
//
// Frontends with equal source ranges share a list. A map of the table leads from a frontend
// to the number of its list. One set has the ranges of all lists of a family. A key of the
// set consists of the number of a list and one of its ranges, see [Range.Key]. So the
// number of elements is the sum of the lengths of the different lists, and a change of one
// list does not affect the others.
//
// A change of a service takes these steps:
//
//  1. [Lists.Begin], and [Change.Number] for each frontend that has source ranges.
//  2. Write the ranges in [Lists.Fresh] to the kernel. No frontend refers to these lists.
//  3. Write the frontends with their numbers, together with the ranges in Change.Remove and
//     Change.Add, in one transaction for each service.
//  4. [Change.End].
//  5. Delete the ranges that [Lists.Reap] returns. A packet may be on its way through the
//     rules, with the number of its list. So do that in a later call, not immediately.
//
// Packets find the old list until step 3 succeeds. Afterwards they find the new list.
// They never find a part of a list.
package sourcelists

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// Lists are the lists of an instance. Calls must not overlap.
type Lists struct {
	nodeAddrs []netip.Addr
	byRanges  map[Ranges]*sharedList
	byNumber  map[uint32]*sharedList
	uses      map[types.NamespacedName]*use
	fresh     []*sharedList
	// unused has the lists that no service uses, and unusedRanges is the number of ranges in
	// these lists.
	unused       map[*sharedList]bool
	unusedRanges int
	// last is the number that was assigned last.
	last uint32
}

// sharedList is a list of source ranges that services share.
type sharedList struct {
	number uint32
	// ranges are the ranges that the list has or will have in the kernel.
	ranges Ranges
	// The kernel has the first ranges of the list. The number of these ranges is written.
	written int
	// users counts the services that use the list. The field kept is true if the kernel had
	// the list when the pass began. Then services that were not delivered yet may use it.
	users int
	kept  bool
	// waiting has the services that cannot use the list until the kernel has it.
	waiting []types.NamespacedName
}

// use has the lists of a service.
type use struct {
	byAddr map[netip.Addr]*sharedList // by addrOf
	lists  []*sharedList              // without duplicates
}

// addrOf returns the address of a frontend, or the unspecified address of the family for a
// node port. If addrOf returns the same address for several frontends of a service, these
// frontends have the same source ranges.
func addrOf(f *nodeview.Frontend) netip.Addr {
	switch {
	case f.Kind != nodeview.NodePort:
		return f.Addr
	case f.Family == api.IPv6:
		return netip.IPv6Unspecified()
	default:
		return netip.IPv4Unspecified()
	}
}

// New returns an empty Lists. The argument nodeAddrs has the addresses of the node. The
// ranges of services may admit these addresses, see [nodeview.Sources].
func New(nodeAddrs []netip.Addr) *Lists {
	return &Lists{
		nodeAddrs: nodeAddrs,
		byRanges:  map[Ranges]*sharedList{}, byNumber: map[uint32]*sharedList{},
		uses: map[types.NamespacedName]*use{}, unused: map[*sharedList]bool{},
	}
}

// A number of a list has 24 bits for the list. The low octet is free for a prefix length.
// In the number itself, this octet is not zero, because nft prints such a number with ":0"
// at the end and cannot load it.
const (
	lengthMask = 0xff
	maxList    = 1<<24 - 2 // nft prints the highest number as a name
)

// SetNodeAddrs sets the addresses of the node. If services have source ranges,
// SetNodeAddrs changes nothing and returns false, because the ranges might then admit
// other addresses.
func (l *Lists) SetNodeAddrs(addrs []netip.Addr) bool {
	if len(l.uses) > 0 && !slices.Equal(addrs, l.nodeAddrs) {
		return false
	}
	l.nodeAddrs = addrs
	return true
}

// Number returns the number of the i-th list. The index i begins with 1.
func Number(i uint32) uint32 { return i<<8 | lengthMask }

// Found records a list that the kernel has at the beginning of a pass. [Lists.EndPass]
// releases it.
func (l *Lists) Found(number uint32, family api.Family, prefixes []netip.Prefix) {
	list := &sharedList{number: number | lengthMask, ranges: NewRanges(family, prefixes), kept: true}
	list.written = list.ranges.Len()
	l.byNumber[list.number] = list
	l.index(list)
	l.last = max(l.last, number>>8)
}

// EndPass releases the lists that no service needed during the pass.
func (l *Lists) EndPass() {
	for _, list := range l.byNumber {
		if list.kept = false; list.users == 0 {
			l.markUnused(list)
		}
	}
}

// HasKept reports whether there are lists that only EndPass would release.
func (l *Lists) HasKept() bool {
	for _, list := range l.byNumber {
		if list.kept && list.users == 0 {
			return true
		}
	}
	return false
}

// Of returns the number of the list that a frontend of the service uses. If it uses no
// list, the result is 0.
func (l *Lists) Of(service types.NamespacedName, f *nodeview.Frontend) uint32 {
	if u := l.uses[service]; u != nil {
		if list := u.byAddr[addrOf(f)]; list != nil {
			return list.number
		}
	}
	return 0
}

// Change is the change of the lists of a service.
type Change struct {
	// Remove has the ranges to remove from the kernel, and Add has the ranges to add. Both
	// belong into the same transaction as the frontends of the service.
	Remove, Add []Range

	Service types.NamespacedName

	lists    *Lists
	old, new *use
	// planned has each list whose number the method Number has returned.
	planned map[frontends.SourcesID]*sharedList
	// edited has the list whose ranges change in place, and its new ranges.
	edited map[*sharedList]Ranges
}

// Begin begins the change of a service from one view to another. Either view may be nil.
func (l *Lists) Begin(service types.NamespacedName, from, to *api.View) *Change {
	c := &Change{Service: service, lists: l, old: l.uses[service], new: &use{}}
	if c.old != nil && frontends.Same(from, to) {
		c.new = c.old // Number need not be called
	}
	return c
}

// Number returns the number of the list for a frontend of the new view. The frontend must
// have source ranges.
func (c *Change) Number(f *nodeview.Frontend) uint32 {
	addr := addrOf(f)
	if list := c.new.byAddr[addr]; list != nil {
		return list.number
	}
	s := frontends.SourcesOf(f)
	list := c.planned[s]
	if list == nil {
		list = c.assign(NewRanges(f.Family, f.Sources.Prefixes(c.lists.nodeAddrs)))
		if c.planned == nil {
			c.planned = map[frontends.SourcesID]*sharedList{}
		}
		c.planned[s] = list
	}
	if c.new.byAddr == nil {
		c.new.byAddr = map[netip.Addr]*sharedList{}
	}
	c.new.byAddr[addr] = list
	return list.number
}

// assign returns the list for ranges of the new view. It uses an existing list if
// possible. Otherwise it changes a list of the service in place, or makes a new one.
func (c *Change) assign(ranges Ranges) *sharedList {
	l := c.lists
	list := l.byRanges[ranges]
	if list == nil {
		list = c.edit(ranges)
	}
	if list == nil {
		list = l.add(ranges)
	}
	if slices.Contains(c.new.lists, list) {
		return list
	}
	c.new.lists = append(c.new.lists, list)
	list.users++
	if l.unused[list] {
		delete(l.unused, list)
		l.unusedRanges -= list.written
	}
	if list.written < list.ranges.Len() {
		list.waiting = append(list.waiting, c.Service)
	}
	return list
}

// maxEdit limits the ranges that change in place.
const maxEdit = 1000

// edit changes a list of the old view in place and returns it. It returns nil if another
// service uses the list or if too much would change. It also returns nil if a removed range
// overlaps an added range. If the transaction came between two lookups of a packet whose
// source is in both ranges, the packet might find neither range.
func (c *Change) edit(ranges Ranges) *sharedList {
	if c.old == nil {
		return nil
	}
	for _, list := range c.old.lists {
		if list.users > 1 || list.kept || list.ranges.family != ranges.family || slices.Contains(c.new.lists, list) ||
			max(list.ranges.Len()-ranges.Len(), ranges.Len()-list.ranges.Len()) > maxEdit {
			continue
		}
		remove, add := difference(list.ranges, ranges)
		if len(remove)+len(add) > min(maxEdit, ranges.Len()) || overlap(remove, add) {
			continue
		}
		for _, p := range remove {
			c.Remove = append(c.Remove, Range{list.number, p})
		}
		for _, p := range add {
			c.Add = append(c.Add, Range{list.number, p})
		}
		// Until the end of the change, no other service may find the list by its ranges.
		c.lists.unindex(list)
		if c.edited == nil {
			c.edited = map[*sharedList]Ranges{}
		}
		c.edited[list] = ranges
		return list
	}
	return nil
}

// add makes a list with a new number.
func (l *Lists) add(ranges Ranges) *sharedList {
	list := &sharedList{ranges: ranges}
	for list.number == 0 {
		l.last = l.last%maxList + 1
		if number := Number(l.last); l.byNumber[number] == nil {
			list.number = number
		}
	}
	l.byNumber[list.number], l.byRanges[ranges] = list, list
	if ranges.Len() > 0 {
		l.fresh = append(l.fresh, list)
	}
	return list
}

// unindex makes the list unavailable to services that search for its ranges.
func (l *Lists) unindex(list *sharedList) {
	if l.byRanges[list.ranges] == list {
		delete(l.byRanges, list.ranges)
	}
}

// index makes the list available to services that search for these ranges.
func (l *Lists) index(list *sharedList) {
	if l.byRanges[list.ranges] == nil {
		l.byRanges[list.ranges] = list
	}
}

func (l *Lists) markUnused(list *sharedList) {
	if !l.unused[list] {
		l.unused[list] = true
		l.unusedRanges += list.written
	}
}

// End ends the change. If it failed, the kernel has the lists and frontends of the old
// view.
func (c *Change) End(failed bool) {
	l := c.lists
	for list, ranges := range c.edited {
		if !failed {
			list.ranges, list.written = ranges, ranges.Len()
		}
		l.index(list)
	}
	if c.new == c.old {
		return
	}
	drop, keep := c.old, c.new
	if failed {
		drop, keep = keep, drop
	}
	if drop != nil {
		for _, list := range drop.lists {
			if list.users--; list.users == 0 && !list.kept {
				l.markUnused(list)
			}
		}
	}
	if keep == nil || len(keep.lists) == 0 {
		delete(l.uses, c.Service)
	} else {
		l.uses[c.Service] = keep
	}
}

// Chunk is a part of a list that the caller has to write to the kernel.
type Chunk struct {
	Ranges []Range
	// Services cannot be programmed before the chunk is written.
	Services []types.NamespacedName
	list     *sharedList
}

// Fresh passes the lists that the kernel lacks to the function write. Each call of write
// gets one or more chunks with up to n ranges in all, and reports for each chunk whether
// the kernel has it now. If the kernel lacks a chunk, the services of the chunk must
// fail. Then Fresh skips the rest of this list, and no later change uses the list. An
// error of write ends Fresh. Then no later change uses the lists that are not written.
func (l *Lists) Fresh(n int, write func([]Chunk) (written []bool, err error)) error {
	fresh := l.fresh
	l.fresh = nil
	defer func() {
		for _, list := range fresh {
			if list.written < list.ranges.Len() {
				l.cut(list)
			}
		}
	}()
	var chunks []Chunk
	size := 0
	flush := func() error {
		written, err := write(chunks)
		if err != nil {
			return err
		}
		for i, c := range chunks {
			if written[i] {
				c.list.written += len(c.Ranges)
				continue
			}
			l.cut(c.list)
		}
		chunks, size = nil, 0
		return nil
	}
	for _, list := range fresh {
		for list.written < list.ranges.Len() {
			end := min(list.written+n-size, list.ranges.Len())
			chunk := Chunk{Ranges: list.slice(list.written, end), Services: list.waiting, list: list}
			chunks, size = append(chunks, chunk), size+len(chunk.Ranges)
			if size < n && end == list.ranges.Len() {
				break // the next list may fit into the same call of write
			}
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if len(chunks) == 0 {
		return nil
	}
	return flush()
}

// cut handles a list if the kernel has only a part of it: no later change uses the list.
// Later, this part is deleted.
func (l *Lists) cut(list *sharedList) {
	l.unindex(list)
	list.ranges = list.ranges.slice(0, list.written)
}

// slice returns the ranges from the index i up to, but not including, the index j.
func (list *sharedList) slice(i, j int) []Range {
	ranges := make([]Range, 0, j-i)
	for ; i < j; i++ {
		ranges = append(ranges, Range{list.number, list.ranges.at(i)})
	}
	return ranges
}

// Reap returns up to n ranges of lists that no service uses, and forgets them. The caller
// has to delete them from the kernel.
func (l *Lists) Reap(n int) (ranges []Range) {
	for list := range l.unused {
		l.unindex(list)
		begin := max(0, list.written-(n-len(ranges)))
		ranges = append(ranges, list.slice(begin, list.written)...)
		l.unusedRanges -= list.written - begin
		list.ranges, list.written = list.ranges.slice(0, begin), begin
		if begin > 0 {
			break
		}
		delete(l.unused, list)
		delete(l.byNumber, list.number)
	}
	return ranges
}

// Unused returns the number of ranges that Reap would return.
func (l *Lists) Unused() int { return l.unusedRanges }
