// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Explanation is a [View] with the reason for every decision. People can read the result
// of its method String, and programs can read its JSON form.
type Explanation struct {
	// Service is the name of the explained service. Its fields are empty if neither the
	// service nor any of its EndpointSlices is known.
	Service types.NamespacedName
	// View is the node's view of the service. It is nil if there is none.
	View *api.View
	// Frontends are the frontends of the view, except frontends that Narrow removed.
	Frontends []Frontend

	node, zone                   string
	absent                       string // why View is nil
	internalLocal, externalLocal bool   // the effective policies
	lists                        []listReport
	skipped                      []endpointReport // endpoints that can be on no list
	unserved                     []namedFrontend
}

// listReport explains the endpoint lists of one service port and family.
type listReport struct {
	// Port is the service port, or nil for an all-ports service.
	Port   *api.PortMapping `json:",omitempty"`
	Family api.Family
	// Usable reports whether any endpoint in the cluster is usable. If none is usable,
	// the frontends of the port and family reject connections.
	Usable   bool
	Topology topologyResult
	// Endpoints are sorted by address.
	Endpoints []endpointReport `json:",omitempty"`
}

// endpointReport has the reasons why an endpoint is or is not on the lists. In a listReport,
// the reasons apply to one service port. For skipped endpoints, they apply to all ports.
type endpointReport struct {
	// Slice is the name of the EndpointSlice that contains the endpoint.
	Slice    string
	Endpoint *api.SliceEndpoint
	// TargetPort is the port at the endpoint. It is 0 if the endpoint lacks the port, or if
	// the service is an all-ports service.
	TargetPort int32 `json:",omitempty"`
	// Internal, External and ShortCircuit say why the endpoint is or is not on the list for
	// internal, external or short-circuited traffic. In api.Scopes, the corresponding fields
	// are Internal, External and Cluster. ShortCircuit is 0 unless the external policy is
	// Local.
	Internal     reason `json:",omitzero"`
	External     reason `json:",omitzero"`
	ShortCircuit reason `json:",omitzero"`
	// If this endpoint is a duplicate, Preferred names the EndpointSlice of the endpoint
	// that is used instead.
	Preferred string `json:",omitempty"`

	ports []api.EndpointPort // of the slice
}

// Explain returns the same view as [View], with the reasons for all decisions.
func Explain(s *api.ServiceState, node *api.Node) *Explanation {
	here := locationOf(node)
	e := &Explanation{node: here.node, zone: here.zone}
	switch {
	case s.Service == nil:
		e.absent = "service not found or not selected"
		if len(s.Slices) > 0 {
			e.Service = types.NamespacedName{Namespace: s.Slices[0].Namespace, Name: s.Slices[0].ServiceName}
			e.absent += ", but slices refer to it"
		}
		return e
	case s.Service.Type == api.ExternalName:
		e.Service = s.Service.Key()
		e.absent = "a service of type ExternalName has no frontends"
		return e
	}
	pol := policiesOf(s.Service)
	e.Service = s.Service.Key()
	e.internalLocal, e.externalLocal = pol.internalLocal, pol.externalLocal
	e.View = view(s, node, &trace{e, pol})
	e.Frontends = slices.Collect(Frontends(e.View))
	e.unserved = unserved(e.View)
	return e
}

// ExplainView returns an explanation of a view without reasons for endpoints. Use it in a
// program that gets views from a server and does not have the EndpointSlices.
func ExplainView(view *api.View, node *api.Node) *Explanation {
	here, pol := locationOf(node), policiesOf(view.Service)
	return &Explanation{
		Service: view.Key(), node: here.node, zone: here.zone, View: view,
		internalLocal: pol.internalLocal, externalLocal: pol.externalLocal,
		Frontends: slices.Collect(Frontends(view)), unserved: unserved(view),
	}
}

// Narrow removes the frontends for which the function keep returns false. It also removes
// the lists that no other frontend uses. It reports whether any frontend is left.
func (e *Explanation) Narrow(keep func(FrontendKey) bool) bool {
	e.Frontends = slices.DeleteFunc(e.Frontends, func(f Frontend) bool { return !keep(f.FrontendKey) })
	e.unserved = slices.DeleteFunc(e.unserved, func(u namedFrontend) bool { return !keep(u.FrontendKey) })
	e.lists = slices.DeleteFunc(e.lists, func(l listReport) bool {
		return !slices.ContainsFunc(e.Frontends, func(f Frontend) bool { return f.ServicePort == l.Port && f.Family == l.Family })
	})
	return len(e.Frontends)+len(e.unserved) > 0
}

// trace records the decisions that lead to a view. A nil trace records nothing.
type trace struct {
	to  *Explanation
	pol policies
}

func (t *trace) addSkipped(slice *api.EndpointSlice, ep *api.SliceEndpoint, why reason) {
	if t == nil {
		return
	}
	t.to.skipped = append(t.to.skipped, t.endpoint(slice, ep, 0, listReasons{why, why}))
}

// addList records the list of family f for the port at index p. The candidates of this
// family are c.candidates[lo:hi].
func (t *trace) addList(c *selection, p int, f api.Family, found *endpointCounts, lo, hi int) {
	if t == nil {
		return
	}
	list := listReport{Port: c.ports[p], Family: f, Usable: found.usable, Topology: found.topology}
	for i := lo; i < hi; i++ {
		cand := &c.candidates[i]
		target := max(0, c.target(p, i))
		ep := t.endpoint(c.slices[cand.slice], cand.ep, target, c.reasonsAt(p, i))
		if ep.Internal == outDuplicate {
			ep.Preferred = c.slices[c.preferredTo(p, i).slice].Name
		}
		list.Endpoints = append(list.Endpoints, ep)
	}
	t.to.lists = append(t.to.lists, list)
}

func (t *trace) endpoint(slice *api.EndpointSlice, ep *api.SliceEndpoint, target int32, m listReasons) endpointReport {
	e := endpointReport{
		Slice:      slice.Name,
		Endpoint:   ep,
		TargetPort: target,
		Internal:   m.list(t.pol.internalLocal),
		External:   m.list(t.pol.externalLocal),
		ports:      slice.Ports,
	}
	if t.pol.externalLocal {
		e.ShortCircuit = m.shortCircuit()
	}
	return e
}

// preferredTo returns the candidate that is used instead of the duplicate at index i. The
// argument p is the index of the port.
func (c *selection) preferredTo(p, i int) *candidate {
	j, _ := slices.BinarySearchFunc(c.candidates, c.candidates[i].addr, func(o candidate, a netip.Addr) int { return o.addr.Compare(a) })
	for !c.reasonsAt(p, j).eligible() || c.target(p, j) != c.target(p, i) {
		j++
	}
	return &c.candidates[j]
}

// addrPort formats an endpoint's address, and its port unless the port is 0.
func addrPort(a netip.Addr, port int32) string {
	if port == 0 {
		return a.String()
	}
	return netip.AddrPortFrom(a, uint16(port)).String()
}
