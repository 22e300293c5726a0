// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
)

// Parameters is the set of traffic parameters that a service sets, or that a backend
// honours. Traffic parameters are settings that the Kubernetes API does not have. A
// backend that does not honour a parameter serves the service without it. The zero value
// has no parameter.
type Parameters struct {
	// Algorithm is an algorithm other than api.Random (Frontend.Algorithm).
	Algorithm bool `json:",omitempty"`
	// Weights means that endpoints have different weights (api.Endpoint.Weight).
	Weights bool `json:",omitempty"`
	// Resets are resets of connections to lost endpoints (Existing.Resets).
	Resets bool `json:",omitempty"`
	// NodePortSources are source ranges of node ports (Frontend.Sources).
	NodePortSources bool `json:",omitempty"`
}

// ParametersOf returns the traffic parameters of a service. If view is nil, the service has
// no parameters.
func ParametersOf(view *api.View) Parameters {
	if view == nil || view.Service == nil {
		return Parameters{}
	}
	svc := view.Service
	weight := func(e *api.Endpoint) int32 {
		if e.Weight == 0 {
			return api.DefaultWeight
		}
		return e.Weight
	}
	return Parameters{
		Algorithm: svc.Algorithm != api.Random,
		Weights: slices.ContainsFunc(view.Endpoints, func(e api.Endpoint) bool {
			return weight(&e) != weight(&view.Endpoints[0])
		}),
		Resets: svc.ResetConnections,
		NodePortSources: slices.ContainsFunc(svc.SourceRanges, func(r api.SourceRanges) bool { return r.NodePorts }) &&
			slices.ContainsFunc(svc.Ports, func(p api.PortMapping) bool { return p.NodePort != 0 }),
	}
}

// Without returns those parameters of p that are not in o.
func (p Parameters) Without(o Parameters) Parameters {
	return Parameters{
		p.Algorithm && !o.Algorithm, p.Weights && !o.Weights, p.Resets && !o.Resets, p.NodePortSources && !o.NodePortSources,
	}
}

// String lists the parameters, for people. It returns "" if there are none.
func (p Parameters) String() string {
	var out []string
	for _, of := range [...]struct {
		has  bool
		name string
	}{
		{p.Algorithm, "stable hashing"}, {p.Weights, "weights of endpoints"},
		{p.Resets, "resets of connections to lost endpoints"}, {p.NodePortSources, "source ranges of node ports"},
	} {
		if of.has {
			out = append(out, of.name)
		}
	}
	return strings.Join(out, ", ")
}
