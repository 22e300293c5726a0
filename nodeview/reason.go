// SPDX-License-Identifier: Apache-2.0

package nodeview

import "fmt"

// Reason says why an endpoint is, or is not, on a list.
type Reason uint8

// Why an endpoint is on a list.
const (
	// InReady: it is ready, and topology does not choose.
	InReady Reason = iota + 1
	// InForNode: it is ready, and hinted for this node.
	InForNode
	// InForZone: it is ready, and hinted for this node's zone.
	InForZone
	// InHere: it is ready and runs on this node.
	InHere
	// InTerminating: it serves while it terminates, and the list has no ready one.
	InTerminating
)

// Why an endpoint is not on a list.
const (
	// OutNotReady: it is neither ready, nor serving and terminating.
	OutNotReady Reason = iota + 16
	// OutOthersReady: it serves while it terminates, but the list has ready ones.
	OutOthersReady
	// OutOtherNodes: it is hinted for other nodes, and another one for this node.
	OutOtherNodes
	// OutOtherZones: it is hinted for other zones, and another one for this node's.
	OutOtherZones
	// OutNotHere: it does not run on this node.
	OutNotHere
	// OutNoPort: its slice has no port of the service port's name and protocol,
	// or one without a number.
	OutNoPort
	// OutDuplicate: another entry with the same address and port is preferred.
	OutDuplicate
	// OutFamily: the service is not served in its family.
	OutFamily
)

// In reports whether the endpoint is on the list.
func (r Reason) In() bool { return r != 0 && r < OutNotReady }

// String says it in words.
func (r Reason) String() string {
	switch r {
	case InReady:
		return "ready"
	case InForNode:
		return "ready and hinted for this node"
	case InForZone:
		return "ready and hinted for this node's zone"
	case InHere:
		return "ready and on this node"
	case InTerminating:
		return "serving while terminating, as none is ready"
	case OutNotReady:
		return "not ready"
	case OutOthersReady:
		return "terminating, while others are ready"
	case OutOtherNodes:
		return "hinted for other nodes"
	case OutOtherZones:
		return "hinted for other zones"
	case OutNotHere:
		return "not on this node"
	case OutNoPort:
		return "its slice does not serve the port"
	case OutDuplicate:
		return "another entry with its address and port is preferred"
	case OutFamily:
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
	// NoneReady: there is nothing to choose from.
	NoneReady Topology = iota
	// NoHints: no ready endpoint has any.
	NoHints
	// HintsIncomplete: neither node nor zone hints are on every ready endpoint,
	// so they are ignored.
	HintsIncomplete
	// HintsElsewhere: the hints that are on every ready endpoint name only other
	// nodes or zones, so they are ignored.
	HintsElsewhere
	// ForNode: only those hinted for this node are used.
	ForNode
	// ForZone: only those hinted for this node's zone are used.
	ForZone
)

// String says it in words.
func (t Topology) String() string {
	switch t {
	case NoneReady:
		return "no endpoint is ready"
	case NoHints:
		return "no hints, all ready endpoints"
	case HintsIncomplete:
		return "hints are not on every ready endpoint and ignored, all ready endpoints"
	case HintsElsewhere:
		return "hints are for elsewhere and ignored, all ready endpoints"
	case ForNode:
		return "ready endpoints hinted for this node"
	case ForZone:
		return "ready endpoints hinted for this node's zone"
	default:
		return fmt.Sprintf("Topology(%d)", uint8(t))
	}
}
