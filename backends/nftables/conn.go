// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"golang.org/x/sys/unix"
)

// conn is a connection to nf_tables for one table. It is for one goroutine at a time.
type conn struct {
	*netfilter.Conn
	table string
}

// newConn returns a connection in the network namespace of the file descriptor netNS, or
// in that of the process if it is 0. The first request opens it.
func newConn(netNS int, table string) *conn {
	c := netfilter.NewConn(netNS)
	c.Describe = describe
	return &conn{c, table}
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

// list is query for all objects of a kind. If others change tables meanwhile it
// begins again, with restart, that many times.
func (c *conn) list(ctx context.Context, msg uint16, again int, restart func(), fill func(*wire), f func(attributes []byte)) error {
	for attempt := 0; ; attempt++ {
		restart()
		err := c.query(ctx, msg, unix.NLM_F_DUMP, fill, f)
		if !errors.Is(err, netfilter.ErrInterrupted) || attempt == again {
			return err
		}
	}
}

// dump calls f with each element of the map m. If others change tables
// meanwhile it begins again, with restart.
func (c *conn) dump(ctx context.Context, m mapID, restart func(), f func(element, foreign)) error {
	chains := map[string]string{}
	err := c.list(ctx, unix.NFT_MSG_GETSETELEM, 3, restart, func(w *wire) {
		w.String(unix.NFTA_SET_ELEM_LIST_TABLE, c.table)
		w.String(unix.NFTA_SET_ELEM_LIST_SET, m.name())
	}, func(payload []byte) { decodeElements(m, payload, chains, f) })
	// Where other tables change all the time no dump is ever undisturbed. That does not
	// make this one wrong: nobody but us should change this table.
	if err != nil && !errors.Is(err, netfilter.ErrInterrupted) {
		return fmt.Errorf("reading %s: %w", m.name(), err)
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
	}, func(payload []byte) {
		decodeElements(id.m, payload, map[string]string{}, func(got element, not foreign) {
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
		return e, false, fmt.Errorf("reading %s: %w", id, err)
	}
	return e, ok, nil
}

// objectsAgain is how often chains, sets or rules are listed again.
const objectsAgain = 10

// chains returns the hooks of the table's chains.
func (c *conn) chains(ctx context.Context) (map[string]hook, error) {
	var chains map[string]hook
	err := c.list(ctx, unix.NFT_MSG_GETCHAIN, objectsAgain, func() { chains = map[string]hook{} }, func(w *wire) {
		w.String(unix.NFTA_CHAIN_TABLE, c.table)
	}, func(payload []byte) {
		if table, name, h := decodeChain(payload); table == c.table {
			chains[name] = h
		}
	})
	if err != nil {
		return nil, fmt.Errorf("listing the chains of table %s: %w", c.table, err)
	}
	return chains, nil
}

// sets returns the table's maps and sets.
func (c *conn) sets(ctx context.Context) (map[string]layout, error) {
	var sets map[string]layout
	err := c.list(ctx, unix.NFT_MSG_GETSET, objectsAgain, func() { sets = map[string]layout{} }, func(w *wire) {
		w.String(unix.NFTA_SET_TABLE, c.table)
	}, func(payload []byte) {
		s := decodeSet(payload)
		sets[s.name] = s
	})
	if err != nil {
		return nil, fmt.Errorf("listing the sets of table %s: %w", c.table, err)
	}
	return sets, nil
}

// rules calls f with the chain of each rule of the table, in order, and with the
// rule in canonical form.
func (c *conn) rules(ctx context.Context, restart func(), f func(chain, rule string)) error {
	err := c.list(ctx, unix.NFT_MSG_GETRULE, objectsAgain, restart, func(w *wire) {
		w.String(unix.NFTA_RULE_TABLE, c.table)
	}, func(payload []byte) {
		var chain string
		for attr, v := range netfilter.Attributes(payload) {
			switch attr {
			case unix.NFTA_RULE_CHAIN:
				chain = netfilter.String(v)
			case unix.NFTA_RULE_EXPRESSIONS:
				f(chain, canonical(v))
			}
		}
	})
	if err != nil {
		return fmt.Errorf("listing the rules of table %s: %w", c.table, err)
	}
	return nil
}

// exists reports whether the table is there, and whether it is awake: somebody may have
// switched it off.
func (c *conn) exists(ctx context.Context) (there, awake bool, err error) {
	var flags uint32
	err = c.query(ctx, unix.NFT_MSG_GETTABLE, 0, func(w *wire) {
		w.String(unix.NFTA_TABLE_NAME, c.table)
	}, func(payload []byte) {
		for attr, v := range netfilter.Attributes(payload) {
			if attr == unix.NFTA_TABLE_FLAGS && len(v) == 4 {
				flags = binary.BigEndian.Uint32(v)
			}
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("looking for table %s: %w", c.table, err)
	}
	return true, flags&unix.NFT_TABLE_F_DORMANT == 0, nil
}

// generation returns a number that is another one after any change of any table.
func (c *conn) generation(ctx context.Context) (id uint32, err error) {
	err = c.query(ctx, unix.NFT_MSG_GETGEN, 0, func(*wire) {}, func(payload []byte) {
		for attr, v := range netfilter.Attributes(payload) {
			if attr == unix.NFTA_GEN_ID && len(v) >= 4 {
				id = binary.BigEndian.Uint32(v)
			}
		}
	})
	if err != nil {
		return 0, fmt.Errorf("asking for the generation of tables: %w", err)
	}
	return id, nil
}

// deleteTable removes a table and all that is in it, if it is there.
func (c *conn) deleteTable(ctx context.Context, name string) error {
	err := c.transact(ctx, func(w *wire) { w.deleteTable(name) })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("deleting table %s: %w", name, err)
	}
	return nil
}
