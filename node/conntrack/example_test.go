// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack_test

import (
	"context"

	"github.com/kpng-project/kpng/node/conntrack"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// mySink programs services. It embeds a Reconciler, so a driver also starts and stops the
// Reconciler.
type mySink struct {
	conntrack.Reconciler
}

// Sync programs the changes, and then passes them to the Reconciler, which deletes the
// connections that the changes made stale.
func (s *mySink) Sync(ctx context.Context, c *sink.Changes) error {
	// … program the changes here …
	return s.Reconciler.Sync(ctx, c)
}

func Example() {
	addrs := nodeaddr.Of() // addresses of node ports; usually a nodeaddr.Watcher
	var s sink.Sink = &mySink{conntrack.New(conntrack.Options{NodeAddresses: addrs})}
	_ = s // pass s to kpng.Run, or to sink.Run
}
