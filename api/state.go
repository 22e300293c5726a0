// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// ServiceState is the cluster's whole state of one service.
type ServiceState struct {
	// Service is nil while only slices of the service are known.
	Service *Service `json:",omitempty"`
	// Slices are the service's slices, sorted by name.
	Slices []*EndpointSlice `json:",omitempty"`
	// Lost are the service's claims that another service owns, sorted.
	Lost []LostClaim `json:",omitempty"`
}

// FindSlice returns the index of the slice with this name, and true. If there is none, it
// returns the index at which to insert the slice, and false.
func (s *ServiceState) FindSlice(name string) (int, bool) {
	return slices.BinarySearchFunc(s.Slices, name, func(s *EndpointSlice, name string) int { return strings.Compare(s.Name, name) })
}

// Claim is an address, protocol and port that a frontend needs for its service alone.
// Protocol and Port are 0 for a claim of the whole address (AllPorts). For a node port,
// IP is 0.0.0.0 or ::, because the claim applies to all node addresses.
type Claim struct {
	IP       netip.Addr `json:",omitzero"`
	Protocol Protocol   `json:",omitempty"`
	Port     int32      `json:",omitempty"`
}

// LostClaim is a claim that another service owns. The owner's claim has a higher rank
// (cluster IPs, then load-balancer IPs, then external IPs), or the owner is older.
type LostClaim struct {
	Claim
	Winner types.NamespacedName
}

// CompareKeys orders keys by namespace, then by name. Everything in this module uses this
// order.
func CompareKeys(a, b types.NamespacedName) int {
	if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
		return c
	}
	return strings.Compare(a.Name, b.Name)
}
