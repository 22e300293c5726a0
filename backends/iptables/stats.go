// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"
	"unsafe"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netfilter"
	"golang.org/x/sys/unix"
)

// counted describes the connections that a chain counts: those of a service port to an
// endpoint.
type counted struct {
	service  *api.View
	port     *api.PortMapping // nil for an all-ports service
	endpoint netip.AddrPort
}

var _ backends.Counter = (*backend)(nil)

// Stats implements [backends.Counter]. With counters, each endpoint of a service port has a
// chain of its own, whose rule counts new connections. A change of other endpoints does not
// write this chain, so its counter keeps its value. The kernel counts neither bytes nor
// present connections, because table nat gets only the first packet of a connection.
//
// Stats reads the kernel directly. It needs neither the programs of iptables nor their
// lock. A Sync waits only while Stats lists the chains.
func (b *backend) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	if !b.opts.Stats {
		return errors.New("read counters of iptables: the option Stats is not set")
	}
	b.stats.Lock()
	defer b.stats.Unlock()
	for run, chains := range b.counting() {
		read := run.readChains
		if run.flavour == flavourLegacy {
			read = run.readTable
		}
		counts, err := read(ctx, chains)
		if err != nil {
			return fmt.Errorf("read %s counters of iptables: %w", run.family, err)
		}
		for name, n := range counts {
			if !yield(chains[name].stats(n)) {
				return nil
			}
		}
	}
	return nil
}

// counting returns the chains that count connections, by their runners and names.
func (b *backend) counting() map[*runner]map[string]counted {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := map[*runner]map[string]counted{}
	for _, t := range b.rulesets {
		chains := t.counting()
		put(all, t.run, chains, len(chains) > 0)
	}
	return all
}

func (t *ruleset) counting() map[string]counted {
	chains := map[string]counted{}
	maps.Copy(chains, t.counted)
	for _, r := range t.records {
		maps.Copy(chains, r.counted)
	}
	return chains
}

func (c counted) stats(connections uint64) backends.Stats {
	s := backends.Stats{
		Service: c.service.Key(), Endpoint: c.endpoint,
		Connections: int64(connections), Active: -1, FromClients: -1, ToClients: -1,
	}
	if c.port != nil {
		s.Port, s.Protocol = c.port.Name, c.port.Protocol
	}
	return s
}

// readChains returns the counters of chains in flavour nft. It reads one chain after the
// other, because the time to read a whole table is quadratic in the number of its rules.
func (r *runner) readChains(ctx context.Context, chains map[string]counted) (map[string]uint64, error) {
	counts := make(map[string]uint64, len(chains))
	c := netfilter.NewConn(r.netNS)
	defer c.Close()
	for name := range chains {
		err := c.Query(ctx, func(w *netfilter.Builder) {
			at := w.Begin(getRule, unix.NLM_F_DUMP, netfilter.Family(r.family))
			w.String(unix.NFTA_RULE_TABLE, nat)
			w.String(unix.NFTA_RULE_CHAIN, name)
			w.End(at)
		}, func(rule []byte) {
			for _, e := range netfilter.Attributes(netfilter.Attribute(rule, unix.NFTA_RULE_EXPRESSIONS)) {
				if string(netfilter.Attribute(e, unix.NFTA_EXPR_NAME)) != "counter\x00" {
					continue
				}
				n := netfilter.Attribute(netfilter.Attribute(e, unix.NFTA_EXPR_DATA), unix.NFTA_COUNTER_PACKETS)
				counts[name] = binary.BigEndian.Uint64(n) // the last rule of the chain has the counter
			}
		})
		// A chain of one or two rules is one message, so an interruption does not matter. The
		// kernel lacks the chain if a Sync failed, or has just deleted it.
		if err != nil && !errors.Is(err, netfilter.ErrInterrupted) && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
	}
	return counts, nil
}

// maxRereads limits how often a table is read again. Before that, readTable waits: one
// millisecond first, and twice as long each time.
const maxRereads = 8

// readTable returns the counters of chains in flavour legacy. Each change of rules by any
// program replaces the table. Then all counters are zero until the program has added the
// old values. So readTable reads again if a counter is less than in the last result.
func (r *runner) readTable(ctx context.Context, chains map[string]counted) (map[string]uint64, error) {
	for attempt := 0; ; attempt++ {
		counts := make(map[string]uint64, len(chains))
		err := r.eachEntry(func(chain []byte, n uint64) {
			if _, ok := chains[string(chain)]; ok {
				counts[string(chain)] = n
			}
		})
		wasReplaced := err == nil && hasLess(counts, r.lastCounts) || errors.Is(err, unix.EAGAIN)
		if !wasReplaced || attempt == maxRereads {
			r.lastCounts = counts
			return counts, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(time.Millisecond << attempt):
		}
	}
}

// hasLess reports whether a counter in the map counts is less than the same counter in
// the map last.
func hasLess(counts, last map[string]uint64) bool {
	for chain, n := range last {
		if is, ok := counts[chain]; ok && is < n {
			return true
		}
	}
	return false
}

// eachEntry calls f for each rule of table nat with the target DNAT, in flavour legacy.
// The arguments of f are the rule's chain and its number of packets.
func (r *runner) eachEntry(f func(chain []byte, packets uint64)) error {
	info, err := r.tableInfo(nat)
	if err != nil {
		return err
	}
	answer := make([]byte, entriesHeader+int(info.size))
	copy(answer, nat)
	binary.NativeEndian.PutUint32(answer[len(info.name):], info.size)
	if err := r.getOption(optionGetEntries, unsafe.Pointer(&answer[0]), uintptr(len(answer))); err != nil {
		return err
	}
	entries := answer[entriesHeader:]
	// These are offsets in the structs ipt_entry and ip6t_entry.
	offsets, counters := 88, 96
	if r.family == api.IPv6 {
		offsets, counters = 140, 152
	}
	var chain []byte
	for len(entries) > counters+8 {
		target, next := int(binary.NativeEndian.Uint16(entries[offsets:])), int(binary.NativeEndian.Uint16(entries[offsets+2:]))
		if next > len(entries) || target+targetHeader > next {
			return errors.New("a rule is cut off")
		}
		switch name, _, _ := bytes.Cut(entries[target+2:target+targetHeader], []byte{0}); string(name) {
		case "ERROR": // the beginning of a chain
			chain, _, _ = bytes.Cut(entries[target+targetHeader:next], []byte{0})
		case "DNAT":
			f(chain, binary.NativeEndian.Uint64(entries[counters:]))
		}
		entries = entries[next:]
	}
	return nil
}

// The lengths of the structs ipt_get_entries, without entries, and xt_entry_target. In
// xt_entry_target, the name begins at offset 2.
const entriesHeader, targetHeader = 40, 32
