// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// claims knows who holds which frontend: every claim of every service, in order of what is
// claimed, then of rank and then of age, so that the claimants of one frontend lie together,
// the winner first. It is guarded by State.mu.
type claims struct {
	tree *btree.BTreeG[claim]
}

// ranked is a claim with its rank. A service may claim one frontend by addresses of several
// kinds; the best rank counts.
type ranked struct {
	api.Claim
	rank rank
}

// rank orders the claims of different services to one frontend, before age does. The API server
// allocates cluster IPs, a controller load-balancer IPs. Anybody may name any address as an
// external IP, also one that is going to be another service's: it must not win against that.
type rank uint8

const (
	clusterIP      rank = iota
	loadBalancerIP      // in the order of Service.FrontendIPs
	externalIP
	nodePort
)

type claim struct {
	ranked
	claimant *api.Service
}

func newClaims() claims {
	return claims{tree: btree.NewG(32, func(a, b claim) bool { return a.compare(b) < 0 })}
}

func (c claim) compare(o claim) int {
	if d := compareClaims(c.Claim, o.Claim); d != 0 {
		return d
	}
	return c.precedence(o)
}

// precedence is negative if c wins against o where they meet.
func (c claim) precedence(o claim) int {
	if d := cmp.Compare(c.rank, o.rank); d != 0 {
		return d
	}
	return byAge(c.claimant, o.claimant)
}

// compareClaims puts a claim to a whole address before those to its ports.
func compareClaims(a, b api.Claim) int {
	if c := a.IP.Compare(b.IP); c != 0 {
		return c
	}
	return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}

// byAge orders claimants: the older service first, among equals by namespace
// and name. A nil one comes before all others, as the start of a range.
func byAge(a, b *api.Service) int {
	if a == nil || b == nil {
		return cmp.Compare(btoi(a != nil), btoi(b != nil))
	}
	if c := a.Created.Compare(b.Created); c != 0 {
		return c
	}
	return api.CompareKeys(a.Key(), b.Key())
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// claimsOf returns what s claims, in order, each once.
func claimsOf(s *api.Service) []ranked {
	if s == nil || s.Type == api.ExternalName {
		return nil
	}
	var list []ranked
	for _, family := range s.Families() {
		for kind, ips := range s.FrontendIPs(family) {
			for _, ip := range ips {
				if s.AllPorts {
					list = append(list, ranked{api.Claim{IP: ip}, rank(kind)})
					continue
				}
				for i := range s.Ports {
					list = appendPort(list, rank(kind), ip, s.Ports[i].Protocol, s.Ports[i].Port)
				}
			}
		}
		if !s.AllPorts {
			for i := range s.Ports {
				list = appendPort(list, nodePort, api.Unspecified(family), s.Ports[i].Protocol, s.Ports[i].NodePort)
			}
		}
	}
	slices.SortFunc(list, func(a, b ranked) int {
		return cmp.Or(compareClaims(a.Claim, b.Claim), cmp.Compare(a.rank, b.rank))
	})
	return slices.CompactFunc(list, func(a, b ranked) bool { return a.Claim == b.Claim })
}

func appendPort(list []ranked, rank rank, ip netip.Addr, protocol api.Protocol, port int32) []ranked {
	if protocol == api.UnknownProtocol || port == 0 {
		return list
	}
	return append(list, ranked{api.Claim{IP: ip, Protocol: protocol, Port: port}, rank})
}

// outcome says who holds what a service claims, the service itself or another.
type outcome struct {
	claim
	holder *api.Service
}

// replace puts the claims of new in the place of those of old, two versions of
// one service of which either may be nil. It returns the outcomes that are to be
// noted: what new has lost, and what other services have won or lost by the
// change. False means that new holds and has lost what old did.
func (c *claims) replace(old, new *api.Service) ([]outcome, bool) {
	before, after := claimsOf(old), claimsOf(new)
	same := old != nil && new != nil && old.Created.Equal(new.Created) && slices.Equal(before, after)
	var arenas []api.Claim
	if !same {
		arenas = c.arenas(before, after)
	}
	var holders map[claim]types.NamespacedName // of what other services claim
	for _, arena := range arenas {
		for o := range c.outcomes(arena) {
			if o.claimant != old {
				if holders == nil {
					holders = map[claim]types.NamespacedName{}
				}
				holders[o.claim] = o.holder.Key()
			}
		}
	}
	for _, cl := range before {
		c.tree.Delete(claim{cl, old})
	}
	for _, cl := range after {
		c.tree.ReplaceOrInsert(claim{cl, new})
	}
	var changed []outcome
	for _, arena := range arenas {
		for o := range c.outcomes(arena) {
			if o.claimant == new && o.holder != new || o.claimant != new && holders[o.claim] != o.holder.Key() {
				changed = append(changed, o)
			}
		}
	}
	return changed, !same
}

// arenas returns where the claims of both lists meet others, each arena once: a
// claim stands for itself or, if it is one to a whole address or somebody has
// one to its address, that for all claims to the address.
func (c *claims) arenas(before, after []ranked) []api.Claim {
	list := make([]api.Claim, 0, len(before)+len(after))
	for _, claims := range [...][]ranked{before, after} {
		for _, cl := range claims {
			if whole := (api.Claim{IP: cl.IP}); cl.Claim == whole || c.claimed(whole) {
				cl.Claim = whole
			}
			list = append(list, cl.Claim)
		}
	}
	slices.SortFunc(list, compareClaims)
	list = slices.Compact(list)
	// Where a service that claimed an address claims ports of it now, or the
	// other way round, the arena of the address is before those of its ports.
	address := api.Claim{}
	return slices.DeleteFunc(list, func(cl api.Claim) bool {
		if claimsAddress(cl) {
			address = cl
			return false
		}
		return cl.IP == address.IP
	})
}

// claimed reports whether anybody claims a whole address.
func (c *claims) claimed(whole api.Claim) bool {
	found := false
	c.tree.AscendGreaterOrEqual(claim{ranked: ranked{Claim: whole}}, func(o claim) bool {
		found = o.Claim == whole
		return false
	})
	return found
}

// outcomes yields who holds what in an arena. Claims are granted in order of rank and age, each
// if it meets none granted before.
func (c *claims) outcomes(arena api.Claim) iter.Seq[outcome] {
	return func(yield func(outcome) bool) {
		var buffer [4]claim
		all := buffer[:0]
		c.tree.AscendGreaterOrEqual(claim{ranked: ranked{Claim: arena}}, func(o claim) bool {
			if o.Claim != arena && !(claimsAddress(arena) && o.IP == arena.IP) {
				return false
			}
			all = append(all, o)
			return true
		})
		if !claimsAddress(arena) {
			for _, cl := range all {
				if !yield(outcome{cl, all[0].claimant}) {
					return
				}
			}
			return
		}
		slices.SortStableFunc(all, claim.precedence)
		holders := map[api.Claim]*api.Service{}
		var first *api.Service // that holds anything
		for _, cl := range all {
			holder := holders[cl.Claim]
			if holder == nil {
				holder = holders[arena]
			}
			if holder == nil && cl.Claim == arena {
				holder = first
			}
			if holder == nil {
				holder = cl.claimant
				holders[cl.Claim] = holder
			}
			if first == nil {
				first = holder
			}
			if !yield(outcome{cl, holder}) {
				return
			}
		}
	}
}

// claimsAddress reports whether c takes a whole address.
func claimsAddress(c api.Claim) bool { return c.Protocol == 0 && c.Port == 0 }
