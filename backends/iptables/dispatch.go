// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// Dispatch chains form a tree. The chain "services" selects one of 16 chains by the
// lowest four bits of the destination address. Each of these 16 chains selects one of 16
// further chains by the next four bits. The chain nodePorts selects a chain by protocol
// and port. If an address has many ports, a subchain for the address selects one of its
// own subchains by protocol and port. So packets to other addresses of the dispatch chain
// pass only one rule for all these ports.

// dispatchChain returns the name of the chain that has the entry of a frontend. The name
// is without the prefix.
func dispatchChain(k *nodeview.FrontendKey) string {
	if k.Kind == nodeview.NodePort {
		return fmt.Sprintf("N%c%X", k.Protocol.String()[0], k.Port/portsPerChain)
	}
	const digits = "0123456789ABCDEF"
	b := k.Addr.AsSlice()
	last := b[len(b)-1]
	return string([]byte{'D', digits[last&15], digits[last>>4]})
}

// portsPerChain is the number of node ports of a dispatch chain.
const portsPerChain = 64

// dispatchName matches the names, without the prefix, of dispatch chains that have
// entries.
var dispatchName = regexp.MustCompile(`^(D[0-9A-F]{2}|N[TUS][0-9A-F]+)$`)

// These expressions match names of chains without the prefix: the first subchain of an
// address, all subchains of addresses, and all chains that have entries.
var (
	addressChain = regexp.MustCompile(`^A[A-Z2-7]{15}$`)
	subchain     = regexp.MustCompile(`^[AB][A-Z2-7]{15}$`)
	hasEntries   = regexp.MustCompile(dispatchName.String() + `|^B[A-Z2-7]{15}$`)
)

// rank returns the rank of a chain. A chain has a greater rank than the chains to which it
// leads. The argument is the name of the chain without the prefix.
func rank(suffix string) int {
	switch {
	case suffix == services:
		return lastRank
	case suffix == nodePorts || len(suffix) == 2 && suffix[0] == 'D':
		return 8
	case dispatchName.MatchString(suffix):
		return 7
	case len(suffix) == 1+hashLen:
		return ranks[suffix[0]]
	}
	return 0 // a chain of the skeleton
}

const lastRank = 9

// ranks has the results of rank for the kinds of chains that have a hash in their names.
var ranks = map[byte]int{'E': 1, 'G': 2, 'K': 2, 'L': 3, 'C': 4, 'F': 4, 'X': 4, 'B': 5, 'A': 6}

// parent returns the name of the chain that leads to a dispatch chain. Both names are
// without the prefix. The chain "services" is the root, so its parent is "".
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

// manyEntries limits the entries of an address in a dispatch chain. An address with more
// entries has subchains.
const manyEntries = 16

// arrange returns the entries of a dispatch chain, and the rules of its subchains by name.
// The argument rests maps the match of an entry to the rest of its rule. An entry for one
// port of an address precedes the entry for all ports of the address.
func (r *renderer) arrange(rests map[string]string) (entries []string, subchains map[string][]string) {
	matches := slices.Collect(maps.Keys(rests))
	slices.SortFunc(matches, func(a, b string) int { return strings.Compare(b, a) })
	for len(matches) > 0 {
		address, _, hasPort := strings.Cut(matches[0], " -p ")
		n := 1
		for hasPort && n < len(matches) && strings.HasPrefix(matches[n], address+" -p ") {
			n++
		}
		if n <= manyEntries {
			for _, match := range matches[:n] {
				entries = append(entries, strings.TrimPrefix(match+" "+rests[match], " "))
			}
		} else {
			if subchains == nil {
				subchains = map[string][]string{}
			}
			entries = append(entries, address+" "+jump(r.divide(address, matches[:n], rests, subchains)))
		}
		matches = matches[n:]
	}
	return entries, subchains
}

// divide adds the subchains of an address. It returns the name of the first subchain.
func (r *renderer) divide(address string, matches []string, rests map[string]string, subchains map[string][]string) string {
	first := r.hashed("A", address)
	for _, match := range matches {
		text, number, _ := strings.Cut(strings.TrimPrefix(match, address+" "), " --dport ")
		port, _ := strconv.Atoi(number)
		group := port / portsPerChain
		name := r.hashed("B", address, text, group)
		if _, ok := subchains[name]; !ok {
			subchains[first] = append(subchains[first], fmt.Sprintf("%s --dport %d:%d %s", text, group*portsPerChain, (group+1)*portsPerChain-1, jump(name)))
		}
		subchains[name] = append(subchains[name], match+" "+rests[match])
	}
	return first
}

// growOrPrune adds a dispatch chain to its parent, or removes it from there.
func (t *ruleset) growOrPrune(id chainID, exists bool) {
	t.changedChains[id] = true
	up := parent(t.suffix(id))
	if up == "" {
		return
	}
	suffix := t.suffix(id)
	upID := chainID{id.table, t.name(up)}
	if t.branches[upID] == nil {
		t.branches[upID] = map[string]bool{}
	}
	if t.branches[upID][suffix] != exists {
		put(t.branches[upID], suffix, true, exists)
		t.growOrPrune(upID, len(t.branches[upID]) > 0)
	}
}

func (t *ruleset) suffix(id chainID) string { return strings.TrimPrefix(id.name, t.opts.prefix()) }

func (t *ruleset) isDispatch(id chainID) bool {
	s := t.suffix(id)
	return s == services || s == nodePorts || len(s) == 2 && s[0] == 'D' || dispatchName.MatchString(s) || subchain.MatchString(s)
}

// home returns the dispatch chain to which an entry of the kernel's chain id belongs.
func (t *ruleset) home(id chainID, match string) chainID {
	if !subchain.MatchString(t.suffix(id)) {
		return id
	}
	address, _, _ := strings.Cut(strings.TrimPrefix(match, "-d "), " ")
	prefix, err := netip.ParsePrefix(address)
	if err != nil {
		return id // another program has added the rule; no service has this entry
	}
	return chainID{id.table, t.name(dispatchChain(&nodeview.FrontendKey{Addr: prefix.Addr()}))}
}

// renderDispatch updates the rules of a dispatch chain and of its subchains.
func (t *ruleset) renderDispatch(id chainID) {
	rests := make(map[string]string, len(t.claims[id]))
	maps.Copy(rests, t.lingering[id])
	for match, c := range t.claims[id] {
		rests[match] = c.rest
	}
	entries, subchains := t.arrange(rests)
	children := slices.Sorted(maps.Keys(t.branches[id]))
	exists := len(entries)+len(children) > 0 || t.suffix(id) == services || t.hasForeign(id)
	put(t.chains, id, t.dispatch(id, entries, children), exists)
	for _, sub := range t.subchains[id] {
		put(t.chains, sub, "", t.hasForeign(sub))
		t.changedChains[sub] = true
	}
	var list []chainID
	for name, rules := range subchains {
		sub := chainID{id.table, name}
		list = append(list, sub)
		t.chains[sub] = strings.Join(rules, "\n")
		t.changedChains[sub] = true
	}
	put(t.subchains, id, list, len(list) > 0)
}
