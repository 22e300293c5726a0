// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/healthport"
)

// String describes the explanation in several lines of text.
func (e *Explanation) String() string {
	var b strings.Builder
	e.head(&b)
	if e.View == nil {
		return b.String()
	}
	external := slices.ContainsFunc(e.Frontends, func(f Frontend) bool { return f.Kind != ClusterIP })
	for i := range e.lists {
		e.lists[i].text(&b, external)
	}
	section(&b, "endpoints on no list", e.skipped, func(ep *endpointReport) {
		fmt.Fprintf(&b, "  %s: %s\n", ep.name(), ep.why(ep.Internal))
	})
	section(&b, "draining: no new connections, existing ones are left alone", e.View.Draining, func(ep *api.Endpoint) {
		fmt.Fprintf(&b, "  %s\n", strings.Join(e.addrPorts(ep), ", "))
	})
	section(&b, "frontends", e.Frontends, func(f *Frontend) { f.text(&b) })
	section(&b, "not served", e.unserved, func(u *namedFrontend) { fmt.Fprintf(&b, "  %s: %s\n", u.FrontendKey, u.why()) })
	if port := healthport.Of(e.View.Service); port != 0 {
		fmt.Fprintf(&b, "\nhealth check node port %d: ready on this node are %d IPv4 and %d IPv6 addresses\n",
			port, healthport.Ready(e.View, api.IPv4), healthport.Ready(e.View, api.IPv6))
	}
	return b.String()
}

// section writes a heading and the items below it. Without items it writes nothing.
func section[T any](b *strings.Builder, heading string, items []T, write func(*T)) {
	if len(items) > 0 {
		fmt.Fprintf(b, "\n%s\n", heading)
	}
	for i := range items {
		write(&items[i])
	}
}

func (e *Explanation) head(b *strings.Builder) {
	node := "a node without a name"
	if e.node != "" {
		node = "node " + e.node
	}
	fmt.Fprintf(b, "service %s on %s", e.Service, node)
	if e.zone != "" {
		fmt.Fprintf(b, " in zone %s", e.zone)
	}
	if e.View == nil {
		fmt.Fprintf(b, ": %s\n", e.absent)
		return
	}
	fmt.Fprintf(b, "\ninternal traffic policy %s, external traffic policy %s\n",
		policyNames[e.internalLocal], policyNames[e.externalLocal])
	if p := ParametersOf(e.View); p != (Parameters{}) {
		fmt.Fprintf(b, "traffic parameters: %s\n", p)
	}
	if e.View.Service.ExternalTrafficToLocal && !e.externalLocal {
		b.WriteString("(externalTrafficPolicy Local has no effect: the service has no external frontend)\n")
	}
}

var policyNames = map[bool]string{false: "Cluster", true: "Local"} // the key true means that the policy is Local

// text describes the lists. The argument external reports whether the service has external
// frontends.
func (l *listReport) text(b *strings.Builder, external bool) {
	fmt.Fprintf(b, "\n%s, %s: ", portText(l.Port), l.Family)
	switch {
	case l.Usable:
		fmt.Fprintf(b, "topology: %s\n", l.Topology)
	case slices.ContainsFunc(l.Endpoints, l.onlyNeedsWeight):
		b.WriteString("no endpoint is usable anywhere: all weights of ready endpoints are 0\n")
	default:
		b.WriteString("no endpoint is usable anywhere\n")
	}
	for i := range l.Endpoints {
		l.Endpoints[i].text(b, external)
	}
}

// onlyNeedsWeight reports whether an endpoint would be usable if its weight were not 0.
func (l *listReport) onlyNeedsWeight(e endpointReport) bool {
	c := e.Endpoint.Conditions
	c.Drain = false
	return e.Endpoint.Drain && usable(c) && (l.Port == nil || e.TargetPort != 0)
}

func portText(p *api.PortMapping) string {
	if p == nil {
		return "all ports"
	}
	text := fmt.Sprintf("port %d/%s", p.Port, p.Protocol)
	if p.Name != "" {
		text += " " + p.Name
	}
	return text
}

// addrPorts returns the address of ep with each of its ports for the service.
func (e *Explanation) addrPorts(ep *api.Endpoint) []string {
	var ports []int32
	for i := range e.View.Service.Ports {
		if port := ep.TargetPort(&e.View.Service.Ports[i]); port != 0 {
			ports = append(ports, port)
		}
	}
	if e.View.Service.AllPorts {
		ports = []int32{0}
	}
	slices.Sort(ports)
	var all []string
	for _, port := range slices.Compact(ports) {
		all = append(all, addrPort(ep.Addr, port))
	}
	return all
}

func (e *endpointReport) name() string {
	return fmt.Sprintf("%s of slice %s on %s", addrPort(e.Endpoint.Addr, e.TargetPort), e.Slice,
		cmp.Or(e.Endpoint.Details.Value().NodeName, "no known node"))
}

func (e *endpointReport) text(b *strings.Builder, external bool) {
	fmt.Fprintf(b, "  %s\n", e.name())
	why := func(list string, r reason) {
		in := "out"
		if r.In() {
			in = "in"
		}
		fmt.Fprintf(b, "    %-14s %-3s  %s\n", list, in, e.why(r))
	}
	if e.Internal == e.External && (e.ShortCircuit == 0 || e.ShortCircuit == e.Internal) {
		why("every list", e.Internal)
		return
	}
	why("internal", e.Internal)
	if !external {
		return
	}
	why("external", e.External)
	if e.ShortCircuit != 0 {
		why("short circuit", e.ShortCircuit)
	}
}

// why returns a text about a reason, with the facts of this endpoint.
func (e *endpointReport) why(r reason) string {
	switch {
	case r == outDuplicate:
		return fmt.Sprintf("%s: that of slice %s", r, e.Preferred)
	case r == outNoPort && len(e.ports) > 0:
		const most = 5
		var has []string
		for _, p := range e.ports[:min(most, len(e.ports))] {
			name := fmt.Sprintf("%q/%s", p.Name, p.Protocol)
			if p.Port == 0 {
				name += " without a number"
			}
			has = append(has, name)
		}
		if more := len(e.ports) - most; more > 0 {
			has = append(has, fmt.Sprintf("%d more", more))
		}
		return fmt.Sprintf("%s; it has %s", r, strings.Join(has, ", "))
	default:
		return r.String()
	}
}

func (f *Frontend) text(b *strings.Builder) {
	fmt.Fprintf(b, "  %s\n", f.FrontendKey)
	if f.Kind == ClusterIP || f.Masquerade == MasqueradeAll {
		fmt.Fprintf(b, "    from anywhere   %s\n", f.Elsewhere)
	} else {
		fmt.Fprintf(b, "    from elsewhere  %s\n    from this node  %s\n", f.Elsewhere, f.Node)
	}
	if f.Sources.Restricted {
		fmt.Fprintf(b, "    sources         %s\n", f.Sources)
	}
	fmt.Fprintf(b, "    masquerade      %s\n", masqueradeTexts[f.Masquerade])
	if f.Algorithm != api.Random {
		fmt.Fprintf(b, "    algorithm       %s\n", algorithmTexts[f.Algorithm])
	}
	if f.Affinity > 0 {
		fmt.Fprintf(b, "    affinity        a client keeps its endpoint for %s\n", f.Affinity)
	}
}

// String describes the verdict and, for Forward, the endpoints.
func (t Traffic) String() string {
	switch t.Verdict {
	case Forward:
		to := make([]string, len(t.Endpoints))
		for i, e := range t.Endpoints {
			to[i] = addrPort(e.Addr, e.Port)
			if e.Weight != 0 {
				to[i] += fmt.Sprintf(" (weight %d)", e.Weight)
			}
		}
		return "forward to " + strings.Join(to, ", ")
	case Reject:
		return "reject: no endpoint is usable anywhere"
	default:
		return "drop: usable endpoints are only on other nodes"
	}
}

// String describes the admitted sources.
func (s Sources) String() string {
	switch {
	case !s.Restricted:
		return "any source"
	case len(s.Ranges) == 0:
		return "no source of this family"
	}
	text := make([]string, len(s.Ranges))
	for i, r := range s.Ranges {
		text[i] = r.String()
	}
	slices.Sort(text)
	return "only " + strings.Join(text, ", ")
}

var algorithmTexts = map[api.Algorithm]string{
	api.HashClient:     "stable hashing by client address",
	api.HashConnection: "stable hashing by client address and port",
}

var masqueradeTexts = map[Masquerade]string{
	MasqueradeIfConfigured: "from outside the pod network, if the backend enables it",
	MasqueradeAll:          "all",
	MasqueradeNode:         "only the node's own traffic",
}
