// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/nodeview"
)

// chainID identifies a chain of one family.
type chainID struct{ table, name string }

// tables has the tables in the order in which they are written. Table filter is first: if
// a frontend loses its last endpoint, table filter must reject the frontend's packets
// before table nat stops translating them.
var tables = [...]string{filter, mangle, nat}

const filter, mangle, nat = "filter", "mangle", "nat"

// The names, without the prefix, of the chains that every instance has.
const (
	services    = "SERVICES"    // the first chain of each table
	nodePorts   = "NODEPORTS"   // a dispatch chain for node ports
	postrouting = "POSTROUTING" // masquerades marked packets
	markPacket  = "MARK"        // marks packets to be masqueraded
	outsiders   = "OUTSIDERS"   // marks packets to cluster IPs from outside the pod network
	reject      = "REJECT"
	ownNode     = "OWNNODE" // drops packets that neither this node nor its pods have sent
)

// The kinds of sets. Set names have the number of the family at the end, because IPv4 and
// IPv6 share the names.
const (
	rejectSet     = "REJECT"     // frontends whose packets are rejected: address, protocol and port
	dropSet       = "DROP"       // frontends whose packets are dropped: address, protocol and port
	clusterIPSet  = "CLUSTERIPS" // cluster IPs; packets to their unknown ports are rejected
	nodeAddresses = "NODE"       // the addresses of node ports
	hairpinSet    = "HAIRPIN"    // connections of endpoints to themselves: address, protocol and port, address
)

// setTypes has the type of each set.
var setTypes = map[string]string{
	rejectSet: "hash:ip,port", dropSet: "hash:ip,port", clusterIPSet: "hash:ip", nodeAddresses: "hash:ip",
	hairpinSet: "hash:ip,port,ip",
}

// rendered has the chains, entries and elements that a service needs in one family.
type rendered struct {
	// chains has the rules of the chains that only this service uses. A rule is a line,
	// without "-A" and the name of its chain, exactly as iptables-save prints it.
	chains map[chainID]string
	// entries are rules of dispatch chains. The key has the match of a rule, and the value
	// has the rest of the rule. An empty value adds no rule, but takes the match away from
	// other services.
	entries map[entryID]string
	// elements are the set elements that the service needs.
	elements map[element]bool
	// sources has the sources that the service admits at each restricted address.
	sources map[netip.Addr]*sourceList
	// counted has the chains that count connections. It is nil without Options.Stats.
	counted map[string]counted
	// rules is the number of rules in chains and entries.
	rules int
}

// entryID identifies a rule of a dispatch chain by the match of a frontend. The rest of
// the rule is a comment and a target.
type entryID struct {
	chain chainID
	match string
}

// element is an element of a set. The field set has the kind of the set, such as
// rejectSet.
type element struct{ set, text string }

func newRendered() *rendered {
	return &rendered{chains: map[chainID]string{}, entries: map[entryID]string{}, elements: map[element]bool{}, sources: map[netip.Addr]*sourceList{}}
}

func (r *rendered) isEmpty() bool { return len(r.chains)+len(r.entries)+len(r.elements) == 0 }

// matchRecent is the beginning of the match for session affinity. The kernel or iptables
// may lack this match.
const matchRecent = "-m recent "

func (r *rendered) hasAffinity() bool {
	for _, rules := range r.chains {
		if strings.Contains(rules, matchRecent) {
			return true
		}
	}
	return false
}

func (r *rendered) add(table, name string, rules []string) {
	r.chains[chainID{table, name}] = strings.Join(rules, "\n")
	r.rules += len(rules)
}

// environment has the properties of the node that affect rules.
type environment struct {
	// nodePorts are the addresses of node ports.
	nodePorts []netip.Addr
	// node has the addresses of the Node object. They affect source ranges.
	node []netip.Addr
	// pods are the CIDRs of pods.
	pods []netip.Prefix
}

func (e *environment) equal(o *environment) bool {
	return slices.Equal(e.nodePorts, o.nodePorts) && slices.Equal(e.node, o.node) && slices.Equal(e.pods, o.pods)
}

// renderer computes rules. Its results depend only on its fields and arguments.
type renderer struct {
	opts     *Options
	family   api.Family
	withSets bool
	env      environment
}

// name returns the full name of a chain.
func (r *renderer) name(suffix string) string { return r.opts.prefix() + suffix }

// isOwn reports whether a chain or set belongs to the instance.
func (o *Options) isOwn(name string) bool {
	suffix, ok := strings.CutPrefix(name, o.prefix())
	return ok && suffix != "" && strings.Trim(suffix, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") == ""
}

// hashed returns the name of a chain that belongs to one service. Names of services are
// too long for names of chains, so the result has a 75-bit hash of the parts.
func (r *renderer) hashed(kind string, parts ...any) string {
	h := sha256.New()
	for _, part := range append(parts, int(r.family)) {
		fmt.Fprintf(h, "%v\x00", part)
	}
	return r.name(kind + base32.StdEncoding.EncodeToString(h.Sum(nil))[:hashLen])
}

// hashLen is the number of characters of the hash in a name.
const hashLen = 15

func jump(target string) string { return "-j " + target }

// setMatch returns a match for packets whose fields are an element of a set.
func (r *renderer) setMatch(set, fields string) string {
	return fmt.Sprintf("-m set --match-set %s %s ", r.setName(set), fields)
}

func (r *renderer) setName(set string) string { return fmt.Sprint(r.name(set), int(r.family)) }

// prefixOf returns the prefix with only the address a.
func prefixOf(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

var protocolNames = map[api.Protocol]string{api.TCP: "tcp", api.UDP: "udp", api.SCTP: "sctp"}

// match returns the match of a frontend. The match of a node port does not contain an
// address.
func match(k *nodeview.FrontendKey) string {
	text := ""
	if k.Kind != nodeview.NodePort {
		text = "-d " + prefixOf(k.Addr).String()
	}
	if k.Port == 0 {
		return text
	}
	p := protocolNames[k.Protocol]
	return strings.TrimPrefix(text+" -p "+p+" -m "+p+" --dport "+strconv.Itoa(int(k.Port)), " ")
}

// fromHere matches packets that this node sends.
const fromHere = "-m addrtype --src-type LOCAL "

// podMatches returns matches of packets of this node's pods. A match that is not empty
// ends with a space.
func (r *renderer) podMatches() (matches []string) {
	for _, cidr := range r.env.pods {
		switch {
		case api.FamilyOf(cidr.Addr()) != r.family:
		case cidr.Bits() == 0:
			matches = append(matches, "")
		default:
			matches = append(matches, fmt.Sprintf("-s %s ", cidr.Masked()))
		}
	}
	for _, name := range r.opts.PodInterfaces {
		if prefix, ok := strings.CutSuffix(name, "*"); ok {
			name = prefix + "+"
		}
		matches = append(matches, fmt.Sprintf("-i %s ", name))
	}
	return matches
}

// jumps are the rules in the kernel's own chains that lead to the chains of the instance.
func (r *renderer) jumps() map[chainID]string {
	const isNew = "-m conntrack --ctstate NEW "
	forward := isNew
	if !r.opts.AcceptInvalid {
		forward = "-m conntrack --ctstate INVALID,NEW "
	}
	return map[chainID]string{
		{nat, "PREROUTING"}:    jump(r.name(services)),
		{nat, "OUTPUT"}:        jump(r.name(services)),
		{nat, "POSTROUTING"}:   jump(r.name(postrouting)),
		{mangle, "PREROUTING"}: isNew + jump(r.name(services)),
		{mangle, "OUTPUT"}:     isNew + jump(r.name(services)),
		{filter, "INPUT"}:      isNew + jump(r.name(services)),
		{filter, "FORWARD"}:    forward + jump(r.name(services)),
		{filter, "OUTPUT"}:     isNew + jump(r.name(services)),
	}
}

// skeleton returns the content that does not depend on services. The dispatch chains
// services and nodePorts are not part of it.
func (r *renderer) skeleton() *rendered {
	out := newRendered()
	bit := fmt.Sprintf("%#x", r.opts.MasqueradeMark)
	out.add(nat, r.name(markPacket), []string{fmt.Sprintf("-j MARK --set-xmark %s/%s", bit, bit)})
	var hairpin []string
	if r.withSets {
		hairpin = append(hairpin, "-m conntrack --ctstate DNAT "+r.setMatch(hairpinSet, "dst,dst,src")+jump(r.name(markPacket)))
	}
	out.add(nat, r.name(postrouting), append(hairpin,
		fmt.Sprintf("-m mark ! --mark %s/%s -j RETURN", bit, bit),
		fmt.Sprintf("-j MARK --set-xmark %s/0x0", bit),
		"-j MASQUERADE --random-fully",
	))
	if rules := r.outsiders(); len(rules) > 0 {
		out.add(nat, r.name(outsiders), rules)
	}
	icmp := "icmp-port-unreachable"
	if r.family == api.IPv6 {
		icmp = "icmp6-port-unreachable"
	}
	out.add(filter, r.name(ownNode), append(r.fromNode("-j RETURN"), "-j DROP"))
	out.add(filter, r.name(reject), []string{"-p tcp -j REJECT --reject-with tcp-reset", "-j REJECT --reject-with " + icmp})
	if r.withSets {
		for _, a := range r.nodePortAddrs() {
			out.elements[element{nodeAddresses, a.String()}] = true
		}
	}
	return out
}

// outsiders returns the rules that mark packets to cluster IPs. With MasqueradeAll, they
// mark all these packets. With MasqueradeOutsiders, they mark the packets from outside
// the pod network. If the options define no pods of the family, MasqueradeOutsiders adds
// no rules.
func (r *renderer) outsiders() (rules []string) {
	if !r.marksOutsiders() {
		return nil
	}
	if !r.opts.MasqueradeAll {
		for _, match := range r.podMatches() {
			rules = append(rules, match+"-j RETURN")
		}
	}
	return append(rules, jump(r.name(markPacket)))
}

// marksOutsiders reports whether outsiders returns rules.
func (r *renderer) marksOutsiders() bool {
	hasFamily := func(cidr netip.Prefix) bool { return api.FamilyOf(cidr.Addr()) == r.family }
	return r.opts.MasqueradeAll ||
		r.opts.MasqueradeOutsiders && (len(r.opts.PodInterfaces) > 0 || slices.ContainsFunc(r.env.pods, hasFamily))
}

// nodePortAddrs returns the addresses of node ports in the renderer's family.
func (r *renderer) nodePortAddrs() (addrs []netip.Addr) {
	for _, a := range r.env.nodePorts {
		if api.FamilyOf(a) == r.family && !a.IsLoopback() {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// serviceRenderer renders one service.
type serviceRenderer struct {
	*renderer
	view *api.View
	key  string
	out  *rendered
	// last is the previous record of the service, or nil.
	last *record

	// The fields below have results that many frontends of the service share.
	lists    map[listID]string
	kept     map[uint64][]keptList
	wrappers map[wrapper]string
	targets  map[nodeview.ListID]map[netip.AddrPort]bool
	ranges   map[frontends.SourcesID]*sourceList
	comments map[*api.PortMapping]string
}

// renderService returns the rules and elements that view needs. If view is nil,
// the result is empty. The argument last is the previous record of the service in the same
// environment, or nil.
func (r *renderer) renderService(view *api.View, last *record) *rendered {
	s := serviceRenderer{
		renderer: r, view: view, out: newRendered(), last: last,
		lists: map[listID]string{}, kept: map[uint64][]keptList{}, wrappers: map[wrapper]string{},
		targets: map[nodeview.ListID]map[netip.AddrPort]bool{}, ranges: map[frontends.SourcesID]*sourceList{},
		comments: map[*api.PortMapping]string{},
	}
	if view == nil {
		return s.out
	}
	s.key = view.Key().String()
	if !r.opts.AcceptUnknownPorts {
		for _, a := range view.Service.IPs.ClusterIPs.Family(r.family) {
			if r.withSets {
				s.out.elements[element{clusterIPSet, a.String()}] = true
			} else {
				f := nodeview.Frontend{FrontendKey: nodeview.FrontendKey{Kind: nodeview.ClusterIP, Addr: a, Family: r.family}}
				s.out.entries[s.entryOf(filter, &f)] = s.comment(&f) + jump(r.name(reject))
			}
		}
	}
	for f := range nodeview.Frontends(view) {
		if f.Family != r.family {
			continue
		}
		id := s.entryOf(filter, &f)
		for i, rule := range [len(tables)]string{s.filterTarget(&f), s.mangleTarget(&f), s.natTarget(&f)} {
			id.chain.table = tables[i]
			if rule != "" {
				s.out.entries[id] = s.comment(&f) + rule
				s.out.rules++
			} else if _, ok := s.out.entries[id]; !ok {
				s.out.entries[id] = "" // the frontend needs no entry in this table
			}
		}
	}
	return s.out
}

// entryOf returns the identifier of the entry of a frontend in a table.
func (s *serviceRenderer) entryOf(table string, f *nodeview.Frontend) entryID {
	return entryID{chainID{table, s.name(dispatchChain(&f.FrontendKey))}, match(&f.FrontendKey)}
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9._:/-]{1,200}$`)

// comment returns a comment with the name of the service port. It returns no comment if
// the name has unusual characters, which the API does not allow.
func (s *serviceRenderer) comment(f *nodeview.Frontend) string {
	if comment, ok := s.comments[f.ServicePort]; ok {
		return comment
	}
	text := s.key
	if f.ServicePort != nil && f.ServicePort.Name != "" {
		text += ":" + f.ServicePort.Name
	}
	comment := ""
	if plainName.MatchString(text) {
		comment = fmt.Sprintf("-m comment --comment %q ", text)
	}
	s.comments[f.ServicePort] = comment
	return comment
}

// endNAT ends table nat for a packet that table filter drops. Otherwise a rule of
// another service or program could translate it.
const endNAT = "-j ACCEPT"

// wrapper identifies a chain of table nat that leads to chains of lists.
type wrapper struct {
	masquerade      nodeview.Masquerade
	node, elsewhere string // the chains of lists
}

// natTarget returns the target in table nat for the packets of f. It returns
// "" if there is no endpoint for any packet. Frontends with the same lists share a chain.
func (s *serviceRenderer) natTarget(f *nodeview.Frontend) string {
	w := wrapper{masquerade: f.Masquerade, elsewhere: s.list(f, &f.Elsewhere)}
	if f.Masquerade == nodeview.MasqueradeNode {
		w.node = s.list(f, &f.Node)
	}
	switch {
	case w.node == "" && w.elsewhere == "":
		return ""
	case f.Masquerade == nodeview.MasqueradeIfConfigured && !s.marksOutsiders():
		return jump(w.elsewhere)
	}
	chain, ok := s.wrappers[w]
	if !ok {
		kind := "X" // the chain of external frontends
		if f.Masquerade == nodeview.MasqueradeIfConfigured {
			kind = "C" // the chain of a cluster IP
		}
		chain = s.hashed(kind, s.key, w.masquerade, w.node, w.elsewhere)
		s.out.add(nat, chain, s.wrap(w))
		s.wrappers[w] = chain
	}
	return jump(chain)
}

// wrap returns the rules of the chain for w.
func (s *serviceRenderer) wrap(w wrapper) (rules []string) {
	switch w.masquerade {
	case nodeview.MasqueradeIfConfigured:
		return []string{jump(s.name(outsiders)), jump(w.elsewhere)}
	case nodeview.MasqueradeAll:
		return []string{jump(s.name(markPacket)), jump(w.elsewhere)}
	}
	if w.node != "" {
		rules = append(rules, fromHere+jump(s.name(markPacket)))
		rules = append(rules, s.fromNode(jump(w.node))...)
	}
	if w.elsewhere == "" {
		return append(rules, endNAT)
	}
	return append(rules, jump(w.elsewhere))
}

// fromNode returns rules for packets of this node and its pods. Each rule ends with the
// content of end.
func (r *renderer) fromNode(end string) []string {
	rules := []string{fromHere + end}
	for _, match := range r.podMatches() {
		rules = append(rules, match+end)
	}
	return rules
}

// filterTarget returns the target in table filter for the packets of f that
// table nat did not translate. It returns "" if these packets need no rule, or if a set
// handles them.
func (s *serviceRenderer) filterTarget(f *nodeview.Frontend) string {
	verdict := cmp.Or(f.Elsewhere.Verdict, f.Node.Verdict)
	set, target := rejectSet, s.name(reject)
	if verdict != nodeview.Reject {
		set, target = dropSet, "DROP"
	}
	switch {
	case verdict == nodeview.Forward:
		return ""
	case s.reachesItself(f, &f.Node):
		return jump(s.name(ownNode))
	case s.withSets && f.Kind != nodeview.NodePort && f.Port != 0:
		s.out.elements[element{set, fmt.Sprintf("%s,%s:%d", f.Addr, protocolNames[f.Protocol], f.Port)}] = true
		return ""
	}
	return jump(target)
}

// reachesItself reports whether an endpoint of t has the address and port of f. If table
// nat selects this endpoint, the packet does not change, so table filter cannot recognize
// that it was translated.
func (s *serviceRenderer) reachesItself(f *nodeview.Frontend, t *nodeview.Traffic) bool {
	if len(t.Endpoints) == 0 {
		return false
	}
	targets, ok := s.targets[t.List]
	if !ok {
		targets = make(map[netip.AddrPort]bool, len(t.Endpoints))
		for _, e := range t.Endpoints {
			targets[netip.AddrPortFrom(e.Addr, uint16(e.Port))] = true
		}
		s.targets[t.List] = targets
	}
	return targets[netip.AddrPortFrom(f.Addr, uint16(f.Port))]
}
