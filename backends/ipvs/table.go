// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/nftrule"
	"github.com/kpng-project/kpng/internal/sourcelists"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// table is the nftables table of an instance. In the output of nft, its chains for IPv4
// look like this:
//
//	chain restricted {
//		meta priority set ip daddr . meta l4proto . th dport map @restricted4 goto only-sources4
//	}
//	chain only-sources4 {
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
//		ip daddr . meta l4proto . th dport @frontends4 goto untranslated4
//		ip daddr @addresses4 meta l4proto { tcp, udp, sctp } goto reject-chain
//	}
//	chain untranslated4 {
//		ip daddr . meta l4proto . th dport @drops4 drop
//		ip daddr . meta l4proto . th dport @rejects4 goto reject-chain
//	}
//	chain frontend4 {
//		fib saddr type local ip daddr . meta l4proto . th dport @node-masquerades4 jump mark-all
//		fib saddr type local dnat to ip daddr . meta l4proto . th dport map @redirects4
//		iifname "veth*" dnat to ip daddr . meta l4proto . th dport map @redirects4
//		ip daddr . meta l4proto . th dport @masquerades4 jump mark-all
//		ip daddr @cluster-ips4 jump mark-outsiders
//	}
//
// The kernel evaluates these chains only for new connections, before routing and before
// IPVS. Except for redirects and health checks, only IPVS translates addresses. The chain
// restricted comes before all translations, so that no other program can translate packets
// that it drops. The chain sources4 has a rule for each prefix length in the set sources4,
// see package sourcelists. The chain untranslated comes after the chains of other programs. So it
// does not refuse connections that another program translates.
type table struct {
	name string
	opts *Options
	nft  *nftables.Conn
	// flush sends the transaction of nft that changes elements.
	flush func() error
	// maxElements limits the elements of one transaction.
	maxElements int
	// ranges counts the source ranges in the table.
	ranges sourcelists.Counts
	// If draining is true, the table refuses all connections to frontends that no other
	// backend translates, and ignores all others.
	draining bool
}

const (
	// socketBuffer is the size of the buffer for a transaction.
	socketBuffer = 32 << 20
	// maxTransaction limits the elements of a transaction. Other programs cannot change tables
	// meanwhile.
	maxTransaction = 20_000
	// elementSize is more than the size of any element in a transaction.
	elementSize = 256
	// maxChunk limits the elements of a netlink message, which must be below 64 KiB.
	maxChunk = 400
	// requestTimeout limits a request to nf_tables. Without this limit, a request waits
	// forever for further answers if the kernel refuses a whole transaction with one answer.
	requestTimeout = 2 * time.Minute
)

func newTable(opts *Options, socketBuffer int) (*table, error) {
	nft, err := nftables.New(nftables.WithNetNSFd(opts.NetNS), nftables.WithSockOptions(func(c *netlink.Conn) error {
		// Each request has a socket of its own.
		return errors.Join(c.SetWriteBuffer(socketBuffer), c.SetReadBuffer(socketBuffer), c.SetReadDeadline(time.Now().Add(requestTimeout)))
	}))
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	return &table{
		name: opts.tableName(), opts: opts, nft: nft, flush: nft.Flush,
		maxElements: min(socketBuffer/elementSize, maxTransaction), ranges: sourcelists.Counts{},
	}, nil
}

// countRanges adds n to the count of each source range of elements.
func countRanges(counts sourcelists.Counts, elements iter.Seq[element], n int) {
	for e := range elements {
		if e.set.kind == sources {
			counts.Add(e.set.family, []byte(e.key), n)
		}
	}
}

// sourceChain returns the chain that looks up source ranges of these lengths.
func (t *table) sourceChain(family api.Family, lengths sourcelists.Lengths) chain {
	return chain{&nftables.Chain{Table: t.table(), Name: sourcelists.ChainName(family)}, lengths.Rules(family)}
}

func (t *table) table() *nftables.Table {
	return &nftables.Table{Name: t.name, Family: nftables.TableFamilyINet}
}

// chain is a chain with its rules.
type chain struct {
	*nftables.Chain
	rules [][]expr.Any
}

// chains returns all chains. A chain follows the chains to which it jumps.
func (t *table) chains() []chain {
	var chains []chain
	add := func(name string, rules ...[]expr.Any) {
		chains = append(chains, chain{&nftables.Chain{Table: t.table(), Name: name}, rules})
	}
	base := func(name string, kind nftables.ChainType, at *nftables.ChainHook, priority *nftables.ChainPriority, rules ...[]expr.Any) {
		chains = append(chains, chain{&nftables.Chain{Table: t.table(), Name: name, Type: kind, Hooknum: at, Priority: priority}, rules})
	}
	hook := func(name string, at *nftables.ChainHook, priority *nftables.ChainPriority, rules ...[]expr.Any) {
		base(name, nftables.ChainTypeNAT, at, priority, rules...)
	}
	bit := t.opts.MasqueradeMark
	add("mark-all", append(nftrule.Mark(^bit, bit), nftrule.SetMeta(expr.MetaKeyMARK)))
	var outsiders [][]expr.Any
	switch {
	case t.opts.MasqueradeAll:
		outsiders = [][]expr.Any{nftrule.Jump("mark-all")}
	case t.opts.MasqueradeOutsiders:
		outsiders = t.opts.pods().Outsiders(nftrule.Jump("mark-all"))
	}
	add("mark-outsiders", outsiders...)
	add("reject-chain",
		[]expr.Any{nftrule.LoadMeta(expr.MetaKeyL4PROTO), nftrule.Equal(unix.IPPROTO_TCP), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}},
		[]expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}})

	var restrictions, services, untranslated, output, postrouting [][]expr.Any
	postrouting = append(postrouting, slices.Concat(
		nftrule.Mark(bit, 0), []expr.Any{nftrule.Equal(nftrule.Native(bit)...)}, nftrule.Mark(^uint32(0), bit),
		[]expr.Any{nftrule.SetMeta(expr.MetaKeyMARK), &expr.Masq{FullyRandom: true}}))
	for _, family := range families {
		add(fmt.Sprintf("frontend%d", family), t.frontendRules(family)...)
		only := fmt.Sprintf("only-sources%d", family)
		chains = append(chains, t.sourceChain(family, t.ranges.Lengths(family)))
		add(only, nftrule.Jump(sourcelists.ChainName(family)), nftrule.Drop())
		if t.draining {
			untranslated = append(untranslated, frontend(family).FollowedBy(in(frontends, family), nftrule.GoTo("reject-chain")[0]))
		} else {
			services = append(services, frontend(family).FollowedBy(in(frontends, family), nftrule.GoTo(fmt.Sprintf("frontend%d", family))[0]))
			restrictions = append(restrictions, frontend(family).FollowedBy(
				value(restricted, family), nftrule.SetMeta(expr.MetaKeyPRIORITY), nftrule.GoTo(only)[0]))
			refusals := fmt.Sprintf("untranslated%d", family)
			add(refusals,
				frontend(family).FollowedBy(in(drops, family), nftrule.Drop()[0]),
				frontend(family).FollowedBy(in(rejects, family), nftrule.GoTo("reject-chain")[0]))
			untranslated = append(untranslated, frontend(family).FollowedBy(in(frontends, family), nftrule.GoTo(refusals)[0]))
		}
		services = append(services, frontend(family).FollowedBy(translate(healthChecks, family)...))
		// The addresses in the set addresses are local only because of this instance. Without
		// these rules, packets to other ports of these addresses would reach programs on this
		// node.
		for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
			untranslated = append(untranslated, nftrule.NewKey(family).Destination().FollowedBy(in(addresses, family),
				nftrule.LoadMeta(expr.MetaKeyL4PROTO), nftrule.Equal(protocol), nftrule.GoTo("reject-chain")[0]))
		}
		// Masquerade this node's connections to these addresses, because endpoints may have no
		// route to the source. For IPv4, the kernel uses the destination as the source; for
		// IPv6, it uses any address of the node.
		output = append(output, nftrule.NewKey(family).Destination().FollowedBy(in(addresses, family), nftrule.Jump("mark-all")[0]))
		postrouting = append(postrouting, nftrule.NewKey(family).Source().Destination().ProtocolAndPort().FollowedBy(
			in(hairpins, family), &expr.Masq{FullyRandom: true}))
	}
	add("restricted", restrictions...)
	isNew := append(nftrule.InState(nftrule.StateNew), nftrule.Jump("restricted")...)
	base("sources-prerouting", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, sourcesPriority, isNew)
	base("sources-output", nftables.ChainTypeFilter, nftables.ChainHookOutput, sourcesPriority, isNew)
	add("services", services...)
	add("untranslated", untranslated...)
	refusal := nftrule.IgnoreReplies()
	hook("late-prerouting", nftables.ChainHookPrerouting, nftables.ChainPriorityLast, refusal, nftrule.Jump("untranslated"))
	hook("late-output", nftables.ChainHookOutput, nftables.ChainPriorityLast, refusal, nftrule.Jump("untranslated"))
	hook("prerouting", nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest, refusal, nftrule.Jump("services"))
	hook("output", nftables.ChainHookOutput, nftables.ChainPriorityNATDest, slices.Concat([][]expr.Any{refusal}, output, [][]expr.Any{nftrule.Jump("services")})...)
	hook("postrouting", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, postrouting...)
	return chains
}

// sourcesPriority is before the nat chains of all programs.
var sourcesPriority = nftables.ChainPriorityRef(*nftables.ChainPriorityNATDest - 10)

// frontendRules returns the rules for packets to frontends.
func (t *table) frontendRules(family api.Family) [][]expr.Any {
	lookup := func(kind setKind, then ...expr.Any) []expr.Any {
		return frontend(family).FollowedBy(append([]expr.Any{in(kind, family)}, then...)...)
	}
	rules := [][]expr.Any{
		append(nftrule.StartsHere(), lookup(nodeMasquerades, nftrule.Jump("mark-all")...)...),
	}
	for _, match := range append([][]expr.Any{nftrule.StartsHere()}, t.opts.pods().Matches()...) {
		rules = append(rules, append(match, frontend(family).FollowedBy(translate(redirects, family)...)...))
	}
	return append(rules,
		lookup(masquerades, nftrule.Jump("mark-all")...),
		nftrule.NewKey(family).Destination().FollowedBy(in(clusterIPs, family), nftrule.Jump("mark-outsiders")[0]))
}

// translate returns expressions that translate the destination if a map has the key.
func translate(kind setKind, family api.Family) []expr.Any {
	addrRegisters := 1
	if family == api.IPv6 {
		addrRegisters = 4
	}
	return []expr.Any{value(kind, family), nftrule.DNATTo(family, 0, addrRegisters)}
}

// value returns an expression that replaces the key by its value in a map.
func value(kind setKind, family api.Family) expr.Any {
	return &expr.Lookup{SourceRegister: nftrule.Reg(0), DestRegister: nftrule.Reg(0), IsDestRegSet: true, SetName: setID{kind, family}.name()}
}

// frontend returns a key of destination address, protocol and destination port.
func frontend(family api.Family) *nftrule.Key {
	return nftrule.NewKey(family).Destination().ProtocolAndPort()
}

// in returns an expression that matches if the key is in a set.
func in(kind setKind, family api.Family) expr.Any {
	return &expr.Lookup{SourceRegister: nftrule.Reg(0), SetName: setID{kind, family}.name()}
}

// comment returns the comment that a rule has in the kernel. It is a digest of the rule.
func comment(rule []expr.Any) []byte {
	h := fnv.New64a()
	for _, e := range rule {
		b, err := expr.Marshal(unix.NFPROTO_INET, e)
		if err != nil {
			panic(err) // cannot happen, because this package makes the expressions
		}
		h.Write(b)
	}
	return userdata.AppendString(nil, userdata.TypeComment, fmt.Sprintf("kpng %x", h.Sum64()))
}

// errChanged means that another program or another version of kpng has changed the table.
var errChanged = errors.New("the chains are not as this version makes them")

// read returns all elements of the table. If the sets or chains differ from those of this
// version, or if an element has the wrong size, it returns the other elements and
// errChanged. It stops when ctx ends.
func (t *table) read(ctx context.Context) (map[element]bool, error) {
	all := map[element]bool{}
	var changed error
	if exists, err := t.exists(); err != nil {
		return nil, err
	} else if !exists {
		return all, errChanged
	}
	for _, id := range allSets() {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		want := id.set(t.table())
		set, err := t.nft.GetSetByName(want.Table, want.Name)
		if err != nil && isErrno(err) && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("read set %s of table inet %s: %w", want.Name, t.name, err)
		}
		if err != nil || set.KeyType.GetNFTMagic() != want.KeyType.GetNFTMagic() || set.IsMap != want.IsMap {
			changed = errChanged
			continue
		}
		list, err := t.nft.GetSetElements(want)
		if err != nil {
			return nil, fmt.Errorf("read set %s of table inet %s: %w", want.Name, t.name, err)
		}
		for _, e := range list {
			_, isRange := sourcelists.ParseKey(e.Key)
			if len(e.Key) != int(want.KeyType.Bytes) || want.IsMap && len(e.Val) != int(want.DataType.Bytes) || id.kind == sources && !isRange {
				changed = errChanged
				continue
			}
			all[element{id, string(e.Key), string(e.Val)}] = true
		}
	}
	for i, family := range families {
		if changed == nil {
			break
		}
		old, err := t.oldSources(family, 1+i<<20)
		if err != nil {
			return nil, fmt.Errorf("read the source ranges of table inet %s: %w", t.name, err)
		}
		maps.Copy(all, old)
	}
	t.ranges = sourcelists.Counts{}
	countRanges(t.ranges, maps.Keys(all), 1)
	for _, c := range t.chains() {
		rules, err := t.nft.GetRules(c.Table, c.Chain)
		if err != nil {
			return nil, fmt.Errorf("read chain %s of table inet %s: %w", c.Name, t.name, err)
		}
		if !slices.EqualFunc(rules, c.rules, func(got *nftables.Rule, want []expr.Any) bool {
			return bytes.Equal(got.UserData, comment(want))
		}) {
			changed = errChanged
		}
	}
	return all, changed
}

// exists reports whether the table exists.
func (t *table) exists() (bool, error) {
	_, err := t.nft.ListTableOfFamily(t.name, nftables.TableFamilyINet)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if errors.Is(err, unix.EINVAL) { // the answer to a request for which the kernel has no module
		err = fmt.Errorf("%w: %w", errNoTables, err)
	}
	if err != nil {
		return false, fmt.Errorf("look for table inet %s: %w", t.name, explain(err))
	}
	return true, nil
}

// hasRules reports whether the table exists and has rules.
func (t *table) hasRules() (bool, error) {
	if exists, err := t.exists(); err != nil || !exists {
		return false, err
	}
	rules, err := t.nft.GetRules(t.table(), &nftables.Chain{Table: t.table(), Name: "prerouting"})
	if err != nil {
		return false, fmt.Errorf("read chain prerouting of table inet %s: %w", t.name, err)
	}
	return len(rules) > 0, nil
}

// create replaces the table by a new table with these elements. If the elements need
// several transactions, those of the set frontends are last. Between the transactions,
// the table may refuse connections to addresses that the instance makes local, and to
// frontends with source ranges, but does not accept connections that it must refuse.
func (t *table) create(elements map[element]bool) error {
	t.ranges = sourcelists.Counts{}
	t.nft.AddTable(t.table()) // because DelTable fails if the table is missing
	t.nft.DelTable(t.table())
	t.nft.AddTable(t.table())
	for _, id := range allSets() {
		if err := t.nft.AddSet(id.set(t.table()), nil); err != nil {
			return fmt.Errorf("create set %s: %w", id.name(), err)
		}
	}
	for _, c := range t.chains() {
		t.nft.AddChain(c.Chain)
		t.addRules(c)
	}
	var first, last []element
	for e := range elements {
		if e.set.kind == frontends {
			last = append(last, e)
		} else {
			first = append(first, e)
		}
	}
	slices.SortFunc(first, element.compare)
	all := append(first, last...)
	for {
		n := min(len(all), t.maxElements)
		if err := t.change(nil, all[:n:n]); err != nil {
			return err
		}
		if all = all[n:]; len(all) == 0 {
			return nil
		}
	}
}

// change removes and adds elements in one transaction.
func (t *table) change(remove, add []element) error {
	ranges := maps.Clone(t.ranges)
	countRanges(ranges, slices.Values(remove), -1)
	countRanges(ranges, slices.Values(add), 1)
	for i, list := range [][]element{remove, add} {
		slices.SortFunc(list, element.compare)
		for len(list) > 0 {
			id := list[0].set
			var chunk []nftables.SetElement
			for len(list) > 0 && list[0].set == id && len(chunk) < maxChunk {
				chunk = append(chunk, list[0].encode())
				list = list[1:]
			}
			f := t.nft.SetDeleteElements
			if i == 1 {
				f = t.nft.SetAddElements
			}
			if err := f(id.set(t.table()), chunk); err != nil {
				return fmt.Errorf("change set %s of table inet %s: %w", id.name(), t.name, err)
			}
		}
	}
	for _, family := range families {
		if lengths := ranges.Lengths(family); lengths != t.ranges.Lengths(family) {
			c := t.sourceChain(family, lengths)
			t.nft.FlushChain(c.Chain)
			t.addRules(c)
		}
	}
	if err := t.flush(); err != nil {
		return fmt.Errorf("change table inet %s: %w", t.name, explain(err))
	}
	t.ranges = ranges
	return nil
}

// addRules adds the rules of a chain.
func (t *table) addRules(c chain) {
	for _, rule := range c.rules {
		t.nft.AddRule(&nftables.Rule{Table: c.Table, Chain: c.Chain, Exprs: rule, UserData: comment(rule)})
	}
}

// delete deletes the table if it exists.
func (t *table) delete() error {
	exists, err := t.exists()
	if errors.Is(err, errNoTables) || err == nil && !exists {
		return nil
	}
	if err != nil {
		return err
	}
	t.nft.AddTable(t.table())
	t.nft.DelTable(t.table())
	if err := t.nft.Flush(); err != nil {
		return fmt.Errorf("delete table inet %s: %w", t.name, explain(err))
	}
	return nil
}

// errNoTables means that the kernel cannot have tables.
var errNoTables = errors.New("the kernel lacks nf_tables (module nf_tables)")

// explain adds the likely cause to errors of a kernel that cannot use nftables.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w (CAP_NET_ADMIN is missing)", err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w: %w", errNoTables, err)
	default:
		return err
	}
}
