// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// pass is the state of a pass. A pass first reads the table, except the endpoints if there
// are many of them. Each Sync then reads the endpoints of its services, and writes the
// differences for its services. The end of the pass removes the elements that no service
// needs. Unchanged elements stay, so traffic to their services is not interrupted.
type pass struct {
	// snapshots are the contents of the maps when the pass began. Since then, Syncs may have
	// changed the elements that are marked as claimed.
	snapshots map[mapID]*snapshot
	// state describes the table as it was read.
	state *state
	// onDemand is true if the pass reads the elements of a list only when it needs them. Then
	// the snapshots of these maps have no elements that services have claimed.
	onDemand bool
	// err is the error of a failed read on demand, or nil.
	err error
	// foreignCommits is the number that conn.foreignCommits returned before the table was
	// read.
	foreignCommits int64
	// numbers has the numbers of the lists in the table.
	numbers   *numbers
	maxDumped int
	dumpAll   bool
	// base is the state of the table when the read began, or nil if it was unknown. Its journal
	// has the changes since then.
	base    *state
	journal *journal
}

// beginPass loads the skeleton and reads the table. It skips both steps if Start did them
// and no other program has changed any table since then. It also skips both after
// preparePass. Then Verify finds changes that other programs have made meanwhile.
func (t *table) beginPass(ctx context.Context, nodeAddrs []netip.Addr) error {
	p, base := t.ahead, t.state
	t.state, t.pass, t.ahead = nil, nil, nil
	foreignCommits, err := t.conn.foreignCommits(ctx)
	if err != nil {
		return err
	}
	if p == nil || p.base != base || p.journal.isFull() || base == nil && p.foreignCommits != foreignCommits {
		if foreignCommits, err = t.loadSkeleton(ctx); err != nil {
			return err
		}
		p = t.newPass(foreignCommits)
		if err := p.read(ctx, t.conn); err != nil {
			return err
		}
	}
	p.replay()
	p.state.held = p.snapshots
	p.state.slotChainsMade()
	p.state.sourceChainsMade(p.state.ranges.Chains())
	if err := t.deleteForeign(ctx, p); err != nil {
		return err
	}
	t.sources = sourcelists.New(nodeAddrs)
	p.findSources(t.sources)
	t.services, t.hashSlots, t.numbers = map[types.NamespacedName][]list{}, 0, p.numbers
	t.pass, t.state, t.dumpAll = p, p.state, false
	t.drift.reset(p.foreignCommits)
	t.leftovers.Exist = false
	return t.repairChains(ctx)
}

// readAhead reads the table while the source still collects services, so that the first
// pass starts faster. The argument foreignCommits is the number that conn.foreignCommits
// returned before the skeleton was loaded.
func (t *table) readAhead(ctx context.Context, foreignCommits int64) {
	if t.state != nil {
		return // the first pass has already begun
	}
	p := t.newPass(foreignCommits)
	if err := p.read(ctx, t.conn); err == nil {
		t.ahead = p
	} else {
		klog.FromContext(ctx).V(2).Info("Cannot read the table ahead of the first pass", "table", t.conn.Table, "reason", err)
	}
}

// maxDumped limits the endpoints that a pass reads at its beginning. The time to dump a map
// grows with the square of the number of its elements, because the kernel begins each
// message at the first element.
const maxDumped = 20_000

func (t *table) newPass(foreignCommits int64) *pass {
	return &pass{
		snapshots:      map[mapID]*snapshot{},
		state:          newState(t.clientSeed),
		foreignCommits: foreignCommits,
		numbers:        newNumbers(),
		maxDumped:      t.opts.maxDumped,
		dumpAll:        t.dumpAll,
	}
}

// The method read reads all maps. If there are many endpoints, it omits their maps.
func (ps *pass) read(ctx context.Context, c *conn) error {
	endpoints := 0
	for _, m := range allMaps() {
		if ps.onDemand = endpoints > ps.maxDumped && !ps.dumpAll; ps.onDemand && m.readOnDemand() {
			ps.snapshots[m] = newSnapshot(m)
			continue
		}
		s, err := readSnapshot(ctx, c, m, ps.journal)
		if err != nil {
			return err
		}
		ps.snapshots[m] = s
		if s.unsure {
			ps.foreignCommits = -1 // so that Verify compares the table after the pass
		}
		for e := range s.all() {
			if c, ok := classOfElement(&e.elementID, &e.value); ok && m.kind == kindLists {
				endpoints += 1 << c.size
			}
			ps.account(&e, 1)
		}
	}
	return nil
}

// account records that the table has the element e (n is 1), or no longer has it (n is
// -1).
func (ps *pass) account(e *element, n int) {
	l := listNumber{e.m.family, 0}
	switch e.m.kind {
	case kindClasses:
		c, _ := classOfElement(&e.elementID, &e.value)
		if n > 0 {
			ps.state.classesMade([]class{c})
		} else {
			ps.state.classesDeleted([]class{c})
		}
		return
	case kindLists:
		l.number = e.elementID.number()
	case kindFrontends:
		l.number = e.value.number() &^ handlingMask
	}
	ps.state.count(&e.elementID, &e.value, n)
	if n > 0 && rangeOf(isNumbered(l.number)).contains(l.number) {
		ps.numbers.found(l)
	}
}

// valueOf returns the number that an element of the table has as its value, or 0 if the
// table has no such element.
func (ps *pass) valueOf(id *elementID) uint32 {
	v, _ := ps.snapshots[id.m].get(id)
	return v.number()
}

// deleteForeign deletes elements that this package cannot have made. They could make the
// kernel refuse new elements.
func (t *table) deleteForeign(ctx context.Context, p *pass) error {
	for _, m := range allMaps() {
		foreign := p.snapshots[m].foreign
		if len(foreign) == 0 {
			continue
		}
		if err := t.conn.Transact(ctx, func(w *nft.Writer) { deleteForeign(w, m, foreign) }); err != nil {
			return fmt.Errorf("remove %d elements of %s that another program made: %w", len(foreign), m.name(), err)
		}
	}
	return nil
}

// claim marks e as needed by a service, and records the old value of e in the patch.
func (ps *pass) claim(p *patch, e *element) {
	ps.claimOld(p, &e.elementID)
	if e.m.kind == kindFrontends {
		// The same transaction must lift the restriction of a frontend without source ranges.
		restricted := e.elementID
		restricted.m.kind = kindRestricted
		ps.claimOld(p, &restricted)
	}
}

// claimFor is like claim, for an op whose element has no other op.
func (ps *pass) claimFor(o *op) {
	if old, ok := ps.snapshots[o.m].claim(&o.elementID); ok {
		o.hasOld, o.old, o.claimed = true, old, true
	}
}

// claimOld records the old value of an element in the patch, unless the element is
// already claimed.
func (ps *pass) claimOld(p *patch, id *elementID) {
	if old, ok := ps.snapshots[id.m].claim(id); ok {
		o := p.op(*id)
		o.hasOld, o.old, o.claimed = true, old, true
	}
}

// recordFailed sets givenBack for the claimed elements of services that failed in a Sync.
func (ps *pass) recordFailed(p *patch, failed sink.Failed) {
	for _, o := range p.ops {
		_, hasFailed := failed[p.services[p.root(o.part)][0]]
		// A shared element stays claimed if another service needs it.
		if o.claimed && hasFailed && !(o.m.shared() && ps.state.wanted[o.sharedID()] > 0) {
			ps.snapshots[o.m].giveBack(&o.elementID)
		}
	}
}

// endPass removes the elements and chains that no service needs. If services failed,
// endPass keeps the elements that these services may need.
func (t *table) endPass(ctx context.Context, failed bool) error {
	ps := t.pass
	t.pass = nil
	if err := t.prune(ctx, ps, failed); err != nil {
		return err
	}
	if !failed {
		t.sources.EndPass()
	}
	if err := t.reapLists(ctx, 0); err != nil {
		return err
	}
	if failed && t.replaced != "" && !t.repeated {
		t.repeated = true
		return fmt.Errorf("services failed; another pass must fill table inet %s before it replaces table inet %s", t.conn.Table, t.replaced)
	}
	if err := t.replaceTable(ctx); err != nil {
		return err
	}
	if err := t.tidyChains(ctx); err != nil {
		return err
	}
	t.leftovers.RecordPass(t.opts.now(), failed)
	if !failed {
		t.opts.Observer.Drifted(false)
	}
	return nil
}

// prune removes the elements that no service needs. It removes the elements of frontends
// before the elements of endpoints, see allMaps. A failed service still has its old
// elements. So if services failed, prune keeps the elements that may belong to these
// services.
func (t *table) prune(ctx context.Context, ps *pass, failed bool) error {
	if err := t.readStaleLists(ctx, ps); err != nil {
		return err
	}
	t.leftovers.Exist = failed && (ps.keepOfFailed() || t.leftovers.Exist || t.sources.HasKept())
	if !failed {
		t.numbers.endPass()
	}
	t.staleClients = true // there may be clients of lists that another process removed
	var stale part
	var ops []op
	removed := 0
	flush := func() error {
		for i := range ops {
			stale.ops = append(stale.ops, &ops[i])
		}
		if err := t.commit(ctx, []part{stale}); err != nil {
			return fmt.Errorf("remove %d stale elements of table inet %s: %w", len(ops), t.conn.Table, err)
		}
		removed += len(ops)
		stale, ops = part{}, ops[:0]
		return nil
	}
	for _, m := range allMaps() {
		limit := givenBack
		switch {
		case m.kind >= kindNodePortAddresses, m.kind == kindSources:
			continue // the elements of these maps belong to no service
		case failed:
			limit = unclaimed
		}
		for e := range ps.snapshots[m].upTo(limit) {
			if m.shared() {
				ps.snapshots[m].remove(&e.elementID) // nothing holds it any more
			}
			ops = append(ops, op{elementID: e.elementID, hasOld: true, old: e.value})
			if len(ops) == maxOps {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	if !failed {
		t.state.held = nil
	}
	if removed > 0 {
		klog.FromContext(ctx).Info("Removed stale elements", "table", t.conn.Table, "elements", removed)
	}
	return nil
}

// keepOfFailed claims the elements that failed services may still need. It claims all
// hairpin elements. If a service has claimed a frontend and then failed, the frontend still
// has its old list, so keepOfFailed claims the elements of that list. The result "leaves"
// is true if the table may keep elements that no service needs.
func (ps *pass) keepOfFailed() (leaves bool) {
	kept := map[listNumber]bool{}
	for m, s := range ps.snapshots {
		for i, c := range s.claims {
			if c == givenBack {
				leaves = true
				if e := s.element(i); m.kind == kindFrontends {
					kept[listNumber{m.family, e.value.number() &^ handlingMask}] = true
				}
			}
		}
	}
	for l := range kept {
		e := (&list{listKey: listKey{family: l.family}, number: l.number}).shortcutID()
		if shortcut := ps.valueOf(&e); shortcut != 0 {
			kept[listNumber{l.family, shortcut}] = true
		}
	}
	for m, s := range ps.snapshots {
		for e := range s.upTo(unclaimed) {
			keep := m.kind == kindHairpins
			if m.belongsToList() {
				number := e.elementID.number()
				if isNumbered(number) {
					number &^= endpointMask
				}
				keep = kept[listNumber{m.family, number}]
			}
			if keep {
				s.claim(&e.elementID)
				leaves = true
			}
		}
	}
	return leaves
}

// repairChains writes chains of source ranges and of classes, if they are missing or
// differ from the expected chains.
func (t *table) repairChains(ctx context.Context) error {
	l, err := t.conn.inspect(ctx, t.conn.Table)
	if err != nil {
		return err
	}
	needed := map[class]bool{}
	for c := range t.state.lists {
		needed[c] = true
	}
	damaged := t.state.missing(needed)
	for c := range t.state.made {
		if !c.isSkeletonChain() && l.Chains[c.name()] != t.state.rules[c.name()] {
			damaged = append(damaged, c)
		}
	}
	slices.SortFunc(damaged, func(a, b class) int { return b.compare(a) }) // slot chains first
	err = t.conn.Transact(ctx, func(w *nft.Writer) {
		for _, c := range t.state.ranges.Chains() {
			if l.Chains[c.Name] != t.state.rules[c.Name] {
				w.MakeChain(c)
			}
		}
		for _, c := range damaged {
			makeClass(w, c, t.clientSeed)
		}
	})
	if err != nil {
		return fmt.Errorf("make the chains of table inet %s: %w", t.conn.Table, err)
	}
	t.state.classesMade(damaged)
	return nil
}

// tidyChains deletes unused chains, and the chains and sets of other programs.
func (t *table) tidyChains(ctx context.Context) error {
	maps.Copy(t.state.rules, t.skeleton)
	l, err := t.conn.inspect(ctx, t.conn.Table)
	if err != nil {
		return err
	}
	foreign := slices.DeleteFunc(slices.Collect(maps.Keys(l.Chains)), func(name string) bool {
		_, ok := t.state.rules[name]
		return ok
	})
	unused := t.state.unusedClasses()
	err = t.conn.Transact(ctx, func(w *nft.Writer) {
		deleteClasses(w, unused)
		w.DeleteChainsAndSets(foreign, l.foreignSets())
	})
	if err != nil {
		return fmt.Errorf("delete unused chains of table inet %s: %w", t.conn.Table, err)
	}
	t.state.classesDeleted(unused)
	return nil
}
