// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Explanation is a [View] with the reason of every decision in it. Its String
// is for people to read, its JSON for programs.
type Explanation struct {
	// Service is what was asked about, zero if not even that is known.
	Service types.NamespacedName
	// Node and Zone are where the view is taken from, empty if not known.
	Node string `json:",omitempty"`
	Zone string `json:",omitempty"`
	// View is what [View] returns. If it is nil there is nothing else, and Absent
	// says why.
	View   *api.ServiceEndpoints `json:",omitempty"`
	Absent string                `json:",omitempty"`
	// InternalLocal and ExternalLocal say which traffic policies are Local, those
	// that do not count left out.
	InternalLocal, ExternalLocal bool
	// Lists explains the lists of each service port and family.
	Lists []ListExplanation `json:",omitempty"`
	// Skipped are endpoints that no list considers.
	Skipped []EndpointExplanation `json:",omitempty"`
	// Frontends and Unserved are what the functions of that name yield.
	Frontends []Frontend         `json:",omitempty"`
	Unserved  []UnservedFrontend `json:",omitempty"`
}

// ListExplanation says how the lists of one service port and family came about.
type ListExplanation struct {
	// Port is the service port, nil for all ports.
	Port   *api.PortMapping `json:",omitempty"`
	Family api.Family
	// Usable says that some endpoint in the cluster is usable. Otherwise the
	// frontends of the port and family reject.
	Usable   bool
	Topology Topology
	// Endpoints are in order of address.
	Endpoints []EndpointExplanation `json:",omitempty"`
}

// EndpointExplanation says why an endpoint is on each list, or not. On lists
// of its own it is for one service port; among the skipped it is for all.
type EndpointExplanation struct {
	// Slice is the name of the slice that the endpoint is from.
	Slice    string
	Endpoint *api.SliceEndpoint
	// TargetPort is the port at the endpoint, 0 if there is none or any.
	TargetPort int32 `json:",omitempty"`
	// Internal, External and ShortCircuit are the lists api.Scopes names Internal,
	// External and Cluster. ShortCircuit is 0 unless the external policy is Local.
	Internal     Reason `json:",omitzero"`
	External     Reason `json:",omitzero"`
	ShortCircuit Reason `json:",omitzero"`
	// Preferred names the slice whose entry counts instead, for outDuplicate.
	Preferred string `json:",omitempty"`
}

// Explain returns the node's view of s, as [View] does, with all reasons.
func Explain(s *api.ServiceState, node *api.Node) *Explanation {
	here := placeOf(node)
	e := &Explanation{Node: here.node, Zone: here.zone}
	switch {
	case s.Service == nil:
		e.Absent = "no such service is served"
		if len(s.Slices) > 0 {
			e.Service = s.Slices[0].ServiceKey()
			e.Absent += ", though slices name it"
		}
		return e
	case s.Service.Type == api.ExternalName:
		e.Service = s.Service.Key()
		e.Absent = "a service of type ExternalName has no frontends"
		return e
	}
	pol := policiesOf(s.Service)
	e.Service = s.Service.Key()
	e.InternalLocal, e.ExternalLocal = pol.internalLocal, pol.externalLocal
	e.View = view(s, node, &trace{e, pol})
	e.Frontends = slices.Collect(Frontends(e.View))
	e.Unserved = slices.Collect(Unserved(e.View))
	return e
}

// trace writes down what view decides. A nil one does not.
type trace struct {
	to  *Explanation
	pol policies
}

// skipped notes an endpoint that is no candidate.
func (t *trace) skipped(slice *api.EndpointSlice, ep *api.SliceEndpoint, why Reason) {
	if t == nil {
		return
	}
	t.to.Skipped = append(t.to.Skipped, t.endpoint(slice, ep, 0, membership{why, why}))
}

// decided notes what was found out about the candidates lo to hi, those of
// family f, for the port at index p.
func (t *trace) decided(c *contest, p int, f api.Family, found *tally, lo, hi int) {
	if t == nil {
		return
	}
	list := ListExplanation{Port: c.ports[p], Family: f, Usable: found.usable, Topology: found.topology}
	for i := lo; i < hi; i++ {
		cand := &c.candidates[i]
		target := max(0, c.target(p, i))
		ep := t.endpoint(c.slices[cand.slice], cand.ep, target, c.member(p, i))
		if ep.Internal == outDuplicate {
			ep.Preferred = c.slices[c.preferredTo(p, i).slice].Name
		}
		list.Endpoints = append(list.Endpoints, ep)
	}
	t.to.Lists = append(t.to.Lists, list)
}

func (t *trace) endpoint(slice *api.EndpointSlice, ep *api.SliceEndpoint, target int32, m membership) EndpointExplanation {
	e := EndpointExplanation{
		Slice:      slice.Name,
		Endpoint:   ep,
		TargetPort: target,
		Internal:   m.list(t.pol.internalLocal),
		External:   m.list(t.pol.externalLocal),
	}
	if t.pol.externalLocal {
		e.ShortCircuit = m.shortCircuit()
	}
	return e
}

// preferredTo returns the candidate that dropDuplicates preferred to the one at
// index i for the port at index p.
func (c *contest) preferredTo(p, i int) *candidate {
	j := slices.IndexFunc(c.candidates, func(o candidate) bool { return o.addr == c.candidates[i].addr })
	for !c.member(p, j).competes() || c.target(p, j) != c.target(p, i) {
		j++
	}
	return &c.candidates[j]
}

// addrPort prints an endpoint's address, with its port if it has one.
func addrPort(a netip.Addr, port int32) string {
	if port == 0 {
		return a.String()
	}
	return netip.AddrPortFrom(a, uint16(port)).String()
}
