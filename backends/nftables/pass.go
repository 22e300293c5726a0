// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"iter"
	"maps"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

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

// beginPass reads the table.
func (b *Backend) beginPass(ctx context.Context, node *api.Node) error {
	b.state, b.pass = nil, nil
	if err := b.refreshSkeleton(ctx); err != nil {
		return err
	}
	there, err := b.readUnlessFound(ctx)
	if err != nil {
		return err
	}
	if err := b.dropForeign(ctx, there); err != nil {
		return err
	}
	own, err := b.ownObjects(ctx)
	if err != nil {
		return err
	}
	b.planner = newPlanner()
	b.planner.nodeAddrs = nodeAddrs(node)
	clear(b.restricted)
	b.leftovers = false
	b.state, b.verified, b.cutShort = there.state, 0, 0
	b.pass = &pass{there.snapshots, rangesByFrontend(there.snapshots), map[string]object{}, map[elementID]value{}}
	for _, o := range own {
		b.pass.stale[o.name] = o
	}
	return nil
}

// want plans what a service gets, with what there is of it.
func (b *Backend) want(p *patch, se *api.ServiceEndpoints) {
	if b.pass == nil {
		b.planner.plan(se, p.add, p.own)
		return
	}
	b.planner.plan(se, func(e element) {
		// The kernel takes no range that overlaps with another: those that are there
		// have to go together with what comes.
		for _, old := range b.pass.ranges[e.elementID] {
			b.pass.take(p, &old)
		}
		b.pass.take(p, &e)
		p.add(e)
	}, p.own)
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

// settle notes what services that did not fail have now, and gives back what p took for
// the others.
func (f *pass) settle(p *patch, failed sink.Failed) {
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
func (b *Backend) endPass(ctx context.Context, failed bool) error {
	f := b.pass
	b.pass = nil
	if err := b.prune(ctx, f, failed); err != nil {
		return err
	}
	if err := b.replaceTable(ctx); err != nil {
		return err
	}
	if err := b.tidyChains(ctx); err != nil {
		return err
	}
	b.drifting = false
	b.patience.synced(failed)
	return nil
}

// found is what a table has.
type found struct {
	snapshots map[mapID]*snapshot
	state     *state
	// generation is that of before it was read.
	generation uint32
}

// readAhead reads the table for the first Sync while the source still gathers, so
// that services need not wait for that then.
func (b *Backend) readAhead(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.fresh {
		return
	}
	var err error
	if b.found, err = b.read(ctx); err != nil {
		klog.FromContext(ctx).V(2).Info("The table could not be read ahead", "table", b.table(), "reason", err)
	}
}

// readUnlessFound returns what readAhead found, or reads the table if anybody has
// changed any table since.
func (b *Backend) readUnlessFound(ctx context.Context) (*found, error) {
	there := b.found
	b.found = nil
	if there != nil {
		now, err := b.conn.generation(ctx)
		if err != nil || now == there.generation {
			return there, err
		}
	}
	return b.read(ctx)
}

// read reads all maps, and what chains there are.
func (b *Backend) read(ctx context.Context) (*found, error) {
	st := newState(b.seed)
	generation, err := b.conn.generation(ctx)
	if err != nil {
		return nil, err
	}
	snapshots := map[mapID]*snapshot{}
	for _, m := range allMaps() {
		s, err := readSnapshot(ctx, b.conn, m)
		if err != nil {
			return nil, err
		}
		for e := range s.all() {
			if m.role == classes || m.role == hereClasses {
				c, _ := classOf(&e.elementID, &e.value)
				st.hasClass(c)
				continue
			}
			st.has(&e.elementID, &e.value)
			if m.shared() {
				st.wanted[e.elementID] = hold
			}
		}
		snapshots[m] = s
	}
	return &found{snapshots, st, generation}, nil
}

// dropForeign removes elements that this package could not have made. They may be in
// the way of some that it makes.
func (b *Backend) dropForeign(ctx context.Context, there *found) error {
	for _, m := range allMaps() {
		foreign := there.snapshots[m].foreign
		if len(foreign) == 0 {
			continue
		}
		if err := b.conn.transact(ctx, func(w *wire) { w.deleteForeign(m, foreign) }); err != nil {
			return fmt.Errorf("removing %d elements of %s that somebody else made: %w", len(foreign), m.name(), err)
		}
	}
	return nil
}

// ownObjects returns the services' own chains and sets that are there.
func (b *Backend) ownObjects(ctx context.Context) ([]object, error) {
	chains, err := b.conn.chains(ctx)
	if err != nil {
		return nil, err
	}
	sets, err := b.conn.sets(ctx)
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
func (b *Backend) prune(ctx context.Context, f *pass, failed bool) error {
	if failed {
		b.leftovers = f.spare() || b.leftovers
		b.state.holding = true
	}
	var stale part
	removed := 0
	flush := func() error {
		if err := b.transact(ctx, []part{stale}); err != nil {
			return fmt.Errorf("removing %d elements of table inet %s that no service has: %w", len(stale.ops), b.table(), err)
		}
		removed += len(stale.ops)
		stale = part{ops: stale.ops[:0]}
		return nil
	}
	for _, m := range allMaps() {
		if m.role >= nodePortAddresses {
			continue // no services'
		}
		for e := range f.unheld(m, failed) {
			o := op{elementID: e.elementID, hasOld: true, old: e.value}
			if m.shared() {
				if b.state.wanted[e.elementID] > hold {
					b.state.wanted[e.elementID] -= hold
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
		klog.FromContext(ctx).Info("Removed elements that no service has", "table", b.table(), "elements", removed)
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
		switch m.role {
		case hereFrontends, lists, hereLists, endpoints, hereEndpoints:
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
		if m.role == sources {
			for e := range s.all() {
				ranges[e.frontend()] = append(ranges[e.frontend()], e)
			}
		}
	}
	return ranges
}

// tidyChains gives the chains of classes the rules that they should have, and removes those
// that nothing leads to.
func (b *Backend) tidyChains(ctx context.Context) error {
	maps.Copy(b.state.rules, b.skeleton)
	chains, err := b.readChains(ctx)
	if err != nil {
		return err
	}
	var others []string
	for name, is := range chains {
		if _, ok := b.state.rules[name]; ok {
			continue
		}
		if isOwn(name) { // of a service that failed
			b.state.rules[name] = is
		} else {
			others = append(others, name)
		}
	}
	var missing []class
	for c, use := range b.state.classes {
		if use.frontends > 0 && (!use.made || chains[c.chain()] != b.state.rules[c.chain()]) {
			missing = append(missing, c)
		}
	}
	unused := b.state.unusedClasses()
	err = b.conn.transact(ctx, func(w *wire) {
		for _, c := range missing {
			w.makeClass(c)
		}
		w.deleteClasses(unused)
		w.deleteChains(others)
	})
	if err != nil {
		return fmt.Errorf("making the chains of table inet %s: %w", b.table(), err)
	}
	for _, c := range missing {
		if !b.state.classes[c].made {
			b.state.hasClass(c)
		}
	}
	for _, c := range unused {
		b.state.lostClass(c)
	}
	return nil
}
