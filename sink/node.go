// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"time"

	"github.com/kpng-project/kpng/api"
)

// nodeState is the Node as the sink knows it.
type nodeState struct {
	acked *api.Node // the Node that the sink last acknowledged
	// pending: the source has a changed Node, which the sink has not acknowledged. since:
	// the last revision before this change.
	pending bool
	since   uint64
	// unsure: a Sync with a Node other than acked failed. So the sink may have that other
	// Node.
	unsure bool
	// If failures is not 0, the sink refuses the pending Node: Syncs that delivered only
	// the Node failed. Meanwhile, other Syncs deliver the acknowledged Node.
	failures int
	err      error
	retryAt  time.Time
}

// noteNode records that the source has a changed Node.
func (d *Driver) noteNode(node *api.Node) {
	switch same := node.Equal(d.node.acked); {
	case same && !d.node.unsure:
		d.node = nodeState{acked: d.node.acked}
	case !d.node.pending:
		d.node.pending, d.node.since = true, d.position
	}
	d.node.retryAt = time.Now()
}

// ackedNode records that the sink has acknowledged node. The argument present is the
// Node that the source has now.
func (d *Driver) ackedNode(node, present *api.Node) {
	if node.Equal(present) {
		d.node = nodeState{acked: present}
	}
	d.node.unsure = false
}

// refusedNode records the failure of a Sync that delivered only the Node, and schedules
// a retry.
func (d *Driver) refusedNode(err error) {
	d.node.failures++
	d.node.err = err
	d.node.retryAt = time.Now().Add(d.backoff.wait(d.node.failures, draw()))
}
