// SPDX-License-Identifier: Apache-2.0

package nodeview

import "fmt"

// reason says why an endpoint is on a list, or why it is not.
type reason uint8

// The reasons; see reasonTexts for their meaning.
const (
	inReady reason = iota + 1
	inForNode
	inForZone
	inHere
	inTerminating
	outNotReady // this constant and all later constants mean: not on the list
	outOthersReady
	outOtherNodes
	outOtherZones
	outNotHere
	outNoPort
	outDuplicate
	outFamily
	outNoWeight
)

var reasonTexts = [...]string{
	inReady:        "ready",
	inForNode:      "ready and hinted for this node",
	inForZone:      "ready and hinted for this node's zone",
	inHere:         "ready and on this node",
	inTerminating:  "serving while terminating, and none is ready",
	outNotReady:    "not ready",
	outOthersReady: "terminating, while others are ready",
	outOtherNodes:  "hinted for other nodes",
	outOtherZones:  "hinted for other zones",
	outNotHere:     "not on this node",
	outNoPort:      "its slice has no port of the same name and protocol",
	outDuplicate:   "another entry with its address and port is preferred",
	outNoWeight:    "its weight is zero",
	outFamily:      "the service is not served in its family",
}

// In reports whether r is a reason to be on the list.
func (r reason) In() bool { return r != 0 && r < outNotReady }

// String describes the reason.
func (r reason) String() string { return text(reasonTexts[:], r) }

// topologyResult says whether and how hints restrict the ready endpoints of a port and family.
type topologyResult uint8

// The results of the topology rule; see topologyTexts for their meaning.
const (
	noneReady topologyResult = iota
	noHints
	hintsIncomplete
	hintsElsewhere
	forNode
	forZone
)

var topologyTexts = [...]string{
	noneReady:       "no endpoint is ready",
	noHints:         "no hints; all ready endpoints",
	hintsIncomplete: "hints ignored (not on every ready endpoint); all ready endpoints",
	hintsElsewhere:  "hints ignored (none for this node or zone); all ready endpoints",
	forNode:         "ready endpoints hinted for this node",
	forZone:         "ready endpoints hinted for this node's zone",
}

// String describes the result.
func (t topologyResult) String() string { return text(topologyTexts[:], t) }

func text[T ~uint8](texts []string, v T) string {
	if int(v) < len(texts) && texts[v] != "" {
		return texts[v]
	}
	return fmt.Sprintf("%T(%d)", v, v)
}
