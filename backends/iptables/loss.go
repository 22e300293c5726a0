// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netns"
	"golang.org/x/sys/unix"
)

// checkLoss returns a [kernelnode.Difference] if another program has removed all rules of
// a table, all jumps to one of its first chains, or elements of a set. A reload of a
// firewall may do that. Unlike verify, it takes about as long with many rules as with few.
func (t *ruleset) checkLoss(ctx context.Context) error {
	if t.beginErr != nil {
		return nil
	}
	check := t.checkChains
	if t.run.flavour == flavourLegacy {
		check = t.checkEntries
	}
	err := check(ctx)
	if err != nil || !t.withSets {
		return err
	}
	if err := t.destroySources(ctx); err != nil {
		return err
	}
	counts, err := t.run.countElements(ctx)
	if err != nil {
		return err
	}
	for kind := range setTypes {
		if is := counts[t.setName(kind)]; is < t.sure[kind] {
			return kernelnode.Differs("set %s has %d elements, fewer than %d", t.setName(kind), is, t.sure[kind])
		}
	}
	return nil
}

// checkChains checks the first chains of each table in flavour nft, if any program has
// changed nf_tables since the last check.
func (t *ruleset) checkChains(ctx context.Context) error {
	generation, err := t.run.generation(ctx)
	if err != nil || generation == t.checked {
		return err
	}
	users := map[chainID]int{} // rules in the chains, and rules that lead to them
	for id, rule := range t.jumps() {
		target := chainID{id.table, rule[strings.LastIndexByte(rule, ' ')+1:]}
		if users[target] == 0 {
			users[target] = countRules(t.chains[target])
		}
		users[target]++
	}
	for id, want := range users {
		if t.changedChains[id] { // a Sync failed, so the kernel may have other rules
			continue
		}
		if is, err := t.run.chainUsers(ctx, id); err != nil {
			return err
		} else if is < want {
			return kernelnode.Differs("%s or the rules that lead to it were deleted", t.describe(id))
		}
	}
	t.checked = generation
	return nil
}

func countRules(rules string) int {
	if rules == "" {
		return 0
	}
	return strings.Count(rules, "\n") + 1
}

// chainUsers returns the number of rules in a chain plus the number of rules that lead to
// it. It returns 0 if the chain does not exist.
func (r *runner) chainUsers(ctx context.Context, id chainID) (n int, err error) {
	err = r.conn.Query(ctx, func(w *netfilter.Builder) {
		at := w.Begin(getChain, 0, netfilter.Family(r.family))
		w.String(unix.NFTA_CHAIN_TABLE, id.table)
		w.String(unix.NFTA_CHAIN_NAME, id.name)
		w.End(at)
	}, func(attributes []byte) {
		n = int(netfilter.Uint32(netfilter.Attribute(attributes, unix.NFTA_CHAIN_USE)))
	})
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read chain %s of table %s: %w", id.name, id.table, err)
	}
	return n, nil
}

// checkEntries counts the entries of each table in flavour legacy. It returns a
// [kernelnode.Difference] if a table has fewer entries than the instance wrote. A table
// may have lost as many entries since the last call as the instance has rules there, or
// more. Then these rules may be lost, and checkEntries compares all rules.
func (t *ruleset) checkEntries(ctx context.Context) error {
	entries := map[string]int{}
	for _, table := range tables {
		is, err := t.run.countEntries(table)
		if err != nil {
			return err
		}
		last := t.entries[table]
		entries[table] = is
		if is == last {
			continue
		}
		// Each chain has two entries in addition to its rules.
		rules, chains := 0, 0
		for id, text := range t.chains {
			if id.table == table {
				rules += countRules(text)
				chains++
			}
		}
		if is < rules+2*chains {
			return kernelnode.Differs("rules of table %s were deleted", table)
		}
		if rules > 0 && is <= last-rules {
			if err := t.verifyRules(ctx); err != nil {
				return err
			}
		}
	}
	t.entries = entries
	return nil
}

// getInfo is the struct ipt_getinfo of linux/netfilter_ipv4/ip_tables.h. The struct for
// IPv6 is equal.
type getInfo struct {
	name                 [32]byte
	validHooks           uint32
	hookEntry, underflow [5]uint32
	entries, size        uint32
}

// The socket options IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES. The options for IPv6 are
// equal.
const optionGetInfo, optionGetEntries = 64, 65

// countEntries returns the number of entries of a table in flavour legacy.
func (r *runner) countEntries(table string) (int, error) {
	info, err := r.tableInfo(table)
	return int(info.entries), err
}

// tableInfo returns the kernel's description of a table in flavour legacy. It is zero if the
// table does not exist.
func (r *runner) tableInfo(table string) (info getInfo, err error) {
	copy(info.name[:], table)
	err = r.getOption(optionGetInfo, unsafe.Pointer(&info), unsafe.Sizeof(info))
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return getInfo{}, fmt.Errorf("read the size of table %s: %w", table, err)
	}
	return info, nil
}

// getOption reads a socket option of flavour legacy. It reads the request from value, and
// then writes the answer to value.
func (r *runner) getOption(option uintptr, value unsafe.Pointer, n uintptr) (err error) {
	family, level := unix.AF_INET, unix.IPPROTO_IP
	if r.family == api.IPv6 {
		family, level = unix.AF_INET6, unix.IPPROTO_IPV6
	}
	nsErr := netns.Do(r.netNS, func() {
		var fd int
		if fd, err = r.socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
			return
		}
		defer unix.Close(fd)
		size := uint32(n)
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), option, uintptr(value), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
			err = errno
		}
	})
	return errors.Join(nsErr, err)
}

// countElements returns the number of elements of each set.
func (r *runner) countElements(ctx context.Context) (map[string]int, error) {
	counts := map[string]int{}
	err := r.conn.Query(ctx, func(w *netfilter.Builder) {
		at := w.Begin(listSet, unix.NLM_F_DUMP, unix.NFPROTO_UNSPEC)
		w.Bytes(attrProtocol, setProtocol)
		w.Uint32(attrFlags|unix.NLA_F_NET_BYTEORDER, listHeader)
		w.End(at)
	}, func(attributes []byte) {
		name := netfilter.String(netfilter.Attribute(attributes, attrSetName))
		counts[name] = int(netfilter.Uint32(netfilter.Attribute(netfilter.Attribute(attributes, attrData), attrCount)))
	})
	if err != nil {
		return nil, fmt.Errorf("list sets: %w", err)
	}
	return counts, nil
}
