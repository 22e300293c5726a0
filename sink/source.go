// SPDX-License-Identifier: Apache-2.0

package sink

import (
	"iter"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Source provides a node's views of all services to a driver. It is a feed in this
// process, or a client of a remote server. It has one reader, usually a driver. Calls of
// its methods never overlap. [Driver.Run] returns an error if another driver is reading
// the source.
//
// A source holds the reader's position: the state up to which the reader has called
// Advance. It has no position at the start, after Reset, and when the position is too
// old. Then the next update has [Update.Lost] set.
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

// Update is the difference between a reader's position and the present state. It is
// immutable.
type Update struct {
	// Lost reports that the source had no position. Then Changes is empty, and the reader
	// has to read all services with After.
	Lost bool
	// Revision is the revision of the views in the update.
	Revision uint64
	// Changes contains each service whose view differs from the view at the position, in
	// order of namespace and name, except those in Large. Each Old is the view at the
	// position; Unsure is false.
	Changes []Change
	// Large contains services that may have changed, in order of namespace and name. Their
	// views are not computed yet, because the size of one of them is LargeSize or more.
	Large []LargeChange
	// Node is the Node object of this node, or nil if it is not known. NodeChanged reports
	// that Node differs from the node at the position or that Lost is true.
	Node        *api.Node
	NodeChanged bool
	// View returns the view of a service, or nil if there is none.
	View func(types.NamespacedName) *api.View
	// After yields all services after key, in order of namespace and name. The zero key comes
	// before all services.
	After func(key types.NamespacedName) iter.Seq2[types.NamespacedName, View]
}

// LargeSize is the size (see [View]) from which on a service is large. A driver
// delivers a large service in a Sync of its own, after other changes.
const LargeSize = 4096

// LargeChange is a change of a service whose views are not computed yet.
type LargeChange struct {
	Key types.NamespacedName
	// Old is the view at the position.
	Old View
	// TriggerTime is the field of this name in [Change].
	TriggerTime time.Time
}

// View is a view that may not be computed yet.
type View struct {
	// Size is the size of the view: one, and its elements (see [api.Elements]). It may be
	// greater, because it can be an estimate.
	Size int
	// Get returns the view. It is nil if there is no view.
	Get func() *api.View
}

// get returns the view, or nil if there is none.
func (v View) get() *api.View {
	if v.Get == nil {
		return nil
	}
	return v.Get()
}

// ViewOf returns a View that is computed. The argument may be nil.
func ViewOf(view *api.View) View {
	if view == nil {
		return View{}
	}
	return View{sizeOf(view), func() *api.View { return view }}
}

// sizeOf returns the size of a view, by the measure of [Options.BatchSize].
func sizeOf(view *api.View) int {
	if view == nil {
		return 1
	}
	return 1 + int(view.Elements().Total())
}
