// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/kpng-project/kpng/internal/kernelnode"
	"k8s.io/klog/v2"
)

// A large table takes long to read. So passes and comparisons read it while Syncs write:
// they use a connection of their own, and do not hold the lock that a Sync needs. A
// journal records the changes of Syncs meanwhile.

// reader is the connection for reads beside Syncs. All of them use one connection, which stays
// open, see [netfilter.Conn.Close].
type reader struct {
	mu   sync.Mutex
	conn *conn
}

// read calls f with the connection, for the table of that name. Other reads wait until f
// returns.
func (r *reader) read(table string, f func(*conn) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return f(&conn{r.conn.Other(table)})
}

func (r *reader) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.conn.Close()
}

// journal records each change of the state's elements since a read began. After
// maxJournal changes, the journal is full. Then it forgets all changes, and the read was
// in vain.
type journal struct {
	mu      sync.Mutex
	changes []journalChange
	full    bool
}

// maxJournal limits the changes of a journal. They use about 10 MB.
const maxJournal = 100_000

// journalChange records that the kernel now has an element, or no longer has it.
type journalChange struct {
	element
	exists bool
}

// newJournal returns a journal of s, which records the changes of s until endJournal is
// called.
func (s *state) newJournal() *journal {
	j := &journal{}
	s.journals = append(s.journals, j)
	return j
}

func (s *state) endJournal(j *journal) {
	s.journals = slices.DeleteFunc(s.journals, func(o *journal) bool { return o == j })
}

func (j *journal) add(id *elementID, v *value, exists bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.changes) == maxJournal {
		j.changes, j.full = nil, true
	}
	if !j.full {
		j.changes = append(j.changes, journalChange{element{*id, *v}, exists})
	}
}

// isFull reports whether j has forgotten changes. A nil journal is not full.
func (j *journal) isFull() bool {
	if j == nil {
		return false
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.full
}

// since returns the changes after the first n. A nil journal and a full journal have no
// changes.
func (j *journal) since(n int) []journalChange {
	if j == nil {
		return nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.changes[min(n, len(j.changes)):]
}

// lost reports whether a dump of the map m may lack elements because of the changes. If the
// kernel has already sent an element that is then removed, the dump misses another element.
func lost(changes []journalChange, m mapID) bool {
	return slices.ContainsFunc(changes, func(c journalChange) bool { return c.m == m && !c.exists })
}

// preparePass loads the skeleton, and returns a function that reads the table and may be
// called without the lock. It returns nil if the next pass must begin immediately.
func (t *table) preparePass(ctx context.Context) (read func(context.Context) (*pass, error)) {
	if t.state == nil {
		return nil
	}
	name, seed := t.conn.Table, t.clientSeed
	l, err := t.conn.Find(ctx)
	foreignCommits := int64(0)
	if err == nil && l.Exists {
		foreignCommits, err = t.loadSkeleton(ctx)
	}
	if err != nil || !l.Exists || t.conn.Table != name || t.clientSeed != seed || t.replaced != "" {
		t.state = nil
		return nil
	}
	p := t.newPass(foreignCommits)
	p.base, p.journal = t.state, t.state.newJournal()
	return func(ctx context.Context) (*pass, error) {
		return p, t.reader.read(name, func(c *conn) error { return p.read(ctx, c) })
	}
}

// prepared keeps p for the next Sync that begins a pass. The pass p has already read the
// table.
func (t *table) prepared(ctx context.Context, p *pass, err error) {
	switch {
	case err != nil:
		p.base.endJournal(p.journal)
		klog.FromContext(ctx).V(2).Info("Cannot read the table before a pass", "table", t.conn.Table, "reason", err)
	case p.base == t.state:
		t.ahead = p
	}
}

// replay applies the changes of the journal to ps. Then ps describes the present table.
func (ps *pass) replay() {
	for _, c := range ps.journal.since(0) {
		if ps.onDemand && c.m.readOnDemand() {
			continue // the pass reads this element later
		}
		s := ps.snapshots[c.m]
		if old, ok := s.remove(&c.elementID); ok {
			ps.account(&old, -1)
		}
		if c.exists {
			s.add(&c.element)
			ps.account(&c.element, 1)
		}
	}
}

// mapComparison is a comparison of one map with its expected digest.
type mapComparison struct {
	m       mapID
	attempt int
	state   *state
	journal *journal
	done    chan struct{} // closed when the map has been read
	// hashes has two hashes of each element: of its ID, and of the whole element.
	hashes  [][2]uint64
	foreign int
	err     error
}

// newMapComparison begins to read the map m. The last attempt reads a small map with the lock,
// so that no Sync disturbs it.
func (t *table) newMapComparison(ctx context.Context, m mapID, attempt int) *mapComparison {
	c := &mapComparison{m: m, attempt: attempt, state: t.state, journal: t.state.newJournal(), done: make(chan struct{})}
	if attempt == maxDumpRetries && t.state.digests[m].n <= t.opts.maxDumped {
		c.err = c.read(context.WithoutCancel(ctx), t.conn)
		close(c.done)
		return c
	}
	name := t.conn.Table
	t.beside(func(ctx context.Context) {
		defer close(c.done)
		c.err = t.reader.read(name, func(conn *conn) error { return c.read(ctx, conn) })
	})
	return c
}

func (c *mapComparison) read(ctx context.Context, conn *conn) error {
	if c.attempt > 0 {
		if err := waitForResize(ctx, c.attempt-1); err != nil {
			return err
		}
	}
	return conn.dump(ctx, c.m, func(e element, foreign []byte) {
		if foreign != nil {
			c.foreign++
			return
		}
		c.hashes = append(c.hashes, [2]uint64{c.state.hash(&e.elementID, &value{}), c.state.hash(&e.elementID, &e.value)})
	})
}

// compareMap compares a map with its expected digest. It ignores the elements that Syncs
// write meanwhile. If ctx ends first, the next call continues the comparison.
func (t *table) compareMap(ctx context.Context, m mapID) error {
	d := &t.drift
	for attempt := 0; ; attempt++ {
		c := d.comparison
		if c == nil || c.m != m || c.state != t.state {
			c = t.newMapComparison(ctx, m, attempt)
			d.comparison = c
		}
		t.unlocked(func() {
			select {
			case <-c.done:
			case <-ctx.Done():
			}
		})
		select {
		case <-c.done:
		default:
			return context.Cause(ctx)
		}
		d.comparison, attempt = nil, c.attempt
		if t.state != c.state {
			return errors.New("its contents are unknown")
		}
		t.state.endJournal(c.journal)
		if c.err != nil {
			return c.err
		}
		is, want := c.digests()
		disturbed := c.journal.isFull() || slices.ContainsFunc(c.journal.since(0), func(c journalChange) bool { return c.m == m })
		switch {
		case is == want:
			return nil
		case disturbed && attempt == maxDumpRetries:
			d.unsure = true // a later comparison decides
			return nil
		// Even a dump that races with a resize has the right number of elements.
		case is.n != want.n && !disturbed || attempt == maxDumpRetries:
			return kernelnode.Differs("%s has %d elements, which are not the %d that it should have", m.name(), is.n, want.n)
		}
	}
}

// digests returns the digests of the present and of the expected elements of the map. Both
// digests omit the elements that were written while the map was read.
func (c *mapComparison) digests() (is, want digest) {
	written := map[uint64]*journalChange{}
	for _, change := range c.journal.since(0) {
		if change.m == c.m {
			written[c.state.hash(&change.elementID, &value{})] = &change
		}
	}
	is, want = digest{n: c.foreign}, c.state.digests[c.m]
	for _, h := range c.hashes {
		if written[h[0]] == nil {
			is.n++
			is.sum += h[1]
		}
	}
	for _, change := range written {
		if change.exists {
			want.n--
			want.sum -= c.state.hash(&change.elementID, &change.value)
		}
	}
	return is, want
}
