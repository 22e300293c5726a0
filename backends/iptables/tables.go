// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"github.com/kpng-project/kpng/backends/internal/netns"
	"golang.org/x/sys/unix"
)

// Messages of linux/netfilter/nf_tables.h.
const (
	getTable, delTable, getChain, getGeneration = nfTables | unix.NFT_MSG_GETTABLE, nfTables | unix.NFT_MSG_DELTABLE, nfTables | unix.NFT_MSG_GETCHAIN, nfTables | unix.NFT_MSG_GETGEN

	nfTables = unix.NFNL_SUBSYS_NFTABLES << 8
)

// hasTables returns false if the kernel certainly has no rules of a flavour in table nat.
// Start and Cleanup call it to skip a flavour that the node does not use.
func hasTables(ctx context.Context, netNS int, flavour Flavour, family api.Family) (bool, error) {
	if flavour == Legacy {
		file := "/proc/thread-self/net/ip_tables_names"
		if family == api.IPv6 {
			file = "/proc/thread-self/net/ip6_tables_names"
		}
		var names []byte
		var readErr error
		if err := netns.Do(netNS, func() { names, readErr = os.ReadFile(file) }); err != nil {
			return false, err
		}
		if readErr != nil && !errors.Is(readErr, fs.ErrNotExist) {
			return false, fmt.Errorf("list tables of flavour legacy: %w", readErr)
		}
		return slices.Contains(strings.Fields(string(names)), nat), nil
	}
	c := netfilter.NewConn(netNS)
	defer c.Close()
	_, err := generationOf(ctx, c)
	for _, unsupported := range []error{unix.EOPNOTSUPP, unix.EINVAL, unix.EPROTONOSUPPORT} {
		if errors.Is(err, unsupported) {
			return false, nil
		}
	}
	return err == nil, err
}

// hasChains reports whether the kernel has chains of the instance. In flavour nft, this also
// works if iptables-save cannot read the tables.
func (t *ruleset) hasChains(ctx context.Context) (has bool, err error) {
	if t.run.flavour == Legacy {
		saved, err := t.readRules(ctx)
		return err == nil && len(saved.chains) > 0, err
	}
	c := netfilter.NewConn(t.opts.NetNS)
	defer c.Close()
	err = c.Query(ctx, func(w *netfilter.Builder) { w.End(w.Begin(getChain, unix.NLM_F_DUMP, netfilter.Family(t.family))) }, func(attributes []byte) {
		table := netfilter.String(netfilter.Attribute(attributes, unix.NFTA_CHAIN_TABLE))
		name := netfilter.String(netfilter.Attribute(attributes, unix.NFTA_CHAIN_NAME))
		has = has || slices.Contains(tables[:], table) && t.opts.isOwn(name)
	})
	if err != nil {
		return false, fmt.Errorf("list chains of nf_tables: %w", err)
	}
	return has, nil
}

// deleteEmptyTables deletes the tables of flavour nft for which isEmpty returns true. The
// programs of iptables create tables and their base chains, but cannot delete them. If
// another program changes any table meanwhile, the kernel refuses the deletion.
func deleteEmptyTables(ctx context.Context, netNS int, family api.Family) error {
	c := netfilter.NewConn(netNS)
	defer c.Close()
	nfproto := netfilter.Family(family)
	for _, table := range tables {
		generation, err := generationOf(ctx, c)
		if err != nil {
			return err
		}
		empty, err := isEmpty(ctx, c, nfproto, table)
		if err != nil {
			return err
		}
		if !empty {
			continue
		}
		err = c.TransactAt(ctx, generation, func(w *netfilter.Builder) {
			at := w.Begin(delTable, 0, nfproto)
			w.String(unix.NFTA_TABLE_NAME, table)
			w.End(at)
		})
		if err != nil && !errors.Is(err, unix.ERESTART) {
			return fmt.Errorf("delete empty table %s: %w", table, err)
		}
	}
	return nil
}

// generation returns a number that changes with each change of rules in flavour nft. It
// returns 0 in flavour legacy, which has no such number.
func (r *runner) generation(ctx context.Context) (uint32, error) {
	if r.flavour == Legacy {
		return 0, nil
	}
	c := netfilter.NewConn(r.netNS)
	defer c.Close()
	return generationOf(ctx, c)
}

// generationOf returns the number of the last transaction of the network namespace.
func generationOf(ctx context.Context, c *netfilter.Conn) (generation uint32, err error) {
	err = c.Query(ctx, func(w *netfilter.Builder) { w.End(w.Begin(getGeneration, 0, unix.AF_UNSPEC)) }, func(attributes []byte) {
		generation = netfilter.Uint32(netfilter.Attribute(attributes, unix.NFTA_GEN_ID))
	})
	if err != nil {
		return 0, fmt.Errorf("read the generation of nf_tables: %w", err)
	}
	return generation, nil
}

// baseChains are the base chains of iptables in tables nat and filter.
var baseChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// isEmpty reports whether a table has nothing except base chains of iptables. These
// chains must have no rules and the policy accept.
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
