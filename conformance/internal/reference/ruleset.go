// SPDX-License-Identifier: Apache-2.0

//go:build linux

package reference

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/maglev"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// ruleset is the content of the proxy's nftables table.
type ruleset struct {
	opts *Options
	// The keys of these maps are names, and the values are declarations. A change of the
	// table keeps existing counters. It also keeps existing sets, because they store the
	// affinity of clients.
	sets, chains, counters map[string]string
	rules                  strings.Builder
	number                 int
	// service is the service for which rules are being written.
	service types.NamespacedName
	// counterOf has the counter of each service port and endpoint.
	counterOf map[backends.Stats]string
}

// mark is the packet mark for masquerading.
const mark = "0x00100000"

// origin says where traffic comes from.
type origin string

const (
	own       origin = "own"  // from the node itself
	pods      origin = "pods" // from the node's pods
	elsewhere origin = "elsewhere"
)

func render(opts *Options, node *api.Node, services []*api.View) *ruleset {
	r := &ruleset{opts: opts, sets: map[string]string{}, chains: map[string]string{}, counters: map[string]string{}, counterOf: map[backends.Stats]string{}}
	local := fmt.Sprintf("iifname \"%s*\"", opts.PodInterfaces)
	for _, o := range []origin{own, pods, elsewhere} {
		r.chain("dnat-"+string(o), "")
		r.chain("verdict-"+string(o), "")
	}
	// First, drop packets whose source is not in the source ranges.
	for _, hook := range []string{"prerouting", "output"} {
		r.chain("guard-"+hook, "type filter hook "+hook+" priority -110;")
		r.rule("guard-"+hook, "jump guard")
		// Then refuse the packets of connections to lost endpoints.
		for _, f := range []api.Family{api.IPv4, api.IPv6} {
			r.rule("guard-"+hook, fmt.Sprintf("%[1]s saddr . tcp sport . %[1]s daddr . tcp dport @lost-%[1]s reject with tcp reset", family(f)))
		}
	}
	for _, f := range []api.Family{api.IPv4, api.IPv6} {
		r.sets["lost-"+family(f)] = fmt.Sprintf("type %[1]s . inet_service . %[1]s . inet_service; flags timeout; timeout 10s;", addressType(f))
	}
	r.chain("raw-output", "type filter hook output priority -300;")
	r.rule("raw-output", "meta mark", probeMark, "notrack")
	r.chain("guard", "")
	r.chain("nat-prerouting", "type nat hook prerouting priority -100;")
	r.rule("nat-prerouting", local, "goto dnat-pods")
	r.rule("nat-prerouting", "goto dnat-elsewhere")
	r.chain("nat-output", "type nat hook output priority -100;")
	r.rule("nat-output", "goto dnat-own")
	r.chain("nat-postrouting", "type nat hook postrouting priority 100;")
	r.rule("nat-postrouting", "meta mark and", mark, "!= 0 meta mark set meta mark xor", mark, "masquerade")
	for _, hook := range []string{"input", "forward"} {
		r.chain("filter-"+hook, "type filter hook "+hook+" priority 0;")
		r.rule("filter-"+hook, local, "goto verdict-pods")
		r.rule("filter-"+hook, "goto verdict-elsewhere")
	}
	r.chain("filter-output", "type filter hook output priority 0;")
	r.rule("filter-output", "goto verdict-own")

	var nodeAddrs []netip.Addr
	if node != nil {
		for _, a := range node.Addresses {
			nodeAddrs = append(nodeAddrs, a.IP)
		}
	}
	clusterIPs := map[netip.Addr]bool{}
	for _, view := range services {
		r.service = view.Key()
		for f := range nodeview.Frontends(view) {
			r.frontend(view, &f, nodeAddrs)
			if f.Kind == nodeview.ClusterIP {
				clusterIPs[f.Addr] = true
			}
		}
		if opts.Fault != NoHairpin {
			for _, e := range nodeview.Hairpins(view) {
				a := e.Addr
				r.rule("nat-postrouting", "ct status dnat", ip(a), "saddr", a, ip(a), "daddr", a, "masquerade")
			}
		}
	}
	if opts.Fault != UnknownPorts && opts.Fault != NoVerdicts {
		for _, o := range []origin{own, pods, elsewhere} {
			for addr := range clusterIPs {
				r.rule("verdict-"+string(o), ip(addr), "daddr", addr, "meta l4proto tcp reject with tcp reset")
				r.rule("verdict-"+string(o), ip(addr), "daddr", addr, "meta l4proto { udp, sctp } reject")
			}
		}
	}
	return r
}

func (r *ruleset) frontend(view *api.View, f *nodeview.Frontend, nodeAddrs []netip.Addr) {
	fault := r.opts.Fault
	match := r.match(f)
	if (f.Sources.Restricted || fault == GuardsAll && len(view.Service.SourceRanges) > 0) && fault != AnySource {
		sources := f.Sources
		if fault == GuardsAll {
			sources.Ranges = view.Service.SourceRanges[0].Prefixes
		}
		if fault == NoOwnAddress {
			sources.Own = nil
		}
		var ranges []string
		for _, p := range sources.Prefixes(nodeAddrs) {
			if api.FamilyOf(p.Addr()) == f.Family && p.Bits() > 0 {
				ranges = append(ranges, p.String())
			} else if api.FamilyOf(p.Addr()) == f.Family {
				ranges = append(ranges, p.Addr().String()+"/1", upperHalf(p.Addr()))
			}
		}
		if fault != GuardsLate || f.Elsewhere.Verdict == nodeview.Forward {
			except := ""
			if len(ranges) > 0 {
				except = fmt.Sprintf("%s saddr != { %s }", family(f.Family), strings.Join(ranges, ", "))
			}
			r.rule("guard", match, except, "drop")
		}
	}
	r.number++
	for _, o := range []origin{own, pods, elsewhere} {
		traffic := f.Node
		if o == elsewhere || fault == NoShortCircuit {
			traffic = f.Elsewhere
		}
		if fault == DrainingToo {
			for e := range f.Existing.All() {
				if e.Scopes == (api.Scopes{}) { // the endpoint is draining
					traffic.Verdict = nodeview.Forward
					traffic.Endpoints = append(slices.Clone(traffic.Endpoints), e)
				}
			}
		}
		if traffic.Verdict != nodeview.Forward {
			r.verdict(o, match, traffic.Verdict)
			continue
		}
		chain := fmt.Sprintf("f%d-%s", r.number, o)
		r.chain(chain, "")
		r.rule("dnat-"+string(o), match, "goto", chain)
		r.masquerade(o, f, chain)
		if f.Affinity > 0 && fault != NoAffinity {
			r.balanceWithAffinity(chain, view, f, traffic.Endpoints)
		} else {
			r.balance(chain, f, traffic.Endpoints)
		}
	}
}

// match returns the nft expression that matches the packets to a frontend.
func (r *ruleset) match(f *nodeview.Frontend) string {
	where := fmt.Sprintf("%s daddr %s", family(f.Family), f.Addr)
	if f.Kind == nodeview.NodePort {
		var cidrs []string
		for _, cidr := range r.opts.NodePortCIDRs {
			if api.FamilyOf(cidr.Addr()) == f.Family {
				cidrs = append(cidrs, cidr.String())
			}
		}
		where = fmt.Sprintf("%s daddr { %s } fib daddr type local", family(f.Family), strings.Join(cidrs, ", "))
		switch r.opts.Fault {
		case AnyNodePort:
			where = fmt.Sprintf("meta nfproto %s fib daddr type local", map[api.Family]string{api.IPv4: "ipv4", api.IPv6: "ipv6"}[f.Family])
		case FirstNodePort:
			where = map[api.Family]string{api.IPv4: "ip daddr 192.168.1.2", api.IPv6: "ip6 daddr fd00:192:168:1::2"}[f.Family]
		}
	}
	if f.Port == 0 {
		if r.opts.Fault == NoAllPorts {
			return where + " meta l4proto tcp"
		}
		return where
	}
	switch protocol := strings.ToLower(f.Protocol.String()); r.opts.Fault {
	case AnyPort:
		return fmt.Sprintf("%s meta l4proto %s", where, protocol)
	case AnyProtocol:
		return fmt.Sprintf("%s meta l4proto { tcp, udp } th dport %d", where, f.Port)
	default:
		return fmt.Sprintf("%s meta l4proto %s th dport %d", where, protocol, f.Port)
	}
}

func (r *ruleset) verdict(o origin, match string, v nodeview.Verdict) {
	switch r.opts.Fault {
	case DropsAll:
		v = nodeview.Drop
	case NoVerdicts:
		return
	}
	if v == nodeview.Drop {
		r.rule("verdict-"+string(o), match, "drop")
		return
	}
	r.rule("verdict-"+string(o), match, "meta l4proto tcp reject with tcp reset")
	r.rule("verdict-"+string(o), match, "reject")
}

func (r *ruleset) masquerade(o origin, f *nodeview.Frontend, chain string) {
	set := "meta mark set meta mark or " + mark
	switch {
	case r.opts.Fault == NoMasquerade:
	case r.opts.Fault == MasqueradesAll,
		f.Masquerade == nodeview.MasqueradeAll,
		f.Masquerade == nodeview.MasqueradeNode && o == own,
		f.Masquerade == nodeview.MasqueradeIfConfigured && r.opts.MasqueradeAll:
		r.rule(chain, set)
	case f.Masquerade == nodeview.MasqueradeIfConfigured && r.opts.MasqueradeOutside:
		for _, cidr := range r.opts.ClusterCIDRs {
			if api.FamilyOf(cidr.Addr()) == f.Family {
				r.rule(chain, family(f.Family), "saddr !=", cidr, set)
			}
		}
	}
}

// balance adds the rules that choose an endpoint.
func (r *ruleset) balance(chain string, f *nodeview.Frontend, endpoints []nodeview.Target) {
	endpoints, weights := r.weighted(endpoints)
	if f.Algorithm != api.Random {
		r.hash(chain, f, endpoints, weights)
		return
	}
	rest := sum(weights)
	for i, e := range endpoints {
		r.rule(chain, weights[i].of(rest), r.dnat(f, e))
		rest -= weights[i]
	}
}

// hash adds the rules that choose an endpoint by stable hashing.
func (r *ruleset) hash(chain string, f *nodeview.Frontend, endpoints []nodeview.Target, weights []weight) {
	var table []uint16
	if r.opts.Fault == HashModulo {
		for i := range 251 {
			table = append(table, uint16(i%len(endpoints)))
		}
	} else {
		all := make([]maglev.Endpoint, len(endpoints))
		for i, e := range endpoints {
			all[i] = maglev.Endpoint{Key: e.AddrPort().String(), Weight: uint16(weights[i])}
		}
		table = maglev.Table(all)
	}
	const few = 256 // nft is slow with many elements
	if n := len(table); n > few {
		for i := range few {
			table[i] = table[i*n/few]
		}
		table = table[:few]
	}
	var elements []string
	for i, e := range table {
		elements = append(elements, fmt.Sprintf("%d : goto %s-%d", i, chain, e))
	}
	for i, e := range endpoints {
		endpoint := fmt.Sprintf("%s-%d", chain, i)
		r.chain(endpoint, "")
		r.rule(endpoint, r.dnat(f, e))
	}
	key, seed := family(f.Family)+" saddr", 0x6b706e67
	if f.Algorithm == api.HashConnection {
		key += " . th sport"
	}
	if r.opts.Fault == HashSeed {
		seed = os.Getpid()
	}
	r.rule(chain, fmt.Sprintf("jhash %s mod %d seed %#x vmap { %s }", key, len(table), seed, strings.Join(elements, ", ")))
}

// weight is the weight of an endpoint.
type weight int

// of returns an nft expression that matches packets at random, with the probability w /
// rest. The expression must not have an anonymous set. When rules are replaced, the kernel
// empties the set of an old rule while a packet may still pass this rule.
func (w weight) of(rest weight) string {
	if w == rest {
		return ""
	}
	return fmt.Sprintf("numgen random mod %d < %d", rest, w)
}

func sum(weights []weight) (sum weight) {
	for _, w := range weights {
		sum += w
	}
	return sum
}

// dnat returns the nft statement that translates the destination to an endpoint.
func (r *ruleset) dnat(f *nodeview.Frontend, e nodeview.Target) string {
	port := e.Port
	if r.opts.Fault == KeepPort && f.Port != 0 {
		port = f.ServicePort.Port
	}
	if port == 0 {
		return fmt.Sprintf("%s dnat %s to %s", r.count(f, e), family(f.Family), e.Addr)
	}
	protocol := strings.ToLower(f.Protocol.String())
	if r.opts.Fault == AnyProtocol {
		protocol = "{ tcp, udp }"
	}
	return fmt.Sprintf("meta l4proto %s %s dnat %s to %s", protocol, r.count(f, e), family(f.Family), netip.AddrPortFrom(e.Addr, uint16(port)))
}

// weighted returns the endpoints that rules choose, and their weights.
func (r *ruleset) weighted(endpoints []nodeview.Target) ([]nodeview.Target, []weight) {
	if r.opts.Fault == OneEndpoint {
		endpoints = endpoints[:1]
	}
	weights := make([]weight, len(endpoints))
	for i, e := range endpoints {
		weights[i] = weight(cmp.Or(e.Weight, api.DefaultWeight))
	}
	if r.opts.Fault == Uneven {
		weights[0] *= 3
	}
	return endpoints, weights
}

// balanceWithAffinity adds the rules that choose an endpoint with session affinity. Each
// endpoint has a set of its clients. All frontends of a service port share these sets.
func (r *ruleset) balanceWithAffinity(chain string, view *api.View, f *nodeview.Frontend, endpoints []nodeview.Target) {
	_, weights := r.weighted(endpoints)
	var chosen []string
	if r.opts.Fault == LooseAffinity {
		for i := range view.Endpoints {
			e := &view.Endpoints[i]
			endpoints = append(slices.Clone(endpoints), nodeview.Target{Endpoint: e, Port: e.TargetPort(f.ServicePort)})
		}
	}
	for i, e := range endpoints {
		who := fmt.Sprintf("%s-%d", e.Addr, e.Port)
		if r.opts.Fault == FixedAffinity {
			who = fmt.Sprint(i)
		}
		timeout := int(f.Affinity.Seconds())
		if r.opts.Fault == EternalAffinity {
			timeout = 10800
		}
		port := fmt.Sprint(f.ServicePort.Protocol, f.ServicePort.Port)
		if r.opts.Fault == SharedAffinity {
			port, who = "", e.Addr.String()
		}
		set := objectName("clients", view.Key(), port, f.Family, who, timeout)
		r.sets[set] = fmt.Sprintf("type %s; size 65535; flags dynamic; timeout %ds;", addressType(f.Family), timeout)
		endpoint := fmt.Sprintf("%s-%d", chain, i)
		r.chain(endpoint, "")
		r.rule(endpoint, fmt.Sprintf("update @%s { %s saddr }", set, family(f.Family)))
		r.rule(endpoint, r.dnat(f, e))
		r.rule(chain, fmt.Sprintf("%s saddr @%s goto %s", family(f.Family), set, endpoint))
		if i < len(weights) {
			chosen = append(chosen, endpoint)
		}
	}
	rest := sum(weights)
	for i, endpoint := range chosen {
		r.rule(chain, weights[i].of(rest), "goto", endpoint)
		rest -= weights[i]
	}
}

// script returns the commands that change the table from the ruleset "old" to r in one
// transaction. If the table does not exist, old is nil.
func (r *ruleset) script(old *ruleset) string {
	var text strings.Builder
	table := "inet " + r.opts.Table
	fault := r.opts.Fault
	if old == nil {
		if fault == FlushesOthers {
			text.WriteString("flush ruleset\n")
		}
		fmt.Fprintf(&text, "add table %s\n", table)
		old = &ruleset{}
	} else if fault != KeepsRules {
		fmt.Fprintf(&text, "flush table %s\n", table)
	}
	for _, chain := range sorted(r.chains) {
		fmt.Fprintf(&text, "add chain %s %s { %s }\n", table, chain, r.chains[chain])
	}
	for _, set := range sorted(r.sets) {
		fmt.Fprintf(&text, "add set %s %s { %s }\n", table, set, r.sets[set])
	}
	for _, counter := range sorted(r.counters) {
		fmt.Fprintf(&text, "add counter %s %s\n", table, counter)
	}
	text.WriteString(r.rules.String())
	if fault != KeepsRules {
		for _, chain := range sorted(old.chains) {
			if _, still := r.chains[chain]; !still {
				fmt.Fprintf(&text, "delete chain %s %s\n", table, chain)
			}
		}
		for _, set := range sorted(old.sets) {
			if _, still := r.sets[set]; !still {
				fmt.Fprintf(&text, "delete set %s %s\n", table, set)
			}
		}
		for _, counter := range sorted(old.counters) {
			if _, still := r.counters[counter]; !still {
				fmt.Fprintf(&text, "delete counter %s %s\n", table, counter)
			}
		}
	}
	return text.String()
}

func (r *ruleset) chain(name, hook string) { r.chains[name] = hook }

func (r *ruleset) rule(chain string, words ...any) {
	fmt.Fprintf(&r.rules, "add rule inet %s %s %s", r.opts.Table, chain, fmt.Sprintln(words...))
}

// objectName joins parts into a valid name of a chain or set.
func objectName(parts ...any) string {
	return strings.Map(func(c rune) rune {
		if strings.ContainsRune("/:. ", c) {
			return '_'
		}
		return c
	}, fmt.Sprintln(parts...)[:len(fmt.Sprintln(parts...))-1])
}

func ip(a netip.Addr) string { return family(api.FamilyOf(a)) }

func addressType(f api.Family) string {
	return map[api.Family]string{api.IPv4: "ipv4_addr", api.IPv6: "ipv6_addr"}[f]
}

func family(f api.Family) string { return map[api.Family]string{api.IPv4: "ip", api.IPv6: "ip6"}[f] }

// upperHalf returns the upper half of the address space of addr's IP family.
func upperHalf(addr netip.Addr) string {
	if addr.Is4() {
		return "128.0.0.0/1"
	}
	return "8000::/1"
}

func sorted(m map[string]string) []string {
	var keys []string
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}
