// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
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
	// elements are the elements of sets that the service needs.
	elements map[element]bool
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
	return &rendered{map[chainID]string{}, map[entryID]string{}, map[element]bool{}}
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
}

// environment has the properties of the node that affect rules.
type environment struct {
	// nodePorts are the addresses of node ports.
	nodePorts []netip.Addr
	// The field node has the addresses of the Node object, which affect source ranges.
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
	return r.name(kind + base32.StdEncoding.EncodeToString(h.Sum(nil))[:15])
}

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
	var parts []string
	if k.Kind != nodeview.NodePort {
		parts = append(parts, "-d "+prefixOf(k.Addr).String())
	}
	if k.Port != 0 {
		p := protocolNames[k.Protocol]
		parts = append(parts, fmt.Sprintf("-p %s -m %s --dport %d", p, p, k.Port))
	}
	return strings.Join(parts, " ")
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

// skeleton returns the content that does not depend on services. The chains services and
// nodePorts are not part of it, because they are dispatch chains.
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
	out.add(filter, r.name(reject), []string{"-p tcp -j REJECT --reject-with tcp-reset", "-j REJECT --reject-with " + icmp})
	if r.withSets {
		for _, a := range r.nodePortAddrs() {
			out.elements[element{nodeAddresses, a.String()}] = true
		}
	}
	return out
}

// outsiders returns the rules that mark packets to cluster IPs. With MasqueradeAll, they
// mark all these packets, and with MasqueradeOutsiders, those from outside the pod
// network. If the options define no pods of the family, MasqueradeOutsiders adds no
// rules.
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
	se  *api.ServiceEndpoints
	key string
	out *rendered
}

// The method service returns the rules and elements that the view se needs. If se is nil,
// the result is empty.
func (r *renderer) service(se *api.ServiceEndpoints) *rendered {
	s := serviceRenderer{r, se, "", newRendered()}
	if se == nil {
		return s.out
	}
	s.key = se.Key().String()
	if !r.opts.AcceptUnknownPorts {
		for _, a := range se.Service.IPs.ClusterIPs.Family(r.family) {
			if r.withSets {
				s.out.elements[element{clusterIPSet, a.String()}] = true
			} else {
				s.entry(filter, &nodeview.Frontend{FrontendKey: nodeview.FrontendKey{Kind: nodeview.ClusterIP, Addr: a, Family: r.family}}, r.name(reject))
			}
		}
	}
	for f := range nodeview.Frontends(se) {
		if f.Family != r.family {
			continue
		}
		s.entry(mangle, &f, s.restricted(&f))
		s.entry(nat, &f, s.translated(&f))
		s.entry(filter, &f, s.untranslated(&f))
	}
	return s.out
}

// entry adds the entry of a frontend to its dispatch chain. If target is empty, the
// frontend needs no entry.
func (s *serviceRenderer) entry(table string, f *nodeview.Frontend, target string) {
	id := entryID{chainID{table, s.name(dispatchChain(&f.FrontendKey))}, match(&f.FrontendKey)}
	if target != "" {
		s.out.entries[id] = s.comment(f) + jump(target)
	} else if _, ok := s.out.entries[id]; !ok {
		s.out.entries[id] = ""
	}
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9._:/-]{1,200}$`)

// comment returns a comment with the name of the service port. It returns no comment if
// the name has unusual characters, which the API does not allow.
func (s *serviceRenderer) comment(f *nodeview.Frontend) string {
	text := s.key
	if f.ServicePort != nil && f.ServicePort.Name != "" {
		text += ":" + f.ServicePort.Name
	}
	if !plainName.MatchString(text) {
		return ""
	}
	return fmt.Sprintf("-m comment --comment %q ", text)
}

// port returns a text that identifies the service port of f.
func port(f *nodeview.Frontend) string {
	if f.ServicePort == nil {
		return "all"
	}
	return fmt.Sprint(f.ServicePort.Protocol, f.ServicePort.Port)
}

// endNAT ends table nat for a packet that table filter drops. Otherwise a rule of
// another service or program could translate it.
const endNAT = "-j ACCEPT"

// The method translated returns the chain of table nat for the packets of f. It returns
// "" if there is no endpoint for any packet.
func (s *serviceRenderer) translated(f *nodeview.Frontend) string {
	var rules []string
	kind := "C" // the chain of a cluster IP
	switch f.Masquerade {
	case nodeview.MasqueradeIfConfigured:
		list := s.list(f, &f.Elsewhere)
		if list == "" || !s.marksOutsiders() {
			return list
		}
		rules = append(rules, jump(s.name(outsiders)), jump(list))
	case nodeview.MasqueradeAll:
		kind = "X" // the chain of external frontends
		if list := s.list(f, &f.Elsewhere); list != "" {
			rules = append(rules, jump(s.name(markPacket)), jump(list))
		}
	case nodeview.MasqueradeNode:
		kind = "X"
		if list := s.list(f, &f.Node); list != "" {
			rules = append(rules, fromHere+jump(s.name(markPacket)))
			rules = append(rules, s.fromNode(jump(list))...)
		}
		if list := s.list(f, &f.Elsewhere); list != "" {
			rules = append(rules, jump(list))
		} else if len(rules) > 0 {
			rules = append(rules, endNAT)
		}
	}
	if len(rules) == 0 {
		return ""
	}
	chain := s.hashed(kind, s.key, port(f))
	s.out.add(nat, chain, rules)
	return chain
}

// The method restricted returns the chain of table mangle that drops packets to f from
// other sources than those that f admits. It returns "" if f admits all sources. Table
// mangle is before table nat, so a rule of another program cannot translate such packets
// first.
func (s *serviceRenderer) restricted(f *nodeview.Frontend) string {
	if !f.Sources.Restricted {
		return ""
	}
	var rules []string
	for _, prefix := range f.Sources.Prefixes(s.env.node) {
		rules = append(rules, fmt.Sprintf("-s %s -j RETURN", prefix.Masked()))
	}
	chain := s.hashed("F", s.key, port(f), f.Addr)
	s.out.add(mangle, chain, append(rules, "-j DROP"))
	return chain
}

// fromNode returns rules for packets of this node and its pods. Each rule ends with the
// content of end.
func (s *serviceRenderer) fromNode(end string) []string {
	rules := []string{fromHere + end}
	for _, match := range s.podMatches() {
		rules = append(rules, match+end)
	}
	return rules
}

// The method untranslated returns the target in table filter for the packets of f that
// table nat did not translate. It returns "" if these packets need no rule, or if a set
// handles them.
func (s *serviceRenderer) untranslated(f *nodeview.Frontend) string {
	verdict := cmp.Or(f.Elsewhere.Verdict, f.Node.Verdict)
	set, target := rejectSet, s.name(reject)
	if verdict != nodeview.Reject {
		set, target = dropSet, "DROP"
	}
	switch {
	case verdict == nodeview.Forward:
		return ""
	case reachesItself(f, &f.Node):
		chain := s.hashed("R", s.key, port(f), f.Addr)
		s.out.add(filter, chain, append(s.fromNode("-j RETURN"), "-j DROP"))
		return chain
	case s.withSets && f.Kind != nodeview.NodePort && f.Port != 0:
		s.out.elements[element{set, fmt.Sprintf("%s,%s:%d", f.Addr, protocolNames[f.Protocol], f.Port)}] = true
		return ""
	}
	return target
}

// reachesItself reports whether an endpoint of t has the address and port of f. If table
// nat selects this endpoint, the packet does not change, so table filter cannot recognize
// that it was translated.
func reachesItself(f *nodeview.Frontend, t *nodeview.Traffic) bool {
	return slices.ContainsFunc(t.Endpoints, func(e nodeview.Target) bool { return e.Addr == f.Addr && e.Port == f.Port })
}

// list adds the chain that selects an endpoint of t, and returns its name. It returns ""
// if the verdict of t is not Forward.
func (s *serviceRenderer) list(f *nodeview.Frontend, t *nodeview.Traffic) string {
	if t.Verdict != nodeview.Forward {
		return ""
	}
	chain := s.hashed("L", s.key, port(f), uint64(t.List))
	if _, ok := s.out.chains[chainID{nat, chain}]; ok {
		return chain
	}
	var known, random []string
	for i := range t.Endpoints {
		protocol, target := s.endpoint(f, &t.Endpoints[i])
		record := ""
		if f.Affinity > 0 {
			clients := s.clients(f, &t.Endpoints[i])
			record = matchRecent + "--set " + clients
			known = append(known, fmt.Sprintf("%s%s--update --seconds %d --reap %s%s", protocol, matchRecent, int64(f.Affinity/time.Second), clients, jump(target)))
		}
		random = append(random, protocol+oneIn(len(t.Endpoints)-i)+record+jump(target))
	}
	s.out.add(nat, chain, append(known, random...))
	return chain
}

// The method endpoint returns the target that sends packets of f to the endpoint e. If a
// rule with this target must match the protocol, the result protocol is that match. A
// connection of the endpoint to itself is masqueraded: by an element of a set or, if that
// is not possible, by a rule of a chain, which then is the target.
func (s *serviceRenderer) endpoint(f *nodeview.Frontend, e *nodeview.Target) (protocol, target string) {
	if e.Port != 0 {
		protocol = "-p " + protocolNames[f.Protocol] + " "
	}
	target = "DNAT --to-destination " + destination(e)
	switch {
	case !e.Local:
	case s.withSets && e.Port != 0:
		s.out.elements[element{hairpinSet, fmt.Sprintf("%s,%s:%d,%s", e.Addr, protocolNames[f.Protocol], e.Port, e.Addr)}] = true
	default:
		chain := s.hashed("E", s.key, port(f), destination(e))
		s.out.add(nat, chain, []string{
			fmt.Sprintf("-s %s %s", prefixOf(e.Addr), jump(s.name(markPacket))),
			protocol + jump(target),
		})
		return "", chain
	}
	return protocol, target
}

// destination returns the address to which packets for e are sent. It includes the port
// unless e stands for all ports.
func destination(e *nodeview.Target) string {
	if e.Port == 0 {
		return e.Addr.String()
	}
	return netip.AddrPortFrom(e.Addr, uint16(e.Port)).String()
}

// clients returns options of the iptables match "recent". The options select the list of
// the clients of f that are connected to e.
func (s *serviceRenderer) clients(f *nodeview.Frontend, e *nodeview.Target) string {
	mask := "255.255.255.255"
	if s.family == api.IPv6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	return fmt.Sprintf("--name %s --mask %s --rsource ", s.hashed("E", s.key, port(f), destination(e)), mask)
}

// oneIn returns a match that selects one in n packets at random. The kernel stores the
// probability in 31 bits.
func oneIn(n int) string {
	if n == 1 {
		return ""
	}
	return fmt.Sprintf("-m statistic --mode random --probability %.11f ", math.Round((1<<31)/float64(n))/(1<<31))
}

// Dispatch chains form a tree. The chain services selects one of 16 chains by the lowest
// four bits of the destination address. Each of these 16 chains selects one of 16 further
// chains by the next four bits. The chain nodePorts selects a chain by protocol and port.

// dispatchChain returns the name, without the prefix, of the chain that has the entry of a
// frontend.
func dispatchChain(k *nodeview.FrontendKey) string {
	if k.Kind == nodeview.NodePort {
		return fmt.Sprintf("N%c%X", k.Protocol.String()[0], k.Port/portsPerChain)
	}
	b := k.Addr.AsSlice()
	last := b[len(b)-1]
	return fmt.Sprintf("D%X%X", last&15, last>>4)
}

// portsPerChain is the number of node ports of a dispatch chain.
const portsPerChain = 64

// dispatchName matches the names, without the prefix, of dispatch chains that have
// entries.
var dispatchName = regexp.MustCompile(`^(D[0-9A-F]{2}|N[TUS][0-9A-F]+)$`)

// parent returns the name of the chain that leads to a dispatch chain. Both names are
// without the prefix. The chain services is the root, so its parent is "".
func parent(suffix string) string {
	switch {
	case suffix == services:
		return ""
	case suffix == nodePorts:
		return services
	case suffix[0] == 'N':
		return nodePorts
	case len(suffix) == 3: // such as D3F
		return suffix[:2]
	default:
		return services
	}
}

// branch returns the rules that lead from the parent of a dispatch chain to that chain.
func (r *renderer) branch(suffix string) []string {
	target := jump(r.name(suffix))
	switch {
	case suffix == nodePorts && r.withSets:
		return []string{r.setMatch(nodeAddresses, "dst") + target}
	case suffix == nodePorts:
		var rules []string
		for _, a := range r.nodePortAddrs() {
			rules = append(rules, fmt.Sprintf("-d %s %s", prefixOf(a), target))
		}
		return rules
	case suffix[0] == 'N':
		protocol := map[byte]string{'T': "tcp", 'U': "udp", 'S': "sctp"}[suffix[1]]
		var group int
		fmt.Sscanf(suffix[2:], "%X", &group)
		return []string{fmt.Sprintf("-p %s -m %s --dport %d:%d %s", protocol, protocol, group*portsPerChain, (group+1)*portsPerChain-1, target)}
	default:
		var value byte
		fmt.Sscanf(suffix[len(suffix)-1:], "%X", &value)
		mask := byte(0x0f)
		if len(suffix) == 3 {
			value, mask = value<<4, 0xf0
		}
		return []string{fmt.Sprintf("-d %s/%s %s", r.lowest(value), r.lowest(mask), target)}
	}
}

// lowest returns an address that is zero except for its last octet.
func (r *renderer) lowest(value byte) netip.Addr {
	b := make([]byte, addrLen(r.family))
	b[len(b)-1] = value
	a, _ := netip.AddrFromSlice(b)
	return a
}

func addrLen(family api.Family) int {
	if family == api.IPv6 {
		return 16
	}
	return 4
}

// dispatch returns the rules of a dispatch chain with these entries and children.
func (r *renderer) dispatch(id chainID, entries []string, children []string) string {
	rules := entries
	isFilterRoot := id == chainID{filter, r.name(services)}
	if isFilterRoot && !r.opts.AcceptInvalid {
		rules = append(rules, "-m conntrack --ctstate INVALID -j DROP")
	}
	if isFilterRoot {
		// Skip translated packets: their new destination may equal another frontend.
		rules = append(rules, "-m conntrack --ctstate DNAT -j RETURN")
	}
	if isFilterRoot && r.withSets {
		rules = append(rules, r.setMatch(dropSet, "dst,dst")+"-j DROP", r.setMatch(rejectSet, "dst,dst")+jump(r.name(reject)))
	}
	for _, suffix := range children {
		rules = append(rules, r.branch(suffix)...)
	}
	if isFilterRoot && r.withSets && !r.opts.AcceptUnknownPorts {
		rules = append(rules, r.setMatch(clusterIPSet, "dst")+jump(r.name(reject)))
	}
	return strings.Join(rules, "\n")
}

// sortEntries sorts the entries of a dispatch chain, so that an entry for one port of an
// address precedes the entry for all its ports.
func sortEntries(matches []string) {
	slices.SortFunc(matches, func(a, b string) int { return strings.Compare(b, a) })
}
