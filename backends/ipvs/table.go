// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"golang.org/x/sys/unix"
)

// table is the nftables table of an instance. In the output of nft, its chains for IPv4
// look like this:
//
//	chain restricted {
//		meta priority set ip daddr . meta l4proto . th dport map @restricted4 goto service-sources4
//	}
//	chain service-sources4 {
//		jump sources4
//		drop
//	}
//	chain sources4 {
//		meta priority & ffff:ff18 . ip saddr & 255.255.255.0 @sources4 meta priority set none accept
//	}
//	chain services {
//		ip daddr . meta l4proto . th dport @frontends4 goto frontend4
//		dnat to ip daddr . meta l4proto . th dport map @health-checks4
//	}
//	chain untranslated {
//		meta priority 6fff:1-6fff:2 return
//		ip daddr . meta l4proto . th dport @frontends4 goto untranslated4
//		ip daddr @addresses4 meta l4proto { tcp, udp, sctp } goto reject-chain
//	}
//	chain untranslated4 {
//		ip daddr . meta l4proto . th dport @drops4 drop
//		ip daddr . meta l4proto . th dport @rejects4 goto reject-chain
//	}
//	chain frontend4 {
//		ip daddr . meta l4proto . th dport @masquerades4 jump mark-all
//		ip daddr @cluster-ips4 jump mark-outsiders
//	}
//
// The kernel evaluates these chains only for new connections, before routing and before
// IPVS. Except for health checks, only IPVS translates addresses. The chain "restricted"
// comes before all translations, so that no other program can translate packets that this
// chain drops. The chain sources4 has a rule for each prefix length in the set sources4,
// see package sourcelists. The chain "untranslated" comes after the chains of other
// programs. So it does not refuse connections that another program translates.
type table struct {
	opts *options
	conn *nft.Conn
	// maxElements limits the elements of one transaction.
	maxElements int
	// ranges counts the source ranges in the table.
	ranges sourcelists.Counts
	// If draining is true, the table refuses connections to frontends unless another
	// backend translates them. It ignores all other connections.
	draining bool
}

// maxTransaction limits the elements of a transaction. Other programs cannot change tables
// meanwhile.
const maxTransaction = 20_000

func newTable(opts *options) *table {
	c := nft.NewConn(opts.NetNS, opts.tableName(), describeElement)
	if opts.exchange != nil {
		c.Exchange = opts.exchange
	}
	return &table{
		opts: opts, conn: c,
		maxElements: cmp.Or(opts.maxElements, maxTransaction), ranges: sourcelists.Counts{},
	}
}

// countRanges adds n to the count of each source range in the argument elements.
func countRanges(counts sourcelists.Counts, elements iter.Seq[element], n int) {
	for e := range elements {
		if e.set.kind == sources {
			counts.Add(e.set.family, []byte(e.key), n)
		}
	}
}

// chains returns all chains.
func (t *table) chains() (chains nft.Chains) {
	chains.AddCommon(&t.opts.Options)
	chains = append(chains, t.ranges.Chains()...)
	var restrictions, services, output []nft.Rule
	// Tables of the backend nftables have recorded their refusals, and carry them out themselves.
	untranslated := []nft.Rule{nft.LoadMeta(unix.NFT_META_PRIORITY) + nft.Between(nft.DropLater, nft.RejectLater) + nft.Return}
	postrouting := []nft.Rule{nft.MasqueradeMarked(&t.opts.Options)}
	for _, family := range nft.Families {
		chains.Add(fmt.Sprintf("frontend%d", family), frontendRules(family)...)
		if t.draining {
			untranslated = append(untranslated, frontend(family).Then(in(frontends, family)+nft.GoTo(nft.RejectChain)))
		} else {
			services = append(services, frontend(family).Then(in(frontends, family)+nft.GoTo(fmt.Sprintf("frontend%d", family))))
			restrictions = append(restrictions, sourcelists.Restrict(family, frontend(family), setID{restricted, family}.name()))
			refusals := fmt.Sprintf("untranslated%d", family)
			chains.Add(refusals,
				frontend(family).Then(in(drops, family)+nft.Drop),
				frontend(family).Then(in(rejects, family)+nft.GoTo(nft.RejectChain)))
			untranslated = append(untranslated, frontend(family).Then(in(frontends, family)+nft.GoTo(refusals)))
		}
		services = append(services, frontend(family).Then(translate(healthChecks, family)))
		// The addresses in the set "addresses" are local only because of this instance.
		// Without these rules, packets to other ports of these addresses would reach
		// programs on this node.
		for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
			untranslated = append(untranslated, nft.NewKey(family).Destination().Then(in(addresses, family)+
				nft.LoadMeta(unix.NFT_META_L4PROTO)+nft.Equal(protocol)+nft.GoTo(nft.RejectChain)))
		}
		// Masquerade this node's connections to these addresses, because endpoints may have no
		// route to the source. For IPv4, the kernel uses the destination as the source; for
		// IPv6, it uses any address of the node.
		output = append(output, nft.NewKey(family).Destination().Then(in(addresses, family)+nft.Jump(nft.MarkAll)))
		postrouting = append(postrouting, nft.NewKey(family).Source().Destination().ProtocolAndPort().Then(in(hairpins, family)+nft.Masquerade))
	}
	sourcelists.AddChains(&chains, restrictions...)
	chains.Add("services", services...)
	chains.Add("untranslated", untranslated...)
	const dnat, snat = -100, 100
	for _, hook := range []struct {
		name   string
		number uint32
		rules  []nft.Rule
	}{{"prerouting", unix.NF_INET_PRE_ROUTING, nil}, {"output", unix.NF_INET_LOCAL_OUT, output}} {
		refusal := []nft.Rule{nft.IgnoreReplies()}
		chains.AddBase("late-"+hook.name, nft.NAT(hook.number, math.MaxInt32), append(refusal, nft.Jump("untranslated"))...)
		chains.AddBase(hook.name, nft.NAT(hook.number, dnat), slices.Concat(refusal, hook.rules, []nft.Rule{nft.Jump("services")})...)
	}
	chains.AddBase("postrouting", nft.NAT(unix.NF_INET_POST_ROUTING, snat), postrouting...)
	return chains
}

// frontendRules returns the rules for packets to frontends.
func frontendRules(family api.Family) []nft.Rule {
	return []nft.Rule{
		frontend(family).Then(in(masquerades, family) + nft.Jump(nft.MarkAll)),
		nft.NewKey(family).Destination().Then(in(clusterIPs, family) + nft.Jump(nft.MarkOutsiders)),
	}
}

// translate returns expressions that translate the destination if a map has the key.
func translate(kind setKind, family api.Family) nft.Rule {
	return nft.Lookup(setID{kind, family}.name()) + nft.DNATTo(family, 0, nft.AddrLen(family)/4)
}

// frontend returns a key of destination address, protocol and destination port.
func frontend(family api.Family) *nft.Key { return nft.NewKey(family).Destination().ProtocolAndPort() }

// in returns an expression that matches if the key is in a set.
func in(kind setKind, family api.Family) nft.Rule { return nft.InSet(setID{kind, family}.name()) }

// errChanged means that another program or another version of kpng has changed the table.
var errChanged = errors.New("the chains are not as this version makes them")

// read returns all elements of the table. If this version would make other sets or
// chains, or if an element has the wrong size, read returns the valid elements and
// errChanged. It stops when ctx ends.
func (t *table) read(ctx context.Context) (map[element]bool, error) {
	all := map[element]bool{}
	l, err := t.conn.Inspect(ctx, func(string, []byte) {})
	if err != nil {
		return nil, err
	}
	var changed error
	for _, id := range allSets() {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		want := id.set()
		if set, ok := l.Sets[want.Name]; !ok || !want.SameAs(&set) {
			changed = errChanged
			continue
		}
		found, err := t.readSet(ctx, id)
		if err != nil {
			return nil, fmt.Errorf("read table inet %s: %w", t.conn.Table, err)
		}
		for e := range found {
			_, isRange := sourcelists.ParseKey([]byte(e.key))
			if len(e.key) != want.KeyLen || len(e.value) != want.DataLen || id.kind == sources && !isRange {
				changed = errChanged
			} else {
				all[e] = true
			}
		}
	}
	if changed != nil {
		for i, family := range nft.Families {
			old, err := t.oldSources(ctx, l, family, 1+i<<20)
			if err != nil {
				return nil, fmt.Errorf("read the source ranges of table inet %s: %w", t.conn.Table, err)
			}
			maps.Copy(all, old)
		}
	}
	t.ranges = sourcelists.Counts{}
	countRanges(t.ranges, maps.Keys(all), 1)
	for _, c := range t.chains() {
		if l.Chains[c.Name] != c.Digest() {
			changed = errChanged
		}
	}
	return all, changed
}

// readSet returns the elements of a set. If the kernel resizes the set during a dump, it
// sends some elements twice and omits as many others. So readSet repeats such a dump.
func (t *table) readSet(ctx context.Context, id setID) (map[element]bool, error) {
	const maxRetries = 6
	for attempt := 0; ; attempt++ {
		found, n := map[element]bool{}, 0
		err := t.conn.Dump(ctx, id.name(), func(item []byte) {
			found[decodeElement(id, item)] = true
			n++
		})
		if err != nil || len(found) == n || attempt == maxRetries {
			return found, err
		}
		time.Sleep(2 * time.Millisecond << attempt)
	}
}

// hasRules reports whether the table exists and has rules.
func (t *table) hasRules() (has bool, err error) {
	err = t.conn.Rules(context.Background(), "prerouting", func(string, []byte) { has = true })
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	if err != nil {
		return false, fmt.Errorf("read chain prerouting of table inet %s: %w", t.conn.Table, err)
	}
	return has, nil
}

// create replaces the table by a new table with these elements. If the elements need
// several transactions, the elements of the set frontends are last. Between the
// transactions, the table may refuse connections to addresses that the instance makes
// local, and to frontends with source ranges. But it never accepts connections that it must
// refuse.
func (t *table) create(elements map[element]bool) error {
	t.ranges = sourcelists.Counts{}
	all := slices.SortedFunc(maps.Keys(elements), func(a, b element) int {
		return cmp.Or(-cmp.Compare(min(a.set.kind, 1), min(b.set.kind, 1)), a.compare(b)) // frontends last
	})
	begin := func(w *nft.Writer) {
		w.NewTable() // because DeleteTable fails if the table is missing
		w.DeleteTable(w.Table)
		w.NewTable()
		for _, id := range allSets() {
			w.NewSet(id.set())
		}
		for _, c := range t.chains() {
			w.MakeChain(c)
		}
	}
	for {
		n := min(len(all), t.maxElements)
		if err := t.transact(begin, nil, all[:n]); err != nil {
			return err
		}
		if all = all[n:]; len(all) == 0 {
			return nil
		}
		begin = func(*nft.Writer) {}
	}
}

// change removes and adds elements in one transaction.
func (t *table) change(remove, add []element) error {
	return t.transact(func(*nft.Writer) {}, remove, add)
}

// transact is like change, but its transaction begins with the messages that the function begin
// encodes.
func (t *table) transact(begin func(*nft.Writer), remove, add []element) error {
	ranges := maps.Clone(t.ranges)
	countRanges(ranges, slices.Values(remove), -1)
	countRanges(ranges, slices.Values(add), 1)
	err := t.conn.Transact(context.Background(), func(w *nft.Writer) {
		begin(w)
		writeElements(w, unix.NFT_MSG_DELSETELEM, 0, remove)
		writeElements(w, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, add)
		for _, c := range sourcelists.Changed(t.ranges, ranges) {
			w.MakeChain(c)
		}
	})
	if err != nil {
		return fmt.Errorf("change table inet %s: %w", t.conn.Table, nft.Explain(err))
	}
	t.ranges = ranges
	return nil
}
