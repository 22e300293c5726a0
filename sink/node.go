// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"time"

	"github.com/kpng-project/kpng/api"
)

// nodeState is the Node as the sink knows it.
type nodeState struct {
	acked *api.Node // the Node that the sink last acknowledged
	// pending: the Node has changed since then. since: the last revision before this change.
	pending bool
	since   uint64
	// If failures is not 0, the sink refuses the pending Node: Syncs that delivered only the
	// Node failed. Then other Syncs have the acknowledged Node.
	failures int
	err      error
	retryAt  time.Time
}

// noteNode records that the source has a changed Node.
func (d *Driver) noteNode(node *api.Node) {
	if !d.node.pending && !node.Equal(d.node.acked) {
		d.node.pending, d.node.since = true, d.position
	}
	d.node.retryAt = time.Now()
}

// refusedNode records that a Sync failed that delivered only the Node, and schedules its
// retry.
func (d *Driver) refusedNode(err error) {
	d.node.failures++
	d.node.err = err
	d.node.retryAt = time.Now().Add(d.opts.Backoff.wait(d.node.failures, draw()))
}
