// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"k8s.io/apimachinery/pkg/types"
)

// selection is the state of one call of View: every candidate for every port.
type selection struct {
	slices []*api.EndpointSlice
	// The service's ports that can have a frontend, or one nil element. See servedPorts.
	ports []*api.PortMapping
	// targets[s*len(ports)+p] is the target port number of ports[p] in slices[s], or 0 if
	// slices[s] does not serve the port. overrides[s] are the PortOverrides of slices[s].
	targets   []int32
	overrides [][]api.PortName
	// in the order of ordering.Endpoints
	candidates []candidate
	// one row for each port, with one entry for each candidate
	reasons []listReasons
}

// candidate is an endpoint that serves at least one port.
type candidate struct {
	addr  netip.Addr
	ep    *api.SliceEndpoint
	slice int32

	// assignLists sets the fields below. scopes: the candidate's lists for all ports
	// together. uneven: the ports have different lists. drains: the candidate is draining.
	scopes         api.Scopes
	uneven, drains bool
}

// row returns the reasons of every candidate for the port at index p.
func (c *selection) row(p int) []listReasons {
	return c.reasons[p*len(c.candidates):][:len(c.candidates)]
}

func (c *selection) reasonsAt(p, candidate int) listReasons {
	return c.reasons[p*len(c.candidates)+candidate]
}

func (c *selection) target(p, candidate int) int32 {
	return c.targets[int(c.candidates[candidate].slice)*len(c.ports)+p]
}

// gather appends endpoints to buf. An endpoint must serve at least one port, and its
// address must be of a served family.
func (c *selection) gather(buf []candidate, served []api.Family, tr *trace) []candidate {
	for s, slice := range c.slices {
		offers := c.targets[s*len(c.ports):][:len(c.ports)]
		noPort := !slices.ContainsFunc(offers, func(n int32) bool { return n != 0 })
		for i := range slice.Endpoints {
			ep := &slice.Endpoints[i]
			switch {
			case !slices.Contains(served, api.FamilyOf(ep.Addr)):
				tr.addSkipped(slice, ep, outFamily)
			case noPort:
				tr.addSkipped(slice, ep, outNoPort)
			default:
				buf = append(buf, candidate{addr: ep.Addr, ep: ep, slice: int32(s)})
			}
		}
	}
	return buf
}

// sort sorts the candidates in the order of ordering.Endpoints.
func (c *selection) sort() {
	overrides := c.overrides
	slices.SortFunc(c.candidates, func(a, b candidate) int {
		if d := a.addr.Compare(b.addr); d != 0 || a.slice == b.slice {
			return d
		}
		x := api.Endpoint{PortOverrides: overrides[a.slice]}
		return ordering.Endpoints(&x, &api.Endpoint{PortOverrides: overrides[b.slice]})
	})
}

// countV4 returns the number of IPv4 candidates. Candidates are sorted, IPv4 first.
func (c *selection) countV4() int {
	n, _ := slices.BinarySearchFunc(c.candidates, 128, func(cand candidate, bits int) int {
		return cmp.Compare(cand.addr.BitLen(), bits)
	})
	return n
}

// dropUnserved excludes, for each port, the candidates that do not serve the port.
func (c *selection) dropUnserved() {
	for p := range c.ports {
		row := c.row(p)
		for i := range row {
			if c.target(p, i) == 0 {
				row[i] = listReasons{outNoPort, outNoPort}
			}
		}
	}
}

// If several candidates for a port have the same address and target port, dropDuplicates
// keeps only the preferred candidate. Such duplicates occur while a pod moves between
// EndpointSlices, or when an address is reused. Two EndpointSlices may list one address
// with different ports, so dropDuplicates decides each port separately.
func (c *selection) dropDuplicates() {
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
				if !row[i].eligible() {
					continue
				}
				other, ok := best[c.target(p, i)]
				if ok && c.preference(i, other) >= 0 {
					row[i] = listReasons{outDuplicate, outDuplicate}
					continue
				}
				if ok {
					row[other] = listReasons{outDuplicate, outDuplicate}
				}
				best[c.target(p, i)] = i
			}
		}
	}
}

// preference orders two candidates with the same address and port. It prefers ready
// candidates that do not drain, then ready candidates, then candidates that do not
// terminate, then serving candidates, then the smaller EndpointSlice name. An
// EndpointSlice may contain an address twice, in any order. So preference finally
// compares other fields.
func (c *selection) preference(i, j int) int {
	a, b := c.candidates[i], c.candidates[j]
	x, y := a.ep, b.ep
	d, e := x.Details.Value(), y.Details.Value()
	return cmp.Or(
		trueFirst(ready(x.Conditions), ready(y.Conditions)),
		trueFirst(x.Ready, y.Ready),
		trueFirst(!x.Terminating, !y.Terminating),
		trueFirst(x.Serving, y.Serving),
		cmp.Compare(c.slices[a.slice].Name, c.slices[b.slice].Name),
		cmp.Compare(d.NodeName, e.NodeName),
		cmp.Compare(d.Hostname, e.Hostname),
		cmp.Compare(d.Zone, e.Zone),
		slices.Compare(hints(x).ForNodes, hints(y).ForNodes),
		slices.Compare(hints(x).ForZones, hints(y).ForZones),
		ordering.Keys(target(x), target(y)),
		cmp.Compare(x.Weight, y.Weight),
		trueFirst(!x.Drain, !y.Drain),
	)
}

func target(e *api.SliceEndpoint) types.NamespacedName {
	if t := e.Details.Value().Target; t != nil {
		return *t
	}
	return types.NamespacedName{}
}

func trueFirst(a, b bool) int {
	if a == b {
		return 0
	} else if a {
		return -1
	}
	return 1
}
