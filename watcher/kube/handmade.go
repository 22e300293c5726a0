// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"iter"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/diffstore"
)

const (
	// HoldTimeout is how long a new service without a selector waits for the
	// list of its slices before it goes into the state without.
	HoldTimeout = 5 * time.Second
	// MaxOwnWatches is how many services without a selector have a watch of
	// their own each. Once there are more, a single one takes over for good.
	MaxOwnWatches = 32
)

// handmadeScope is the scope of the slices from the watch that serves all
// services without a selector. The scopes of the services' own watches follow.
const handmadeScope diffstore.Scope = 1

// handmade writes the services into the state, and for those without a selector
// the slices that the common watch leaves out. It is used with a
// ServiceProxyName only.
type handmade struct {
	*watch
	// startOwn watches the slices of one service until it is stopped, and
	// startSingle those of all services.
	startOwn    func(*ownService) (stop context.CancelFunc)
	startSingle func()

	mu        sync.Mutex
	closed    bool
	services  map[types.NamespacedName]*ownService
	lastScope diffstore.Scope

	// single says that one watch serves all services, and listed that its first
	// list is in. slices is what it delivers, for whatever service: one that
	// comes later finds its slices here.
	single, listed bool
	slices         map[types.NamespacedName]*api.EndpointSlice

	// What the next commit has to do. stale says that services came or went, so
	// that other entries of slices belong into the state than before; dropped
	// are those whose slices have to go; ready are those for which the gate need
	// not wait any more.
	stale          bool
	dropped, ready []*ownService
}

// ownService is a service without a selector.
type ownService struct {
	key   types.NamespacedName
	scope diffstore.Scope
	stop  context.CancelFunc // ends its own watch, if it has one
	// held is the service while it is kept out of the state, until the list of
	// its slices is in or the timer fires.
	held  *api.Service
	timer *time.Timer
}

func newHandmade(w *watch) *handmade {
	return &handmade{
		watch:     w,
		services:  map[types.NamespacedName]*ownService{},
		slices:    map[types.NamespacedName]*api.EndpointSlice{},
		lastScope: handmadeScope,
	}
}

// close makes sure that nothing is written any more.
func (h *handmade) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, own := range h.services {
		own.release()
	}
}

// commit writes to the state. The caller holds h.mu.
func (h *handmade) commit(write func(tx *cluster.Tx)) {
	if h.closed {
		return
	}
	h.state.Update(func(tx *cluster.Tx) {
		write(tx)
		for _, own := range h.dropped {
			tx.ReplaceSlices(own.scope, none)
		}
		if h.stale && h.single {
			tx.ReplaceSlices(handmadeScope, h.served())
		}
	})
	for _, own := range append(h.ready, h.dropped...) {
		h.gate.done(own)
	}
	h.stale, h.ready, h.dropped = false, nil, nil
}

// served yields those slices of the single watch that belong to a service
// without a selector.
func (h *handmade) served() iter.Seq[*api.EndpointSlice] {
	return func(yield func(*api.EndpointSlice) bool) {
		for _, s := range h.slices {
			if h.services[s.ServiceKey()] != nil && !yield(s) {
				return
			}
		}
	}
}

// add begins to serve a service that has no selector. If hold is set, which is
// the service, it goes into the state with its first list.
func (h *handmade) add(key types.NamespacedName, hold *api.Service) *ownService {
	h.lastScope++
	own := &ownService{key: key, scope: h.lastScope, stop: func() {}}
	h.services[key] = own
	h.stale = true
	if h.listed {
		return own
	}
	h.gate.wait(own)
	h.wantSingle(len(h.services))
	if !h.single {
		own.stop = h.startOwn(own)
	}
	if hold != nil {
		own.held = hold
		own.timer = time.AfterFunc(HoldTimeout, func() { h.giveUp(own) })
	}
	return own
}

// wantSingle starts the watch for all services if there are too many for own ones.
func (h *handmade) wantSingle(services int) {
	if !h.single && services > MaxOwnWatches {
		h.single = true
		h.startSingle()
	}
}

// drop ends serving a service without a selector, if it is one.
func (h *handmade) drop(key types.NamespacedName) {
	own := h.services[key]
	if own == nil {
		return
	}
	own.release()
	delete(h.services, key)
	h.stale = true
	h.dropped = append(h.dropped, own)
}

// publish writes the service if it was held back for its list of slices.
func (h *handmade) publish(tx *cluster.Tx, own *ownService) {
	if own.held != nil {
		own.timer.Stop()
		tx.SetService(mainScope, own.held)
		own.held = nil
	}
	h.ready = append(h.ready, own)
}

// giveUp publishes a service whose list does not come.
func (h *handmade) giveUp(own *ownService) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if own.held == nil || h.services[own.key] != own {
		return
	}
	h.logger.Info("No list of its endpoint slices for a service without selector, going on", "service", klog.KRef(own.key.Namespace, own.key.Name), "waited", HoldTimeout)
	h.commit(func(tx *cluster.Tx) { h.publish(tx, own) })
}

// release ends the service's own watch and its wait.
func (own *ownService) release() {
	own.stop()
	if own.timer != nil {
		own.timer.Stop()
	}
}

// isNew reports whether readers have not seen the service yet, but would at once.
func (h *handmade) isNew(key types.NamespacedName) bool {
	if !h.state.IsSynced() {
		return false
	}
	_, published := h.state.Snapshot().Services.Get(key)
	return !published
}

// takeOver says that the first list of the single watch is in.
func (h *handmade) takeOver(tx *cluster.Tx) {
	if h.listed {
		return
	}
	h.listed = true
	for _, own := range h.services {
		own.stop()
		tx.ReplaceSlices(own.scope, none)
		h.publish(tx, own)
	}
}

// none is an empty listing of slices.
func none(func(*api.EndpointSlice) bool) {}
