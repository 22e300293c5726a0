// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"iter"

	"github.com/google/btree"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"k8s.io/apimachinery/pkg/types"
)

// sliceIndex has all slices, sorted by namespace and name. When the label of a slice
// changes, or the slice is deleted, the index still has the old slice, and so the name of
// the previous service. State.mu guards the index.
type sliceIndex struct {
	tree *btree.BTreeG[*api.EndpointSlice]
}

func newSliceIndex() sliceIndex {
	return sliceIndex{btree.NewG(32, func(a, b *api.EndpointSlice) bool { return ordering.Keys(a.Key(), b.Key()) < 0 })}
}

// set sets a slice and returns the old slice of the same name, or nil if there was none.
func (x sliceIndex) set(slice *api.EndpointSlice) *api.EndpointSlice {
	old, _ := x.tree.ReplaceOrInsert(slice)
	return old
}

// get returns a slice. It returns nil if there is no such slice.
func (x sliceIndex) get(key types.NamespacedName) *api.EndpointSlice {
	slice, _ := x.tree.Get(&api.EndpointSlice{Namespace: key.Namespace, Name: key.Name})
	return slice
}

// remove removes and returns a slice. It returns nil if there is no such slice.
func (x sliceIndex) remove(key types.NamespacedName) *api.EndpointSlice {
	old, _ := x.tree.Delete(&api.EndpointSlice{Namespace: key.Namespace, Name: key.Name})
	return old
}

// all yields all slices in the order of their keys.
func (x sliceIndex) all() iter.Seq[*api.EndpointSlice] {
	return func(yield func(*api.EndpointSlice) bool) { x.tree.Ascend(yield) }
}
