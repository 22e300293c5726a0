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

// claims holds the claims of all services and determines the owner of each claim. The
// tree is sorted by claim, then rank, then age. So the claims to one frontend are
// adjacent, and the winner is the first of them. State.mu guards the tree.
type claims struct {
	tree *btree.BTreeG[claim]
}

// The type ranked is a claim with its rank. If a service has an address as a
// load-balancer IP and as an external IP, its claim has the rank of a load-balancer IP.
type ranked struct {
	api.Claim
	rank rank
}

// rank orders the claims of different services to one frontend. Among claims of the same
// rank, the oldest service wins. The API server allocates cluster IPs, and a controller
// allocates load-balancer IPs. Any user may name any address as an external IP, even a
// future address of another service, so external IPs have a low rank.
type rank uint8

const (
	clusterIP      rank = iota
	loadBalancerIP      // the ranks of IPs have the order of the kinds in Service.FrontendIPs
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

// precedence compares conflicting claims. The result is negative if c wins against o.
func (c claim) precedence(o claim) int {
	if d := cmp.Compare(c.rank, o.rank); d != 0 {
		return d
	}
	return byAge(c.claimant, o.claimant)
}

// compareClaims orders claims by address. A claim to a whole address precedes claims to
// its ports.
func compareClaims(a, b api.Claim) int {
	if c := a.IP.Compare(b.IP); c != 0 {
		return c
	}
	return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}

// byAge orders services by age, then by namespace and name. A nil service precedes all
// others, so that it can mark the start of a range.
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

// claimsOf returns the claims of s, sorted and without duplicates.
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
					list = appendPort(list, rank(kind), api.Claim{IP: ip, Protocol: s.Ports[i].Protocol, Port: s.Ports[i].Port})
				}
			}
		}
		if !s.AllPorts {
			for i := range s.Ports {
				list = appendPort(list, nodePort, api.Claim{Family: family, Protocol: s.Ports[i].Protocol, Port: s.Ports[i].NodePort})
			}
		}
	}
	slices.SortFunc(list, func(a, b ranked) int {
		return cmp.Or(compareClaims(a.Claim, b.Claim), cmp.Compare(a.rank, b.rank))
	})
	return slices.CompactFunc(list, func(a, b ranked) bool { return a.Claim == b.Claim })
}

func appendPort(list []ranked, rank rank, c api.Claim) []ranked {
	if c.Protocol == api.UnknownProtocol || c.Port == 0 {
		return list
	}
	return append(list, ranked{c, rank})
}

// outcome is a claim with its owner, which is the claimant or another service.
type outcome struct {
	claim
	owner *api.Service
}

// replace replaces the claims of a service's old version by the claims of its new
// version. One version may be nil. It returns the changed outcomes: the claims that the
// new version has lost, and the claims of other services that have a new owner. The bool
// says whether the claims of both versions differ.
func (c *claims) replace(old, new *api.Service) ([]outcome, bool) {
	before, after := claimsOf(old), claimsOf(new)
	same := old != nil && new != nil && old.Created.Equal(new.Created) && slices.Equal(before, after)
	var groups []api.Claim
	if !same {
		groups = c.conflictGroups(before, after)
	}
	var owners map[claim]types.NamespacedName // owners of other services' claims before the change
	for _, group := range groups {
		for o := range c.outcomes(group) {
			if o.claimant != old {
				if owners == nil {
					owners = map[claim]types.NamespacedName{}
				}
				owners[o.claim] = o.owner.Key()
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
	for _, group := range groups {
		for o := range c.outcomes(group) {
			if o.claimant == new && o.owner != new || o.claimant != new && owners[o.claim] != o.owner.Key() {
				changed = append(changed, o)
			}
		}
	}
	return changed, !same
}

// conflictGroups returns the groups of claims that may conflict with the old claims
// (before) or the new claims (after). Each result is the name of a group: the whole
// address if a service claims that address, otherwise a port.
func (c *claims) conflictGroups(before, after []ranked) []api.Claim {
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
	// The group of a whole address includes the groups of its ports. Delete those.
	var address netip.Addr
	return slices.DeleteFunc(list, func(cl api.Claim) bool {
		if claimsAddress(cl) {
			address = cl.IP
			return false
		}
		return cl.IP.IsValid() && cl.IP == address
	})
}

// claimed reports whether a service claims a whole address.
func (c *claims) claimed(whole api.Claim) bool {
	found := false
	c.tree.AscendGreaterOrEqual(claim{ranked: ranked{Claim: whole}}, func(o claim) bool {
		found = o.Claim == whole
		return false
	})
	return found
}

// outcomes yields the outcome of each claim in a group. In order of rank and age, it
// grants each claim that does not conflict with an already granted claim.
func (c *claims) outcomes(group api.Claim) iter.Seq[outcome] {
	return func(yield func(outcome) bool) {
		var buffer [4]claim
		all := buffer[:0]
		c.tree.AscendGreaterOrEqual(claim{ranked: ranked{Claim: group}}, func(o claim) bool {
			if o.Claim != group && !(claimsAddress(group) && o.IP == group.IP) {
				return false
			}
			all = append(all, o)
			return true
		})
		if !claimsAddress(group) {
			for _, cl := range all {
				if !yield(outcome{cl, all[0].claimant}) {
					return
				}
			}
			return
		}
		slices.SortStableFunc(all, claim.precedence)
		owners := map[api.Claim]*api.Service{}
		var first *api.Service // the service whose claim is granted first; other claims to the whole address lose to it
		for _, cl := range all {
			owner := owners[cl.Claim]
			if owner == nil {
				owner = owners[group]
			}
			if owner == nil && cl.Claim == group {
				owner = first
			}
			if owner == nil {
				owner = cl.claimant
				owners[cl.Claim] = owner
			}
			if first == nil {
				first = owner
			}
			if !yield(outcome{cl, owner}) {
				return
			}
		}
	}
}

func claimsAddress(c api.Claim) bool { return c.Protocol == 0 && c.Port == 0 }
