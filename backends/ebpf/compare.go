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
	// The keys of found are the lists that frontends or elements of lists in the kernel
	// have. The values are the digests of the elements, plus one if a frontend has the list.
	found map[uint64]uint64
	// changed has the lists that were added or deleted since the comparison began.
	changed map[uint64]struct{}
	// wrong is true if a frontend in the kernel has another list than its record.
	wrong bool
}

// skip excludes the lists of a change, and of the record that it replaces, from the
// comparison. All arguments may be nil.
func (c *comparison) skip(new *change, old *record) {
	if c == nil {
		return
	}
	if new != nil {
		c.changed[new.id] = struct{}{}
	}
	if old != nil {
		c.changed[old.list.ID] = struct{}{}
	}
}

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
	if c.wrong || c.differs(d.records) {
		d.records = nil
		return false, fmt.Errorf("another program changed the eBPF maps (%w)", sink.ErrStartOver)
	}
	return true, nil
}

func (d *dataplane) newComparison() *comparison {
	c := &comparison{found: map[uint64]uint64{}, changed: map[uint64]struct{}{}}
	c.readers = append(c.readers, d.frontends.reader(func(f frontendKey, l list) {
		r := d.records[f]
		c.wrong = c.wrong || r == nil || r.list != l
		c.found[l.ID]++ // so that a list without a frontend differs
	}), d.slots.reader(func(k slotKey, a address) {
		c.found[k.List] += slotDigest(d.seed, k.Index, a)
	}), d.members.reader(func(k memberKey, _ uint32) {
		c.found[k.List] += memberDigest(d.seed, k.Endpoint)
	}))
	return c
}

// differs reports whether a list that has not changed differs from its record.
func (c *comparison) differs(records map[frontendKey]*record) bool {
	for _, r := range records {
		digest, ok := c.found[r.list.ID]
		if _, changed := c.changed[r.list.ID]; !changed && (!ok || digest != r.digest+1) {
			return true
		}
		delete(c.found, r.list.ID)
	}
	// The other lists have no frontend.
	for id := range c.found {
		if _, changed := c.changed[id]; !changed {
			return true
		}
	}
	return false
}
