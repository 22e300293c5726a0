// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// presentSources returns the kernel's number of the list with the source ranges of a
// frontend.
func (t *table) presentSources(key types.NamespacedName) func(f *nodeview.Frontend) uint32 {
	return func(f *nodeview.Frontend) uint32 { return t.sources.Of(key, f) }
}

// restrictedElement returns the element that leads from f to its list of source ranges.
func restrictedElement(s match, f *nodeview.Frontend, list uint32) element {
	e, _ := frontendElement(mapID{kindRestricted, s, f.Family}, f)
	e.value = numberValue(list)
	return e
}

func sourceElement(r sourcelists.Range) element {
	e := element{elementID: elementID{m: mapID{kind: kindSources, family: api.FamilyOf(r.Prefix.Addr())}}}
	copy(e.key[:], r.Key())
	return e
}

// findSources records the lists of source ranges that the kernel has.
func (ps *pass) findSources(l *sourcelists.Lists) {
	for _, family := range nft.Families {
		lists := map[uint32][]netip.Prefix{}
		for _, s := range allMatches {
			for e := range ps.snapshots[mapID{kindRestricted, s, family}].all() {
				lists[e.value.number()] = nil // the list may have no ranges
			}
		}
		for e := range ps.snapshots[mapID{kind: kindSources, family: family}].all() {
			r, _ := sourcelists.ParseKey(e.key[:e.m.keyLen()])
			lists[r.List] = append(lists[r.List], r.Prefix)
		}
		for number, prefixes := range lists {
			l.Found(number, family, prefixes)
		}
	}
}

// writeLists writes lists that no frontend uses yet, with a part for each chunk. If the
// kernel refuses a list, it adds the list's service to the argument failed.
func (t *table) writeLists(ctx context.Context, failed *sink.Failed) error {
	return t.sources.Fresh(maxOps, func(chunks []sourcelists.Chunk) (written []bool, err error) {
		var parts []part
		for _, c := range chunks {
			parts = append(parts, part{c.Services, sourceOps(c.Ranges, true)})
		}
		if err := t.apply(ctx, parts, failed); err != nil {
			return nil, err
		}
		for _, p := range parts {
			written = append(written, p.ops[0].applied)
		}
		return written, nil
	})
}

// sourceOps returns ops that add ranges to the kernel or remove them.
func sourceOps(ranges []sourcelists.Range, add bool) []*op {
	block := make([]op, len(ranges))
	ops := make([]*op, len(ranges))
	for i, r := range ranges {
		block[i] = op{elementID: sourceElement(r).elementID, hasOld: !add, hasNew: add}
		ops[i] = &block[i]
	}
	return ops
}

// withoutFailed returns the parts whose services have not failed. If a service of a part
// has failed, all services of the part fail.
func withoutFailed(parts []part, failed *sink.Failed) []part {
	return slices.DeleteFunc(parts, func(p part) bool {
		for _, key := range p.services {
			if err, ok := (*failed)[key]; ok {
				fail([]part{p}, err, failed)
				return true
			}
		}
		return false
	})
}

const (
	// maxReaped limits the ranges that one transaction removes.
	maxReaped = 10_000
	// maxUnused limits the ranges of unused lists that Sync leaves to Verify.
	maxUnused = 100_000
)

// reapLists removes unused lists until at most limit ranges of such lists are left. It
// stops when ctx ends, but not before the first transaction. After an error, the state is
// unknown.
func (t *table) reapLists(ctx context.Context, limit int) error {
	for {
		ranges := t.sources.Reap(min(max(t.sources.Unused()-limit, 0), maxReaped))
		if len(ranges) == 0 {
			return nil
		}
		if err := t.commit(ctx, []part{{ops: sourceOps(ranges, false)}}); err != nil {
			return fmt.Errorf("remove unused source ranges of table inet %s: %w", t.conn.Table, err)
		}
		if ctx.Err() != nil {
			return nil // a later call continues
		}
	}
}

// rangesAfter returns the counts of source ranges after a transaction.
func (s *state) rangesAfter(removed, added []elementRef) sourcelists.Counts {
	ranges := maps.Clone(s.ranges)
	for i, list := range [][]elementRef{removed, added} {
		for _, e := range list {
			if e.m.kind == kindSources {
				ranges.Add(e.m.family, e.key[:e.m.keyLen()], 2*i-1)
			}
		}
	}
	return ranges
}

// sourceChainsMade records that the kernel has these chains of source ranges.
func (s *state) sourceChainsMade(chains nft.Chains) {
	for _, c := range chains {
		s.rules[c.Name] = c.Digest()
	}
}
