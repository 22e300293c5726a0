// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
)

// handmadeServices writes what the watch of services delivers.
type handmadeServices struct{ *handmade }

func (h handmadeServices) set(i *item[api.Service]) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !i.selectorless {
		h.drop(i.key)
	} else if h.hold(i) {
		return
	}
	h.commit(func(tx *cluster.Tx) { tx.SetService(mainScope, i.value) })
}

// hold serves a service without a selector and reports whether it is to be kept
// out of the state for now.
func (h handmadeServices) hold(i *item[api.Service]) bool {
	own := h.services[i.key]
	switch {
	case own != nil && own.held != nil:
		own.held = i.value
	case own == nil && h.isNew(i.key):
		own = h.add(i.key, i.value)
	case own == nil:
		own = h.add(i.key, nil)
	}
	return own.held != nil
}

func (h handmadeServices) remove(key types.NamespacedName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(key)
	h.commit(func(tx *cluster.Tx) { tx.DeleteService(mainScope, key) })
}

func (h handmadeServices) replace(all []*item[api.Service]) {
	h.mu.Lock()
	defer h.mu.Unlock()
	selectorless := map[types.NamespacedName]bool{}
	for _, i := range all {
		if i.selectorless {
			selectorless[i.key] = true
		}
	}
	for key := range h.services {
		if !selectorless[key] {
			h.drop(key)
		}
	}
	h.wantSingle(len(selectorless))
	publish := make([]*item[api.Service], 0, len(all))
	for _, i := range all {
		if !i.selectorless || !h.hold(i) {
			publish = append(publish, i)
		}
	}
	h.commit(func(tx *cluster.Tx) { tx.ReplaceServices(mainScope, values(publish)) })
}

// ownSlices writes what the service's own watch delivers.
type ownSlices struct {
	*handmade
	own *ownService
}

// write commits, unless the watch has been superseded meanwhile.
func (w ownSlices) write(write func(tx *cluster.Tx)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.services[w.own.key] == w.own && !w.listed {
		w.commit(write)
	}
}

func (w ownSlices) set(i *item[api.EndpointSlice]) {
	w.write(func(tx *cluster.Tx) { tx.SetSlice(w.own.scope, i.value) })
}

func (w ownSlices) remove(key types.NamespacedName) {
	w.write(func(tx *cluster.Tx) { tx.DeleteSlice(w.own.scope, key) })
}

func (w ownSlices) replace(all []*item[api.EndpointSlice]) {
	w.write(func(tx *cluster.Tx) {
		tx.ReplaceSlices(w.own.scope, values(all))
		w.publish(tx, w.own)
	})
}

// handmadeSlices writes what the single watch delivers.
type handmadeSlices struct{ *handmade }

func (h handmadeSlices) set(i *item[api.EndpointSlice]) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.slices[i.key] = i.value
	h.commit(func(tx *cluster.Tx) {
		if h.services[i.value.ServiceKey()] != nil {
			tx.SetSlice(handmadeScope, i.value)
		} else {
			tx.DeleteSlice(handmadeScope, i.key)
		}
	})
}

func (h handmadeSlices) remove(key types.NamespacedName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.slices, key)
	h.commit(func(tx *cluster.Tx) { tx.DeleteSlice(handmadeScope, key) })
}

func (h handmadeSlices) replace(all []*item[api.EndpointSlice]) {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.slices)
	for _, i := range all {
		h.slices[i.key] = i.value
	}
	h.commit(func(tx *cluster.Tx) {
		// First take over what the services' own watches wrote, then drop the rest.
		tx.ReplaceSlices(handmadeScope, h.served())
		h.takeOver(tx)
	})
}
