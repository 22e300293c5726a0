// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// conn is a connection to nf_tables for one table. One goroutine may use it at a time.
type conn struct {
	*netfilter.Conn
	table string
	// All hashes use this seed.
	seed maphash.Seed
}

// newConn returns a connection in the network namespace of the file descriptor netNS, or
// of the process if netNS is 0. The first request opens the connection.
func newConn(netNS int, table string) *conn {
	c := netfilter.NewConn(netNS)
	c.Describe = describeMessage
	return &conn{c, table, maphash.MakeSeed()}
}

// transact sends the messages that fill encodes as one transaction; see
// [netfilter.Conn.Transact].
func (c *conn) transact(ctx context.Context, fill func(*wire)) error {
	return c.Transact(ctx, func(b *netfilter.Builder) { fill(&wire{b, c.table}) })
}

// query sends one request about the table, with the attributes that fill adds; see
// [netfilter.Conn.Query].
func (c *conn) query(ctx context.Context, msg, flags uint16, fill func(*wire), f func(attributes []byte)) error {
	return c.Query(ctx, func(b *netfilter.Builder) {
		w := wire{b, c.table}
		at := w.begin(int(msg), flags)
		fill(&w)
		w.End(at)
	}, f)
}

// The method list requests all objects of one kind in the table.
//
// The kernel answers in several messages. Before each further message, it skips as many
// objects of this table as it has already sent. The kernel reports an interruption if any
// table changed between two messages. Only a change of this table matters, and other
// programs should not change it, so list ignores interruptions. After a change by another
// program, foreignCommits returns another number, and Verify reads the table again.
func (c *conn) list(ctx context.Context, msg uint16, fill func(*wire), f func(attributes []byte)) error {
	err := c.query(ctx, msg, unix.NLM_F_DUMP, fill, f)
	if errors.Is(err, netfilter.ErrInterrupted) {
		return nil
	}
	return err
}

// noAttributes is the argument fill of the method query if no attributes are needed.
func noAttributes(*wire) {}

// dump calls f with each element of the map m. If this package cannot have made the element,
// the argument foreign is the element's encoding, which is valid until f returns. Otherwise
// foreign is nil.
func (c *conn) dump(ctx context.Context, m mapID, f func(e element, foreign []byte)) error {
	names := map[string]string{}
	return c.dumpSet(ctx, m.name(), func(item []byte) {
		if e, ok := decodeElement(m, item, names); ok {
			f(e, nil)
		} else {
			f(e, item)
		}
	})
}

// dumpSet calls f with the encoding of each element of a map or set of the table. The
// encoding is valid until f returns.
func (c *conn) dumpSet(ctx context.Context, name string, f func(item []byte)) error {
	err := c.list(ctx, unix.NFT_MSG_GETSETELEM, func(w *wire) {
		w.String(unix.NFTA_SET_ELEM_LIST_SET, name)
	}, func(attributes []byte) { decodeElements(attributes, f) })
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}

// getElement reads the element with this ID from the kernel. If the kernel does not have
// this element, ok is false.
func (c *conn) getElement(ctx context.Context, id elementID) (e element, ok bool, err error) {
	err = c.query(ctx, unix.NFT_MSG_GETSETELEM, 0, func(w *wire) {
		w.String(unix.NFTA_SET_ELEM_LIST_SET, id.m.name())
		list := w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		w.addElement(&element{elementID: id}, false)
		w.EndNest(list)
	}, func(attributes []byte) {
		decodeElements(attributes, func(item []byte) {
			if got, own := decodeElement(id.m, item, map[string]string{}); own {
				e, ok = got, true
			}
		})
	})
	if errors.Is(err, unix.ENOENT) {
		return e, false, nil
	}
	if err != nil {
		return e, false, fmt.Errorf("read %s: %w", id, err)
	}
	return e, ok, nil
}

// listing describes a table of the kernel, without elements.
type listing struct {
	exists, dormant bool
	sets            map[string]layout
	hooks           map[string]hook
	// chains has the digest of each chain; see digestOf.
	chains map[string]digest
	// clientSeed is the seed of the hash of clients, or 0 if no rule has it.
	clientSeed uint32
}

// inspect reads the listing of the table with that name.
func (c *conn) inspect(ctx context.Context, name string) (*listing, error) {
	c = &conn{c.Conn, name, c.seed}
	l, err := c.findTable(ctx)
	if err == nil && !l.exists {
		return l, nil
	}
	if err == nil {
		err = c.list(ctx, unix.NFT_MSG_GETSET, noAttributes, func(attributes []byte) {
			s := decodeSet(attributes)
			l.sets[s.name] = s
		})
	}
	if err == nil {
		l.hooks, err = c.listChains(ctx)
	}
	for name, h := range l.hooks {
		l.chains[name] = digestOf(c.seed, h, nil)
	}
	if err == nil { // addRule needs the rules of a chain in order, and the kernel lists them in order
		err = c.list(ctx, unix.NFT_MSG_GETRULE, noAttributes, func(attributes []byte) {
			chain := netfilter.String(netfilter.Attribute(attributes, unix.NFTA_RULE_CHAIN))
			d := l.chains[chain]
			rule := netfilter.Attribute(attributes, unix.NFTA_RULE_EXPRESSIONS)
			d.addRule(c.seed, rule)
			l.chains[chain] = d
			if chain == clientChain(api.IPv4) || chain == clientChain(api.IPv6) {
				l.clientSeed = cmp.Or(l.clientSeed, hashSeed(rule))
			}
		})
	}
	if err != nil {
		return nil, fmt.Errorf("list table inet %s: %w", name, err)
	}
	return l, nil
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

// findTable returns a listing that only says whether the table exists and is dormant.
func (c *conn) findTable(ctx context.Context) (*listing, error) {
	l := &listing{sets: map[string]layout{}, chains: map[string]digest{}}
	err := c.query(ctx, unix.NFT_MSG_GETTABLE, 0, noAttributes, func(attributes []byte) {
		flags := netfilter.Uint32(netfilter.Attribute(attributes, unix.NFTA_TABLE_FLAGS))
		l.exists, l.dormant = true, flags&unix.NFT_TABLE_F_DORMANT != 0
	})
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return l, err
}

// listChains returns the hooks of the table's chains.
func (c *conn) listChains(ctx context.Context) (map[string]hook, error) {
	found := map[string]hook{}
	err := c.ListChains(ctx, unix.NFPROTO_INET, func(attributes []byte) (isNew bool) {
		table, name, h := decodeChain(attributes)
		if table != c.table {
			return false
		}
		_, known := found[name]
		found[name] = h
		return !known
	})
	return found, err
}

// foreignCommits returns a number that changes when another program changes any table in
// the network namespace. Transactions of this connection do not change this number. The
// result is the kernel's count of all transactions minus those of this connection.
func (c *conn) foreignCommits(ctx context.Context) (int64, error) {
	generation, err := c.Generation(ctx)
	if err != nil {
		return 0, err
	}
	return int64(generation - c.Commits), nil
}

// deleteTable deletes a table and everything in it, if it exists.
func (c *conn) deleteTable(ctx context.Context, name string) error {
	err := c.transact(ctx, func(w *wire) { w.deleteTable(name) })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete table inet %s: %w", name, err)
	}
	return nil
}
