// SPDX-License-Identifier: Apache-2.0

package nodeview

import "fmt"

// Reason says why an endpoint is, or is not, on a list.
type Reason uint8

// The reasons; reasonTexts says what each means.
const (
	inReady Reason = iota + 1
	inForNode
	inForZone
	inHere
	inTerminating
	outNotReady // this and the following: not on the list
	outOthersReady
	outOtherNodes
	outOtherZones
	outNotHere
	outNoPort
	outDuplicate
	outFamily
)

var reasonTexts = [...]string{
	inReady:        "ready",
	inForNode:      "ready and hinted for this node",
	inForZone:      "ready and hinted for this node's zone",
	inHere:         "ready and on this node",
	inTerminating:  "serving while terminating, as none is ready",
	outNotReady:    "not ready",
	outOthersReady: "terminating, while others are ready",
	outOtherNodes:  "hinted for other nodes",
	outOtherZones:  "hinted for other zones",
	outNotHere:     "not on this node",
	outNoPort:      "its slice does not serve the port",
	outDuplicate:   "another entry with its address and port is preferred",
	outFamily:      "the service is not served in its family",
}

// In reports whether the endpoint is on the list.
func (r Reason) In() bool { return r != 0 && r < outNotReady }

// String says it in words.
func (r Reason) String() string { return text(reasonTexts[:], r) }

// Topology says which hints choose among the ready endpoints of a port and
// family.
type Topology uint8

// The outcomes of the topology rule; topologyTexts says what each means.
const (
	noneReady Topology = iota
	noHints
	hintsIncomplete
	hintsElsewhere
	forNode
	forZone
)

var topologyTexts = [...]string{
	noneReady:       "no endpoint is ready",
	noHints:         "no hints, all ready endpoints",
	hintsIncomplete: "hints are not on every ready endpoint and ignored, all ready endpoints",
	hintsElsewhere:  "hints are for elsewhere and ignored, all ready endpoints",
	forNode:         "ready endpoints hinted for this node",
	forZone:         "ready endpoints hinted for this node's zone",
}

// String says it in words.
func (t Topology) String() string { return text(topologyTexts[:], t) }

// text returns the text of v.
func text[T ~uint8](texts []string, v T) string {
	if int(v) < len(texts) && texts[v] != "" {
		return texts[v]
	}
	return fmt.Sprintf("%T(%d)", v, v)
}
