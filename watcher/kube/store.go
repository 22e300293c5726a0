// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// item is an API object, reduced to the value that the state stores.
type item[T any] struct {
	key types.NamespacedName
	// value is nil if the object is deleted or the proxy does not need it.
	value *T
	// selectorless is true for a service without a selector.
	selectorless bool
	// problems are the invalid parts of the object.
	problems []error
	// unlabelled is set for a slice without the proxy's label. dropped is true if such a
	// slice was not needed when it was decoded.
	unlabelled *origin
	dropped    bool
	// unreadable is true for an object that could not be decoded.
	unreadable bool
	// postponed is the object of an event that is not reduced yet, as a Go value or in
	// protobuf. Then the item has only a key and a resource version.
	postponed any

	resourceVersion string
}

// newItem returns an item with the metadata of o.
func newItem[T any](o metav1.Object) *item[T] {
	return &item[T]{
		key:             types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()},
		resourceVersion: o.GetResourceVersion(),
	}
}

// GetObjectMeta returns the metadata that the reflector needs.
func (i *item[T]) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: i.key.Namespace, Name: i.key.Name, ResourceVersion: i.resourceVersion}
}

// GetObjectKind implements runtime.Object.
func (i *item[T]) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject implements runtime.Object. It is never called.
func (i *item[T]) DeepCopyObject() runtime.Object { return i }

// writer writes items to the state.
type writer[T any] interface {
	// write writes an object to the state, or deletes the object if the item has no value.
	write(*item[T])
	// replace writes a full listing.
	replace([]*item[T])
}

// store receives objects from a queue. It reduces each object and passes it to a writer. It
// keeps no objects itself. An object in a list from an API server is reduced as soon as it
// is decoded.
type store[O metav1.Object, T any] struct {
	*watch
	kind, resource string
	reduce         func(O, *item[T]) // sets the item's fields that depend on the kind of the object
	// decoders has values of the type decoder[O].
	decoders sync.Pool
	mu       sync.Locker // locked during calls of the writer
	to       writer[T]
	listed   func() // called after each full listing
}

// objectStore is a store of any kind of objects.
type objectStore interface {
	cache.ReflectorStore
	// objectKind returns the API's name for the kind of the objects.
	objectKind() string
	// example returns an empty item of the type that the store uses.
	example() any
	// decode decodes an object in protobuf and reduces it. If it cannot decode the object, it
	// logs an error, and marks the item as unreadable.
	decode(object []byte) runtime.Object
	// postpone returns an item for an object in protobuf. The object is decoded when it is
	// written. If it finds no metadata in the object, it decodes the object immediately.
	postpone(object []byte) runtime.Object
	// postponeObject is like postpone, but for a decoded object. It returns objects that are
	// not of the store's kind unchanged.
	postponeObject(o runtime.Object) runtime.Object
	// keyOf returns the key of an object, or an error if the object is not of the store's
	// kind.
	keyOf(obj any) (types.NamespacedName, error)
}

var _ objectStore = (*store[*corev1.Node, api.Node])(nil)

// item reduces an object. If obj is already an item, it returns obj.
func (s *store[O, T]) item(obj any) (*item[T], error) {
	if i, ok := obj.(*item[T]); ok {
		switch o := i.postponed.(type) {
		case nil:
			return i, nil
		case []byte:
			return s.decode(o).(*item[T]), nil
		default:
			obj = o
		}
	}
	o, ok := obj.(O)
	if !ok {
		return nil, s.unexpected(obj)
	}
	i := newItem[T](o)
	if i.key.Name != "" { // the object of a bookmark has no name
		s.reduce(o, i)
	}
	return i, nil
}

func (s *store[O, T]) objectKind() string { return s.kind }

func (s *store[O, T]) example() any { return &item[T]{} }

func (s *store[O, T]) decode(object []byte) runtime.Object {
	var i *item[T]
	s.whileRunning(func() {
		decode := s.decoders.Get().(decoder[O])
		defer s.decoders.Put(decode)
		o, err := decode(object)
		if err == nil {
			i, _ = s.item(o)
			return
		}
		i = newItem[T](o)
		i.unreadable = true
		s.logger.Error(err, "Ignored an object that cannot be decoded", "kind", s.kind, "object", objectName(o.GetNamespace(), o.GetName()))
	})
	if i == nil {
		i = &item[T]{unreadable: true}
	}
	return i
}

// metadata selects the key and the resource version of an object of any kind.
var metadata = fieldSet{1: {fields: fieldSet{1: all, 3: all, 6: all}}}

func (s *store[O, T]) postpone(object []byte) runtime.Object {
	o, err := newDecoder[metav1.PartialObjectMetadata](metadata)(object)
	if err != nil || o.Name == "" || o.ResourceVersion == "" {
		return s.decode(object)
	}
	i := newItem[T](o)
	i.postponed = bytes.Clone(object)
	return i
}

func (s *store[O, T]) postponeObject(o runtime.Object) runtime.Object {
	object, ok := o.(O)
	if !ok {
		return o
	}
	i := newItem[T](object)
	i.postponed = object
	return i
}

func (s *store[O, T]) keyOf(obj any) (types.NamespacedName, error) {
	switch o := obj.(type) {
	case *item[T]:
		return o.key, nil
	case O, cache.DeletedFinalStateUnknown:
		key, err := cache.DeletionHandlingObjectToName(o)
		return types.NamespacedName(key), err
	}
	return types.NamespacedName{}, s.unexpected(obj)
}

func (s *store[O, T]) unexpected(obj any) error {
	return fmt.Errorf("unexpected object of type %T among %s", obj, s.resource)
}

// Add writes an object.
func (s *store[O, T]) Add(obj any) error { return s.Update(obj) }

// Update writes an object, or deletes the object if the proxy does not need it.
func (s *store[O, T]) Update(obj any) error {
	i, err := s.item(obj)
	if err != nil || i.unreadable {
		return err
	}
	s.logProblems(s.kind, i.key, i.problems)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.to.write(i)
	return nil
}

// Delete deletes an object.
func (s *store[O, T]) Delete(obj any) error {
	key, err := s.keyOf(obj)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.to.write(&item[T]{key: key})
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
		list[n] = nil // let the garbage collector free the original object
		if !i.unreadable {
			s.logProblems(s.kind, i.key, i.problems)
			items = append(items, i)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.to.replace(items)
	s.listed()
	return nil
}

// Resync does nothing, because the state has all objects.
func (s *store[O, T]) Resync() error { return nil }

// table is a writer for objects of one kind. It writes every item that has a value.
type table[T any] struct {
	state      *cluster.State
	set        func(*cluster.Tx, *T)
	remove     func(*cluster.Tx, types.NamespacedName)
	replaceAll func(*cluster.Tx, iter.Seq[*T])
	problems   func(*cluster.Tx, types.NamespacedName, []error) // nil for nodes
}

func (t table[T]) write(i *item[T]) {
	t.state.Update(func(tx *cluster.Tx) { t.writeIn(tx, i) })
}

func (t table[T]) writeIn(tx *cluster.Tx, i *item[T]) {
	if i.value == nil {
		t.remove(tx, i.key)
	} else {
		t.set(tx, i.value)
		t.report(tx, i)
	}
}

// report records the problems of an item that the state has.
func (t table[T]) report(tx *cluster.Tx, i *item[T]) {
	if t.problems != nil && i.value != nil {
		t.problems(tx, i.key, i.problems)
	}
}

func (t table[T]) replace(all []*item[T]) {
	t.state.Update(func(tx *cluster.Tx) { t.replaceIn(tx, all) })
}

func (t table[T]) replaceIn(tx *cluster.Tx, all []*item[T]) {
	t.replaceAll(tx, values(all))
	for _, i := range all {
		t.report(tx, i)
	}
}

func values[T any](items []*item[T]) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for _, i := range items {
			if i.value != nil && !yield(i.value) {
				return
			}
		}
	}
}

type stores struct {
	services  *store[*corev1.Service, api.Service]
	slices    *store[*discoveryv1.EndpointSlice, api.EndpointSlice]
	nodes     *store[*corev1.Node, api.Node]
	selection *selection // nil if ServiceProxyName is empty
}

// byKind returns the stores by the kind of their objects.
func (s *stores) byKind() map[string]objectStore {
	stores := map[string]objectStore{}
	for _, store := range []objectStore{s.services, s.slices, s.nodes} {
		stores[store.objectKind()] = store
	}
	return stores
}

// newStores returns stores that pass the objects for the proxy to the state. The selection
// calls the finder find to request EndpointSlices. Each call is for the services that became
// wanted within the time gather.
func (w *watch) newStores(find finder, gather time.Duration) *stores {
	d := newDecoders(w.opts.Options)
	s := &stores{
		services: &store[*corev1.Service, api.Service]{
			watch: w, kind: "Service", resource: services, mu: new(sync.Mutex), reduce: w.reduceService,
			decoders: sync.Pool{New: func() any { return d.service() }},
			to:       table[api.Service]{w.state, (*cluster.Tx).SetService, (*cluster.Tx).DeleteService, (*cluster.Tx).ReplaceServices, (*cluster.Tx).SetServiceProblems},
		},
		slices: &store[*discoveryv1.EndpointSlice, api.EndpointSlice]{
			watch: w, kind: "EndpointSlice", resource: endpointSlices, mu: new(sync.Mutex), reduce: w.reduceSlice,
			decoders: sync.Pool{New: func() any { return d.slice() }},
			to:       table[api.EndpointSlice]{w.state, (*cluster.Tx).SetSlice, (*cluster.Tx).DeleteSlice, (*cluster.Tx).ReplaceSlices, (*cluster.Tx).SetSliceProblems},
		},
		nodes: &store[*corev1.Node, api.Node]{
			watch: w, kind: "Node", resource: nodes, mu: new(sync.Mutex), reduce: w.reduceNode,
			decoders: sync.Pool{New: func() any { return d.node() }},
			to:       table[api.Node]{w.state, (*cluster.Tx).SetNode, func(tx *cluster.Tx, key types.NamespacedName) { tx.DeleteNode(key.Name) }, (*cluster.Tx).ReplaceNodes, nil},
		},
	}
	s.services.listed = func() { w.listed(services) }
	s.slices.listed = func() { w.listed(endpointSlices) }
	s.nodes.listed = func() { w.listed(nodes) }
	if w.opts.ServiceProxyName != "" {
		s.selection = newSelection(w, s, find, gather)
	}
	return s
}

func (w *watch) reduceService(s *corev1.Service, i *item[api.Service]) {
	if w.converter.WantsService(s) {
		i.value, i.problems = w.converter.Service(s)
		i.selectorless = watcher.Selectorless(s)
	}
}

func (w *watch) reduceSlice(s *discoveryv1.EndpointSlice, i *item[api.EndpointSlice]) {
	if w.converter.WantsSlice(s) {
		i.value, i.problems = w.converter.EndpointSlice(s)
	}
}

func (w *watch) reduceNode(n *corev1.Node, i *item[api.Node]) {
	if w.opts.NodeName == "" || n.Name == w.opts.NodeName {
		i.value, i.problems = w.converter.Node(n)
	}
}

// objectName returns the name of an object for the log. klog.KRef does not quote it.
func objectName(namespace, name string) string {
	return plain.Line(klog.KRef(namespace, name).String())
}

// logProblems logs the invalid parts of an object.
func (w *watch) logProblems(kind string, object types.NamespacedName, problems []error) {
	for _, p := range problems {
		w.logger.Info("Ignored an invalid field", "kind", kind, "object", objectName(object.Namespace, object.Name), "problem", p.Error())
	}
}
