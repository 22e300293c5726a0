// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nft

import (
	"context"
	"errors"
	"fmt"

	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// ErrNoTables means that the kernel cannot have tables.
var ErrNoTables = errors.New("the kernel lacks nf_tables (module nf_tables)")

// Explain returns an error that wraps ErrNoTables if err is the answer of a kernel
// without nf_tables.
func Explain(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return fmt.Errorf("%w: %w", ErrNoTables, err)
	}
	return err
}

// Conn is a connection to nf_tables for one table. One goroutine may use it at a time.
type Conn struct {
	*netfilter.Conn
	Table string
}

// NewConn returns a connection in the network namespace of the file descriptor netNS, or
// of the process if netNS is 0. The first request opens the connection. Errors contain the
// text that the function describe returns for an encoded element of a set. If describe does
// not know the set, it returns an empty string.
func NewConn(netNS int, table string, describe func(set string, item []byte) string) *Conn {
	c := netfilter.NewConn(netNS)
	c.Describe = func(msgType uint16, attributes []byte, offset int) string {
		return describeMessage(msgType, attributes, offset, describe)
	}
	return &Conn{c, table}
}

// Other returns the same connection for another table.
func (c *Conn) Other(table string) *Conn { return &Conn{c.Conn, table} }

// Transact sends the messages that fill encodes as one transaction; see
// [netfilter.Conn.Transact].
func (c *Conn) Transact(ctx context.Context, fill func(*Writer)) error {
	return c.Conn.Transact(ctx, func(b *netfilter.Builder) { fill(&Writer{b, c.Table}) })
}

// Query sends the request that fill encodes; see [netfilter.Conn.Query].
func (c *Conn) Query(ctx context.Context, fill func(*Writer), f func(attributes []byte)) error {
	return c.Conn.Query(ctx, func(b *netfilter.Builder) { fill(&Writer{b, c.Table}) }, f)
}

// list requests all objects of one kind in the table. If name is not empty, list requests
// only objects whose attribute attr has this value.
//
// The kernel answers in several messages. Before each further message, it skips as many
// objects of this table as it has already sent. The kernel reports an interruption if
// any table changed between two messages. The function list ignores interruptions,
// because only a change of this table matters, and other programs should not change this
// table. If another program changes the table, the generation of nf_tables changes, and
// callers read the table again.
func (c *Conn) list(ctx context.Context, msg int, attr uint16, name string, f func(attributes []byte)) error {
	err := c.Query(ctx, func(w *Writer) { w.named(msg, unix.NLM_F_DUMP, attr, name) }, f)
	if errors.Is(err, netfilter.ErrInterrupted) {
		return nil
	}
	return err
}

// Dump calls f with the encoding of each element of a map or set. The encoding is valid
// until f returns.
func (c *Conn) Dump(ctx context.Context, set string, f func(item []byte)) error {
	err := c.list(ctx, unix.NFT_MSG_GETSETELEM, unix.NFTA_SET_ELEM_LIST_SET, set, func(attributes []byte) { decodeElements(attributes, f) })
	if err != nil {
		return fmt.Errorf("read %s: %w", set, err)
	}
	return nil
}

// decodeElements calls f with the encoding of each element of a NFT_MSG_NEWSETELEM message.
func decodeElements(attributes []byte, f func(item []byte)) {
	for _, item := range netfilter.Attributes(netfilter.Attribute(attributes, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
		f(item)
	}
}

// maxGet limits the elements of a request. The kernel answers with a message for each
// element, and all messages must fit into the socket's buffer.
const maxGet = 500

// Get reads n elements of a map or set. For each element, in order, it calls f with the
// encoding of the element, or with nil if the element does not exist. The function encode
// adds the key of element i to a message. Get stops if f returns false. For many elements of
// a large map, Get is faster than Dump, because the kernel begins each message of a dump at
// the first element.
func (c *Conn) Get(ctx context.Context, set string, n int, encode func(w *Writer, i int), f func(i int, item []byte) (more bool)) error {
	for next, more := 0, true; next < n && more; {
		first, end := next, min(next+maxGet, n)
		err := c.Query(ctx, func(w *Writer) {
			w.Elements(unix.NFT_MSG_GETSETELEM, 0, set, end-first, func(i int) { encode(w, first+i) })
		}, func(attributes []byte) {
			decodeElements(attributes, func(item []byte) { more = more && f(next, item) })
			next++
		})
		switch {
		case errors.Is(err, unix.ENOENT): // the kernel stops at an element that does not exist
			more = more && f(next, nil)
			next++
		case err == nil && next < end:
			return fmt.Errorf("the kernel returned %d of %d elements of %s", next-first, end-first, set)
		case err == nil:
			err = context.Cause(ctx)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// Rules calls f with each rule of a chain, or of all chains if the argument chain is empty.
// The rules of a chain are in order.
func (c *Conn) Rules(ctx context.Context, chain string, f func(chain string, rule []byte)) error {
	return c.list(ctx, unix.NFT_MSG_GETRULE, unix.NFTA_RULE_CHAIN, chain, func(attributes []byte) {
		f(netfilter.String(netfilter.Attribute(attributes, unix.NFTA_RULE_CHAIN)), netfilter.Attribute(attributes, unix.NFTA_RULE_EXPRESSIONS))
	})
}

// Listing describes a table of the kernel, without elements.
type Listing struct {
	Exists, Dormant bool
	Sets            map[string]Set
	Hooks           map[string]Hook
	// Chains has the digest of each chain.
	Chains map[string]Digest
}

// Inspect reads the listing of the table. It calls f with each rule.
func (c *Conn) Inspect(ctx context.Context, f func(chain string, rule []byte)) (*Listing, error) {
	l, err := c.Find(ctx)
	if err == nil && !l.Exists {
		return l, nil
	}
	if err == nil {
		err = c.list(ctx, unix.NFT_MSG_GETSET, 0, "", func(attributes []byte) {
			s := decodeSet(attributes)
			l.Sets[s.Name] = s
		})
	}
	if err == nil {
		l.Hooks, err = c.listChains(ctx)
	}
	for name, h := range l.Hooks {
		l.Chains[name] = Chain{Hook: h}.Digest()
	}
	if err == nil {
		err = c.Rules(ctx, "", func(chain string, rule []byte) {
			d := l.Chains[chain]
			d.add(rule)
			l.Chains[chain] = d
			f(chain, rule)
		})
	}
	if err != nil {
		return nil, fmt.Errorf("list table inet %s: %w", c.Table, Explain(err))
	}
	return l, nil
}

// Find returns a listing that says only whether the table exists and whether it is
// dormant.
func (c *Conn) Find(ctx context.Context) (*Listing, error) {
	l := &Listing{Sets: map[string]Set{}, Chains: map[string]Digest{}}
	err := c.Query(ctx, func(w *Writer) { w.named(unix.NFT_MSG_GETTABLE, 0, 0, "") }, func(attributes []byte) {
		flags := netfilter.Uint32(netfilter.Attribute(attributes, unix.NFTA_TABLE_FLAGS))
		l.Exists, l.Dormant = true, flags&unix.NFT_TABLE_F_DORMANT != 0
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		err = nil
	case errors.Is(err, unix.EINVAL): // the answer to a request for which the kernel has no module
		err = fmt.Errorf("%w: %w", ErrNoTables, err)
	}
	return l, err
}

// listChains returns the hooks of the table's chains.
func (c *Conn) listChains(ctx context.Context) (map[string]Hook, error) {
	found := map[string]Hook{}
	err := c.ListChains(ctx, unix.NFPROTO_INET, func(attributes []byte) (isNew bool) {
		table, name, h := decodeChain(attributes)
		if table != c.Table {
			return false
		}
		_, known := found[name]
		found[name] = h
		return !known
	})
	return found, err
}

func decodeChain(attributes []byte) (table, name string, h Hook) {
	text := func(attr uint16) string { return netfilter.String(netfilter.Attribute(attributes, attr)) }
	nest := netfilter.Attribute(attributes, unix.NFTA_CHAIN_HOOK)
	return text(unix.NFTA_CHAIN_TABLE), text(unix.NFTA_CHAIN_NAME), Hook{
		number:   netfilter.Uint32(netfilter.Attribute(nest, unix.NFTA_HOOK_HOOKNUM)),
		priority: int32(netfilter.Uint32(netfilter.Attribute(nest, unix.NFTA_HOOK_PRIORITY))),
		kind:     text(unix.NFTA_CHAIN_TYPE),
		policy:   netfilter.Uint32(netfilter.Attribute(attributes, unix.NFTA_CHAIN_POLICY)),
	}
}

// Delete deletes the table and everything in it, if it exists.
func (c *Conn) Delete(ctx context.Context) error {
	err := c.Transact(ctx, func(w *Writer) { w.DeleteTable(w.Table) })
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(Explain(err), ErrNoTables) {
		return nil
	}
	return fmt.Errorf("delete table inet %s: %w", c.Table, err)
}
