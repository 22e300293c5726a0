// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Source is where a driver gets its node's view from: a feed in process, or a
// client of a server elsewhere. It has one reader, and its methods are called
// from one goroutine at a time.
//
// A source holds a position: what the reader acknowledged last. At the start,
// after Reset, and when the position is too far behind, it has none, and the
// next update is full.
type Source interface {
	// Changed returns a channel that is closed once there may be an update:
	// when Next would return one beyond the position. It is never closed before
	// the source has synced for the first time. A source that loses its server
	// keeps its last state.
	Changed() <-chan struct{}
	// Next returns the difference between the position and now, nil if the
	// source has not synced yet. It does not wait and does not move the
	// position. An update may turn out to be empty. After an error the driver
	// calls again, with backoff, and its sink keeps what it has.
	Next() (*Update, error)
	// Advance moves the position to u, the last update that Next returned.
	Advance(u *Update)
	// Reset forgets the position.
	Reset()
	// Close releases what the source holds. No other method may be called then.
	// Who made the source closes it, after its driver has ended.
	Close()
}

// Update is what a source has beyond its reader's position. It is immutable.
type Update struct {
	Changes
	// View returns the node's view of any service at this update's revision,
	// nil if it has none.
	View func(types.NamespacedName) *api.ServiceEndpoints
}
