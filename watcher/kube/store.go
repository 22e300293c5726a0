// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"iter"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
)

// item is an object of the API, reduced to what goes into the state.
type item[T any] struct {
	key types.NamespacedName
	uid types.UID
	// revision is the resource version.
	revision string
	// value is nil if the object is of no use to the proxy.
	value *T
	// selectorless says of a service that it has no selector.
	selectorless bool
	// labelled says of a slice that its labels alone make it one for the proxy.
	labelled bool
}

// GetObjectMeta gives the reflector, which collects the items of a streaming
// list before it hands them over, the name to key them by.
func (i *item[T]) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: i.key.Namespace, Name: i.key.Name, UID: i.uid}
}

// writer brings items into the state.
type writer[T any] interface {
	set(*item[T])
	remove(types.NamespacedName)
	// replace writes a full listing. All items have a value.
	replace([]*item[T])
}

// store is what a reflector writes into. It reduces objects as they arrive and
// hands them to its writer: a cache.TransformingStore that stores nothing.
type store[O metav1.Object, T any] struct {
	// Store is nil. Before v0.35, client-go's reflectors require methods of it that
	// they never call.
	cache.Store
	resource string
	reduce   func(O, *item[T]) // sets the value and what is said of it
	to       writer[T]
	listed   func() // called after each full listing
}

var _ cache.TransformingStore = (*store[*corev1.Node, api.Node])(nil)

func newStore[O metav1.Object, T any](w *watch, resource string, to writer[T], reduce func(O, *item[T])) *store[O, T] {
	return &store[O, T]{
		resource: resource,
		reduce:   reduce,
		to:       to,
		listed:   func() { w.gate.done(resource) },
	}
}

// item returns the reduced form of what the reflector delivers, which may be
// that already.
func (s *store[O, T]) item(obj any) (*item[T], error) {
	if i, ok := obj.(*item[T]); ok {
		return i, nil
	}
	o, ok := obj.(O)
	if !ok {
		return nil, fmt.Errorf("unexpected object of type %T among %s", obj, s.resource)
	}
	i := &item[T]{key: keyOf(o.GetNamespace(), o.GetName()), uid: o.GetUID(), revision: o.GetResourceVersion()}
	s.reduce(o, i)
	return i, nil
}

// Transformer returns the reduction, which the reflector applies to the objects
// of a streaming list one by one.
func (s *store[O, T]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return s.item(obj) }
}

// Add sets the object.
func (s *store[O, T]) Add(obj any) error { return s.Update(obj) }

// Update sets the object, or removes it if it has become of no use.
func (s *store[O, T]) Update(obj any) error {
	i, err := s.item(obj)
	if err != nil {
		return err
	}
	if i.value == nil {
		s.to.remove(i.key)
	} else {
		s.to.set(i)
	}
	return nil
}

// Delete removes the object.
func (s *store[O, T]) Delete(obj any) error {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	var key types.NamespacedName
	switch o := obj.(type) {
	case *item[T]:
		key = o.key
	case O:
		key = keyOf(o.GetNamespace(), o.GetName())
	default:
		return fmt.Errorf("unexpected deleted object of type %T among %s", obj, s.resource)
	}
	s.to.remove(key)
	return nil
}

// Replace writes a full listing.
func (s *store[O, T]) Replace(list []any, _ string) error {
	items := make([]*item[T], 0, len(list))
	for n, obj := range list {
		i, err := s.item(obj)
		if err != nil {
			return err
		}
		list[n] = nil // the reduced form is all that is needed of it
		if i.value != nil {
			items = append(items, i)
		}
	}
	s.to.replace(items)
	s.listed()
	return nil
}

// Resync has nothing to do: there is no queue that could have lost something.
func (s *store[O, T]) Resync() error { return nil }

func keyOf(namespace, name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}

func values[T any](items []*item[T]) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for _, i := range items {
			if !yield(i.value) {
				return
			}
		}
	}
}

// serviceWriter, sliceWriter and nodeWriter write what one watch of the whole
// cluster brings.
type (
	serviceWriter struct{ state *cluster.State }
	sliceWriter   struct{ state *cluster.State }
	nodeWriter    struct{ state *cluster.State }
)

func (w serviceWriter) set(i *item[api.Service]) {
	w.state.Update(func(tx *cluster.Tx) { tx.SetService(i.value) })
}

func (w serviceWriter) remove(key types.NamespacedName) {
	w.state.Update(func(tx *cluster.Tx) { tx.DeleteService(key) })
}

func (w serviceWriter) replace(all []*item[api.Service]) {
	w.state.Update(func(tx *cluster.Tx) { tx.ReplaceServices(values(all)) })
}

func (w sliceWriter) set(i *item[api.EndpointSlice]) {
	w.state.Update(func(tx *cluster.Tx) { tx.SetSlice(i.value) })
}

func (w sliceWriter) remove(key types.NamespacedName) {
	w.state.Update(func(tx *cluster.Tx) { tx.DeleteSlice(key) })
}

func (w sliceWriter) replace(all []*item[api.EndpointSlice]) {
	w.state.Update(func(tx *cluster.Tx) { tx.ReplaceSlices(values(all)) })
}

func (w nodeWriter) set(i *item[api.Node]) {
	w.state.Update(func(tx *cluster.Tx) { tx.SetNode(i.value) })
}

func (w nodeWriter) remove(key types.NamespacedName) {
	w.state.Update(func(tx *cluster.Tx) { tx.DeleteNode(key.Name) })
}

func (w nodeWriter) replace(all []*item[api.Node]) {
	w.state.Update(func(tx *cluster.Tx) { tx.ReplaceNodes(values(all)) })
}
