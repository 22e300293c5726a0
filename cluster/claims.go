// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"encoding/binary"
	"iter"
	"net/netip"
	"slices"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/distinct"
	"github.com/kpng-project/kpng/internal/elements"
	"github.com/kpng-project/kpng/internal/ordering"
)

// claims holds the claims of all services and determines the owner of each claim. A
// change takes O(log n) time for each claim that it adds or removes, however many services
// compete for the claim. State.mu guards the fields.
type claims struct {
	// tree is sorted by claim, then rank, then age. So the claims to one frontend are
	// adjacent. The first of them owns the frontend, unless a service owns the whole address.
	tree *btree.BTreeG[packed]
	// byPrecedence has the claims to addresses, without those to node ports, sorted by
	// address, rank and age. It decides whether a service owns a whole address: if the
	// first claim at an address is a claim to the whole address, its service owns the
	// address and all its ports. Otherwise no service owns the whole address.
	// byPrecedence is nil until a service claims a whole address.
	byPrecedence *btree.BTreeG[packed]
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
	loadBalancerIP      // the ranks of IPs have the order of the kinds in elements.Addresses
	externalIP
	nodePort
	afterAll // no claim has this rank
)

type claim struct {
	ranked
	claimant *api.Service
}

// packed is a claim in a compact form. The trees use it, because they have a claim for
// each frontend.
type packed struct {
	high, low uint64 // the address
	port      int32
	// version is 4 or 6, or 0 if the claim has no address.
	version, family, protocol uint8
	rank                      rank
	claimant                  *api.Service
}

func (c claim) packed() packed {
	p := packed{port: c.Port, family: uint8(c.Family), protocol: uint8(c.Protocol), rank: c.rank, claimant: c.claimant}
	if c.IP.IsValid() {
		ip := c.IP.As16()
		p.version = uint8(api.FamilyOf(c.IP))
		p.high, p.low = binary.BigEndian.Uint64(ip[:8]), binary.BigEndian.Uint64(ip[8:])
	}
	return p
}

func (p packed) claim() claim {
	c := claim{ranked{api.Claim{Family: api.Family(p.family), Protocol: api.Protocol(p.protocol), Port: p.port}, p.rank}, p.claimant}
	if p.version != 0 {
		var ip [16]byte
		binary.BigEndian.PutUint64(ip[:8], p.high)
		binary.BigEndian.PutUint64(ip[8:], p.low)
		c.IP = netip.AddrFrom16(ip).Unmap()
	}
	return c
}

// compareIP and compareFrontend put equal claims together. The search in a tree spends its
// time in these functions. Unlike cmp.Or, they stop at the first difference. Most addresses
// differ in the lower half, so they compare it first.
func (p *packed) compareIP(o *packed) int {
	if p.low != o.low {
		return cmp.Compare(p.low, o.low)
	}
	return cmp.Compare(p.high, o.high)
}

func (p *packed) compareFrontend(o *packed) int {
	if c := p.compareIP(o); c != 0 {
		return c
	}
	return cmp.Or(cmp.Compare(p.family, o.family), cmp.Compare(p.protocol, o.protocol), cmp.Compare(p.port, o.port))
}

// precedence compares conflicting claims. The result is negative if p wins against o.
func (p *packed) precedence(o *packed) int {
	if c := cmp.Compare(p.rank, o.rank); c != 0 {
		return c
	}
	return byAge(p.claimant, o.claimant)
}

func newClaims() claims {
	return claims{tree: btree.NewG(32, func(a, b packed) bool {
		c := a.compareFrontend(&b)
		if c == 0 {
			c = a.precedence(&b)
		}
		return c < 0
	})}
}

// clone returns a copy for readers. It takes constant time, and later writes copy the nodes
// that they change.
func (c *claims) clone() *claims {
	copied := claims{tree: c.tree.Clone()}
	if c.byPrecedence != nil {
		copied.byPrecedence = c.byPrecedence.Clone()
	}
	return &copied
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
	return ordering.Keys(a.Key(), b.Key())
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
		for kind, ips := range elements.Addresses(s, family) {
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
	if c.Protocol.Number() == 0 || c.Port == 0 {
		return list
	}
	return append(list, ranked{c, rank})
}

// outcome is a claim that a service has won or lost.
type outcome struct {
	claim
	lost bool
}

func (c *claims) outcome(cl claim) outcome { return outcome{cl, c.owner(cl.Claim) != cl.claimant} }

// replace replaces the claims of a service's old version by the claims of its new
// version. One version may be nil. If the versions have the same claims, changed is false.
// Otherwise the result own has the claims that the new version lost. The result others has
// the outcomes of all claims that other services have won or lost.
func (c *claims) replace(old, new *api.Service) (own, others []outcome, changed bool) {
	before, after := claimsOf(old), claimsOf(new)
	if len(before) == 0 && c.unclaimed(after) { // true for nearly all services of an initial list
		for _, cl := range after {
			c.insert(claim{cl, new})
		}
		return nil, nil, len(after) > 0
	}
	sameAge := old != nil && new != nil && old.Created.Equal(new.Created)
	removed, added := before, after
	if sameAge {
		removed, added = without(before, after), without(after, before)
	}
	touched := c.owners(removed, added)
	for _, cl := range removed {
		c.delete(claim{cl, old})
	}
	for _, cl := range after {
		c.insert(claim{cl, new})
	}
	if len(removed)+len(added) == 0 {
		return nil, nil, false
	}
	for _, was := range touched {
		for _, cl := range c.flipped(was, new) {
			others = append(others, c.outcome(cl))
		}
	}
	for _, cl := range after {
		if o := c.outcome(claim{cl, new}); o.lost {
			own = append(own, o)
		}
	}
	return own, others, true
}

// unclaimed reports whether no service has any of these claims, and no claim is to a whole
// address.
func (c *claims) unclaimed(list []ranked) bool {
	return c.byPrecedence == nil && !slices.ContainsFunc(list, func(cl ranked) bool {
		_, claimed := c.first(cl.Claim)
		return claimed || claimsAddress(cl.Claim)
	})
}

// without returns the elements of the sorted list a that are not in the sorted list b.
func without(a, b []ranked) []ranked {
	var out []ranked
	for _, cl := range a {
		for len(b) > 0 && cmp.Or(compareClaims(b[0].Claim, cl.Claim), cmp.Compare(b[0].rank, cl.rank)) < 0 {
			b = b[1:]
		}
		if len(b) == 0 || b[0] != cl {
			out = append(out, cl)
		}
	}
	return out
}

func (c *claims) insert(cl claim) {
	p := cl.packed()
	c.tree.ReplaceOrInsert(p)
	switch {
	case p.version == 0:
	case c.byPrecedence != nil:
		c.byPrecedence.ReplaceOrInsert(p)
	case claimsAddress(cl.Claim):
		c.byPrecedence = btree.NewG(32, func(a, b packed) bool {
			return cmp.Or(a.compareIP(&b), a.precedence(&b), a.compareFrontend(&b)) < 0
		})
		c.tree.Ascend(func(o packed) bool {
			if o.version != 0 {
				c.byPrecedence.ReplaceOrInsert(o)
			}
			return true
		})
	}
}

func (c *claims) delete(cl claim) {
	p := cl.packed()
	c.tree.Delete(p)
	if c.byPrecedence != nil {
		c.byPrecedence.Delete(p) // byPrecedence has no claims to node ports
	}
}

// from returns the first claim in tree that does not precede cl, or the zero value.
func from(tree *btree.BTreeG[packed], cl ranked) (found claim) {
	tree.AscendGreaterOrEqual(claim{ranked: cl}.packed(), func(o packed) bool {
		found = o.claim()
		return false
	})
	return found
}

// first returns the first of the claims that are equal to cl.
func (c *claims) first(cl api.Claim) (claim, bool) {
	if found := from(c.tree, ranked{Claim: cl}); found.Claim == cl {
		return found, true
	}
	return claim{}, false
}

// firsts yields the first claim to an address, and to each of its ports.
func (c *claims) firsts(ip netip.Addr) iter.Seq[claim] {
	return func(yield func(claim) bool) {
		next := ranked{Claim: api.Claim{IP: ip}}
		for {
			found := from(c.tree, next)
			if found.IP != ip || !yield(found) {
				return
			}
			next = ranked{found.Claim, afterAll}
		}
	}
}

// firstAt returns the claim with the best precedence at an address, if a service claims
// the whole address.
func (c *claims) firstAt(ip netip.Addr) (claim, bool) {
	if c.byPrecedence == nil {
		return claim{}, false
	}
	if _, claimed := c.first(api.Claim{IP: ip}); !claimed {
		return claim{}, false
	}
	return from(c.byPrecedence, ranked{Claim: api.Claim{IP: ip}}), true
}

// owner returns the owner of a claim. For a claim to a whole address, it returns the
// service whose claim has the best precedence at this address, even if that claim is to
// a single port.
func (c *claims) owner(cl api.Claim) *api.Service {
	if best, ok := c.firstAt(cl.IP); ok && (claimsAddress(best.Claim) || claimsAddress(cl)) {
		return best.claimant
	}
	best, _ := c.first(cl)
	return best.claimant
}

// ownership says who owned a claim at some time. The field by is the claim of the
// owner, or zero if there was no owner.
type ownership struct {
	claim api.Claim
	by    claim
}

// owners returns the present ownership of all given claims, and of the whole addresses
// of these claims.
func (c *claims) owners(lists ...[]ranked) []ownership {
	var all []ownership
	var seen distinct.Set[api.Claim]
	add := func(cl api.Claim, by claim) {
		if seen.Add(cl) {
			all = append(all, ownership{cl, by})
		}
	}
	for _, list := range lists {
		for _, cl := range list {
			if !claimsAddress(cl.Claim) {
				by, _ := c.first(cl.Claim)
				add(cl.Claim, by)
			}
			if cl.IP.IsValid() {
				by, _ := c.firstAt(cl.IP)
				add(api.Claim{IP: cl.IP}, by)
			}
		}
	}
	return all
}

// flipped compares an earlier ownership with the present one. It returns the claims
// that services have won or lost since then, without the claims of the service in the
// argument "except".
func (c *claims) flipped(was ownership, except *api.Service) (list []claim) {
	now, _ := c.first(was.claim)
	if claimsAddress(was.claim) {
		now, _ = c.firstAt(was.claim.IP)
	}
	if was.by.claimant == now.claimant {
		return nil
	}
	for _, cl := range [...]claim{was.by, now} {
		if cl.claimant == except {
			continue
		}
		if present, ok := c.tree.Get(cl.packed()); ok {
			list = append(list, present.claim())
		}
	}
	if owns(was.by) != owns(now) {
		// The first claim to each port of the address is lost or won, too.
		for cl := range c.firsts(was.claim.IP) {
			if cl.claimant != except {
				list = append(list, cl)
			}
		}
	}
	return list
}

// owns reports whether the claim with the best precedence at an address owns the address.
func owns(cl claim) bool { return cl.claimant != nil && claimsAddress(cl.Claim) }

func claimsAddress(c api.Claim) bool { return c.Port == 0 }
