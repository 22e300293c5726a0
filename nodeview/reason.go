// SPDX-License-Identifier: Apache-2.0

package nodeview

import "fmt"

// Reason says why an endpoint is, or is not, on a list.
type Reason uint8

// Why an endpoint is on a list.
const (
	// inReady: it is ready, and topology does not choose.
	inReady Reason = iota + 1
	// inForNode: it is ready, and hinted for this node.
	inForNode
	// inForZone: it is ready, and hinted for this node's zone.
	inForZone
	// inHere: it is ready and runs on this node.
	inHere
	// inTerminating: it serves while it terminates, and the list has no ready one.
	inTerminating
)

// Why an endpoint is not on a list.
const (
	// outNotReady: it is neither ready, nor serving and terminating.
	outNotReady Reason = iota + 16
	// outOthersReady: it serves while it terminates, but the list has ready ones.
	outOthersReady
	// outOtherNodes: it is hinted for other nodes, and another one for this node.
	outOtherNodes
	// outOtherZones: it is hinted for other zones, and another one for this node's.
	outOtherZones
	// outNotHere: it does not run on this node.
	outNotHere
	// outNoPort: its slice has no port of the service port's name and protocol,
	// or one without a number.
	outNoPort
	// outDuplicate: another entry with the same address and port is preferred.
	outDuplicate
	// outFamily: the service is not served in its family.
	outFamily
)

// In reports whether the endpoint is on the list.
func (r Reason) In() bool { return r != 0 && r < outNotReady }

// String says it in words.
func (r Reason) String() string {
	switch r {
	case inReady:
		return "ready"
	case inForNode:
		return "ready and hinted for this node"
	case inForZone:
		return "ready and hinted for this node's zone"
	case inHere:
		return "ready and on this node"
	case inTerminating:
		return "serving while terminating, as none is ready"
	case outNotReady:
		return "not ready"
	case outOthersReady:
		return "terminating, while others are ready"
	case outOtherNodes:
		return "hinted for other nodes"
	case outOtherZones:
		return "hinted for other zones"
	case outNotHere:
		return "not on this node"
	case outNoPort:
		return "its slice does not serve the port"
	case outDuplicate:
		return "another entry with its address and port is preferred"
	case outFamily:
		return "the service is not served in its family"
	default:
		return fmt.Sprintf("Reason(%d)", uint8(r))
	}
}

// Topology says which hints choose among the ready endpoints of a port and
// family.
type Topology uint8

// The outcomes of the topology rule.
const (
	// noneReady: there is nothing to choose from.
	noneReady Topology = iota
	// noHints: no ready endpoint has any.
	noHints
	// hintsIncomplete: neither node nor zone hints are on every ready endpoint,
	// so they are ignored.
	hintsIncomplete
	// hintsElsewhere: the hints that are on every ready endpoint name only other
	// nodes or zones, so they are ignored.
	hintsElsewhere
	// forNode: only those hinted for this node are used.
	forNode
	// forZone: only those hinted for this node's zone are used.
	forZone
)

// String says it in words.
func (t Topology) String() string {
	switch t {
	case noneReady:
		return "no endpoint is ready"
	case noHints:
		return "no hints, all ready endpoints"
	case hintsIncomplete:
		return "hints are not on every ready endpoint and ignored, all ready endpoints"
	case hintsElsewhere:
		return "hints are for elsewhere and ignored, all ready endpoints"
	case forNode:
		return "ready endpoints hinted for this node"
	case forZone:
		return "ready endpoints hinted for this node's zone"
	default:
		return fmt.Sprintf("Topology(%d)", uint8(t))
	}
}
