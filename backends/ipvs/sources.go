// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"encoding/binary"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// findLists records the lists of source ranges that the table has.
func (d *dataplane) findLists() {
	type list struct {
		number uint32
		family api.Family
	}
	lists := map[list][]netip.Prefix{}
	for e := range d.elements {
		switch e.set.kind {
		case restricted:
			of := list{binary.NativeEndian.Uint32([]byte(e.value)), e.set.family}
			lists[of] = append(lists[of], nil...) // adds the list even if it has no ranges
		case sources:
			r, _ := sourcelists.ParseKey([]byte(e.key))
			of := list{r.List, e.set.family}
			lists[of] = append(lists[of], r.Prefix)
		}
	}
	for of, prefixes := range lists {
		d.lists.Found(of.number, of.family, prefixes)
	}
}

// writeLists adds the lists of source ranges that no frontend uses yet.
func (d *dataplane) writeLists() error {
	return d.lists.Fresh(d.table.maxElements, func(chunks []sourcelists.Chunk) (written []bool, err error) {
		var add []element
		for _, c := range chunks {
			add, written = append(add, sourceElements(c.Ranges)...), append(written, true)
		}
		return written, d.changeTable(nil, add)
	})
}

// rangesOf returns the elements that changes of lists remove and add.
func rangesOf(changes map[types.NamespacedName]*sourcelists.Change) (remove, add []element) {
	for _, c := range changes {
		remove, add = append(remove, sourceElements(c.Remove)...), append(add, sourceElements(c.Add)...)
	}
	return remove, add
}

// maxUnused limits the source ranges of unused lists that Sync leaves to Verify.
const maxUnused = 100_000

// reapLists removes unused lists until at most limit ranges of such lists are left. It
// stops when ctx ends, but not before the first transaction.
func (d *dataplane) reapLists(ctx context.Context, limit int) error {
	for {
		ranges := d.lists.Reap(min(max(d.lists.Unused()-limit, 0), d.table.maxElements))
		if len(ranges) == 0 {
			return nil
		}
		if err := d.changeTable(sourceElements(ranges), nil); err != nil {
			d.known = false // a pass finds these lists again
			return startOver(err)
		}
		if ctx.Err() != nil {
			return nil // a later call continues
		}
	}
}

// nftaSetElemKeyEnd is missing in golang.org/x/sys/unix.
const nftaSetElemKeyEnd = 10

// oldSources returns the source ranges of a table that an earlier version of kpng has made,
// as elements of this version. There, the set restricted4 had the frontends with source
// ranges, and a key of the set sources4 was a frontend and a range. Without these elements,
// an update would admit all sources until the services are delivered. The argument first
// is the number of the first list.
func (t *table) oldSources(ctx context.Context, l *nft.Listing, family api.Family, first int) (map[element]bool, error) {
	frontendsID, rangesID := setID{restricted, family}, setID{sources, family}
	frontends, ok := l.Sets[frontendsID.name()]
	if !ok || frontends.Flags&unix.NFT_SET_MAP != 0 || l.Sets[rangesID.name()].Flags&unix.NFT_SET_INTERVAL == 0 {
		return nil, nil // the table is not of that version
	}
	all := map[element]bool{}
	numbers := map[string]uint32{} // by frontend
	err := t.conn.Dump(ctx, frontendsID.name(), func(item []byte) {
		key := decodeElement(frontendsID, item).key
		numbers[key] = sourcelists.Number(uint32(first + len(numbers)))
		all[element{frontendsID, key, string(nft.Native(numbers[key]))}] = true
	})
	if err != nil {
		return nil, err
	}
	err = t.conn.Dump(ctx, rangesID.name(), func(item []byte) {
		key, end := nft.Value(item, unix.NFTA_SET_ELEM_KEY), nft.Value(item, nftaSetElemKeyEnd)
		n := len(key) - nft.AddrLen(family)
		if n < 0 || len(end) != len(key) {
			return
		}
		addr, _ := netip.AddrFromSlice(key[n:])
		bits := 0 // the length of the common beginning of the first and the last address
		for bits < addr.BitLen() && key[n+bits/8]<<(bits%8)&0x80 == end[n+bits/8]<<(bits%8)&0x80 {
			bits++
		}
		if number := numbers[string(key[:n])]; number != 0 && bits > 0 {
			all[sourceElement(sourcelists.Range{List: number, Prefix: netip.PrefixFrom(addr, bits).Masked()})] = true
		}
	})
	return all, err
}
