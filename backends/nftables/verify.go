// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"

	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// Verify implements [sink.Verifier]: it reads the table and compares it with what
// Syncs left there. If somebody flushed, edited or deleted it, the error
// wraps [sink.ErrStartOver], and the pass that follows mends it.
//
// It holds no second copy of the table to compare with, only the number and a
// hash of each map's elements. When its context ends it remembers how far it
// came, and the next one goes on there. A map in which several have ended is read to its
// end, so that changes wait for that.
func (b *Backend) Verify(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state == nil {
		return fmt.Errorf("it is not known what table inet %s has: %w", b.table(), sink.ErrStartOver)
	}
	if (b.drifting || b.leftovers) && b.patience.over() {
		reason := "may have leftovers of services that could not be programmed"
		if b.drifting {
			reason = "was not as it was left where a change met it"
		}
		return fmt.Errorf("table inet %s %s: %w", b.table(), reason, sink.ErrStartOver)
	}
	err := b.verify(ctx)
	var d difference
	switch {
	case err == nil, ctx.Err() != nil && errors.Is(err, context.Cause(ctx)): // cut short
		return err
	case errors.As(err, &d), errors.Is(err, unix.ENOENT):
		b.drift()
		b.state = nil
		return fmt.Errorf("table inet %s is not as it was left: %w (%w)", b.table(), err, sink.ErrStartOver)
	default:
		return fmt.Errorf("verifying table inet %s: %w", b.table(), err)
	}
}

// difference says in what the table is not as it was left.
type difference string

func (d difference) Error() string { return string(d) }

func differs(format string, args ...any) error { return difference(fmt.Sprintf(format, args...)) }

func (b *Backend) verify(ctx context.Context) error {
	for b.verified <= len(allMaps()) {
		reading := ctx
		if b.cutShort == maxCutShort {
			reading = context.WithoutCancel(ctx)
		}
		if err := b.verifyPart(reading, b.verified); err != nil {
			b.cutShort++
			return err
		}
		b.cutShort = 0
		b.verified++
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	b.verified = 0
	return b.dropUnusedClasses(ctx)
}

// verifyPart verifies the chains, which are part 0, or one of the maps.
func (b *Backend) verifyPart(ctx context.Context, part int) error {
	if part == 0 {
		return b.verifyChains(ctx)
	}
	return b.verifyMap(ctx, allMaps()[part-1])
}

// maxCutShort is how many Verifies in a row may end in the same part. The next one reads it to
// its end: among changes that never pause, a long map would never be verified.
const maxCutShort = 2

// patience is how many Verifies go by before one asks for a new pass though services fail in
// each: ever more. A pass does not mend what they leave then.
type patience struct{ left, next int }

// maxPatience is an hour, at one Verify a minute.
const maxPatience = 60

// synced notes a pass in which services failed, or none.
func (p *patience) synced(failed bool) {
	if !failed {
		*p = patience{}
		return
	}
	p.left, p.next = p.next, min(2*p.next+1, maxPatience)
}

// over counts a Verify, and reports whether it is to ask.
func (p *patience) over() bool {
	p.left--
	return p.left < 0
}

// verifyMap compares the elements of m with the digest of what it should have.
func (b *Backend) verifyMap(ctx context.Context, m mapID) error {
	want := b.state.digests[m]
	for attempt := 0; ; attempt++ {
		var d digest
		err := b.conn.dump(ctx, m, func() { d = digest{} }, func(e element, not foreign) {
			d.n++
			if not == nil {
				d.sum += b.state.hash(&e.elementID, &e.value)
			}
		})
		if err != nil || d == want {
			return err
		}
		// As many elements as there should be, and others: that is also what a map looks like
		// while it grows or shrinks.
		if d.n != want.n || attempt == resizeAttempts {
			return differs("%s has %d elements that are not the %d it should have", m.name(), d.n, want.n)
		}
		if err := pause(ctx, attempt); err != nil {
			return err
		}
	}
}

// verifyChains compares chains and their rules with those that were sent.
func (b *Backend) verifyChains(ctx context.Context) error {
	there, awake, err := b.conn.exists(ctx)
	if err != nil {
		return err
	}
	if there && !awake {
		return differs("it is dormant")
	}
	chains, err := b.readChains(ctx)
	if err != nil {
		return err
	}
	for name, want := range b.state.rules {
		switch is, ok := chains[name]; {
		case !ok:
			return differs("chain %s is gone", name)
		case is.n != want.n:
			return differs("chain %s has %d rules instead of %d", name, is.n, want.n)
		case is != want:
			return differs("chain %s has other rules", name)
		}
	}
	for name := range chains {
		if _, ok := b.state.rules[name]; !ok {
			return differs("there is a chain %s", name)
		}
	}
	return nil
}

// readChains returns the number of each chain's rules, and a hash of where the chain
// is hooked and of all its rules in order.
func (b *Backend) readChains(ctx context.Context) (map[string]digest, error) {
	hooks, err := b.conn.chains(ctx)
	if err != nil {
		return nil, err
	}
	var chains map[string]digest
	restart := func() {
		chains = make(map[string]digest, len(hooks))
		for name, hook := range hooks {
			chains[name] = digestOf(b.seed, hook, nil)
		}
	}
	err = b.conn.rules(ctx, restart, func(chain, rule string) {
		c := chains[chain]
		c.addRule(b.seed, rule)
		chains[chain] = c
	})
	return chains, err
}

// dropUnusedClasses removes the classes that no frontend has had since they were made:
// Syncs leave them, as they may be needed again.
func (b *Backend) dropUnusedClasses(ctx context.Context) error {
	unused := b.state.unusedClasses()
	if len(unused) == 0 {
		return nil
	}
	if err := b.conn.transact(ctx, func(w *wire) { w.deleteClasses(unused) }); err != nil {
		return fmt.Errorf("removing chains that nothing leads to: %w", err)
	}
	for _, c := range unused {
		b.state.lostClass(c)
	}
	return nil
}
