// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"

	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"golang.org/x/sys/unix"
)

// conn is a connection to nf_tables for one table. It is for one goroutine at a time.
type conn struct {
	*netfilter.Conn
	table string
	// seed is that of all hashes.
	seed maphash.Seed
}

// newConn returns a connection in the network namespace of the file descriptor netNS, or
// in that of the process if it is 0. The first request opens it.
func newConn(netNS int, table string) *conn {
	c := netfilter.NewConn(netNS)
	c.Describe = describe
	return &conn{c, table, maphash.MakeSeed()}
}

// transact brings the messages that fill encodes into effect, see [netfilter.Conn.Transact].
func (c *conn) transact(ctx context.Context, fill func(*wire)) error {
	return c.Transact(ctx, func(b *netfilter.Builder) { fill(&wire{b, c.table}) })
}

// query sends one request, see [netfilter.Conn.Query].
func (c *conn) query(ctx context.Context, msg, flags uint16, fill func(*wire), f func(attributes []byte)) error {
	return c.Query(ctx, func(b *netfilter.Builder) {
		at := b.Begin(nftMsg(int(msg)), flags, unix.NFPROTO_INET)
		fill(&wire{b, c.table})
		b.End(at)
	}, f)
}

// list sends a request for many objects of the table.
//
// The kernel returns them in pieces, counts those that it has returned, and says that the
// listing was interrupted if any table changed meanwhile. It counts objects of this table
// only, which other programs should not change, so an interrupted listing is as good. If
// they do change it, conn.others moves, and Verify looks again.
func (c *conn) list(ctx context.Context, msg uint16, fill func(*wire), f func(attributes []byte)) error {
	err := c.query(ctx, msg, unix.NLM_F_DUMP, fill, f)
	if errors.Is(err, netfilter.ErrInterrupted) {
		return nil
	}
	return err
}

// dump calls f with each element of the map m.
func (c *conn) dump(ctx context.Context, m mapID, f func(element, foreign)) error {
	names := map[string]string{}
	err := c.list(ctx, unix.NFT_MSG_GETSETELEM, func(w *wire) {
		w.String(unix.NFTA_SET_ELEM_LIST_TABLE, c.table)
		w.String(unix.NFTA_SET_ELEM_LIST_SET, m.name())
	}, func(attributes []byte) { decodeElements(m, attributes, names, f) })
	if err != nil {
		return fmt.Errorf("read %s: %w", m.name(), err)
	}
	return nil
}

// get returns what the element id has in the kernel, ok false if it is not there.
func (c *conn) get(ctx context.Context, id elementID) (e element, ok bool, err error) {
	err = c.query(ctx, unix.NFT_MSG_GETSETELEM, 0, func(w *wire) {
		w.String(unix.NFTA_SET_ELEM_LIST_TABLE, c.table)
		w.String(unix.NFTA_SET_ELEM_LIST_SET, id.m.name())
		list := w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		w.element(&element{elementID: id}, false)
		w.EndNest(list)
	}, func(attributes []byte) {
		decodeElements(id.m, attributes, map[string]string{}, func(got element, not foreign) {
			// Asked for a range, the kernel also answers with one that contains it.
			if not == nil && got.elementID == id {
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

// quietListings is how many listings of chains in a row must find no other chain, if they
// were interrupted.
const quietListings = 3

// chains returns the hooks of the table's chains.
//
// Here the kernel counts the chains of all tables of the family, so an interrupted listing
// may miss some. It is repeated as long as that finds others.
func (c *conn) chains(ctx context.Context) (map[string]hook, error) {
	found := map[string]hook{}
	for quiet := 0; ; quiet++ {
		before := len(found)
		err := c.query(ctx, unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, func(w *wire) {
			w.String(unix.NFTA_CHAIN_TABLE, c.table)
		}, func(attributes []byte) {
			if table, name, h := decodeChain(attributes); table == c.table {
				found[name] = h
			}
		})
		if len(found) > before {
			quiet = 0
		}
		interrupted := errors.Is(err, netfilter.ErrInterrupted)
		switch {
		case err == nil, interrupted && quiet == quietListings:
			return found, nil
		case !interrupted, ctx.Err() != nil:
			return nil, fmt.Errorf("list the chains of table %s: %w", c.table, err)
		}
	}
}

// sets returns the table's maps and sets.
func (c *conn) sets(ctx context.Context) (map[string]layout, error) {
	sets := map[string]layout{}
	err := c.list(ctx, unix.NFT_MSG_GETSET, func(w *wire) {
		w.String(unix.NFTA_SET_TABLE, c.table)
	}, func(attributes []byte) {
		s := decodeSet(attributes)
		sets[s.name] = s
	})
	if err != nil {
		return nil, fmt.Errorf("list the sets of table %s: %w", c.table, err)
	}
	return sets, nil
}

// rules calls f with the chain of each rule of the table, in order, and with the
// rule in canonical form.
func (c *conn) rules(ctx context.Context, f func(chain, rule string)) error {
	err := c.list(ctx, unix.NFT_MSG_GETRULE, func(w *wire) {
		w.String(unix.NFTA_RULE_TABLE, c.table)
	}, func(attributes []byte) {
		var chain string
		for attr, v := range netfilter.Attributes(attributes) {
			switch attr {
			case unix.NFTA_RULE_CHAIN:
				chain = netfilter.String(v)
			case unix.NFTA_RULE_EXPRESSIONS:
				f(chain, canonical(v))
			}
		}
	})
	if err != nil {
		return fmt.Errorf("list the rules of table %s: %w", c.table, err)
	}
	return nil
}

// digests returns the digest of each chain of the table.
func (c *conn) digests(ctx context.Context) (map[string]digest, error) {
	hooks, err := c.chains(ctx)
	if err != nil {
		return nil, err
	}
	digests := make(map[string]digest, len(hooks))
	for name, h := range hooks {
		digests[name] = digestOf(c.seed, h, nil)
	}
	err = c.rules(ctx, func(chain, rule string) {
		d := digests[chain]
		d.addRule(c.seed, rule)
		digests[chain] = d
	})
	return digests, err
}

// exists reports whether the table exists, and whether it is awake: another program may have
// made it dormant.
func (c *conn) exists(ctx context.Context) (exists, awake bool, err error) {
	var flags uint32
	err = c.query(ctx, unix.NFT_MSG_GETTABLE, 0, func(w *wire) {
		w.String(unix.NFTA_TABLE_NAME, c.table)
	}, func(attributes []byte) {
		for attr, v := range netfilter.Attributes(attributes) {
			if attr == unix.NFTA_TABLE_FLAGS {
				flags = decodeUint32(v)
			}
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("look for table %s: %w", c.table, err)
	}
	return true, flags&unix.NFT_TABLE_F_DORMANT == 0, nil
}

// others returns a number that moves with each transaction of another program in the
// network namespace, on any table, and with no transaction of this connection: the kernel
// counts all transactions.
func (c *conn) others(ctx context.Context) (int64, error) {
	var generation uint32
	err := c.query(ctx, unix.NFT_MSG_GETGEN, 0, func(*wire) {}, func(attributes []byte) {
		for attr, v := range netfilter.Attributes(attributes) {
			if attr == unix.NFTA_GEN_ID {
				generation = decodeUint32(v)
			}
		}
	})
	if err != nil {
		return 0, fmt.Errorf("read the generation of tables: %w", err)
	}
	return int64(generation - c.Commits), nil
}

// deleteTable removes a table and all that is in it, if it is there.
func (c *conn) deleteTable(ctx context.Context, name string) error {
	err := c.transact(ctx, func(w *wire) { w.deleteTable(name) })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete table %s: %w", name, err)
	}
	return nil
}
