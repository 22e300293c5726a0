// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/google/nftables"
	"github.com/kpng-project/kpng/api"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// errNotIntact means that a table does not exist, or that this version of all-ip did not
// create it.
var errNotIntact = errors.New("not there, or not as all-ip makes them")

// probe checks whether this process can use nftables. The error names the likely cause.
func (b *backend) probe() error {
	conn, err := connect()
	if err == nil {
		_, err = conn.ListTableOfFamily(b.name, nftables.TableFamilyIPv4)
	}
	return explain(err)
}

// explain adds the likely cause to the error of an nftables request.
func explain(err error) error {
	switch {
	case err == nil || errors.Is(err, unix.ENOENT):
		return nil // the table does not exist yet
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("all-ip needs the capability NET_ADMIN: %w", err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("all-ip needs nftables (CONFIG_NF_TABLES), which this kernel lacks or may not load: %w", err)
	default:
		return fmt.Errorf("check the kernel for nftables: %w", err)
	}
}

// socketBuffer is the maximum size of a transaction in bytes. A transaction of this size
// has about 200,000 elements. The kernel accepts a transaction only as a whole, so the
// transaction has to fit into the buffer of the socket.
const socketBuffer = 32 << 20

func connect() (*nftables.Conn, error) {
	return nftables.New(nftables.WithSockOptions(func(c *netlink.Conn) error {
		return errors.Join(c.SetWriteBuffer(socketBuffer), c.SetReadBuffer(socketBuffer))
	}))
}

// The method read returns the content of the tables. The error wraps errNotIntact if the
// tables must be recreated.
func (b *backend) read() (state, error) {
	conn, err := connect()
	if err != nil {
		return nil, err
	}
	have := state{}
	for _, t := range tables(b.name) {
		for _, chain := range t.chains() {
			rules, err := conn.GetRules(t.Table, chain)
			if err != nil {
				return nil, fmt.Errorf("read chain %s of tables %q: %w", chain.Name, b.name, err)
			}
			if !slices.EqualFunc(rules, t.rules(chain), func(got, want *nftables.Rule) bool {
				return bytes.Equal(got.UserData, want.UserData)
			}) {
				return nil, fmt.Errorf("chain %s: %w", chain.Name, errNotIntact)
			}
		}
		for set := range t.sets() {
			all, err := conn.GetSetElements(set)
			if err != nil {
				return nil, fmt.Errorf("read set %s of tables %q: %w", set.Name, b.name, err)
			}
			for _, e := range all {
				have[element{t.family, set.Name, string(e.Key)}] = string(e.Val)
			}
		}
	}
	return have, nil
}

// transaction is a list of changes that the kernel applies atomically.
type transaction struct {
	conn   *nftables.Conn
	name   string
	tables []*table

	removed, added map[setKey][]nftables.SetElement
}

type setKey struct {
	family api.Family
	name   string
}

func (b *backend) begin() (*transaction, error) {
	conn, err := connect()
	if err != nil {
		return nil, err
	}
	return &transaction{
		conn: conn, name: b.name, tables: tables(b.name),
		removed: map[setKey][]nftables.SetElement{}, added: map[setKey][]nftables.SetElement{},
	}, nil
}

// The method drop deletes the tables if they exist.
func (tx *transaction) drop() {
	for _, t := range tx.tables {
		tx.conn.AddTable(t.Table) // first create a missing table, because it could not be deleted
		tx.conn.DelTable(t.Table)
	}
}

// The method create deletes the tables and then creates them again, with empty sets.
func (tx *transaction) create() error {
	tx.drop()
	for _, t := range tx.tables {
		tx.conn.AddTable(t.Table)
		for set := range t.sets() {
			if err := tx.conn.AddSet(set, nil); err != nil {
				return fmt.Errorf("create set %s: %w", set.Name, err)
			}
		}
		for _, chain := range t.chains() {
			tx.conn.AddChain(chain)
			for _, rule := range t.rules(chain) {
				tx.conn.AddRule(rule)
			}
		}
	}
	return nil
}

// The method remove removes e from the tables and from s. It does nothing if s does not
// contain e.
func (tx *transaction) remove(s state, e element) {
	value, ok := s[e]
	if !ok {
		return
	}
	delete(s, e)
	set := setKey{e.family, e.set}
	tx.removed[set] = append(tx.removed[set], nftables.SetElement{Key: []byte(e.key), Val: []byte(value)})
}

// The method set changes the value of e in the tables and in s. It does nothing if e
// already has this value in s.
func (tx *transaction) set(s state, e element, value string) {
	if old, ok := s[e]; ok && old == value {
		return
	}
	tx.remove(s, e)
	s[e] = value
	set := setKey{e.family, e.set}
	tx.added[set] = append(tx.added[set], nftables.SetElement{Key: []byte(e.key), Val: []byte(value)})
}

func (tx *transaction) commit() error {
	for _, t := range tx.tables {
		for set := range t.sets() {
			for chunk := range chunks(tx.removed[setKey{t.family, set.Name}]) {
				if err := tx.conn.SetDeleteElements(set, chunk); err != nil {
					return fmt.Errorf("remove elements of set %s: %w", set.Name, err)
				}
			}
			for chunk := range chunks(tx.added[setKey{t.family, set.Name}]) {
				if err := tx.conn.SetAddElements(set, chunk); err != nil {
					return fmt.Errorf("add elements to set %s: %w", set.Name, err)
				}
			}
		}
	}
	if err := tx.conn.Flush(); err != nil {
		return fmt.Errorf("change tables %q: %w", tx.name, err)
	}
	return nil
}

// chunks splits a list into parts that each fit into a message of less than 64 KiB.
func chunks(list []nftables.SetElement) iter.Seq[[]nftables.SetElement] {
	return slices.Chunk(list, 500)
}
