// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"encoding/json"
	"io"
	"net/netip"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// WriteViews writes each view as a line of JSON. Scripts can read this form.
func WriteViews(w io.Writer, views []*api.View) error {
	out := json.NewEncoder(w)
	for _, view := range views {
		if err := out.Encode(view); err != nil {
			return err
		}
	}
	return nil
}

// WriteFrontends writes lines of JSON, for scripts. The first line is the node, or {} if
// node is nil. Each other line is a frontend of a view (see [Frontends]), with the
// Namespace and Name of its service. In this line, Ranges is the result of
// [Sources.Prefixes] for the addresses of node.
func WriteFrontends(w io.Writer, node *api.Node, views []*api.View) error {
	if node == nil {
		node = &api.Node{}
	}
	addrs := make([]netip.Addr, len(node.Addresses))
	for i := range node.Addresses {
		addrs[i] = node.Addresses[i].IP
	}
	out := json.NewEncoder(w)
	if err := out.Encode(node); err != nil {
		return err
	}
	for _, view := range views {
		for f := range Frontends(view) {
			f.Sources = Sources{Restricted: f.Sources.Restricted, Ranges: f.Sources.Prefixes(addrs)}
			if err := out.Encode(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// frontendJSON is the JSON form of a Frontend.
type frontendJSON struct {
	Namespace string `json:",omitempty"`
	Name      string `json:",omitempty"`
	Kind      Kind
	Addr      netip.Addr `json:",omitzero"`
	Family    api.Family
	Protocol  string `json:",omitempty"` // "TCP", "UDP" or "SCTP"
	Port      int32  `json:",omitempty"`
	PortName  string `json:",omitempty"` // name of the service port

	Elsewhere, Node Traffic
	// Keep has further endpoints to which existing flows may continue, besides the endpoints
	// of Elsewhere and Node.
	Keep []Target `json:",omitempty"`

	Sources         Sources `json:",omitzero"`
	Masquerade      Masquerade
	AffinitySeconds int32         `json:",omitempty"`
	Algorithm       api.Algorithm `json:",omitempty"`
	// Reset has those endpoints in Keep whose established TCP connections are reset. If
	// ResetConnections is true, connections to endpoints that are on no list are also
	// reset.
	ResetConnections bool     `json:",omitempty"`
	Reset            []Target `json:",omitempty"`
}

func (f *Frontend) json() frontendJSON {
	j := frontendJSON{
		Kind: f.Kind, Addr: f.Addr, Family: f.Family, Port: f.Port,
		Elsewhere: f.Elsewhere, Node: f.Node, Keep: f.Existing.Without(f.Elsewhere.Endpoints, f.Node.Endpoints), Sources: f.Sources, Masquerade: f.Masquerade,
		AffinitySeconds: int32(f.Affinity.Seconds()),
	}
	if f.ServicePort != nil {
		j.Protocol, j.PortName = f.Protocol.String(), f.ServicePort.Name
	}
	j.Algorithm = f.Algorithm
	if view := f.Existing.view; view != nil {
		j.ResetConnections = view.Service.ResetConnections
		for _, t := range j.Keep {
			if f.Existing.Resets(t.AddrPort()) {
				j.Reset = append(j.Reset, t)
			}
		}
		j.Namespace, j.Name = view.Service.Namespace, view.Service.Name
	}
	return j
}

// MarshalJSON returns the JSON form of f, with the Namespace and Name of its service.
func (f Frontend) MarshalJSON() ([]byte, error) { return json.Marshal(f.json()) }

// MarshalJSON returns the JSON form of e.
func (e *Explanation) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Service                      types.NamespacedName
		Node                         string    `json:",omitempty"`
		Zone                         string    `json:",omitempty"`
		View                         *api.View `json:",omitempty"`
		Absent                       string    `json:",omitempty"`
		InternalLocal, ExternalLocal bool
		Parameters                   Parameters       `json:",omitzero"`
		Lists                        []listReport     `json:",omitempty"`
		Skipped                      []endpointReport `json:",omitempty"`
		Frontends                    []Frontend       `json:",omitempty"`
		Unserved                     []namedFrontend  `json:",omitempty"`
	}{e.Service, e.node, e.zone, e.View, e.absent, e.internalLocal, e.externalLocal, ParametersOf(e.View), e.lists, e.skipped, e.Frontends, e.unserved})
}

// MarshalJSON returns the address, port, node and weight of the endpoint.
func (t Target) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Addr     netip.Addr
		Port     int32  `json:",omitempty"`
		Local    bool   `json:",omitempty"`
		NodeName string `json:",omitempty"`
		Weight   int32  `json:",omitempty"`
	}{t.Addr, t.Port, t.Local, t.NodeName, t.Weight})
}

// MarshalJSON returns whether the endpoint is on the list, and why: {"In": true, "Why":
// "ready and on this node"}.
func (r reason) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		In  bool
		Why string
	}{r.In(), r.String()})
}

// MarshalText returns the result of String.
func (t topologyResult) MarshalText() ([]byte, error) { return []byte(t.String()), nil }
func (v Verdict) MarshalText() ([]byte, error)        { return []byte(v.String()), nil }
func (f fault) MarshalText() ([]byte, error)          { return []byte(f.String()), nil }
