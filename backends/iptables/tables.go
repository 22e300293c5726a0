// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netns"
	"golang.org/x/sys/unix"
)

// Messages of linux/netfilter/nf_tables.h.
const (
	getTable, delTable = nfTables | unix.NFT_MSG_GETTABLE, nfTables | unix.NFT_MSG_DELTABLE
	getChain, getRule  = nfTables | unix.NFT_MSG_GETCHAIN, nfTables | unix.NFT_MSG_GETRULE

	nfTables = unix.NFNL_SUBSYS_NFTABLES << 8
)

// hasTables returns false if the kernel certainly has no rules of a flavour in table nat.
// Start and Cleanup call it to skip a flavour that the node does not use.
func hasTables(ctx context.Context, netNS int, flavour flavour, family api.Family) (bool, error) {
	if flavour == flavourLegacy {
		loaded, err := legacyTables(netNS, family)
		return slices.Contains(loaded, nat), err
	}
	c := netfilter.NewConn(netNS)
	defer c.Close()
	_, err := c.Generation(ctx)
	for _, unsupported := range []error{unix.EOPNOTSUPP, unix.EINVAL, unix.EPROTONOSUPPORT} {
		if errors.Is(err, unsupported) {
			return false, nil
		}
	}
	return err == nil, err
}

// legacyTables returns the tables of flavour legacy that the kernel has loaded.
func legacyTables(netNS int, family api.Family) (names []string, err error) {
	nsErr := netns.Do(netNS, func() { names, err = netfilter.LegacyTables(family) })
	return names, errors.Join(nsErr, err)
}

// readLoadedRules reads the rules of flavour legacy, but only in tables that the kernel
// has loaded.
func (t *ruleset) readLoadedRules(ctx context.Context) (*saved, error) {
	loaded, err := legacyTables(t.opts.NetNS, t.family)
	if err != nil {
		return nil, err
	}
	unused := func(table string) bool { return !slices.Contains(loaded, table) }
	return t.readTables(ctx, slices.DeleteFunc(slices.Clone(tables[:]), unused))
}

// hasChains reports whether the kernel has chains of the instance. In flavour nft, this also
// works if iptables-save cannot read the tables.
func (t *ruleset) hasChains(ctx context.Context) (has bool, err error) {
	if t.run.flavour == flavourLegacy {
		saved, err := t.readLoadedRules(ctx)
		return err == nil && len(saved.chains) > 0, err
	}
	c := netfilter.NewConn(t.opts.NetNS)
	defer c.Close()
	err = c.ListChains(ctx, netfilter.Family(t.family), func(attributes []byte) (isNew bool) {
		table := netfilter.String(netfilter.Attribute(attributes, unix.NFTA_CHAIN_TABLE))
		name := netfilter.String(netfilter.Attribute(attributes, unix.NFTA_CHAIN_NAME))
		if has || !slices.Contains(tables[:], table) || !t.opts.isOwn(name) {
			return false
		}
		has = true
		return true
	})
	return has, err
}

// maxDeletions limits the attempts to delete an empty table.
const maxDeletions = 5

// deleteEmptyTables deletes the tables of flavour nft for which isEmpty returns true. The
// programs of iptables create tables and their base chains, but cannot delete them. If
// another program changes any table meanwhile, the kernel refuses the deletion, and
// deleteEmptyTables tries again. After several attempts, the empty table stays.
func deleteEmptyTables(ctx context.Context, netNS int, family api.Family) error {
	c := netfilter.NewConn(netNS)
	defer c.Close()
	for _, table := range tables {
		for range maxDeletions {
			err := deleteIfEmpty(ctx, c, netfilter.Family(family), table)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.ERESTART) && !errors.Is(err, netfilter.ErrInterrupted) || ctx.Err() != nil {
				return err
			}
		}
	}
	return nil
}

// deleteIfEmpty deletes a table if isEmpty returns true. Its error wraps ERESTART or
// [netfilter.ErrInterrupted] if another program has changed any table meanwhile.
func deleteIfEmpty(ctx context.Context, c *netfilter.Conn, nfproto byte, table string) error {
	generation, err := c.Generation(ctx)
	if err != nil {
		return err
	}
	empty, err := isEmpty(ctx, c, nfproto, table)
	if err != nil || !empty {
		return err
	}
	err = c.TransactAt(ctx, generation, func(w *netfilter.Builder) {
		at := w.Begin(delTable, 0, nfproto)
		w.String(unix.NFTA_TABLE_NAME, table)
		w.End(at)
	})
	if err != nil {
		return fmt.Errorf("delete empty table %s: %w", table, err)
	}
	return nil
}

// generation returns a number that changes with each change of rules in flavour nft. It
// returns 0 in flavour legacy, which has no such number.
func (r *runner) generation(ctx context.Context) (uint32, error) {
	if r.flavour == flavourLegacy {
		return 0, nil
	}
	return r.conn.Generation(ctx)
}

// baseChains are the base chains of iptables in tables nat and filter.
var baseChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// isEmpty reports whether a table has nothing except base chains of iptables. These
// chains must have no rules and the policy accept. If another program changes any table
// meanwhile, isEmpty may return [netfilter.ErrInterrupted] or a wrong result.
func isEmpty(ctx context.Context, c *netfilter.Conn, nfproto byte, table string) (bool, error) {
	objects, chains, empty := -1, 0, true
	err := c.Query(ctx, func(w *netfilter.Builder) { w.End(w.Begin(getTable, unix.NLM_F_DUMP, nfproto)) }, func(attributes []byte) {
		if netfilter.String(netfilter.Attribute(attributes, unix.NFTA_TABLE_NAME)) == table {
			objects = int(netfilter.Uint32(netfilter.Attribute(attributes, unix.NFTA_TABLE_USE)))
		}
	})
	if err != nil {
		return false, fmt.Errorf("list tables of nf_tables: %w", err)
	}
	err = c.Query(ctx, func(w *netfilter.Builder) { w.End(w.Begin(getChain, unix.NLM_F_DUMP, nfproto)) }, func(attributes []byte) {
		if netfilter.String(netfilter.Attribute(attributes, unix.NFTA_CHAIN_TABLE)) != table {
			return
		}
		chains++
		policy := netfilter.Attribute(attributes, unix.NFTA_CHAIN_POLICY)
		rules := netfilter.Uint32(netfilter.Attribute(attributes, unix.NFTA_CHAIN_USE))
		// Only base chains have a policy. Any other chain means that the table is in use.
		name := netfilter.String(netfilter.Attribute(attributes, unix.NFTA_CHAIN_NAME))
		empty = empty && slices.Contains(baseChains, name) && rules == 0 && len(policy) == 4 && binary.BigEndian.Uint32(policy) == nfAccept
	})
	if err != nil {
		return false, fmt.Errorf("list chains of nf_tables: %w", err)
	}
	return empty && chains > 0 && objects == chains, nil
}

// nfAccept is the kernel's number of the policy accept.
const nfAccept = 1
