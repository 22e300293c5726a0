// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"context"
	"fmt"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nft"
	"golang.org/x/sys/unix"
)

// conn is a connection to nf_tables for one table. One goroutine may use it at a time.
type conn struct{ *nft.Conn }

func newConn(netNS int, table string) *conn { return &conn{nft.NewConn(netNS, table, describeElement)} }

// dump calls f with each element of the map m. If this package cannot have made the element,
// the argument foreign is the element's encoding, which is valid until f returns. Otherwise
// foreign is nil.
func (c *conn) dump(ctx context.Context, m mapID, f func(e element, foreign []byte)) error {
	names := map[string]string{}
	return c.Dump(ctx, m.name(), func(item []byte) {
		if e, ok := decodeElement(m, item, names); ok {
			f(e, nil)
		} else {
			f(e, item)
		}
	})
}

// get calls f with each of the elements that have the IDs id(0) to id(n-1), in order. If the
// kernel has no such element, f gets an element without a value, and ok is false. The method
// get stops if f returns false.
func (c *conn) get(ctx context.Context, m mapID, n int, id func(i int) elementID, f func(i int, e element, ok bool) (more bool)) error {
	names := map[string]string{}
	err := c.Get(ctx, m.name(), n, func(w *nft.Writer, i int) {
		key := id(i)
		key.encodeKey(w)
	}, func(i int, item []byte) bool {
		if item == nil {
			return f(i, element{elementID: id(i)}, false)
		}
		e, ok := decodeElement(m, item, names)
		return f(i, e, ok)
	})
	if err != nil {
		return fmt.Errorf("read %s: %w", m.name(), err)
	}
	return nil
}

// getElement reads the element with this ID from the kernel. If the kernel does not have
// this element, ok is false.
func (c *conn) getElement(ctx context.Context, id elementID) (e element, ok bool, err error) {
	err = c.get(ctx, id.m, 1, func(int) elementID { return id }, func(_ int, got element, exists bool) bool {
		if ok = exists; ok {
			e = got
		}
		return true
	})
	return e, ok, err
}

// listing describes a table of the kernel, without elements.
type listing struct {
	*nft.Listing
	// clientSeed is the seed of the hash of clients, or 0 if no rule has it.
	clientSeed uint32
}

// inspect reads the listing of the table with that name.
func (c *conn) inspect(ctx context.Context, name string) (l listing, err error) {
	l.Listing, err = c.Other(name).Inspect(ctx, func(chain string, rule []byte) {
		if chain == clientChain(api.IPv4) || chain == clientChain(api.IPv6) {
			l.clientSeed = cmp.Or(l.clientSeed, hashSeed(rule))
		}
	})
	return l, err
}

// hashSeed returns the seed of the first hash in a rule, or 0.
func hashSeed(rule []byte) uint32 {
	for _, e := range netfilter.Attributes(rule) {
		if netfilter.String(netfilter.Attribute(e, unix.NFTA_EXPR_NAME)) == "hash" {
			return netfilter.Uint32(netfilter.Attribute(netfilter.Attribute(e, unix.NFTA_EXPR_DATA), unix.NFTA_HASH_SEED))
		}
	}
	return 0
}

// foreignCommits returns a number that changes when another program changes any table in
// the network namespace. Transactions of this connection do not change this number. The
// result is the kernel's count of all transactions, without the transactions of this
// connection.
func (c *conn) foreignCommits(ctx context.Context) (int64, error) {
	generation, err := c.Generation(ctx)
	if err != nil {
		return 0, err
	}
	return int64(generation - c.Commits), nil
}
