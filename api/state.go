// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"

	"k8s.io/apimachinery/pkg/types"
)

// ServiceState is the cluster's whole state of one service.
type ServiceState struct {
	// Service is nil if the source has EndpointSlices of the service, but no Service
	// object.
	Service *Service `json:",omitempty"`
	// Slices are the service's EndpointSlices, sorted by name.
	Slices []*EndpointSlice `json:",omitempty"`
	// Lost has those claims of the service that another service has won, in sorted order.
	// Their field Winner is empty in a cluster.State.
	Lost []LostClaim `json:",omitempty"`
}

// Claim is an address, protocol and port that only one service can have. Protocol and
// Port are 0 for a claim of the whole address (AllPorts). The claim of a node port has the
// zero Addr and a Family, because it applies to all node addresses of this family.
type Claim struct {
	IP netip.Addr `json:",omitzero"`
	// Family is 0 if the claim has an IP.
	Family   Family   `json:",omitzero"`
	Protocol Protocol `json:",omitempty"`
	Port     int32    `json:",omitempty"`
}

// LostClaim is a claim that another service owns. A cluster IP ranks before a
// load-balancer IP, which ranks before an external IP. At the same rank, the older
// service owns the claim.
type LostClaim struct {
	Claim
	// Winner is the owner, if it is known. It may be out of date, because a view does not
	// change if only the winner changes.
	Winner types.NamespacedName `json:",omitzero"`
}

func sameClaims(a, b LostClaim) bool { return a.Claim == b.Claim }
