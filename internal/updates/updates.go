// SPDX-License-Identifier: Apache-2.0

// Package updates has the methods of a sink.Source, and the values that a source passes to a
// sink.Driver.
package updates

import (
	"iter"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/elements"
	"k8s.io/apimachinery/pkg/types"
)

// Source has the methods for the reader of a sink.Source. Calls of the methods never
// overlap.
//
// A source holds the reader's position: the state up to which the reader has called
// Advance. It has no position at the start, after Reset, and when the position is too
// old. In these cases, the field Lost of the next update is true.
type Source interface {
	// Changed returns a channel that is closed when the state may differ from the position.
	// Until the source has synced for the first time, the channel stays open. If the source
	// loses the connection to its server, it keeps its last state.
	Changed() <-chan struct{}
	// Next returns the difference between the position and the present state, or nil if the
	// source has not synced yet. It does not block and does not move the position. An update
	// may be empty. If Next returns an error, the driver calls Next again after a backoff,
	// and the sink keeps its state.
	Next() (*Update, error)
	// Advance moves the position to the state of u, the last update that Next returned.
	Advance(u *Update)
	// Reset clears the position. A driver calls it once, when it begins to read. No method
	// may be called after Close.
	Reset()
}

// Read returns all views of a new source, or nil if the source has not synced yet. It closes
// the source.
func Read(s interface {
	Source
	Close()
}) *Update {
	defer s.Close()
	u, _ := s.Next()
	return u
}

// Update is the difference between a reader's position and the present state. It is
// immutable.
type Update struct {
	// Lost reports that the source had no position. Then Changes is empty, and the reader
	// has to read all services with After.
	Lost bool
	// Revision is the revision of the views in the update.
	Revision uint64
	// Changes contains each service whose view differs from the view at the position,
	// except the services in Large. The order is by namespace and name.
	Changes []Change
	// Large contains services that may have changed, in order of namespace and name. The
	// old and the new view of such a service are not computed yet, because the size of at
	// least one of them is LargeSize or more.
	Large []LargeChange
	// Node is the Node object of this node, or nil if it is not known. NodeChanged is true
	// if Node differs from the node at the position, or if Lost is true.
	Node        *api.Node
	NodeChanged bool
	// View returns the view of a service, or nil if there is none.
	View func(types.NamespacedName) *api.View
	// After yields all services after key, in order of namespace and name. The zero key comes
	// before all services.
	After func(key types.NamespacedName) iter.Seq2[types.NamespacedName, View]
}

// Change is a change of a service. Old is the view at the position, and New is the
// present view. TriggerTime has the meaning of the same field in sink.Change.
type Change struct {
	Key         types.NamespacedName
	Old, New    *api.View
	TriggerTime time.Time
}

// LargeSize is the minimum size (see [View]) of a large service. A driver delivers a
// large service in a Sync of its own, after other changes.
const LargeSize = 4096

// LargeChange is a change of a service whose views are not computed yet. Old is the view
// at the position. TriggerTime has the meaning of the same field in sink.Change.
type LargeChange struct {
	Key         types.NamespacedName
	Old         View
	TriggerTime time.Time
}

// View is a view that may not be computed yet. The zero value means that there is no
// view.
type View struct {
	// Size is one plus the number of the view's elements (see package elements). It can be
	// an estimate, and then may be greater.
	Size int
	// Compute returns the view. If there is no view, the field Compute is nil.
	Compute func() *api.View
}

// Get returns the view, or nil if there is none.
func (v View) Get() *api.View {
	if v.Compute == nil {
		return nil
	}
	return v.Compute()
}

// ViewOf returns a View that is computed. The argument may be nil.
func ViewOf(view *api.View) View {
	if view == nil {
		return View{}
	}
	return View{Size(view), func() *api.View { return view }}
}

// Size returns the size of a view. The size of a nil view is one.
func Size(view *api.View) int {
	if view == nil {
		return 1
	}
	return 1 + int(elements.OfView(view).Total())
}
