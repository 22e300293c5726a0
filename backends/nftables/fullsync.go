// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// defaultPiece is about how many elements a full Sync looks at before it lets changes
// through.
const defaultPiece = 10_000

// syncFull makes the table what c says: it reads what there is, writes what
// differs service by service, each at once, and then removes what nobody wants.
// Nothing that stays is touched, and traffic to a service that does not change
// never meets a hole. Between its transactions it lets through what changes meanwhile.
func (b *Backend) syncFull(ctx context.Context, c *sink.Changes) error {
	b.state = nil
	if err := b.refreshSkeleton(ctx); err != nil {
		return err
	}
	b.planner = newPlanner()
	b.planner.nodeAddrs = nodeAddrs(c.Node)
	nodeaddr.SetNode(b.nodeAddresses, c.Node)
	clear(b.restricted)
	clear(b.ahead)
	b.leftovers = false

	f, err := b.newFullSync(ctx, c)
	if err == nil {
		err = f.run(ctx)
	}
	if err != nil {
		b.state = nil
		return err
	}
	b.drifting = false
	b.patience.synced(len(f.failed)+len(f.failedAhead) > 0)
	return f.failed.Err()
}

// fullSync is a full Sync under way.
type fullSync struct {
	*Backend
	changes *sink.Changes
	// snapshots are what there was of each map. Elements that have been taken from
	// them are as later changes left them.
	snapshots map[mapID]*snapshot
	// ranges are the source ranges that there were, by frontend.
	ranges map[elementID][]element
	// stale are the services' own objects that were there and nobody has asked for.
	stale map[string]object
	// All services up to last have been programmed as changes.Services has them,
	// except those in failed, and those in Backend.ahead as they were told meanwhile.
	last   types.NamespacedName
	failed sink.Failed
	// failedAhead are those that could not be programmed as they were told meanwhile.
	failedAhead sink.Failed
}

// newFullSync reads the table.
func (b *Backend) newFullSync(ctx context.Context, c *sink.Changes) (*fullSync, error) {
	there, err := b.readUnlessFound(ctx)
	if err != nil {
		return nil, err
	}
	if err := b.dropForeign(ctx, there); err != nil {
		return nil, err
	}
	b.state, b.verified, b.cutShort = there.state, 0, 0
	own, err := b.ownObjects(ctx)
	if err != nil {
		return nil, err
	}
	f := &fullSync{
		Backend: b, changes: c, snapshots: there.snapshots, ranges: rangesByFrontend(there.snapshots), stale: map[string]object{},
	}
	for _, o := range own {
		f.stale[o.name] = o
	}
	return f, nil
}

func (f *fullSync) run(ctx context.Context) error {
	for _, step := range []func(context.Context) error{f.write, f.prune, f.remakeChains, f.syncNodePortAddresses} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// found is what a table has.
type found struct {
	snapshots map[mapID]*snapshot
	state     *state
	// generation is that of before it was read.
	generation uint32
}

// readAhead reads the table for the first Sync, while the source still gathers what
// there is to tell: changes need not wait for that then.
func (b *Backend) readAhead(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.fresh {
		return
	}
	var err error
	if b.found, err = b.read(ctx); err != nil {
		klog.FromContext(ctx).V(2).Info("The table could not be read ahead", "table", b.opts.table(), "reason", err)
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
	chains, err := b.conn.chains(ctx)
	if err != nil {
		return nil, err
	}
	static := skeletonChains()
	for name := range chains {
		if !slices.Contains(static, name) && !isOwn(name) {
			st.chains[name] = 0
		}
	}
	snapshots := map[mapID]*snapshot{}
	for _, m := range allMaps() {
		s, err := readSnapshot(ctx, b.conn, m)
		if err != nil {
			return nil, err
		}
		for e := range s.all() {
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

// write programs all services, some at a time.
func (f *fullSync) write(ctx context.Context) error {
	if err := f.catchUp(ctx); err != nil {
		return err
	}
	p := newPatch()
	for ch := range f.changes.Services {
		if _, newer := f.ahead[ch.Key]; newer {
			continue
		}
		p.begin(ch.Key)
		f.want(p, ch.New)
		f.restrict(ch.Key, ch.New)
		f.last = ch.Key
		if len(p.ops) >= f.piece {
			if err := f.flush(ctx, p); err != nil {
				return err
			}
			p = newPatch()
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
	}
	return f.flush(ctx, p)
}

// want plans what a service gets, with what there is of it.
func (f *fullSync) want(p *patch, se *api.ServiceEndpoints) {
	f.planner.plan(se, func(e element) {
		// The kernel takes no range that overlaps with another: those that are there
		// have to go together with what comes.
		for _, old := range f.ranges[e.elementID] {
			f.take(p, &old)
		}
		f.take(p, &e)
		p.add(e)
	}, func(o object) {
		p.own(o)
		delete(f.stale, o.name)
	})
}

// take notes what there is of an element, if that has not been noted before.
func (f *fullSync) take(p *patch, e *element) {
	if old, ok := f.snapshots[e.m].take(&e.elementID); ok {
		o := p.op(e.elementID)
		o.hasOld, o.old = true, old
	}
}

// flush brings p into effect, and then what has changed meanwhile.
func (f *fullSync) flush(ctx context.Context, p *patch) error {
	if err := f.apply(ctx, p.parts(), &f.failed); err != nil {
		return err
	}
	return f.catchUp(ctx)
}

// catchUp programs what has changed meanwhile. All that is planned has to be in effect.
func (f *fullSync) catchUp(ctx context.Context) error {
	if f.changes.Meanwhile == nil {
		return nil
	}
	p := newPatch()
	changed := f.changes.Meanwhile()
	for _, ch := range changed {
		_, failed := f.failed[ch.Key]
		_, failedAhead := f.failedAhead[ch.Key]
		if failed || failedAhead {
			continue // it is not known what there is of it, and it comes again
		}
		p.begin(ch.Key)
		_, programmed := f.ahead[ch.Key]
		if programmed || api.CompareKeys(ch.Key, f.last) <= 0 {
			f.planner.plan(ch.Old, p.remove, p.disown)
		} else {
			f.planner.plan(ch.Old, func(e element) {
				if !e.m.shared() { // others may want it
					f.take(p, &e)
				}
			}, func(object) {})
		}
		f.want(p, ch.New)
	}
	if err := f.apply(ctx, p.parts(), &f.failedAhead); err != nil {
		return err
	}
	for _, ch := range changed {
		_, failed := f.failed[ch.Key]
		if err, failedAhead := f.failedAhead[ch.Key]; failedAhead {
			f.leftovers = true
			klog.FromContext(ctx).Error(err, "A change during a full sync failed, will be tried again", "service", ch.Key)
		} else if !failed {
			f.ahead[ch.Key] = ch.New
			f.restrict(ch.Key, ch.New)
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
	for _, name := range sets {
		if isOwn(name) {
			own = append(own, object{name: name, family: api.IPv4}) // or IPv6: it is a set
		}
	}
	return own, nil
}

// prune removes the elements that nobody wants, frontends before what they lead
// to, and then the services' own objects that nobody wants. If services failed, and so
// are as they were, what may be theirs stays.
func (f *fullSync) prune(ctx context.Context) error {
	if len(f.failed) > 0 {
		f.spare()
		f.state.holding = true
	}
	var stale part
	removed := 0
	flush := func() error {
		if err := f.transact(ctx, []part{stale}); err != nil {
			return fmt.Errorf("removing %d elements of table inet %s that no service has: %w", len(stale.ops), f.opts.table(), err)
		}
		removed += len(stale.ops)
		stale = part{ops: stale.ops[:0]}
		return f.catchUp(ctx)
	}
	for _, m := range allMaps() {
		if m.role == nodePortAddresses {
			continue
		}
		for e := range f.unheld(f.snapshots[m]) {
			f.snapshots[m].take(&e.elementID)
			o := op{elementID: e.elementID, hasOld: true, old: e.value}
			if m.shared() {
				o.wanted = -hold // it goes if nobody else wants it
			}
			stale.ops = append(stale.ops, o)
			if len(stale.ops) == f.piece {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	if len(f.failed) == 0 {
		for _, o := range f.stale {
			stale.objects = append(stale.objects, objectOp{old: &o})
		}
	}
	if err := flush(); err != nil {
		return err
	}
	if removed > 0 {
		klog.FromContext(ctx).Info("Removed elements that no service has", "table", f.opts.table(), "elements", removed)
	}
	return nil
}

// unheld yields what need not be kept for services as they were: of a shared map all,
// now that those that want it have been counted, unless some failed.
func (f *fullSync) unheld(s *snapshot) iter.Seq[element] {
	if s.m.shared() && len(f.failed) == 0 {
		return s.all()
	}
	return s.stale()
}

// spare keeps from being pruned what is about frontends that were there and that
// some service wants: endpoints of one that failed, say. Hairpins are of any.
func (f *fullSync) spare() {
	f.leftovers = f.leftovers || len(f.stale) > 0
	for m, s := range f.snapshots {
		switch m.role {
		case hereFrontends, endpoints, hereEndpoints:
			for e := range s.stale() {
				frontend := e.frontend()
				if f.snapshots[frontend.m].taken(&frontend) {
					s.take(&e.elementID)
					f.leftovers = true
				}
			}
		case hairpins:
			for e := range s.stale() {
				s.take(&e.elementID)
				f.leftovers = true
			}
		}
	}
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

// remakeChains gives the chains made on demand the rules that they should have,
// whatever they had, and removes those that nothing leads to.
func (b *Backend) remakeChains(ctx context.Context) error {
	var unused []string
	err := b.conn.transact(ctx, func(w *wire) {
		for _, name := range slices.Sorted(maps.Keys(b.state.chains)) {
			if b.state.chains[name] == 0 {
				unused = append(unused, name)
			} else if c, ok := b.planner.classes[name]; ok {
				w.makeChain(name, c.rules())
			}
		}
		w.deleteChains(unused)
	})
	if err != nil {
		return fmt.Errorf("making the chains of table inet %s: %w", b.opts.table(), err)
	}
	maps.DeleteFunc(b.state.chains, func(_ string, n int) bool { return n == 0 })
	if b.state.rules, err = b.readChains(ctx); err != nil {
		return err
	}
	// Whatever happened to these since they were loaded, Verify is to find.
	maps.Copy(b.state.rules, b.skeleton)
	return nil
}
