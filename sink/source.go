// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"iter"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Source provides a node's view of the services to a driver: a feed in this process, or a
// client of a remote server. It has one reader. Calls of its methods never overlap.
//
// A source holds the reader's position: the state that the reader last acknowledged. It
// has no position at the start, after Reset, and when the position is too old. Then the
// next update has [Update.Lost] set.
type Source interface {
	// Changed returns a channel that is closed when Next may return an update beyond the
	// position. It stays open until the source has synced for the first time. A source that
	// loses its server keeps its last state.
	Changed() <-chan struct{}
	// Next returns the difference between the position and the current state, or nil if the
	// source has not synced yet. It does not block and does not move the position. An update
	// may be empty. After an error the driver calls Next again, with backoff, and the sink
	// keeps its state.
	Next() (*Update, error)
	// Advance moves the position to u, the last update that Next returned.
	Advance(u *Update)
	// Reset clears the position.
	Reset()
	// Close releases the source's resources. No other method may be called after it. The
	// code that created the source closes it, after its driver has ended.
	Close()
}

// Update is the difference between a reader's position and the current state. It is
// immutable.
type Update struct {
	// Lost reports that the source has no position of its reader. Changes is empty, and the
	// reader has to read all services.
	Lost bool
	// Revision is the revision of the views in the update.
	Revision uint64
	// Changes are the services whose views differ from those at the position, in order of
	// namespace and name. Old is the view at the position. Unsure is not set.
	Changes []Change
	// Node is this node, or nil if it is not known. NodeChanged reports that it differs from
	// the node at the position; it is true with Lost.
	Node        *api.Node
	NodeChanged bool
	// View returns the view of a service, or nil if it has none.
	View func(types.NamespacedName) *api.ServiceEndpoints
	// After yields the views of all services after key, in order of namespace and name.
	// The zero key comes before all services. After computes a view when the iteration
	// reaches it.
	After func(key types.NamespacedName) iter.Seq[*api.ServiceEndpoints]
}
