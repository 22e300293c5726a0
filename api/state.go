// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// ServiceState is everything the cluster says about one service.
type ServiceState struct {
	// Service is nil while only slices of it are known.
	Service *Service `json:",omitempty"`
	// Slices are the service's slices, in order of their names.
	Slices []*EndpointSlice `json:",omitempty"`
	// Lost are the claims of the service that another one holds, in order.
	Lost []LostClaim `json:",omitempty"`
}

// FindSlice returns where the slice of that name is in Slices, or would be, and
// whether it is there.
func (s *ServiceState) FindSlice(name string) (int, bool) {
	return slices.BinarySearchFunc(s.Slices, name, func(s *EndpointSlice, name string) int { return strings.Compare(s.Name, name) })
}

// Claim is what a frontend takes for its service alone: a protocol and port at
// an address. Protocol and Port are 0 if it takes the whole address (AllPorts).
// IP is the unspecified address of its family if it is a node port, which all
// node addresses have.
type Claim struct {
	IP       netip.Addr `json:",omitzero"`
	Protocol Protocol   `json:",omitempty"`
	Port     int32      `json:",omitempty"`
}

// LostClaim is a claim that another service holds: one with a claim of a higher rank (first
// cluster IPs, then load-balancer IPs, then external IPs), or an older one.
type LostClaim struct {
	Claim
	Winner types.NamespacedName
}

// CompareKeys orders services and slices by namespace, then by name: the order
// of everything in this module.
func CompareKeys(a, b types.NamespacedName) int {
	if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
		return c
	}
	return strings.Compare(a.Name, b.Name)
}
