// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// contest is the work on one view: every candidate for every port.
type contest struct {
	slices []*api.EndpointSlice
	// ports are the service's ports that can be served; a single nil stands for
	// the only "port" of a service that is served by whole addresses.
	ports []*api.PortMapping
	// targets and overrides say what each slice serves: for slice s and port p,
	// targets[s*len(ports)+p] is the number at the endpoints, 0 if they do not
	// serve it.
	targets   []int32
	overrides [][]api.PortName
	// candidates are in the order of api.Endpoint.Compare.
	candidates []candidate
	// members has a row for each port, with one entry for each candidate.
	members []membership
}

// candidate is an endpoint of a slice that may serve some port.
type candidate struct {
	addr  netip.Addr
	ep    *api.SliceEndpoint
	slice int32

	// What settle finds: the lists of all ports together, whether they differ between
	// ports, and whether a candidate that is on none is draining.
	scopes         api.Scopes
	uneven, drains bool
}

// row returns the membership of every candidate for the port at index p.
func (c *contest) row(p int) []membership {
	return c.members[p*len(c.candidates):][:len(c.candidates)]
}

func (c *contest) member(p, candidate int) membership {
	return c.members[p*len(c.candidates)+candidate]
}

func (c *contest) target(p, candidate int) int32 {
	return c.targets[int(c.candidates[candidate].slice)*len(c.ports)+p]
}

// gather appends to buf the endpoints of the families in which the service is
// served, of slices that serve any of its ports. Which family an endpoint has,
// its address says.
func (c *contest) gather(buf []candidate, served []api.Family, tr *trace) []candidate {
	for s, slice := range c.slices {
		offers := c.targets[s*len(c.ports):][:len(c.ports)]
		noPort := !slices.ContainsFunc(offers, func(n int32) bool { return n != 0 })
		for i := range slice.Endpoints {
			ep := &slice.Endpoints[i]
			switch {
			case !slices.Contains(served, api.FamilyOf(ep.Addr)):
				tr.skipped(slice, ep, outFamily)
			case noPort:
				tr.skipped(slice, ep, outNoPort)
			default:
				buf = append(buf, candidate{addr: ep.Addr, ep: ep, slice: int32(s)})
			}
		}
	}
	return buf
}

// sort brings the candidates into the order of api.Endpoint.Compare.
func (c *contest) sort() {
	overrides := c.overrides
	slices.SortFunc(c.candidates, func(a, b candidate) int {
		if d := a.addr.Compare(b.addr); d != 0 || a.slice == b.slice {
			return d
		}
		x := api.Endpoint{PortOverrides: overrides[a.slice]}
		return x.Compare(&api.Endpoint{PortOverrides: overrides[b.slice]})
	})
}

// countV4 returns how many of the sorted candidates have IPv4 addresses: they
// come first.
func (c *contest) countV4() int {
	n, _ := slices.BinarySearchFunc(c.candidates, 128, func(cand candidate, bits int) int {
		return cmp.Compare(cand.addr.BitLen(), bits)
	})
	return n
}

// dropUnserved keeps the candidates of slices that do not serve a port from
// competing for it.
func (c *contest) dropUnserved() {
	for p := range c.ports {
		row := c.row(p)
		for i := range row {
			if c.target(p, i) == 0 {
				row[i] = membership{outNoPort, outNoPort}
			}
		}
	}
}

// dropDuplicates leaves, of several candidates for a port with the same address
// and the same number there, only the preferred one in the contest: a pod that
// moves between slices, or whose address is used again, is one endpoint. What
// two slices tell about different ports at one address stays apart.
func (c *contest) dropDuplicates() {
	var best map[int32]int // target port → candidate
	for lo, hi := 0, 0; lo < len(c.candidates); lo = hi {
		for hi = lo + 1; hi < len(c.candidates) && c.candidates[hi].addr == c.candidates[lo].addr; {
			hi++
		}
		if hi == lo+1 {
			continue
		}
		if best == nil {
			best = map[int32]int{}
		}
		for p := range c.ports {
			clear(best)
			row := c.row(p)
			for i := lo; i < hi; i++ {
				if !row[i].competes() {
					continue
				}
				other, ok := best[c.target(p, i)]
				if ok && c.preference(i, other) >= 0 {
					row[i] = membership{outDuplicate, outDuplicate}
					continue
				}
				if ok {
					row[other] = membership{outDuplicate, outDuplicate}
				}
				best[c.target(p, i)] = i
			}
		}
	}
}

// preference orders two candidates with the same address and port, the one to
// prefer first: ready, then not terminating, then serving, then the smaller
// slice name. What comes after that only makes the order of arrival irrelevant
// where one slice names an address twice.
func (c *contest) preference(i, j int) int {
	a, b := c.candidates[i], c.candidates[j]
	x, y := a.ep, b.ep
	return cmp.Or(
		trueFirst(x.Ready, y.Ready),
		trueFirst(!x.Terminating, !y.Terminating),
		trueFirst(x.Serving, y.Serving),
		cmp.Compare(c.slices[a.slice].Name, c.slices[b.slice].Name),
		cmp.Compare(x.NodeName, y.NodeName),
		cmp.Compare(x.Hostname, y.Hostname),
		cmp.Compare(x.Zone, y.Zone),
		slices.Compare(hints(x).ForNodes, hints(y).ForNodes),
		slices.Compare(hints(x).ForZones, hints(y).ForZones),
		api.CompareKeys(target(x), target(y)),
	)
}

func target(e *api.SliceEndpoint) types.NamespacedName {
	if e.Target == nil {
		return types.NamespacedName{}
	}
	return *e.Target
}

func trueFirst(a, b bool) int {
	if a == b {
		return 0
	} else if a {
		return -1
	}
	return 1
}
