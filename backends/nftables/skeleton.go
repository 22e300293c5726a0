// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/internal/netfilter"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// The skeleton is the part of the table that does not depend on services: maps and sets,
// without elements, and the chains that look into them.

// hook says where a base chain gets its packets. The zero value is that of other chains.
type hook struct {
	number   uint32
	priority int32
	kind     string
	policy   uint32
}

func nat(number uint32, priority int32) hook { return hook{number, priority, "nat", nfAccept} }

// chain is a chain and its rules, encoded.
type chain struct {
	name string
	hook
	rules []string
}

// layout describes a map or set.
type layout struct {
	name                                      string
	flags, keyType, keyLen, dataType, dataLen uint32
	// size is how many elements it may have, 0 if there is no limit.
	size uint32
	// elements is how many elements the kernel says it has, -1 if it does not say so.
	elements int
	// fields are the lengths of the parts of an interval set's keys.
	fields []uint32
}

// like reports whether two maps have the same layout.
func (s *layout) like(o *layout) bool {
	return s.flags == o.flags && s.keyType == o.keyType && s.keyLen == o.keyLen && s.dataType == o.dataType &&
		(s.dataLen == o.dataLen || s.dataType == unix.NFT_DATA_VERDICT)
}

var families = []api.Family{api.IPv4, api.IPv6}

// skeletonChains returns the chains of the skeleton, those first that others lead to.
func (o *Options) skeletonChains() []chain {
	var chains []chain
	add := func(name string, h hook, rules ...[]expr.Any) {
		chains = append(chains, chain{name, h, encodeRules(rules...)})
	}
	regular := hook{}

	// Connections to be masqueraded carry the mark up to postrouting.
	bit := o.MasqueradeMark
	add("mark-all", regular, append(mark(^bit, bit), setMeta(expr.MetaKeyMARK)))
	add("mark-node", regular, append(startsHere(), jump("mark-all")...))
	add("mark-outsiders", regular, o.markOutsiders()...)

	for _, s := range []match{matchService, matchAddress} {
		var rules [][]expr.Any
		for _, family := range families {
			rules = append(rules, fromSources(mapID{sources, s, family}))
		}
		add(matchNames[s]+"-sources", regular, append(rules, verdictDrop())...)
	}

	add(rejectChain, regular,
		[]expr.Any{loadMeta(expr.MetaKeyL4PROTO), equal(unix.IPPROTO_TCP), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}},
		[]expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}})

	for _, m := range allMaps() {
		if m.kind == endpoints || m.kind == nodeEndpoints {
			// A slot may be missing when its number was drawn before a transaction and is looked up
			// after it. Such a packet must not pass as it is: the whole connection would.
			add(m.name(), regular, translate(m), verdictDrop())
		}
	}

	// Traffic that starts on this node has maps of its own where the external traffic policy
	// is Local.
	add("node-services", regular, lookupSharedChains(nodeFrontends)...)
	short := [][]expr.Any{append(startsHere(), goTo("node-services")...)}
	for _, match := range o.podMatches() {
		short = append(short, append(match, goTo("node-services")...))
	}
	add("short-circuit", regular, short...)

	// As with slots, the chain of a class may just have been removed.
	rules := append(lookupSharedChains(frontends), append(hasPriority(), verdictDrop()...))
	if !o.AcceptUnknownPorts {
		for _, family := range families {
			destination, _ := loadDestination(family, 0)
			rule := append(matchFamily(family), destination, in(mapID{kind: clusterIPs, family: family}))
			rules = append(rules, append(rule, goTo(rejectChain)...))
		}
	}
	add("services", regular, rules...)

	// Only the first packet of a connection gets here.
	add("prerouting", nat(unix.NF_INET_PRE_ROUTING, o.DNATPriority), jump("services"))
	add("output", nat(unix.NF_INET_LOCAL_OUT, o.DNATPriority), jump("services"))
	rules = [][]expr.Any{
		append(hasPriority(), &expr.Immediate{Register: reg(0), Data: native(0)}, setMeta(expr.MetaKeyPRIORITY)),
		slices.Concat(mark(bit, 0), []expr.Any{equal(native(bit)...)}, mark(^uint32(0), bit),
			[]expr.Any{setMeta(expr.MetaKeyMARK), &expr.Masq{FullyRandom: true}}),
	}
	for _, s := range []match{matchService, matchAddress} {
		for _, family := range families {
			rules = append(rules, hairpin(s, family))
		}
	}
	// Here a cluster IP that has a service, of whatever proxy, is translated already, and what
	// goes to an address of this node does not get here.
	for _, cidr := range o.ServiceCIDRs {
		rules = append(rules, append(toPrefix(cidr), verdictDrop()...))
	}
	add("postrouting", nat(unix.NF_INET_POST_ROUTING, o.SNATPriority), rules...)
	return chains
}

func lookupSharedChains(r mapKind) (rules [][]expr.Any) {
	for _, family := range families {
		for _, s := range []match{matchService, matchNodePort, matchAddress} {
			rules = append(rules, lookupSharedChain(mapID{r, s, family}))
		}
	}
	return rules
}

// startsHere matches packets that this node sends.
func startsHere() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: reg(0), ResultADDRTYPE: true, FlagSADDR: true},
		equal(native(unix.RTN_LOCAL)...),
	}
}

// podMatches returns what matches packets of this node's pods.
func (o *Options) podMatches() (matches [][]expr.Any) {
	for _, name := range o.PodInterfaces {
		matches = append(matches, fromInterface(name))
	}
	for _, cidr := range o.ClusterCIDRs {
		matches = append(matches, fromPrefix(cidr))
	}
	return matches
}

// markOutsiders returns the rules that mark what comes to cluster IPs from outside the pod
// network. Where nothing says what the pods of a family are, nothing is marked.
func (o *Options) markOutsiders() (rules [][]expr.Any) {
	switch {
	case o.MasqueradeAll:
		return [][]expr.Any{jump("mark-all")}
	case !o.MasqueradeOutsiders:
		return nil
	}
	for _, match := range o.podMatches() {
		rules = append(rules, append(match, &expr.Verdict{Kind: expr.VerdictReturn}))
	}
	if len(o.PodInterfaces) > 0 {
		return append(rules, jump("mark-all"))
	}
	for _, family := range families {
		if slices.ContainsFunc(o.ClusterCIDRs, func(cidr netip.Prefix) bool { return api.FamilyOf(cidr.Addr()) == family }) {
			rules = append(rules, append(matchFamily(family), jump("mark-all")...))
		}
	}
	return rules
}

// fromSources returns the rule that admits packets from the source ranges in m.
func fromSources(m mapID) []expr.Any {
	load, register := loadFrontend(m.match, m.family)
	source, _ := loadSource(m.family, register)
	rule := append(matchFamily(m.family), load...)
	return append(rule, source, in(m), &expr.Verdict{Kind: expr.VerdictReturn})
}

// hasPriority matches packets that carry the number of a class or slot.
func hasPriority() []expr.Any {
	number := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	return []expr.Any{
		loadMeta(expr.MetaKeyPRIORITY),
		&expr.Byteorder{SourceRegister: reg(0), DestRegister: reg(0), Op: expr.ByteorderHton, Len: 4, Size: 4},
		&expr.Cmp{Op: expr.CmpOpGte, Register: reg(0), Data: number(firstPriority)},
		&expr.Cmp{Op: expr.CmpOpLte, Register: reg(0), Data: number(lastPriority)},
	}
}

// listing is what the kernel has of a table, apart from elements.
type listing struct {
	exists, dormant bool
	sets            map[string]layout
	chains          map[string]chain // with rules in canonical form
}

// inspect reads the table of that name.
func (c *conn) inspect(ctx context.Context, name string) (*listing, error) {
	c = &conn{c.Conn, name, c.seed}
	exists, awake, err := c.exists(ctx)
	if err != nil || !exists {
		return &listing{}, err
	}
	l := &listing{exists: true, dormant: !awake}
	if l.sets, err = c.sets(ctx); err != nil {
		return nil, err
	}
	hooks, err := c.chains(ctx)
	if err != nil {
		return nil, err
	}
	l.chains = make(map[string]chain, len(hooks))
	for name, h := range hooks {
		l.chains[name] = chain{name: name, hook: h}
	}
	err = c.rules(ctx, func(name, rule string) {
		ch := l.chains[name]
		ch.rules = append(ch.rules, rule)
		l.chains[name] = ch
	})
	return l, err
}

// active reports whether packets come to the table.
func (l *listing) active() bool {
	for _, c := range l.chains {
		if c.hook != (hook{}) {
			return !l.dormant
		}
	}
	return false
}

// fits reports whether elements that the table has are of use: whether it has no other maps
// than it should, and none with another layout.
func (l *listing) fits() bool {
	want := map[string]layout{}
	for _, m := range allMaps() {
		want[m.name()] = m.layout()
	}
	for name, s := range l.sets {
		if should, ok := want[name]; !isOwn(name) && (!ok || !should.like(&s)) {
			return false
		}
	}
	return true
}

// loadSkeleton brings the skeleton into the kernel, or what differs from it, in one
// transaction. Elements stay. It returns conn.others from before.
//
// If the table has maps of another layout, as other versions of this package make, the
// skeleton is loaded into a table of another name, without base chains, so that services are
// served by the present table until [table.replaceTable].
func (t *table) loadSkeleton(ctx context.Context) (others int64, err error) {
	if others, err = t.conn.others(ctx); err != nil {
		return 0, err
	}
	names := t.opts.tables()
	var tables [len(names)]*listing
	for i, name := range names {
		if tables[i], err = t.conn.inspect(ctx, name); err != nil {
			return 0, err
		}
	}
	rank := func(l *listing) int {
		switch {
		case l.active() && l.fits():
			return 2
		case !l.active():
			return 1
		default:
			return 0
		}
	}
	now, other := 0, 1
	if rank(tables[1]) > rank(tables[0]) {
		now, other = 1, 0
	}
	t.conn.table, t.replaced = names[now], ""
	if tables[other].exists {
		t.replaced = names[other]
	}
	chains := t.skeletonChains()
	if tables[other].active() && !tables[now].active() {
		klog.FromContext(ctx).Info("Filling a new table, as the layout of the present one differs", "table", names[now], "present", names[other])
		chains = slices.DeleteFunc(chains, func(c chain) bool { return c.hook != (hook{}) })
	}
	return others, t.load(ctx, tables[now], chains, func(*wire) {})
}

// replaceTable makes the table that a pass has filled the one that serves, and deletes the
// other one, in one transaction.
func (t *table) replaceTable(ctx context.Context) error {
	if t.replaced == "" {
		return nil
	}
	present, err := t.conn.inspect(ctx, t.conn.table)
	if err != nil {
		return err
	}
	err = t.load(ctx, present, t.skeletonChains(), func(w *wire) { w.deleteTable(t.replaced) })
	if err == nil {
		t.replaced = ""
	}
	return err
}

// load brings chains and the maps into the table, or what present has not, with what finish adds.
func (t *table) load(ctx context.Context, present *listing, chains []chain, finish func(*wire)) error {
	if present.dormant && present.fits() { // a transaction that wakes it may not add base chains
		if err := t.conn.transact(ctx, func(w *wire) { w.newTable() }); err != nil {
			return fmt.Errorf("load table inet %s: %w", t.conn.table, err)
		}
	}
	err := t.conn.transact(ctx, func(w *wire) {
		if present.exists && !present.fits() {
			w.deleteTable(w.table)
			present = &listing{}
		}
		if !present.exists {
			w.newTable()
		}
		for _, m := range allMaps() {
			if _, ok := present.sets[m.name()]; !ok {
				w.newSet(m.layout())
			}
		}
		w.changeChains(present.chains, chains)
		finish(w)
	})
	if err != nil {
		return fmt.Errorf("load table inet %s: %w", t.conn.table, err)
	}
	t.skeleton = make(map[string]digest, len(chains))
	for _, c := range chains {
		t.skeleton[c.name] = digestOf(t.conn.seed, c.hook, c.rules)
	}
	return nil
}

// changeChains adds messages that make present chains like those wanted, or make them.
func (w *wire) changeChains(present map[string]chain, want []chain) {
	changed := slices.DeleteFunc(slices.Clone(want), func(c chain) bool {
		p, ok := present[c.name]
		return ok && c.hook == p.hook && slices.EqualFunc(c.rules, p.rules, func(rule, canonicalRule string) bool {
			return canonical([]byte(rule)) == canonicalRule
		})
	})
	for _, c := range changed {
		if _, ok := present[c.name]; ok {
			w.flushChain(c.name)
		}
	}
	for _, c := range changed {
		p, ok := present[c.name]
		if ok && p.hook != c.hook { // the kernel does not change a hook in place
			w.deleteChain(c.name)
		}
		if !ok || p.hook != c.hook {
			w.newChain(c.name, c.hook)
		}
	}
	for _, c := range changed {
		for _, rule := range c.rules {
			w.rule(c.name, rule)
		}
	}
}

// digestOf returns the digest of a chain with these rules, encoded.
func digestOf(seed maphash.Seed, h hook, rules []string) digest {
	d := digest{sum: maphash.Comparable(seed, h)}
	for _, rule := range rules {
		d.addRule(seed, canonical([]byte(rule)))
	}
	return d
}

// addRule adds a rule in canonical form to the digest of a chain.
func (d *digest) addRule(seed maphash.Seed, rule string) {
	d.n++
	d.sum = d.sum*31 + maphash.String(seed, rule)
}

// canonical returns a form of an encoded rule that is the same for a rule as it was sent and
// as the kernel lists it. The kernel sorts the attributes of an expression in its own way, and
// adds some that have their default values.
func canonical(rule []byte) string {
	var b []byte
	for _, expression := range netfilter.Attributes(rule) {
		var name string
		for attr, v := range netfilter.Attributes(expression) {
			switch attr {
			case unix.NFTA_EXPR_NAME:
				name = netfilter.String(v)
				b = append(append(b, name...), 0)
			case unix.NFTA_EXPR_DATA:
				b = appendCanonical(b, name, v)
			}
		}
	}
	return string(b)
}

// nested names the attributes of expressions that consist of attributes themselves, and what
// these are called here.
var nested = map[string]map[uint16]string{
	"cmp":       {unix.NFTA_CMP_DATA: "data"},
	"immediate": {unix.NFTA_IMMEDIATE_DATA: "data"},
	"bitwise":   {unix.NFTA_BITWISE_MASK: "data", unix.NFTA_BITWISE_XOR: "data"},
	"data":      {unix.NFTA_DATA_VERDICT: "verdict"},
}

func appendCanonical(b []byte, of string, data []byte) []byte {
	type attribute struct {
		number uint16
		v      []byte
	}
	var attributes []attribute
	for number, v := range netfilter.Attributes(data) {
		if inner, ok := nested[of][number]; ok {
			v = appendCanonical(nil, inner, v)
		} else if of == "nat" && number == unix.NFTA_NAT_FLAGS {
			// Newer kernels note here that there are registers of an address and a port.
			v = binary.BigEndian.AppendUint32(nil, binary.BigEndian.Uint32(v)&^3)
		}
		if isZero := !slices.ContainsFunc(v, func(c byte) bool { return c != 0 }); !isZero {
			attributes = append(attributes, attribute{number, v})
		}
	}
	slices.SortFunc(attributes, func(a, b attribute) int { return cmp.Compare(a.number, b.number) })
	for _, a := range attributes {
		b = binary.NativeEndian.AppendUint16(b, a.number)
		b = binary.NativeEndian.AppendUint16(b, uint16(len(a.v)))
		b = append(b, a.v...)
	}
	return b
}
