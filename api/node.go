// SPDX-License-Identifier: Apache-2.0

package api

import (
	"maps"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"
)

// Node is a Kubernetes Node, reduced to the needs of a proxy.
type Node struct {
	Name      string            `json:",omitempty"`
	UID       types.UID         `json:",omitempty"`
	Labels    map[string]string `json:",omitempty"`
	Addresses []NodeAddress     `json:",omitempty"`
	PodCIDRs  []netip.Prefix    `json:",omitempty"`
	Taints    []Taint           `json:",omitempty"`
	// Deleting reports whether the Node object has a deletion timestamp.
	Deleting bool `json:",omitempty"`
}

// NodeAddress is an IP address from Node.status.addresses. Host names are omitted.
type NodeAddress struct {
	// Type is InternalIP or ExternalIP.
	Type string
	IP   netip.Addr
}

// Taint is a taint of a node.
type Taint struct {
	Key    string `json:",omitempty"`
	Value  string `json:",omitempty"`
	Effect string `json:",omitempty"`
}

// Zone returns the node's zone, which is the value of the label
// topology.kubernetes.io/zone. It returns "" if n is nil or has no zone.
func (n *Node) Zone() string {
	if n == nil {
		return ""
	}
	return n.Labels["topology.kubernetes.io/zone"]
}

// Equal reports whether both nodes are equal.
func (n *Node) Equal(o *Node) bool {
	if n == o {
		return true
	}
	return n != nil && o != nil &&
		n.Name == o.Name && n.UID == o.UID && maps.Equal(n.Labels, o.Labels) &&
		slices.Equal(n.Addresses, o.Addresses) && slices.Equal(n.PodCIDRs, o.PodCIDRs) &&
		slices.Equal(n.Taints, o.Taints) && n.Deleting == o.Deleting
}
