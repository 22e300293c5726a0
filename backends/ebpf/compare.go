// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"fmt"

	"github.com/kpng-project/kpng/sink"
)

// comparison is a comparison of the maps with the records. It may take several calls of
// compare, between which services change.
type comparison struct {
	// readers has the functions that read the rest of the maps.
	readers []func() (more bool, err error)
	// found has what the kernel has of each list, by ID.
	found map[uint64]foundList
	// changed has the lists that were added or deleted since the comparison began, and those
	// that frontends got or lost.
	changed map[uint64]struct{}
	// clients is the content of the map clients.
	clients clientScan
	// wrong is true if a frontend in the kernel has another list than its record.
	wrong bool
}

// foundList is the digest of the elements of a list, and the number of its frontends.
type foundList struct {
	digest    uint64
	frontends int
}

// skip excludes a list from the comparison. The comparison may be nil.
func (c *comparison) skip(id uint64) {
	if c != nil {
		c.changed[id] = struct{}{}
	}
}

var errChanged = fmt.Errorf("another program changed the eBPF maps (%w)", sink.ErrStartOver)

// compare compares the maps with the records until ctx ends, and at least one part of a
// map. The result done is false if another call must continue the comparison. If there is
// a difference, compare returns an error.
func (d *dataplane) compare(ctx context.Context) (done bool, err error) {
	if d.comparison == nil {
		d.comparison = d.newComparison()
	}
	c := d.comparison
	for len(c.readers) > 0 {
		more, err := c.readers[0]()
		if err != nil {
			d.comparison = nil
			return false, err
		}
		if !more {
			c.readers = c.readers[1:]
		}
		if ctx.Err() != nil && len(c.readers) > 0 {
			return false, nil
		}
	}
	d.comparison = nil
	if c.wrong || c.differs(d.lists) {
		d.records = nil
		return false, errChanged
	}
	return true, d.recount(&c.clients)
}

func (d *dataplane) newComparison() *comparison {
	c := &comparison{found: map[uint64]foundList{}, changed: map[uint64]struct{}{}}
	add := func(id, digest uint64, frontends int) {
		f := c.found[id]
		c.found[id] = foundList{f.digest + digest, f.frontends + frontends}
	}
	c.readers = append(c.readers, d.frontends.reader(func(f frontendKey, l list) {
		r := d.records[f]
		c.wrong = c.wrong || r == nil || l != list{ID: r.list.id, Count: r.list.count, Affinity: r.affinity}
		add(l.ID, 0, 1)
	}), d.slots.reader(func(k slotKey, a address) {
		add(k.List, slotDigest(d.seed, k.Index, a), 0)
	}), d.members.reader(func(k memberKey, _ uint32) {
		add(k.List, memberDigest(d.seed, k.Endpoint), 0)
	}), d.clients.reader(c.clients.read(d)))
	return c
}

// differs reports whether a list that has not changed differs from its record.
func (c *comparison) differs(lists map[uint64]*listRecord) bool {
	for id, l := range lists {
		if _, changed := c.changed[id]; !changed && c.found[id] != (foundList{l.digest, l.frontends}) {
			return true
		}
		delete(c.found, id)
	}
	// The other lists have no record.
	for id := range c.found {
		if _, changed := c.changed[id]; !changed {
			return true
		}
	}
	return false
}
