// SPDX-License-Identifier: Apache-2.0

// Package objects follows objects of any kinds in an API server, for sources that
// derive services from objects of other kinds. Like a controller, it keeps the objects,
// finds the objects that depend on a changed object, and retries after errors.
//
// The program declares a type with the fields that it needs. One type serves all kinds: the
// JSON form of an object sets the fields that the object has.
//
//	type object struct {
//		metav1.TypeMeta
//		metav1.ObjectMeta `json:"metadata"`
//		Spec struct{ Backend string }
//	}
//
//	store := objects.New(client, resources, func(o *object) []objects.Key {
//		return []objects.Key{objects.NewKey("Service", o.Namespace, o.Spec.Backend)}
//	})
//	store.Run(ctx, func(ctx context.Context, key objects.Key) error {
//		o := store.Get(key) // nil if the object was deleted
//		…
//	}, state.SetSynced)
//
// The program needs the verbs list and watch on the resources.
package objects

import (
	"context"
	"encoding/json"
	"sync"

	"github.com/kpng-project/kpng/internal/listwatch"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// Key identifies an object. A reference without a name refers to all objects of the kind in
// the namespace.
type Key struct {
	Kind string
	types.NamespacedName
}

// NewKey returns the key of an object. The namespace is empty for kinds without namespaces.
func NewKey(kind, namespace, name string) Key {
	return Key{kind, types.NamespacedName{Namespace: namespace, Name: name}}
}

// String returns the kind and the name, such as "Service default/web".
func (k Key) String() string { return k.Kind + " " + k.NamespacedName.String() }

// Store has the objects of several kinds. Its methods are safe for concurrent use. Callers
// must not modify the objects that it returns.
type Store[T any] struct {
	references func(object *T) []Key
	informers  map[string]cache.SharedIndexInformer // by kind
	queue      workqueue.TypedRateLimitingInterface[Key]
}

// entry is an object in the cache of an informer.
type entry[T any] struct {
	metav1.ObjectMeta // namespace and name only
	key               Key
	object            *T
	references        []Key
}

// byReference is the name of the index by references.
const byReference = "references"

// New returns a Store of the objects of some kinds. The map resources has the resource
// of each kind. For an object, the function
// references returns the keys of all objects to which it refers. Their kinds need not be in
// the Store. The result must depend on the object alone.
func New[T any](client dynamic.Interface, resources map[string]schema.GroupVersionResource, references func(object *T) []Key) *Store[T] {
	s := &Store[T]{
		references: references,
		informers:  map[string]cache.SharedIndexInformer{},
		queue:      workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[Key]()),
	}
	indexers := cache.Indexers{
		cache.NamespaceIndex: cache.MetaNamespaceIndexFunc,
		byReference: func(o any) (all []string, _ error) {
			for _, r := range o.(*entry[T]).references {
				all = append(all, r.String())
			}
			return all, nil
		},
	}
	for kind, resource := range resources {
		all := client.Resource(resource)
		list := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return all.List(ctx, o) }
		informer := cache.NewSharedIndexInformer(listwatch.New(list, all.Watch), &unstructured.Unstructured{}, 0, indexers)
		// SetTransform returns an error only if the informer has started.
		_ = informer.SetTransform(func(o any) (any, error) { return s.decode(kind, o), nil })
		s.informers[kind] = informer
	}
	return s
}

// decode returns the entry of an object. If T cannot represent the object, the entry
// has no object, so that other objects remain usable.
func (s *Store[T]) decode(kind string, o any) any {
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return o // an entry, or the last state of a deleted object
	}
	e := &entry[T]{ObjectMeta: metav1.ObjectMeta{Namespace: u.GetNamespace(), Name: u.GetName()}}
	e.key = NewKey(kind, e.Namespace, e.Name)
	object := new(T)
	text, err := u.MarshalJSON()
	if err == nil {
		err = json.Unmarshal(text, object)
	}
	if err != nil {
		klog.Background().Error(err, "Cannot decode object; ignoring it", "kind", kind, "object", e.key.NamespacedName)
		return e
	}
	e.object, e.references = object, s.references(object)
	return e
}

// Run calls the function process for each object, until ctx ends. It calls process again
// for an object when one of these changes or is deleted: the object itself, an object that
// refers to it, or an object to which it refers, directly or through other objects. After
// an error, it logs the error and repeats the call with a growing delay. Calls do not
// overlap. Run calls the function synced when it has called process for each object that
// existed at the start of Run. Run may be called only once.
func (s *Store[T]) Run(ctx context.Context, process func(ctx context.Context, key Key) error, synced func()) {
	defer context.AfterFunc(ctx, s.queue.ShutDown)()
	var running sync.WaitGroup
	defer running.Wait()
	var listed []cache.InformerSynced
	for _, informer := range s.informers {
		// AddEventHandler returns an error only if the informer has stopped.
		registration, _ := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { s.handle(o) },
			UpdateFunc: func(old, new any) { s.handle(old); s.handle(new) },
			DeleteFunc: func(o any) { s.handle(o) },
		})
		listed = append(listed, registration.HasSynced)
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	if !cache.WaitForCacheSync(ctx.Done(), listed...) {
		return
	}
	for initial := s.queue.Len(); ; initial-- {
		if initial == 0 {
			synced()
		}
		key, end := s.queue.Get()
		if end {
			return
		}
		if err := process(ctx, key); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot process object; retrying", "kind", key.Kind, "object", key.NamespacedName)
			s.queue.AddRateLimited(key)
		} else {
			s.queue.Forget(key)
		}
		s.queue.Done(key)
	}
}

func (s *Store[T]) handle(o any) {
	if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = last.Obj
	}
	e := o.(*entry[T])
	s.enqueue(e.references...)
	s.Changed(e.key)
}

// Changed makes Run process the objects that depend on the object with this key. Call
// it for changes of objects that are not in the Store, such as Services.
func (s *Store[T]) Changed(key Key) {
	seen := map[Key]bool{}
	var visit func(key Key)
	visit = func(key Key) {
		if seen[key] {
			return
		}
		seen[key] = true
		s.enqueue(key)
		for _, e := range s.referring(key) {
			s.enqueue(e.references...)
			visit(e.key)
		}
	}
	visit(key)
}

func (s *Store[T]) enqueue(keys ...Key) {
	for _, key := range keys {
		if s.informers[key.Kind] != nil && key.Name != "" {
			s.queue.Add(key)
		}
	}
}

// referring returns the entries that refer to a key.
func (s *Store[T]) referring(key Key) (all []*entry[T]) {
	for _, key := range []Key{key, NewKey(key.Kind, key.Namespace, "")} {
		for _, informer := range s.informers {
			list, _ := informer.GetIndexer().ByIndex(byReference, key.String())
			for _, o := range list {
				all = append(all, o.(*entry[T]))
			}
		}
		if key.Name == "" {
			break
		}
	}
	return all
}

// Get returns an object. It returns nil if the object does not exist, or if T cannot
// represent it.
func (s *Store[T]) Get(key Key) *T {
	informer := s.informers[key.Kind]
	if informer == nil {
		return nil
	}
	o, _, _ := informer.GetStore().GetByKey(cache.NewObjectName(key.Namespace, key.Name).String())
	if o == nil {
		return nil
	}
	return o.(*entry[T]).object
}

// In returns the objects of a kind in a namespace, in any order.
func (s *Store[T]) In(kind, namespace string) []*T {
	if s.informers[kind] == nil {
		return nil
	}
	list, _ := s.informers[kind].GetIndexer().ByIndex(cache.NamespaceIndex, namespace)
	var entries []*entry[T]
	for _, o := range list {
		entries = append(entries, o.(*entry[T]))
	}
	return objectsOf(entries)
}

// Referring returns the objects that refer to a key, in any order.
func (s *Store[T]) Referring(key Key) []*T { return objectsOf(s.referring(key)) }

func objectsOf[T any](entries []*entry[T]) (all []*T) {
	for _, e := range entries {
		if e.object != nil {
			all = append(all, e.object)
		}
	}
	return all
}
