// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"

	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
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
		return fmt.Errorf("it is not known what table inet %s has: %w", b.opts.table(), sink.ErrStartOver)
	}
	if (b.drifting || b.leftovers) && b.patience.over() {
		reason := "may have leftovers of services that could not be programmed"
		if b.drifting {
			reason = "was not as it was left where a change met it"
		}
		return fmt.Errorf("table inet %s %s: %w", b.opts.table(), reason, sink.ErrStartOver)
	}
	err := b.verify(ctx)
	var d difference
	switch {
	case err == nil, ctx.Err() != nil && errors.Is(err, context.Cause(ctx)): // cut short
		return err
	case errors.As(err, &d), errors.Is(err, unix.ENOENT):
		b.drift()
		b.state = nil
		return fmt.Errorf("table inet %s is not as it was left: %w (%w)", b.opts.table(), err, sink.ErrStartOver)
	default:
		return fmt.Errorf("verifying table inet %s: %w", b.opts.table(), err)
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
	return b.dropUnusedChains(ctx)
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

// verifyChains compares chains and their rules with what they were when they
// were read last. Of a chain that has been made since, the number of rules counts.
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
	for name := range b.state.rules {
		if _, ok := chains[name]; !ok {
			return differs("chain %s is gone", name)
		}
	}
	for name, c := range chains {
		if want, ok := b.state.rules[name]; ok {
			if c != want {
				return differs("chain %s has other rules", name)
			}
			continue
		}
		want, own := b.state.own[name]
		if !own {
			if _, ok := b.state.chains[name]; !ok {
				return differs("there is a chain %s", name)
			}
			want = len(b.planner.classes[name].rules())
		}
		if c.n != want {
			return differs("chain %s has %d rules instead of %d", name, c.n, want)
		}
		b.state.rules[name] = c
	}
	for _, made := range []map[string]int{b.state.chains, b.state.own} {
		for name := range made {
			if _, ok := chains[name]; !ok {
				return differs("chain %s is gone", name)
			}
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
			chains[name] = digest{sum: maphash.Bytes(b.seed, hook)}
		}
	}
	err = b.conn.rules(ctx, restart, func(chain string, expressions []byte) {
		c := chains[chain]
		c.n++
		c.sum = c.sum*31 + maphash.Bytes(b.seed, expressions)
		chains[chain] = c
	})
	return chains, err
}

// dropUnusedChains removes the chains that nothing has led to since they were made:
// Syncs leave them, as they may be needed again.
func (b *Backend) dropUnusedChains(ctx context.Context) error {
	var unused []string
	for name, n := range b.state.chains {
		if n == 0 {
			unused = append(unused, name)
		}
	}
	if len(unused) == 0 {
		return nil
	}
	slices.Sort(unused)
	err := b.conn.transact(ctx, func(w *wire) { w.deleteChains(unused) })
	if err != nil {
		return fmt.Errorf("removing chains that nothing leads to: %w", err)
	}
	klog.FromContext(ctx).V(2).Info("Removed chains that nothing leads to", "table", b.opts.table(), "chains", unused)
	unusedChain := func(name string, _ digest) bool { return slices.Contains(unused, name) }
	maps.DeleteFunc(b.state.rules, unusedChain)
	for _, name := range unused {
		delete(b.state.chains, name)
	}
	return nil
}
