// SPDX-License-Identifier: Apache-2.0

package sink

import "github.com/kpng-project/kpng/internal/updates"

// Source provides a node's views of all services to a driver. It is a feed in this
// process, or a client of a remote server. It has one reader, usually a driver. Calls of
// its methods never overlap. [Driver.Run] returns an error if another driver is reading
// the source.
//
// A source holds the reader's position: the state up to which the reader has called
// Advance. It has no position at the start, after Reset, and when the position is too
// old. Then the next update has the field Lost set.
type Source interface {
	// Changed returns a channel that is closed when the state may differ from the position.
	// Until the source has synced for the first time, the channel stays open. If the source
	// loses its server, it keeps its last state.
	Changed() <-chan struct{}
	// Next returns the difference between the position and the present state, or nil if the
	// source has not synced yet. It does not block and does not move the position. An update
	// may be empty. If Next returns an error, the driver calls Next again after a backoff,
	// and the sink keeps its state.
	Next() (*Update, error)
	// Advance moves the position to the state of u, the last update that Next returned.
	Advance(u *Update)
	// Reset clears the position. A driver calls it once, when it begins to read.
	Reset()
	// Close releases the source's resources. No other method may be called after Close. The
	// code that created the source calls Close, after the driver has ended.
	Close()
}

// Update is the difference between a reader's position and the present state. The sources
// of this module make it, and drivers read it.
type Update = updates.Update
