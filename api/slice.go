// SPDX-License-Identifier: Apache-2.0

package api

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// EndpointSlice is a Kubernetes EndpointSlice (KEP 752), reduced to the needs of a proxy.
// It has some endpoints of one service. They all have the same family and the same ports.
type EndpointSlice struct {
	Namespace string `json:",omitempty"`
	Name      string `json:",omitempty"`
	// ServiceName is the value of the label kubernetes.io/service-name. It names the slice's
	// service, which is in the same namespace.
	ServiceName string `json:",omitempty"`
	// Labels holds the labels that the source is configured to keep.
	Labels map[string]string `json:",omitempty"`
	Family Family
	// Ports are the ports that every endpoint in Endpoints has.
	Ports     []EndpointPort  `json:",omitempty"`
	Endpoints []SliceEndpoint `json:",omitempty"`

	// TriggerTime is the value of the annotation
	// endpoints.kubernetes.io/last-change-trigger-time, the time of the change that caused
	// this version. It is for metrics only: Equal ignores it and wire forms omit it.
	TriggerTime time.Time `json:"-"`
}

// EndpointPort is a port of a slice. It is the target of the service port with the same
// name and protocol.
type EndpointPort struct {
	Name     string   `json:",omitempty"`
	Protocol Protocol `json:",omitempty"`
	// Port is 1 to 65535, or 0 if the slice gives no number.
	Port        int32  `json:",omitempty"`
	AppProtocol string `json:",omitempty"`
}

// SliceEndpoint is one endpoint of a slice.
type SliceEndpoint struct {
	Addr netip.Addr
	// Details is nil if all its fields would be zero. To save memory, many endpoints
	// share one EndpointDetails, which is therefore immutable. The method Value accepts
	// nil.
	Details *EndpointDetails `json:",omitempty"`
	// Weight is the endpoint's share of new connections, relative to other endpoints: 1 to
	// 65535. 0 means [DefaultWeight]. For the weight zero, see Conditions.Drain.
	Weight int32 `json:",omitempty"`

	Conditions
}

// EndpointDetails has the fields that are often equal for many endpoints.
type EndpointDetails struct {
	Hostname string `json:",omitempty"`
	// NodeName is the endpoint's node, or empty if unknown.
	NodeName string `json:",omitempty"`
	Zone     string `json:",omitempty"`
	// Hints are the topology hints (KEP 2433, KEP 3015), or nil if there are none.
	Hints *Hints `json:",omitempty"`
	// Target is the pod behind the endpoint (targetRef). It is nil if the endpoint has no
	// pod, or if the source is not configured to keep pods.
	Target *types.NamespacedName `json:",omitempty"`
}

// Value returns the details, which are zero if d is nil.
func (d *EndpointDetails) Value() EndpointDetails {
	if d == nil {
		return EndpointDetails{}
	}
	return *d
}

// Conditions are an endpoint's conditions (KEP 1669), after the API's defaults are
// applied. The field Drain says whether the endpoint drains.
type Conditions struct {
	// Ready reports whether the endpoint may receive new connections.
	Ready bool `json:",omitempty"`
	// Serving reports whether the endpoint answers. A terminating endpoint may still
	// answer.
	Serving bool `json:",omitempty"`
	// Terminating reports whether the endpoint is being stopped.
	Terminating bool `json:",omitempty"`
	// Drain reports whether the endpoint's weight is zero. Such an endpoint gets no new
	// connections, but keeps existing ones.
	Drain bool `json:",omitempty"`
}

// DefaultWeight is the weight of an endpoint without a weight, as in Cilium.
const DefaultWeight = 100

// Hints are an endpoint's topology hints.
type Hints struct {
	ForNodes []string `json:",omitempty"`
	ForZones []string `json:",omitempty"`
}

// Key returns the slice's namespace and name.
func (s *EndpointSlice) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
}

// Equal reports whether both slices are equal. It ignores TriggerTime.
func (s *EndpointSlice) Equal(o *EndpointSlice) bool {
	if s == o {
		return true
	}
	return s != nil && o != nil &&
		s.Namespace == o.Namespace && s.Name == o.Name && s.ServiceName == o.ServiceName && s.Family == o.Family &&
		maps.Equal(s.Labels, o.Labels) &&
		slices.Equal(s.Ports, o.Ports) &&
		slices.EqualFunc(s.Endpoints, o.Endpoints, SliceEndpoint.equal)
}

func (e SliceEndpoint) equal(o SliceEndpoint) bool {
	return e.Addr == o.Addr && e.Weight == o.Weight && e.Conditions == o.Conditions && e.Details.equal(o.Details)
}

func (d *EndpointDetails) equal(o *EndpointDetails) bool {
	if d == o {
		return true
	}
	a, b := d.Value(), o.Value()
	return a.Hostname == b.Hostname && a.NodeName == b.NodeName && a.Zone == b.Zone && a.Hints.equal(b.Hints) && equalTargets(a.Target, b.Target)
}

func equalTargets(a, b *types.NamespacedName) bool {
	return a == b || a != nil && b != nil && *a == *b
}

func (h *Hints) equal(o *Hints) bool {
	if h == nil || o == nil {
		return h == o
	}
	return slices.Equal(h.ForNodes, o.ForNodes) && slices.Equal(h.ForZones, o.ForZones)
}
