// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// drift is what is known of changes that other programs made to the table, and how far
// the search for them has come.
//
// The kernel counts transactions, so nothing has to be read while conn.others stays. When
// it moves, another program has changed some table, this one or not. A check is cheap: of
// the chains, and of the number of elements where the kernel says it. A comparison
// of all elements is not.
type drift struct {
	// checked and compared are conn.others before the last check and comparison that found
	// nothing.
	checked, compared int64
	// next is the next map to compare, and began conn.others when the comparison began.
	next  int
	began int64
	// cutShort is how many Verifies in a row ended in that map or in the check, and spent is
	// the time that the comparison took so far.
	cutShort int
	spent    time.Duration
	// compareAt is when the next comparison may begin, and verifyAt when anything may.
	compareAt, verifyAt time.Time
	// foundAt is when a Verify found drift last, and pause how long the next one waited.
	foundAt time.Time
	pause   time.Duration
	// reported says that the Observer knows of drift that was not mended.
	reported bool
}

const (
	// maxCutShort is how many Verifies in a row may end in the same place. The next one
	// goes on to its end, so that a long map is compared among changes that never pause.
	maxCutShort = 2
	// comparePause is how long the pause after a comparison is, in durations of it: where
	// other tables change all the time, comparisons take 2 % of a CPU.
	comparePause = 50
	// maxPause is the pause where another program changes this table all the time.
	maxPause = time.Minute
)

// reset notes that a pass has read the table when conn.others was this.
func (d *drift) reset(others int64) {
	d.checked, d.compared, d.next, d.cutShort = others, others, 0, 0
}

// found notes that the table is not as it was left.
func (d *drift) found(t *table) {
	d.reset(-1)
	if !d.reported {
		d.reported = true
		t.opts.Observer.Drifted()
	}
}

// backOff delays the next Verify if the last one that found drift was not long ago: a
// program that changes this table all the time must not cause passes all the time.
func (d *drift) backOff(now time.Time) {
	if now.Sub(d.foundAt) > maxPause {
		d.pause = 0
	} else {
		d.pause = min(2*d.pause+time.Second, maxPause)
	}
	d.foundAt, d.verifyAt = now, now.Add(d.pause)
}

// mended notes that the table is as it should be.
func (d *drift) mended(t *table) {
	if d.reported {
		d.reported = false
		t.opts.Observer.Mended()
	}
}

// leftovers is about what the last pass left because services failed: nothing is known of
// it that would remove it when they are programmed.
type leftovers struct {
	exist bool
	// passAt is when another pass is due because of them, and wait the time from the last
	// one to it.
	passAt time.Time
	wait   time.Duration
}

const (
	minLeftoversWait = time.Minute
	maxLeftoversWait = time.Hour
)

// passed notes the end of a pass in which services failed, or none.
func (l *leftovers) passed(now time.Time, failed bool) {
	l.wait = min(max(2*l.wait, minLeftoversWait), maxLeftoversWait)
	if !failed {
		l.wait = 0
	}
	l.passAt = now.Add(l.wait)
}

// difference is in what the table is not as it was left.
type difference string

func (d difference) Error() string { return string(d) }

func differs(format string, args ...any) error { return difference(fmt.Sprintf(format, args...)) }

// verify is Verify of [sink.Verifier].
func (t *table) verify(ctx context.Context) error {
	now := t.now()
	switch {
	case t.state == nil:
		return fmt.Errorf("the contents of table inet %s are unknown: %w", t.conn.table, sink.ErrStartOver)
	case t.leftovers.exist && !now.Before(t.leftovers.passAt):
		return fmt.Errorf("table inet %s may have leftovers of services that failed: %w", t.conn.table, sink.ErrStartOver)
	case now.Before(t.drift.verifyAt):
		return nil
	}
	err := t.search(ctx)
	var d difference
	switch {
	case err == nil:
		return t.deleteUnusedChains(ctx)
	case ctx.Err() != nil && errors.Is(err, context.Cause(ctx)): // cut short
		return err
	case errors.As(err, &d), errors.Is(err, unix.ENOENT):
		t.drift.found(t)
		t.drift.backOff(now)
		t.state = nil
		return fmt.Errorf("table inet %s is not as it was left: %w (%w)", t.conn.table, err, sink.ErrStartOver)
	default:
		return fmt.Errorf("verify table inet %s: %w", t.conn.table, err)
	}
}

// search searches for changes by other programs.
func (t *table) search(ctx context.Context) error {
	d := &t.drift
	others, err := t.conn.others(ctx)
	if err != nil || others == d.compared {
		return err
	}
	if others != d.checked {
		if err := d.attempt(ctx, t.check); err != nil {
			return err
		}
		d.checked = others
	}
	if d.next == 0 {
		if t.now().Before(d.compareAt) {
			return nil
		}
		d.began, d.spent = others, 0
	}
	return t.compare(ctx)
}

// attempt calls f, which reads something and ends with ctx, unless Verifies ended in it too
// often.
func (d *drift) attempt(ctx context.Context, f func(context.Context) error) error {
	if d.cutShort >= maxCutShort {
		ctx = context.WithoutCancel(ctx)
	}
	if err := f(ctx); err != nil {
		d.cutShort++
		return err
	}
	d.cutShort = 0
	return nil
}

// check compares all chains with what was written, and the number of elements with what
// it should be.
func (t *table) check(ctx context.Context) error {
	exists, awake, err := t.conn.exists(ctx)
	switch {
	case err != nil:
		return err
	case !exists:
		return differs("it was deleted")
	case !awake:
		return differs("it is dormant")
	}
	found, err := t.conn.digests(ctx)
	if err != nil {
		return err
	}
	for name, want := range t.state.rules {
		if is, ok := found[name]; !ok {
			return differs("chain %s was deleted", name)
		} else if is != want {
			return differs("chain %s was changed", name)
		}
	}
	for name := range found {
		if _, ok := t.state.rules[name]; !ok {
			return differs("chain %s was added", name)
		}
	}
	sets, err := t.conn.sets(ctx)
	if err != nil {
		return err
	}
	for _, m := range allMaps() {
		if s, ok := sets[m.name()]; !ok {
			return differs("%s was deleted", m.name())
		} else if want := t.state.digests[m].n; s.elements >= 0 && s.elements != want {
			return differs("%s has %d elements instead of %d", m.name(), s.elements, want)
		}
	}
	return nil
}

// compare compares the elements of the maps with what they should be. When ctx ends it
// remembers how far it came.
func (t *table) compare(ctx context.Context) error {
	d, begin := &t.drift, t.now()
	defer func() { d.spent += t.now().Sub(begin) }()
	for all := allMaps(); d.next < len(all); d.next++ {
		if ctx.Err() != nil && d.cutShort < maxCutShort {
			d.cutShort++
			return context.Cause(ctx)
		}
		if err := d.attempt(ctx, func(ctx context.Context) error { return t.compareMap(ctx, all[d.next]) }); err != nil {
			return err
		}
	}
	d.next, d.compared = 0, d.began
	d.compareAt = t.now().Add(comparePause * (d.spent + t.now().Sub(begin)))
	d.mended(t)
	return nil
}

// compareMap compares the elements of m with the digest of what it should have.
func (t *table) compareMap(ctx context.Context, m mapID) error {
	want := t.state.digests[m]
	for attempt := 0; ; attempt++ {
		var is digest
		err := t.conn.dump(ctx, m, func(e element, not foreign) {
			is.n++
			if not == nil {
				is.sum += t.state.hash(&e.elementID, &e.value)
			}
		})
		if err != nil || is == want {
			return err
		}
		// As many elements as there should be, and others: that is also what a map looks like
		// while the kernel makes it larger or smaller.
		if is.n != want.n || attempt == maxResizeAttempts {
			return differs("%s has %d elements that are not the %d it should have", m.name(), is.n, want.n)
		}
		if err := pause(ctx, attempt); err != nil {
			return err
		}
	}
}

// deleteUnusedChains removes the classes that no frontend has had since they were made:
// Syncs leave them, as they may be needed again.
func (t *table) deleteUnusedChains(ctx context.Context) error {
	unused := t.state.unusedChains()
	if len(unused) == 0 {
		return nil
	}
	if err := t.conn.transact(ctx, func(w *wire) { w.deleteSharedChains(unused) }); err != nil {
		return fmt.Errorf("remove chains that nothing leads to: %w", err)
	}
	for _, c := range unused {
		t.state.sharedChainDeleted(c)
	}
	return nil
}
