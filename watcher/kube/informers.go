// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// Informers contains informers that a program already runs. Watch reads and filters the
// informers' objects instead of connecting to the API server. All three fields are
// required. The program starts and stops the informers and handles their errors.
//
//	factory := informers.NewSharedInformerFactory(client, 0)
//	kube.Informers{
//		Services:       factory.Core().V1().Services().Informer(),
//		EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
//		Nodes:          factory.Core().V1().Nodes().Informer(),
//	}
type Informers struct {
	Services, EndpointSlices, Nodes cache.SharedInformer
}

type informer struct {
	cache.SharedInformer
	resource string
	example  runtime.Object
}

func (in *Informers) all() []informer {
	return []informer{
		{in.Services, services, &corev1.Service{}},
		{in.EndpointSlices, endpointSlices, &discoveryv1.EndpointSlice{}},
		{in.Nodes, nodes, &corev1.Node{}},
	}
}

// validate returns an error if an informer is missing or has objects of the wrong kind.
// The receiver may be nil.
func (in *Informers) validate() error {
	if in == nil {
		return nil
	}
	for _, i := range in.all() {
		if i.SharedInformer == nil {
			return fmt.Errorf("informer for %s is missing: informers are needed for services, endpoint slices and nodes", i.resource)
		}
		if got := i.objectType(); got != nil && got != reflect.TypeOf(i.example) {
			return fmt.Errorf("informer for %s is one of %s", i.resource, got)
		}
	}
	return nil
}

// objectType returns the type of the informer's objects, or nil if the type is unknown.
// If the informer has no objects, objectType reads an unexported field of client-go.
func (i informer) objectType() reflect.Type {
	for _, o := range i.GetStore().List() {
		return reflect.TypeOf(o)
	}
	v := reflect.ValueOf(i.SharedInformer)
	for v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
		if v = v.Elem(); v.Kind() != reflect.Struct {
			continue
		}
		if example := v.FieldByName("objectType"); example.Kind() == reflect.Interface && !example.IsNil() {
			return example.Elem().Type()
		}
		v = v.FieldByName("SharedIndexInformer") // a factory may return a wrapped informer
	}
	return nil
}

// followInformers fills the state from informers until ctx ends.
func (w *watch) followInformers(ctx context.Context, in *Informers) error {
	w.running.Go(func() {
		w.reportDelay(ctx, 2*time.Second, "Informers not synced yet; the program must start them")
	})
	s := w.newStores(func(_ context.Context, services []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error) {
		return in.slicesOf(w.serviceLabel(), services), nil
	}, 0)
	if s.selection != nil {
		w.running.Go(func() { s.selection.lookUps(ctx) })
	}
	all := in.all()
	for n, to := range [...]objectStore{s.services, s.slices, s.nodes} {
		q := newQueue(to)
		w.running.Go(func() { q.run(ctx) })
		f := &follower{watch: w, resource: all[n].resource, store: q}
		if n == 1 && s.selection != nil {
			s.selection.begin(nil)
		}
		registration, err := all[n].AddEventHandler(f)
		if all[n].IsStopped() {
			return fmt.Errorf("follow informer of %s: the informer has stopped; a stopped informer cannot be started again", f.resource)
		}
		if err != nil {
			return fmt.Errorf("follow informer of %s: %w", f.resource, err)
		}
		defer f.stop(all[n], registration)
		synced := func() {
			if cache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
				q.drain(ctx)
				w.listed(f.resource)
			}
		}
		if n == 0 && s.selection != nil {
			synced() // wait for the services first, because they decide which EndpointSlices are wanted
		} else {
			w.running.Go(synced)
		}
	}
	<-ctx.Done()
	return nil
}

func (in *Informers) slicesOf(label string, services []types.NamespacedName) (found []*discoveryv1.EndpointSlice) {
	for _, service := range services {
		var all []any
		err := error(nil)
		if indexer, ok := in.EndpointSlices.GetStore().(cache.Indexer); ok {
			all, err = indexer.ByIndex(cache.NamespaceIndex, service.Namespace)
		}
		if all == nil || err != nil {
			all = in.EndpointSlices.GetStore().List()
		}
		for _, o := range all {
			if s, ok := o.(*discoveryv1.EndpointSlice); ok && s.Namespace == service.Namespace && s.Labels[label] == service.Name {
				found = append(found, s)
			}
		}
	}
	return found
}

// follower receives an informer's events and passes their objects to a store.
type follower struct {
	*watch
	resource string
	store    cache.ReflectorStore

	mu      sync.Mutex
	stopped bool
}

// stop removes the follower from the informer, and waits for a running event handler.
func (f *follower) stop(from cache.SharedInformer, registration cache.ResourceEventHandlerRegistration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stopped = true
	if err := from.RemoveEventHandler(registration); err != nil {
		f.logger.Error(err, "Cannot remove event handler from informer", "resource", f.resource)
	}
}

// OnAdd passes a new object to the store.
func (f *follower) OnAdd(obj any, _ bool) { f.handOn(f.store.Add, obj) }

// OnUpdate passes a changed object, or a new object of the same name, to the store.
func (f *follower) OnUpdate(_, obj any) { f.handOn(f.store.Update, obj) }

// OnDelete passes a deleted object to the store.
func (f *follower) OnDelete(obj any) { f.handOn(f.store.Delete, obj) }

// handOn calls a method of the store with obj. It ends Watch if obj has the wrong kind.
func (f *follower) handOn(to func(any) error, obj any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped {
		return
	}
	if err := to(obj); err != nil {
		f.end(fmt.Errorf("informer for %s: %w", f.resource, err))
	}
}
