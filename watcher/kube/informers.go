// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/client-go/tools/cache"

	"github.com/kpng-project/kpng/api"
)

// Informers are those that a program runs anyway, in place of a connection of
// Watch's own. What they deliver is filtered here. All three are required. Whoever
// hands them in starts and stops them, and hears of their errors.
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

// followInformers fills the state from informers until ctx is done.
func (w *watch) followInformers(ctx context.Context, in *Informers) error {
	if in.Services == nil || in.EndpointSlices == nil || in.Nodes == nil {
		return errors.New("informers are needed for services, endpoint slices and nodes")
	}
	w.awaitLists(ctx)

	var toServices writer[api.Service] = serviceWriter{w.state}
	var toSlices writer[api.EndpointSlice] = sliceWriter{w.state}
	slicesListed := func() {}
	if w.opts.ServiceProxyName != "" {
		// The informer has everybody's slices, in one view.
		m := newMerger(w)
		defer m.close()
		m.shared = true
		toServices, toSlices = mergedServices{m}, viewWriter{m, m.newView()}
		slicesListed = func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.commit(m.sharedListed)
		}
	}

	for _, f := range [...]*follower{
		{watch: w, resource: services, informer: in.Services, store: w.serviceStore(toServices)},
		{watch: w, resource: endpointSlices, informer: in.EndpointSlices, store: w.sliceStore(toSlices), listed: slicesListed},
		{watch: w, resource: nodes, informer: in.Nodes, store: w.nodeStore(nodeWriter{w.state})},
	} {
		registration, err := f.informer.AddEventHandler(f)
		if err != nil {
			return fmt.Errorf("follow informer of %s: %w", f.resource, err)
		}
		defer f.stop(registration)
		w.running.Go(func() { f.awaitList(ctx, registration) })
	}
	<-ctx.Done()
	w.running.Wait()
	return nil
}

// eventStore takes single events.
type eventStore interface {
	Add(any) error
	Update(any) error
	Delete(any) error
}

// follower hands on what an informer delivers.
type follower struct {
	*watch
	resource string
	informer cache.SharedInformer
	store    eventStore
	listed   func() // called when all of the initial list was handed on; may be nil

	mu      sync.Mutex
	stopped bool
}

func (f *follower) awaitList(ctx context.Context, registration cache.ResourceEventHandlerRegistration) {
	if !cache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return
	}
	if f.listed != nil {
		f.listed()
	}
	f.gate.done(f.resource)
}

// stop ends the following. An event that is just being handed on is waited for.
func (f *follower) stop(registration cache.ResourceEventHandlerRegistration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stopped = true
	if err := f.informer.RemoveEventHandler(registration); err != nil {
		f.logger.Error(err, "Removing the handler from an informer failed", "resource", f.resource)
	}
}

// OnAdd hands on an object that is new.
func (f *follower) OnAdd(obj any, _ bool) { f.handOn(f.store.Add, obj) }

// OnUpdate hands on an object that has changed, or its successor of the same name.
func (f *follower) OnUpdate(_, obj any) { f.handOn(f.store.Update, obj) }

// OnDelete hands on that an object is gone.
func (f *follower) OnDelete(obj any) { f.handOn(f.store.Delete, obj) }

func (f *follower) handOn(to func(any) error, obj any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped {
		return
	}
	if err := to(obj); err != nil {
		f.logger.Error(err, "Informer delivered what it should not", "resource", f.resource)
	}
}
