// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// drift is the state of the search for changes that other programs made to the table.
//
// While the result of conn.foreignCommits stays the same, no other program changes any
// table, and no search is needed. A new result means that this table or another table was
// changed. The search has two steps. The first step is a check, which is cheap. It reads
// the chains, and the number of elements if the kernel reports it. The second step is a
// comparison, which is expensive, because it reads all elements.
type drift struct {
	// checkedCommits is the number that conn.foreignCommits returned before the last check
	// that found no difference. comparedCommits is the number that foreignCommits returned
	// before the last comparison that found no difference.
	checkedCommits, comparedCommits int64
	// nextMap is the index of the next map to compare, in the result of allMaps.
	nextMap int
	// services are the services whose lists must be compared before the map nextMap. They are
	// nil unless a comparison of lists has begun.
	services []types.NamespacedName
	// startCommits is the number that conn.foreignCommits returned when the current
	// comparison began.
	startCommits int64
	// elapsed is the time spent on the current comparison so far.
	elapsed time.Duration
	// comparison is the comparison of the map nextMap, if it has begun.
	comparison *mapComparison
	// unsure is true if Syncs changed a map each time that the current comparison read it.
	unsure bool
	// compareAt is the earliest time of the next comparison. After a drift was found, and
	// until verifyAt, Verify only checks that the table has rules.
	compareAt, verifyAt time.Time
	pause               kernelnode.DriftPause
}

// stepElements is the number of elements of lists that a Verify compares before it checks
// whether changes wait.
const stepElements = 500

// reset records that a pass has read the table. The argument foreignCommits is the number
// that conn.foreignCommits returned before the table was read.
func (d *drift) reset(foreignCommits int64) {
	if c := d.comparison; c != nil {
		c.state.endJournal(c.journal)
	}
	d.checkedCommits, d.comparedCommits, d.nextMap, d.services, d.comparison = foreignCommits, foreignCommits, 0, nil, nil
}

// recordDrift records that another program has changed the table.
func (d *drift) recordDrift(t *table) {
	d.reset(-1)
	t.opts.Observer.Drifted(true)
}

// verify implements the method Verify of [sink.Verifier].
func (t *table) verify(ctx context.Context) error {
	now := t.opts.now()
	switch {
	case t.state == nil:
		return fmt.Errorf("the contents of table inet %s are unknown: %w", t.conn.Table, sink.ErrStartOver)
	case t.leftovers.Due(now):
		return fmt.Errorf("table inet %s may have elements of services that failed: %w", t.conn.Table, sink.ErrStartOver)
	}
	err := t.findDrift(ctx, now)
	var d kernelnode.Difference
	switch {
	case err == nil:
		if err := t.reapLists(ctx, 0); err != nil {
			t.state = nil
			return fmt.Errorf("%w (%w)", err, sink.ErrStartOver)
		}
		if err := t.deleteUnusedClasses(ctx); err != nil {
			return err
		}
		return t.deleteStaleClients(ctx)
	case ctx.Err() != nil && errors.Is(err, context.Cause(ctx)):
		return err // interrupted
	case errors.As(err, &d), errors.Is(err, unix.ENOENT):
		t.drift.recordDrift(t)
		t.drift.verifyAt = t.drift.pause.Found(now)
		return fmt.Errorf("another program changed table inet %s: %w (%w)", t.conn.Table, err, sink.ErrStartOver)
	default:
		return fmt.Errorf("verify table inet %s: %w", t.conn.Table, err)
	}
}

var errDeleted = kernelnode.Differs("it or all its rules were deleted")

// findDrift searches for drift if another program has changed any table.
func (t *table) findDrift(ctx context.Context, now time.Time) error {
	d := &t.drift
	foreignCommits, err := t.conn.foreignCommits(ctx)
	if err != nil || foreignCommits == d.comparedCommits {
		return err
	}
	if now.Before(d.verifyAt) {
		// Without rules, no service works. So Verify finds the loss of rules even during
		// the pause.
		l, err := t.conn.inspect(ctx, t.conn.Table)
		if err == nil && !l.hasRules() {
			err = errDeleted
		}
		return err
	}
	if foreignCommits != d.checkedCommits {
		if err := t.check(context.WithoutCancel(ctx)); err != nil {
			return err
		}
		d.checkedCommits = foreignCommits
	}
	if d.nextMap == 0 {
		if t.opts.now().Before(d.compareAt) {
			return nil
		}
		d.startCommits, d.elapsed, d.unsure = foreignCommits, 0, false
	}
	return t.compare(ctx)
}

// check compares the chains with the expected chains, and the number of elements in each
// map with the expected number.
func (t *table) check(ctx context.Context) error {
	l, err := t.conn.inspect(ctx, t.conn.Table)
	switch {
	case err != nil:
		return err
	case !l.Exists:
		return errDeleted
	case l.Dormant:
		return kernelnode.Differs("it is dormant")
	}
	for name, want := range t.state.rules {
		if is, ok := l.Chains[name]; !ok {
			return kernelnode.Differs("chain %s was deleted", name)
		} else if is != want {
			return kernelnode.Differs("chain %s was changed", name)
		}
	}
	for name := range l.Chains {
		if _, ok := t.state.rules[name]; !ok {
			return kernelnode.Differs("chain %s was added", name)
		}
	}
	if foreign := l.foreignSets(); len(foreign) > 0 {
		return kernelnode.Differs("set %s was added", foreign[0])
	}
	for _, want := range allLayouts() {
		if _, ok := l.Sets[want.Name]; !ok {
			return kernelnode.Differs("%s was deleted", want.Name)
		}
	}
	for _, m := range allMaps() {
		if is, want := l.Sets[m.name()].Elements, t.state.digests[m].n; is >= 0 && is != want {
			t.dumpAll = t.dumpAll || m.belongsToList() && is > want
			return kernelnode.Differs("%s has %d elements instead of %d", m.name(), is, want)
		}
	}
	return nil
}

// compare compares the elements of all maps with their expected digests. If ctx ends, the
// next call continues. Each call makes some progress.
func (t *table) compare(ctx context.Context) error {
	d, begin := &t.drift, t.opts.now()
	defer func() { d.elapsed += t.opts.now().Sub(begin) }()
	for all := allMaps(); d.nextMap < len(all); {
		m, err := all[d.nextMap], error(nil)
		if m.belongsToList() && (d.services != nil || t.isLarge()) {
			if err = t.compareLists(context.WithoutCancel(ctx)); err == nil {
				err = context.Cause(ctx)
			}
		} else if err = t.compareMap(ctx, m); err == nil {
			d.nextMap++
		}
		if err != nil {
			return err
		}
	}
	d.nextMap = 0
	d.compareAt = t.opts.now().Add(kernelnode.PauseFactor * (d.elapsed + t.opts.now().Sub(begin)))
	if !d.unsure {
		d.comparedCommits = d.startCommits
		t.opts.Observer.Drifted(false)
	}
	return nil
}

// isLarge reports whether the maps of lists are too large to be dumped.
func (t *table) isLarge() bool {
	n := 0
	for m, d := range t.state.digests {
		if m.readOnDemand() {
			n += d.n
		}
	}
	return n > t.opts.maxDumped
}

// compareLists compares lists with their expected elements, by reading these elements. It
// continues with the services at which the last call has stopped. It does not find elements
// that belong to no list. No packet reaches such elements, and check finds them if the kernel
// reports numbers of elements.
func (t *table) compareLists(ctx context.Context) error {
	d := &t.drift
	if d.services == nil {
		d.services = slices.Collect(maps.Keys(t.services))
	}
	expected, n, compared := map[mapID][]*op{}, 0, 0
	for ; compared < len(d.services) && n < stepElements; compared++ {
		p := newPatch()
		p.beginPart(d.services[compared])
		for _, l := range t.services[d.services[compared]] {
			t.changeList(p, nil, &l)
		}
		for _, o := range p.ops {
			if o.m.belongsToList() {
				expected[o.m] = append(expected[o.m], o)
				n++
			}
		}
	}
	for m, ops := range expected {
		var different *op
		err := t.conn.get(ctx, m, len(ops), func(i int) elementID { return ops[i].elementID }, func(i int, e element, ok bool) bool {
			if !ok || e.value != ops[i].new {
				different = ops[i]
			}
			return different == nil
		})
		if err != nil {
			return err
		}
		if different != nil {
			return kernelnode.Differs("%s was changed", different.elementID)
		}
	}
	if d.services = d.services[compared:]; len(d.services) == 0 {
		d.services = nil
		d.nextMap = slices.IndexFunc(allMaps(), func(m mapID) bool { return m.kind > kindNumbers })
	}
	return nil
}

// deleteUnusedClasses deletes the classes with session affinity that no list uses. There
// may be many, because services choose their timeouts. Other classes are few. They stay
// until the next pass, because it would be expensive to make them again: for the first
// chain that uses a map, the kernel checks all elements of the map.
func (t *table) deleteUnusedClasses(ctx context.Context) error {
	unused := slices.DeleteFunc(t.state.unusedClasses(), func(c class) bool { return c.timeout == 0 })
	if len(unused) == 0 {
		return nil
	}
	if err := t.conn.Transact(ctx, func(w *nft.Writer) { deleteClasses(w, unused) }); err != nil {
		return fmt.Errorf("delete unused chains of table inet %s: %w", t.conn.Table, err)
	}
	t.state.classesDeleted(unused)
	return nil
}
