// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/backends/internal/sourcelists"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// pass is the state of a pass. A pass first reads the table. Each Sync then writes the
// differences for its services, and the end of the pass removes the elements that no
// service needs. Unchanged elements stay, so traffic to their services is not
// interrupted.
type pass struct {
	// snapshots are the contents of the maps when the pass began. Since then, Syncs may have
	// changed the elements that are marked as claimed.
	snapshots map[mapID]*snapshot
	// numbers has the numbers of endpoints in the snapshots, by frontend.
	numbers map[elementID]map[[20]byte]uint32
	// state describes the table as it was read.
	state *state
	// foreignCommits is the number that conn.foreignCommits returned before the table was
	// read.
	foreignCommits int64
}

// beginPass loads the skeleton and reads the table. If Start did both, and no other
// program has changed any table since then, beginPass does neither.
func (t *table) beginPass(ctx context.Context, nodeAddrs []netip.Addr) error {
	p := t.ahead
	t.state, t.pass, t.ahead = nil, nil, nil
	foreignCommits, err := t.conn.foreignCommits(ctx)
	if err != nil {
		return err
	}
	if p == nil || p.foreignCommits != foreignCommits {
		if foreignCommits, err = t.loadSkeleton(ctx); err != nil {
			return err
		}
		if p, err = t.read(ctx, foreignCommits); err != nil {
			return err
		}
	}
	if err := t.deleteForeign(ctx, p); err != nil {
		return err
	}
	t.planner = newPlanner()
	t.lists = sourcelists.New(nodeAddrs)
	p.findLists(t.lists)
	t.numbers = newNumbers()
	for _, list := range p.numbers {
		for _, number := range list {
			t.numbers.used[number] = false
		}
	}
	t.pass, t.state = p, p.state
	t.drift.reset(p.foreignCommits)
	t.leftovers.Exist = false
	return t.repairSourceChains(ctx)
}

// readAhead reads the table while the source still collects services, so that the first
// pass starts faster. The argument foreignCommits is the number that conn.foreignCommits
// returned before the skeleton was loaded.
func (t *table) readAhead(ctx context.Context, foreignCommits int64) {
	if t.state != nil {
		return // the first pass has already begun
	}
	var err error
	if t.ahead, err = t.read(ctx, foreignCommits); err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot read the table ahead of the first pass", "table", t.conn.table, "reason", err)
	}
}

// The method read reads all maps.
func (t *table) read(ctx context.Context, foreignCommits int64) (*pass, error) {
	p := &pass{
		snapshots:      map[mapID]*snapshot{},
		numbers:        map[elementID]map[[20]byte]uint32{},
		state:          newState(t.conn.seed),
		foreignCommits: foreignCommits,
	}
	for _, m := range allMaps() {
		s, err := readSnapshot(ctx, t.conn, m)
		if err != nil {
			return nil, err
		}
		p.snapshots[m] = s
		for e := range s.all() {
			if m.kind == kindSharedChains || m.kind == kindNodeSharedChains {
				c, _ := sharedChainOf(&e.elementID, &e.value)
				p.state.chainsMade([]sharedChain{c})
				continue
			}
			p.state.count(&e.elementID, &e.value, 1)
			if m.shared() {
				p.state.wanted[e.elementID] = holdCount
			}
			switch m.kind {
			case kindSlots, kindNodeSlots:
				if frontend := e.frontendID(); p.numbers[frontend] == nil {
					p.numbers[frontend] = map[[20]byte]uint32{}
				}
			case kindEndpoints, kindNodeEndpoints:
				if list := p.numbers[e.frontendID()]; list != nil {
					list[e.data] = binary.NativeEndian.Uint32(e.key[m.keyLen()-4:])
				}
			}
		}
	}
	p.state.sourceChainsMade(p.state.usedLengths())
	return p, nil
}

// deleteForeign deletes elements that this package cannot have made. They could make the
// kernel refuse new elements.
func (t *table) deleteForeign(ctx context.Context, p *pass) error {
	for _, m := range allMaps() {
		foreign := p.snapshots[m].foreign
		if len(foreign) == 0 {
			continue
		}
		if err := t.conn.transact(ctx, func(w *wire) { w.deleteForeign(m, foreign) }); err != nil {
			return fmt.Errorf("remove %d elements of %s that another program made: %w", len(foreign), m.name(), err)
		}
	}
	return nil
}

// claim marks e as needed by a service, and records the old value of e in the patch.
func (ps *pass) claim(p *patch, e *element) {
	ps.claimOld(p, &e.elementID)
	if e.m.kind == kindFrontends && e.m.match != matchNodePort {
		// The same transaction must lift the restriction of a frontend without source ranges.
		restricted := e.elementID
		restricted.m.kind = kindRestricted
		ps.claimOld(p, &restricted)
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
		// Shared elements stay claimed: state.wanted counts the services that need them.
		if o.claimed && !o.m.shared() && hasFailed {
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
		t.lists.EndPass()
	}
	if err := t.deleteUnusedSources(ctx); err != nil {
		return err
	}
	if failed && t.replaced != "" && !t.repeated {
		t.repeated = true
		return fmt.Errorf("services failed; another pass must fill table inet %s before it replaces table inet %s", t.conn.table, t.replaced)
	}
	if err := t.replaceTable(ctx); err != nil {
		return err
	}
	if err := t.tidyChains(ctx); err != nil {
		return err
	}
	t.leftovers.RecordPass(t.now(), failed)
	if !failed {
		t.drift.recordRepair(t)
	}
	return nil
}

// prune removes the elements that no service needs. It removes the elements of frontends
// before the elements of endpoints, see allMaps. A failed service still has its old
// elements. So if services failed, prune keeps the elements that may belong to these
// services.
func (t *table) prune(ctx context.Context, ps *pass, failed bool) error {
	t.leftovers.Exist = failed && (ps.keepOfFailed() || t.leftovers.Exist || t.lists.HasKept())
	var stale part
	var ops []op
	removed := 0
	flush := func() error {
		for i := range ops {
			stale.ops = append(stale.ops, &ops[i])
		}
		if err := t.commit(ctx, []part{stale}); err != nil {
			return fmt.Errorf("remove %d stale elements of table inet %s: %w", len(ops), t.conn.table, err)
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
		case m.shared():
			limit = claimed // so the loop gets all elements, and state.wanted selects those to keep
		}
		for e := range ps.snapshots[m].upTo(limit) {
			o := op{elementID: e.elementID, hasOld: true, old: e.value}
			if m.shared() {
				if t.state.wanted[e.elementID] > holdCount {
					t.state.wanted[e.elementID] -= holdCount
					continue
				}
				o.wanted = -holdCount
			}
			if ops = append(ops, o); len(ops) == maxOps {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	if removed > 0 {
		klog.FromContext(ctx).Info("Removed stale elements", "table", t.conn.table, "elements", removed)
	}
	return nil
}

// keepOfFailed claims the elements that failed services may still need. It claims all
// hairpin elements. If a service has claimed a frontend during the pass, keepOfFailed
// also claims the other elements of that frontend. It returns true if the table may keep
// elements that no service needs.
func (ps *pass) keepOfFailed() (leaves bool) {
	for m, s := range ps.snapshots {
		leaves = leaves || slices.Contains(s.claims, givenBack)
		for e := range s.upTo(unclaimed) {
			keep := m.kind == kindHairpins
			if kindNodeFrontends <= m.kind && m.kind <= kindNodeEndpoints {
				frontend := e.frontendID()
				keep = ps.snapshots[frontend.m].isWanted(&frontend)
			}
			if keep {
				s.claim(&e.elementID)
				leaves = true
			}
		}
	}
	return leaves
}

// tidyChains repairs shared chains and creates missing ones. It deletes unused chains, and
// the chains and sets of other programs.
func (t *table) tidyChains(ctx context.Context) error {
	maps.Copy(t.state.rules, t.skeleton)
	l, err := t.conn.inspect(ctx, t.conn.table)
	if err != nil {
		return err
	}
	foreign := slices.DeleteFunc(slices.Collect(maps.Keys(l.chains)), func(name string) bool {
		_, ok := t.state.rules[name]
		return ok
	})
	var missing []sharedChain
	for c := range t.state.frontends {
		if !t.state.made[c] || l.chains[c.name()] != t.state.rules[c.name()] {
			missing = append(missing, c)
		}
	}
	unused := t.state.unusedChains()
	err = t.conn.transact(ctx, func(w *wire) {
		for _, c := range missing {
			w.makeSharedChain(c)
		}
		w.deleteSharedChains(unused)
		w.deleteChainsAndSets(foreign, l.foreignSets())
	})
	if err != nil {
		return fmt.Errorf("make the chains of table inet %s: %w", t.conn.table, err)
	}
	t.state.chainsMade(missing)
	t.state.chainsDeleted(unused)
	return nil
}
