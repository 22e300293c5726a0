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

// drift is what is known of changes that other programs made to the table, and the
// progress of the search for them.
//
// The kernel counts transactions, so nothing has to be read while conn.others stays. When
// it moves, another program has changed some table, perhaps this one. A check is cheap:
// it reads the chains, and the number of elements where the kernel reports it. A
// comparison reads all elements, which is expensive.
type drift struct {
	// checked and compared are conn.others before the last check and the last comparison
	// that found nothing.
	checked, compared int64
	// next is the index in allMaps of the next map to compare. began is conn.others when the
	// comparison began, and spent the time that it took so far.
	next  int
	began int64
	spent time.Duration
	// interrupted counts the Verifies in a row whose context ended in the same step.
	interrupted int
	// compareAt is when the next comparison may begin, and verifyAt when the next Verify may
	// read anything.
	compareAt, verifyAt time.Time
	// foundAt is when a Verify found drift last, and pause how long the next one waited.
	foundAt time.Time
	pause   time.Duration
	// reported: the Observer knows of drift that is not mended.
	reported bool
}

const (
	// maxInterrupted limits the Verifies in a row that may be interrupted in the same step.
	// The next one ignores its context, so that a large map is compared among constant
	// changes.
	maxInterrupted = 2
	// comparePause is the pause after a comparison, as a multiple of its duration. While
	// other tables change constantly, comparisons take 2 % of a CPU.
	comparePause = 50
	// maxPause is the pause while another program changes this table constantly.
	maxPause = time.Minute
)

// reset notes that a pass has read the table when conn.others had this value.
func (d *drift) reset(others int64) {
	d.checked, d.compared, d.next, d.interrupted = others, others, 0, 0
}

// found notes that another program changed the table.
func (d *drift) found(t *table) {
	d.reset(-1)
	if !d.reported {
		d.reported = true
		t.opts.Observer.Drifted()
	}
}

// backOff delays the next Verify if drift was found a short time ago: a program that
// changes this table constantly must not cause constant passes.
func (d *drift) backOff(now time.Time) {
	if now.Sub(d.foundAt) > maxPause {
		d.pause = 0
	} else {
		d.pause = min(2*d.pause+time.Second, maxPause)
	}
	d.foundAt, d.verifyAt = now, now.Add(d.pause)
}

// mended notes that the table is right.
func (d *drift) mended(t *table) {
	if d.reported {
		d.reported = false
		t.opts.Observer.Mended()
	}
}

// leftovers is about elements that the last pass kept because services failed. When these
// services succeed, only another pass can find and remove the elements.
type leftovers struct {
	exist bool
	// passAt is when the next pass because of leftovers is due, and wait the time to it from
	// the last pass.
	passAt time.Time
	wait   time.Duration
}

const (
	minLeftoversWait = time.Minute
	maxLeftoversWait = time.Hour
)

// passed notes the end of a pass, and whether services failed in it.
func (l *leftovers) passed(now time.Time, failed bool) {
	l.wait = min(max(2*l.wait, minLeftoversWait), maxLeftoversWait)
	if !failed {
		l.wait = 0
	}
	l.passAt = now.Add(l.wait)
}

// difference is an error that says how the table differs from what this package wrote.
type difference string

func (d difference) Error() string { return string(d) }

func differs(format string, args ...any) error { return difference(fmt.Sprintf(format, args...)) }

// verify implements Verify of [sink.Verifier].
func (t *table) verify(ctx context.Context) error {
	now := t.now()
	switch {
	case t.state == nil:
		return fmt.Errorf("the contents of table inet %s are unknown: %w", t.conn.table, sink.ErrStartOver)
	case t.leftovers.exist && !now.Before(t.leftovers.passAt):
		return fmt.Errorf("table inet %s may have elements of services that failed: %w", t.conn.table, sink.ErrStartOver)
	case now.Before(t.drift.verifyAt):
		return nil
	}
	err := t.findDrift(ctx)
	var d difference
	switch {
	case err == nil:
		return t.deleteUnusedChains(ctx)
	case ctx.Err() != nil && errors.Is(err, context.Cause(ctx)):
		return err // interrupted
	case errors.As(err, &d), errors.Is(err, unix.ENOENT):
		t.drift.found(t)
		t.drift.backOff(now)
		t.state = nil
		return fmt.Errorf("another program changed table inet %s: %w (%w)", t.conn.table, err, sink.ErrStartOver)
	default:
		return fmt.Errorf("verify table inet %s: %w", t.conn.table, err)
	}
}

// findDrift checks and compares the table if another program has changed any table.
func (t *table) findDrift(ctx context.Context) error {
	d := &t.drift
	others, err := t.conn.others(ctx)
	if err != nil || others == d.compared {
		return err
	}
	if others != d.checked {
		if err := d.step(ctx, t.check); err != nil {
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

// step calls f, which reads something until ctx ends. If Verifies were interrupted in
// this step too often, f reads to the end.
func (d *drift) step(ctx context.Context, f func(context.Context) error) error {
	if d.interrupted >= maxInterrupted {
		ctx = context.WithoutCancel(ctx)
	}
	err := context.Cause(ctx)
	if err == nil {
		err = f(ctx)
	}
	if err != nil {
		d.interrupted++
		return err
	}
	d.interrupted = 0
	return nil
}

// check compares the chains, and the number of elements in each map, with what they
// should be.
func (t *table) check(ctx context.Context) error {
	l, err := t.conn.inspect(ctx, t.conn.table)
	switch {
	case err != nil:
		return err
	case !l.exists:
		return differs("it was deleted")
	case l.dormant:
		return differs("it is dormant")
	}
	for name, want := range t.state.rules {
		if is, ok := l.chains[name]; !ok {
			return differs("chain %s was deleted", name)
		} else if is != want {
			return differs("chain %s was changed", name)
		}
	}
	for name := range l.chains {
		if _, ok := t.state.rules[name]; !ok {
			return differs("chain %s was added", name)
		}
	}
	for _, m := range allMaps() {
		if s, ok := l.sets[m.name()]; !ok {
			return differs("%s was deleted", m.name())
		} else if want := t.state.digests[m].n; s.elements >= 0 && s.elements != want {
			return differs("%s has %d elements instead of %d", m.name(), s.elements, want)
		}
	}
	return nil
}

// compare compares the elements of all maps with what they should be. When ctx ends, the
// next call goes on with the same map.
func (t *table) compare(ctx context.Context) error {
	d, begin := &t.drift, t.now()
	defer func() { d.spent += t.now().Sub(begin) }()
	for all := allMaps(); d.next < len(all); d.next++ {
		if err := d.step(ctx, func(ctx context.Context) error { return t.compareMap(ctx, all[d.next]) }); err != nil {
			return err
		}
	}
	d.next, d.compared = 0, d.began
	d.compareAt = t.now().Add(comparePause * (d.spent + t.now().Sub(begin)))
	d.mended(t)
	return nil
}

// compareMap compares the elements of m with the digest that they should have.
func (t *table) compareMap(ctx context.Context, m mapID) error {
	want := t.state.digests[m]
	for attempt := 0; ; attempt++ {
		var is digest
		err := t.conn.dump(ctx, m, func(e element, foreign []byte) {
			is.n++
			if foreign == nil {
				is.sum += t.state.hash(&e.elementID, &e.value)
			}
		})
		if err != nil || is == want {
			return err
		}
		// A dump that raced with a resize has the right number of elements as well.
		if is.n != want.n || attempt == maxDumpRetries {
			return differs("%s has %d elements, which are not the %d that it should have", m.name(), is.n, want.n)
		}
		if err := waitForResize(ctx, attempt); err != nil {
			return err
		}
	}
}

// deleteUnusedChains deletes the shared chains that no frontend has. A Sync leaves them,
// as they may be needed again.
func (t *table) deleteUnusedChains(ctx context.Context) error {
	unused := t.state.unusedChains()
	if len(unused) == 0 {
		return nil
	}
	if err := t.conn.transact(ctx, func(w *wire) { w.deleteSharedChains(unused) }); err != nil {
		return fmt.Errorf("delete unused chains of table inet %s: %w", t.conn.table, err)
	}
	t.state.chainsDeleted(unused)
	return nil
}
