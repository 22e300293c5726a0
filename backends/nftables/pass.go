// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// reading is what a table has, as it was read.
type reading struct {
	snapshots map[mapID]*snapshot
	// own are the services' own objects.
	own   []object
	state *state
	// others is conn.others before.
	others int64
}

// pass is a pass of the driver. The table is read when it begins, Syncs write what
// differs, and what no service wants is removed when it ends. Nothing that stays is
// touched, and traffic to a service that does not change never meets a hole.
type pass struct {
	// snapshots are what each map had when the pass began. Elements that have been taken
	// from them are as later Syncs left them.
	snapshots map[mapID]*snapshot
	// ranges are the source ranges that there were, by frontend.
	ranges map[elementID][]element
	// stale are the services' own objects that there were and no service wants.
	stale map[string]object
	// left are elements that were taken for services that then failed: the kernel still
	// has them. Of shared maps there are none, as those that want them are counted.
	left map[elementID]value
}

// beginPass loads the skeleton and reads the table, unless both was done since Start and
// no other program has changed any table since.
func (t *table) beginPass(ctx context.Context, nodeAddrs []netip.Addr) error {
	found := t.ahead
	t.state, t.pass, t.ahead = nil, nil, nil
	others, err := t.conn.others(ctx)
	if err != nil {
		return err
	}
	if found == nil || found.others != others {
		if others, err = t.loadSkeleton(ctx); err != nil {
			return err
		}
		if found, err = t.read(ctx, others); err != nil {
			return err
		}
	}
	if err := t.dropForeign(ctx, found); err != nil {
		return err
	}
	t.planner = newPlanner()
	t.planner.nodeAddrs = nodeAddrs
	t.state = found.state
	t.drift.reset(found.others)
	t.leftovers.exist = false
	t.pass = &pass{found.snapshots, rangesByFrontend(found.snapshots), map[string]object{}, map[elementID]value{}}
	for _, o := range found.own {
		t.pass.stale[o.name] = o
	}
	return nil
}

// readAhead reads the table for the first pass while the source still gathers, so
// that services need not wait for that then. others is conn.others at the time when the
// skeleton was loaded.
func (t *table) readAhead(ctx context.Context, others int64) {
	if t.state != nil {
		return // the first pass has begun
	}
	var err error
	if t.ahead, err = t.read(ctx, others); err != nil {
		klog.FromContext(ctx).V(2).Info("The table could not be read ahead", "table", t.conn.table, "reason", err)
	}
}

// claim notes in p what the table has of an element that a service wants.
func (f *pass) claim(p *patch, e *element) {
	// The kernel takes no range that overlaps with another: those that are there have to
	// go together with what comes.
	for _, old := range f.ranges[e.elementID] {
		f.take(p, &old)
	}
	f.take(p, e)
}

// take notes in p what there is of an element, unless an earlier Sync did.
func (f *pass) take(p *patch, e *element) {
	old, ok := f.snapshots[e.m].take(&e.elementID)
	if !ok {
		if old, ok = f.left[e.elementID]; !ok {
			return
		}
		delete(f.left, e.elementID)
	}
	o := p.op(e.elementID)
	o.hasOld, o.old, o.taken = true, old, true
}

// delivered notes that services have what p gave them, except for those that failed: it
// gives back what p took for these.
func (f *pass) delivered(p *patch, failed sink.Failed) {
	hasFailed := func(part int) bool {
		_, is := failed[p.services[p.root(part)][0]]
		return is
	}
	for i := range p.ops {
		if o := &p.ops[i]; o.taken && !o.m.shared() && hasFailed(o.part) {
			f.left[o.elementID] = o.old
		}
	}
	for name, o := range p.objects {
		if o.new != nil && !hasFailed(o.part) {
			delete(f.stale, name)
		}
	}
}

// endPass removes what no service wants. Some of it may belong to services that failed.
func (t *table) endPass(ctx context.Context, failed bool) error {
	f := t.pass
	t.pass = nil
	if err := t.prune(ctx, f, failed); err != nil {
		return err
	}
	if err := t.replaceTable(ctx); err != nil {
		return err
	}
	if err := t.tidyChains(ctx); err != nil {
		return err
	}
	t.leftovers.passed(t.now(), failed)
	if !failed {
		t.drift.mended(t)
	}
	return nil
}

// read reads all maps, and what objects of services there are.
func (t *table) read(ctx context.Context, others int64) (*reading, error) {
	own, err := t.ownObjects(ctx)
	if err != nil {
		return nil, err
	}
	found := &reading{map[mapID]*snapshot{}, own, newState(t.conn.seed), others}
	for _, m := range allMaps() {
		s, err := readSnapshot(ctx, t.conn, m)
		if err != nil {
			return nil, err
		}
		for e := range s.all() {
			if m.kind == sharedChains || m.kind == nodeSharedChains {
				c, _ := sharedChainOf(&e.elementID, &e.value)
				found.state.sharedChainMade(c)
				continue
			}
			found.state.has(&e.elementID, &e.value)
			if m.shared() {
				found.state.wanted[e.elementID] = hold
			}
		}
		found.snapshots[m] = s
	}
	return found, nil
}

// dropForeign removes elements that this package could not have made. They may be in
// the way of some that it makes.
func (t *table) dropForeign(ctx context.Context, found *reading) error {
	for _, m := range allMaps() {
		foreign := found.snapshots[m].foreign
		if len(foreign) == 0 {
			continue
		}
		if err := t.conn.transact(ctx, func(w *wire) { w.deleteForeign(m, foreign) }); err != nil {
			return fmt.Errorf("remove %d elements of %s that another program made: %w", len(foreign), m.name(), err)
		}
	}
	return nil
}

// ownObjects returns the services' own chains and sets that are there.
func (t *table) ownObjects(ctx context.Context) ([]object, error) {
	chains, err := t.conn.chains(ctx)
	if err != nil {
		return nil, err
	}
	sets, err := t.conn.sets(ctx)
	if err != nil {
		return nil, err
	}
	var own []object
	for name := range chains {
		if isOwn(name) {
			own = append(own, object{name: name})
		}
	}
	for name := range sets {
		if isOwn(name) {
			own = append(own, object{name: name, family: api.IPv4}) // or IPv6: it is a set
		}
	}
	return own, nil
}

// prune removes the elements that no service wants, frontends before what they lead
// to, and then the services' own objects that no service wants. If services failed, and so
// are as they were, what may be theirs stays.
func (t *table) prune(ctx context.Context, f *pass, failed bool) error {
	if failed {
		t.leftovers.exist = f.spare() || t.leftovers.exist
		t.state.holding = true
	}
	var stale part
	removed := 0
	flush := func() error {
		if err := t.commit(ctx, []part{stale}); err != nil {
			return fmt.Errorf("remove %d stale elements of table inet %s: %w", len(stale.ops), t.conn.table, err)
		}
		removed += len(stale.ops)
		stale = part{ops: stale.ops[:0]}
		return nil
	}
	for _, m := range allMaps() {
		if m.kind >= nodePortAddresses {
			continue // no services'
		}
		for e := range f.unheld(m, failed) {
			o := op{elementID: e.elementID, hasOld: true, old: e.value}
			if m.shared() {
				if t.state.wanted[e.elementID] > hold {
					t.state.wanted[e.elementID] -= hold
					continue
				}
				o.wanted = -hold
			}
			stale.ops = append(stale.ops, o)
			if len(stale.ops) == maxOps {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	if !failed {
		for _, o := range f.stale {
			stale.objects = append(stale.objects, objectOp{old: &o})
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

// unheld yields what need not be kept for services as they were. If none failed, that is
// all of a shared map, now that those that want it have been counted, and what was left.
func (f *pass) unheld(m mapID, failed bool) iter.Seq[element] {
	switch {
	case failed:
		return f.snapshots[m].stale()
	case m.shared():
		return f.snapshots[m].all()
	}
	return func(yield func(element) bool) {
		for e := range f.snapshots[m].stale() {
			if !yield(e) {
				return
			}
		}
		for id, old := range f.left {
			if id.m == m && !yield(element{id, old}) {
				return
			}
		}
	}
}

// spare keeps from being pruned what is about frontends that were there and that
// some service wants: endpoints of one that failed, say. Hairpins are of any. It reports
// whether that leaves something that no service wants.
func (f *pass) spare() (leaves bool) {
	leaves = len(f.stale) > 0 || len(f.left) > 0
	for m, s := range f.snapshots {
		switch m.kind {
		case nodeFrontends, affinityChains, nodeAffinityChains, endpoints, nodeEndpoints:
			for e := range s.stale() {
				frontend := e.frontend()
				if f.snapshots[frontend.m].taken(&frontend) {
					s.take(&e.elementID)
					leaves = true
				}
			}
		case hairpins:
			for e := range s.stale() {
				s.take(&e.elementID)
				leaves = true
			}
		}
	}
	return leaves
}

// rangesByFrontend returns the source ranges that there are.
func rangesByFrontend(snapshots map[mapID]*snapshot) map[elementID][]element {
	ranges := map[elementID][]element{}
	for m, s := range snapshots {
		if m.kind == sources {
			for e := range s.all() {
				ranges[e.frontend()] = append(ranges[e.frontend()], e)
			}
		}
	}
	return ranges
}

// tidyChains gives the chains of classes the rules that they should have, and removes those
// that nothing leads to.
func (t *table) tidyChains(ctx context.Context) error {
	maps.Copy(t.state.rules, t.skeleton)
	chains, err := t.conn.digests(ctx)
	if err != nil {
		return err
	}
	var others []string
	for name, is := range chains {
		if _, ok := t.state.rules[name]; ok {
			continue
		}
		if isOwn(name) { // of a service that failed
			t.state.rules[name] = is
		} else {
			others = append(others, name)
		}
	}
	var missing []sharedChain
	for c, use := range t.state.shared {
		if use.frontends > 0 && (!use.made || chains[c.name()] != t.state.rules[c.name()]) {
			missing = append(missing, c)
		}
	}
	unused := t.state.unusedChains()
	err = t.conn.transact(ctx, func(w *wire) {
		for _, c := range missing {
			w.makeSharedChain(c)
		}
		w.deleteSharedChains(unused)
		w.deleteChains(others)
	})
	if err != nil {
		return fmt.Errorf("make the chains of table inet %s: %w", t.conn.table, err)
	}
	for _, c := range missing {
		if !t.state.shared[c].made {
			t.state.sharedChainMade(c)
		}
	}
	for _, c := range unused {
		t.state.sharedChainDeleted(c)
	}
	return nil
}
