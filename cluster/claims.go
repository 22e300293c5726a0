// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"iter"
	"slices"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
)

// claims says who holds which frontend: every claim of every service, in order
// of what is claimed and then of age, so that the claimants of one frontend
// lie together, the winner first. It is guarded by State.mu.
type claims struct {
	tree *btree.BTreeG[claim]
	// wholes counts the claims to whole addresses. While there are none, no
	// claim meets any but those to the same port.
	wholes int
}

type claim struct {
	api.Claim
	claimant *api.Service
}

func newClaims() claims {
	return claims{tree: btree.NewG(32, func(a, b claim) bool { return a.compare(b) < 0 })}
}

func (c claim) compare(o claim) int {
	if d := compareClaims(c.Claim, o.Claim); d != 0 {
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
func claimsOf(s *api.Service) []api.Claim {
	if s == nil || s.Type == api.ExternalName {
		return nil
	}
	var list []api.Claim
	for _, family := range s.Families() {
		for _, ips := range [...]*api.IPSet{&s.IPs.ClusterIPs, &s.IPs.ExternalIPs, &s.IPs.LoadBalancerIPs} {
			for _, ip := range ips.Family(family) {
				if s.MapIP {
					list = append(list, api.Claim{IP: ip})
					continue
				}
				for i := range s.Ports {
					if p := &s.Ports[i]; p.Protocol != api.UnknownProtocol && p.Port != 0 {
						list = append(list, api.Claim{IP: ip, Protocol: p.Protocol, Port: p.Port})
					}
				}
			}
		}
	}
	if !s.MapIP {
		for i := range s.Ports {
			if p := &s.Ports[i]; p.Protocol != api.UnknownProtocol && p.NodePort != 0 {
				list = append(list, api.Claim{Protocol: p.Protocol, Port: p.NodePort})
			}
		}
	}
	slices.SortFunc(list, compareClaims)
	return slices.Compact(list)
}

// replace puts the claims of new in the place of those of old, two versions of
// one service of which either may be nil. It reports whether that may change
// who holds what, and for which services besides.
func (c *claims) replace(old, new *api.Service) (changed bool, others []*api.Service) {
	before, after := claimsOf(old), claimsOf(new)
	for _, cl := range before {
		c.remove(claim{cl, old})
	}
	for _, cl := range after {
		c.add(claim{cl, new})
	}
	if old != nil && new != nil && old.Created.Equal(new.Created) && slices.Equal(before, after) {
		return false, nil
	}
	for _, list := range [...][]api.Claim{before, after} {
		for _, cl := range list {
			for o := range c.contest(cl) {
				if o.claimant != new {
					others = append(others, o.claimant)
				}
			}
		}
	}
	slices.SortFunc(others, byAge)
	return true, slices.Compact(others)
}

func (c *claims) add(cl claim) {
	if _, had := c.tree.ReplaceOrInsert(cl); !had && cl.whole() {
		c.wholes++
	}
}

func (c *claims) remove(cl claim) {
	if _, had := c.tree.Delete(cl); had && cl.whole() {
		c.wholes--
	}
}

// contest yields the claims among which that to cl is decided: those to the
// same thing, in order of age; or, if somebody claims the whole address, all
// claims to the address.
func (c *claims) contest(cl api.Claim) iter.Seq[claim] {
	return func(yield func(claim) bool) {
		from, byAddress := cl, c.byAddress(cl)
		if byAddress {
			from = api.Claim{IP: cl.IP}
		}
		c.tree.AscendGreaterOrEqual(claim{Claim: from}, func(o claim) bool {
			return (o.Claim == from || byAddress && o.IP == from.IP) && yield(o)
		})
	}
}

// byAddress reports whether cl is decided among all claims to its address.
func (c *claims) byAddress(cl api.Claim) bool {
	whole := claim{Claim: api.Claim{IP: cl.IP}}
	if whole.Claim == cl {
		return true
	}
	found := false
	if c.wholes > 0 && cl.IP.IsValid() {
		c.tree.AscendGreaterOrEqual(whole, func(o claim) bool {
			found = o.Claim == whole.Claim
			return false
		})
	}
	return found
}

// lost returns the claims of s that others hold.
func (c *claims) lost(s *api.Service) []api.LostClaim {
	var lost []api.LostClaim
	for _, cl := range claimsOf(s) {
		if winner := c.winner(claim{cl, s}); winner != s {
			lost = append(lost, api.LostClaim{Claim: cl, Winner: winner.Key()})
		}
	}
	return lost
}

// winner returns the claimant of cl, or the one whose older claim is in its
// way. Claims are granted in order of age, each if it meets none granted before.
func (c *claims) winner(cl claim) *api.Service {
	if !c.byAddress(cl.Claim) {
		for first := range c.contest(cl.Claim) {
			return first.claimant
		}
	}
	var granted []claim
	for _, next := range slices.SortedFunc(c.contest(cl.Claim), func(a, b claim) int {
		return cmp.Or(byAge(a.claimant, b.claimant), compareClaims(a.Claim, b.Claim))
	}) {
		i := slices.IndexFunc(granted, next.meets)
		switch {
		case next == cl && i >= 0:
			return granted[i].claimant
		case next == cl:
			return cl.claimant
		case i < 0:
			granted = append(granted, next)
		}
	}
	return cl.claimant
}

// whole reports whether c takes a whole address.
func (c claim) whole() bool { return c.Protocol == 0 && c.Port == 0 }

// meets reports whether c and o, claims to one address, exclude each other.
func (c claim) meets(o claim) bool { return c.Claim == o.Claim || c.whole() || o.whole() }
