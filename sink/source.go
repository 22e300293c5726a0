// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"iter"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Source is where a driver gets its node's view from: a feed in process, or a
// client of a server elsewhere. It has one reader, and its methods are called
// from one goroutine at a time.
//
// A source holds a position: what the reader acknowledged last. At the start,
// after Reset, and when the position is too far behind, it has none, and the next
// update is [Update.Lost].
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
	// Lost says that the source has no position of its reader, so that Changes is
	// empty and the reader has to take over all services.
	Lost bool
	// Revision is the revision of the views in the update.
	Revision uint64
	// Changes are the services whose views differ from those at the position, in order
	// of namespace and name. Old is the view at the position, and Unsure is not set.
	Changes []Change
	// Node is this node, nil while it is not known. NodeChanged says that it differs
	// from the node at the position; it is true with Lost.
	Node        *api.Node
	NodeChanged bool
	// View returns the view of any service, nil if there is none.
	View func(types.NamespacedName) *api.ServiceEndpoints
	// After yields the views of all services after key, in order of namespace and name.
	// All services are after the zero key. Views are computed as they are read.
	After func(key types.NamespacedName) iter.Seq[*api.ServiceEndpoints]
}
