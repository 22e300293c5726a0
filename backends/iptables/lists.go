// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"math"
	"math/bits"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// listID identifies the chain of an endpoint list within its service. Frontends with the
// same list share the chain, whatever their addresses and ports are.
type listID struct {
	list     nodeview.ListID
	protocol api.Protocol
	// port is the port of the frontends if the chain keeps the port of packets, or else 0.
	port int32
	// servicePort is not 0 if the list has session affinity or counters. Then each
	// service port has a chain of its own.
	servicePort int32
}

// keptList is an endpoint list whose chain keeps the port of packets.
type keptList struct {
	protocol  api.Protocol
	endpoints []nodeview.Target
	chain     string
}

// manyPorts limits the ports of a service without shared chains. If a service has more
// ports, its endpoint lists that keep the port of packets share a chain. With fewer ports,
// a set can masquerade the connections of endpoints to themselves, with fewer rules.
const manyPorts = 16

// list adds the chain that selects an endpoint of t, and returns the name of the chain.
// It returns "" if the verdict of t is not Forward.
func (s *serviceRenderer) list(f *nodeview.Frontend, t *nodeview.Traffic) string {
	if t.Verdict != nodeview.Forward {
		return ""
	}
	id := listID{list: t.List, protocol: f.Protocol}
	switch {
	case f.ServicePort == nil:
	case f.Affinity > 0 || s.opts.Stats:
		id.servicePort = f.ServicePort.Port
	case len(s.view.Service.Ports) > manyPorts && t.Endpoints[0].Port == f.Port:
		id.port = f.Port
	}
	if chain, ok := s.lists[id]; ok {
		return chain
	}
	chain := ""
	if id.port != 0 && !slices.ContainsFunc(t.Endpoints, func(e nodeview.Target) bool { return e.Port != f.Port }) {
		chain = s.keptList(f, t.Endpoints)
	} else {
		chain = s.hashed("L", s.key, id.protocol, id.servicePort, uint64(t.List))
		s.addList(chain, f, t.Endpoints)
	}
	s.lists[id] = chain
	return chain
}

// keptList adds the chain of an endpoint list that keeps the port of packets. All ports of
// a protocol with the same endpoints share the chain.
func (s *serviceRenderer) keptList(f *nodeview.Frontend, endpoints []nodeview.Target) string {
	kept := make([]nodeview.Target, len(endpoints))
	var h maphash.Hash
	h.SetSeed(digestSeed)
	for i, e := range endpoints {
		kept[i] = nodeview.Target{Endpoint: e.Endpoint}
		b := e.Addr.As16()
		h.Write(b[:])
	}
	sum := h.Sum64()
	for _, other := range s.kept[sum] {
		if other.protocol == f.Protocol && slices.Equal(other.endpoints, kept) {
			return other.chain
		}
	}
	chain := s.hashed("L", s.key, f.Protocol, "port of the packet", f.ServicePort.Port)
	s.addList(chain, f, kept)
	s.kept[sum] = append(s.kept[sum], keptList{f.Protocol, kept, chain})
	return chain
}

// A list with at least largeList endpoints is divided into groups. The mean number of
// endpoints in a group is groupSize.
const largeList, groupSize = 128, 16

// groups divides a list into groups. If one endpoint is added or removed, only its group
// changes, unless the number of groups changes. Short lists are one group.
func groups(endpoints []nodeview.Target) [][]nodeview.Target {
	if len(endpoints) < largeList {
		return [][]nodeview.Target{endpoints}
	}
	width := bits.Len(uint(len(endpoints) / groupSize))
	list := make([][]nodeview.Target, 1<<width)
	for _, e := range endpoints {
		b := e.Addr.As16()
		i := binary.BigEndian.Uint64(b[8:]) * 0x9e3779b97f4a7c15 >> (64 - width)
		list[i] = append(list[i], e)
	}
	return list
}

// addList adds the chain of an endpoint list. The chain of a large list leads to a chain
// for each group of endpoints. So a packet passes few rules, and a change of an endpoint
// writes few rules.
func (s *serviceRenderer) addList(chain string, f *nodeview.Frontend, endpoints []nodeview.Target) {
	list := groups(endpoints)
	if len(list) == 1 {
		known, random := s.endpoints(f, endpoints)
		s.out.add(nat, chain, append(known, random...))
		return
	}
	var known, random []string
	rest := weightOf(endpoints)
	for i, group := range list {
		if len(group) == 0 {
			continue
		}
		k, r := s.endpoints(f, group)
		if len(k) > 0 {
			name := s.hashed("K", chain, len(list), i)
			s.out.add(nat, name, k)
			known = append(known, jump(name))
		}
		name := s.hashed("G", chain, len(list), i)
		s.out.add(nat, name, r)
		weight := weightOf(group)
		random = append(random, share(weight, rest)+jump(name))
		rest -= weight
	}
	s.out.add(nat, chain, append(known, random...))
}

// endpoints returns the rules that select one of the endpoints. With session affinity,
// the rules in the result known select the endpoint of a known client. The rules in the
// result random select an endpoint at random, by weight.
func (s *serviceRenderer) endpoints(f *nodeview.Frontend, list []nodeview.Target) (known, random []string) {
	rest := weightOf(list)
	for i := range list {
		protocol, target := s.endpointTarget(f, &list[i])
		record := ""
		if f.Affinity > 0 {
			clients := s.clients(f, &list[i])
			record = matchRecent + "--set " + clients
			known = append(known, fmt.Sprintf("%s%s--update --seconds %d --reap %s%s", protocol, matchRecent, int64(f.Affinity/time.Second), clients, jump(target)))
		}
		random = append(random, protocol+share(weightOf(list[i:i+1]), rest)+record+jump(target))
		rest -= weightOf(list[i : i+1])
	}
	return known, random
}

// endpointTarget returns the target that sends packets of f to the endpoint e. If a rule
// with this target must match the protocol, the result protocol has that match. An
// element of a set masquerades connections of the endpoint to itself. If that is not
// possible, a rule of a chain does it, and the target is this chain. With counters, the
// target is always a chain, so that a change of the list does not rewrite the counter.
func (s *serviceRenderer) endpointTarget(f *nodeview.Frontend, e *nodeview.Target) (protocol, target string) {
	if f.Protocol != 0 {
		protocol = "-p " + protocolNames[f.Protocol] + " "
	}
	target = "DNAT --to-destination " + destination(e)
	var rules []string
	switch {
	case !e.Local:
	case s.withSets && e.Port != 0:
		s.out.elements[element{hairpinSet, fmt.Sprintf("%s,%s:%d,%s", e.Addr, protocolNames[f.Protocol], e.Port, e.Addr)}] = true
	default:
		rules = []string{fmt.Sprintf("-s %s %s", prefixOf(e.Addr), jump(s.name(markPacket)))}
	}
	chain := ""
	switch {
	case s.opts.Stats:
		chain = s.ofPort(f, e)
		if s.out.counted == nil {
			s.out.counted = map[string]counted{}
		}
		s.out.counted[chain] = counted{s.view, f.ServicePort, netip.AddrPortFrom(e.Addr, uint16(e.Port))}
	case rules != nil:
		chain = s.hashed("E", s.key, f.Protocol, destination(e))
	default:
		return protocol, target
	}
	s.out.add(nat, chain, append(rules, protocol+jump(target)))
	return "", chain
}

// ofPort returns a name for the endpoint e of the service port of f.
func (s *serviceRenderer) ofPort(f *nodeview.Frontend, e *nodeview.Target) string {
	port := "all"
	if f.ServicePort != nil {
		port = fmt.Sprint(f.ServicePort.Protocol, f.ServicePort.Port)
	}
	return s.hashed("E", s.key, port, destination(e))
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
	return fmt.Sprintf("--name %s --mask %s --rsource ", s.ofPort(f, e), mask)
}

// weightOf returns the sum of the weights of endpoints.
func weightOf(list []nodeview.Target) (sum int64) {
	for _, t := range list {
		sum += int64(cmp.Or(t.Weight, api.DefaultWeight))
	}
	return sum
}

// share returns a match that selects k of n packets at random. The kernel stores the
// probability in 31 bits.
func share(k, n int64) string {
	if k == n {
		return ""
	}
	return fmt.Sprintf("-m statistic --mode random --probability %.11f ", math.Round((1<<31)*float64(k)/float64(n))/(1<<31))
}
