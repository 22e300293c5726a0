// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// createdLabelled is the age below which a service that becomes wanted was
	// created with its label, so that its slices have it, too.
	createdLabelled = 10 * time.Second
	// labelledWithin is how long the endpoint-slice controller may take to label
	// slices before they are watched without the label.
	labelledWithin = 5 * time.Second
	// filteredAfter is how long the watch stays without a filter once it could
	// have one: to list all slices again is expensive.
	filteredAfter = 5 * time.Minute
	// retryAfter is the time from a failed request for the slices of some services
	// to a listing of all.
	retryAfter = time.Second
	// findTimeout limits a request for the slices of some services, during which
	// all services and slices wait.
	findTimeout = 5 * time.Second
)

// managedByController is the value of the label endpointslice.kubernetes.io/managed-by
// on slices that the endpoint-slice controller makes, and labels.
const managedByController = "endpointslice-controller.k8s.io"

// finder returns the slices of some services that lack the proxy's label, and
// maybe others, at least as new as what the watch has delivered before the call.
type finder func(services []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error)

// origin says where a slice without the proxy's label comes from.
type origin struct {
	service types.NamespacedName
	managed bool // by the endpoint-slice controller
}

// selection decides which slices a proxy with a name keeps: those with its
// label, all of its services without a selector, and of its other services those
// that the endpoint-slice controller has not labelled yet. It follows services
// and slices under one lock, so that each slice meets the services of its time.
//
// A slice that was dropped, or that a filtered watch did not show, may count
// later, for a service that becomes wanted or loses its selector. It is looked
// up then, and the lock is held from the request to the write. An event of the
// slice that was handled before is no newer than the answer, and all others are
// handled after it. So the last event of each slice is what remains.
type selection struct {
	*watch
	serviceTable table[api.Service]
	sliceTable   table[api.EndpointSlice]
	reduced      func(*discoveryv1.EndpointSlice) (*item[api.EndpointSlice], error)
	find         finder

	mu turn
	// services are those that are wanted. The value says that there is no selector.
	services     map[types.NamespacedName]bool
	selectorless int // how many of them
	// unlabelled are the slices in the state that lack the proxy's label.
	unlabelled map[types.NamespacedName]origin

	// watching says that slices have been asked for, filtered that those without
	// the proxy's label are not shown.
	watching, filtered bool
	// restart ends the watch of slices, for the next one to begin. It is nil with
	// informers, whose watch is never filtered.
	restart func()
	// pause says that a request has failed, so that the next watch has to wait.
	pause bool
	// waiting says that a timer is to restart the watch if its filter is wrong.
	waiting bool
	// ready is closed when services have been listed.
	ready chan struct{}
}

// turn is a lock that may be held for long: in a bubble of synctest, time passes
// while others wait for it.
type turn chan struct{}

// Lock implements sync.Locker.
func (t turn) Lock() { t <- struct{}{} }

// Unlock implements sync.Locker.
func (t turn) Unlock() { <-t }

// serviceSelection and sliceSelection are the selection as a writer.
type (
	serviceSelection struct{ *selection }
	sliceSelection   struct{ *selection }
)

// newSelection returns a selection that is between the stores and the state.
func newSelection(w *watch, s *stores, find finder) *selection {
	n := &selection{
		watch: w, serviceTable: s.services.to.(table[api.Service]), sliceTable: s.slices.to.(table[api.EndpointSlice]),
		reduced: func(o *discoveryv1.EndpointSlice) (*item[api.EndpointSlice], error) { return s.slices.item(o) }, find: find, mu: make(turn, 1),
		services: map[types.NamespacedName]bool{}, unlabelled: map[types.NamespacedName]origin{}, ready: make(chan struct{}),
	}
	s.services.listed = sync.OnceFunc(func() {
		w.listed(services)
		close(n.ready)
	})
	s.services.mu, s.services.to = n.mu, serviceSelection{n}
	s.slices.mu, s.slices.to, s.slices.reduce = n.mu, sliceSelection{n}, n.reduceSlice
	return n
}

// reduceSlice converts a slice that counts. The caller holds mu.
func (n *selection) reduceSlice(s *discoveryv1.EndpointSlice, i *item[api.EndpointSlice]) {
	if !n.converter.WantsSlice(s) {
		service := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[n.serviceLabel()]}
		i.unlabelled = &origin{service, s.Labels[discoveryv1.LabelManagedBy] == managedByController}
		if !n.counts(i.unlabelled) {
			return
		}
	}
	n.convertSlice(s, i)
}

// counts reports whether a slice without the proxy's label counts.
func (n *selection) counts(o *origin) bool {
	selectorless, wanted := n.services[o.service]
	return selectorless || wanted && o.managed
}

func (n serviceSelection) write(i *item[api.Service]) {
	missing, less := n.note(i)
	n.commit(missing, less, func(tx *cluster.Tx) { n.serviceTable.writeIn(tx, i) })
}

func (n serviceSelection) replace(all []*item[api.Service]) bool {
	var missing []types.NamespacedName
	gone := maps.Clone(n.services)
	for _, i := range all {
		more, _ := n.note(i)
		missing = append(missing, more...)
		if i.value != nil {
			delete(gone, i.key)
		}
	}
	for key := range gone {
		n.note(&item[api.Service]{key: key})
	}
	n.commit(missing, true, func(tx *cluster.Tx) { n.serviceTable.replaceAll(tx, values(all)) })
	return true
}

// note takes note of a service. It returns the service if slices that count for
// it from now on may be missing in the state, and whether there may be some that
// do not count any more.
func (n *selection) note(i *item[api.Service]) (missing []types.NamespacedName, less bool) {
	was, wanted := n.services[i.key]
	if was {
		n.selectorless--
	}
	if i.value == nil {
		delete(n.services, i.key)
		return nil, wanted
	}
	n.services[i.key] = i.selectorless
	if i.selectorless {
		n.selectorless++
	}
	if n.watching && (i.selectorless && !was || !wanted && time.Since(i.value.Created) > createdLabelled) {
		missing = append(missing, i.key)
	}
	return missing, was && !i.selectorless
}

// commit writes services, the slices that are missing for some of them, and
// drops slices that do not count any more, if there may be less that do.
func (n *selection) commit(missing []types.NamespacedName, less bool, write func(*cluster.Tx)) {
	found, err := n.lookUp(missing)
	n.state.Update(func(tx *cluster.Tx) {
		write(tx)
		if less {
			for key, o := range n.unlabelled {
				if !n.counts(&o) {
					n.put(tx, &item[api.EndpointSlice]{key: key})
				}
			}
		}
		for _, i := range found {
			n.put(tx, i)
		}
	})
	if err != nil {
		n.logger.Error(err, "Listing the endpoint slices of new services failed, listing all")
	}
	n.adapt(err != nil)
}

func (n sliceSelection) write(i *item[api.EndpointSlice]) {
	n.state.Update(func(tx *cluster.Tx) { n.put(tx, i) })
	n.adapt(false)
}

func (n sliceSelection) replace(all []*item[api.EndpointSlice]) bool {
	missing := map[types.NamespacedName]bool{}
	for _, i := range all {
		// Services may have changed since the slice arrived.
		switch {
		case i.unlabelled == nil:
		case !n.counts(i.unlabelled):
			i.value = nil
		case i.value == nil:
			missing[i.unlabelled.service] = true
		}
	}
	if n.filtered {
		for service, selectorless := range n.services {
			if selectorless {
				missing[service] = true
			}
		}
		for _, o := range n.unlabelled {
			missing[o.service] = true
		}
	}
	found, err := n.lookUp(slices.Collect(maps.Keys(missing)))
	if err != nil {
		n.logger.Error(err, "Listing the endpoint slices of new services failed, listing all again")
		n.adapt(true)
		return false
	}
	all = append(all, found...)
	clear(n.unlabelled)
	n.state.Update(func(tx *cluster.Tx) {
		n.sliceTable.replaceAll(tx, values(all))
		for _, i := range all {
			n.noteSlice(i)
		}
	})
	n.adapt(false)
	return true
}

// put brings a slice into the state, or takes it out.
func (n *selection) put(tx *cluster.Tx, i *item[api.EndpointSlice]) {
	n.sliceTable.writeIn(tx, i)
	n.noteSlice(i)
}

func (n *selection) noteSlice(i *item[api.EndpointSlice]) {
	if i.value != nil && i.unlabelled != nil {
		n.unlabelled[i.key] = *i.unlabelled
	} else {
		delete(n.unlabelled, i.key)
	}
}

// lookUp returns the slices that count for some services and that the watch may
// have left out.
func (n *selection) lookUp(services []types.NamespacedName) ([]*item[api.EndpointSlice], error) {
	if len(services) == 0 {
		return nil, nil
	}
	slices.SortFunc(services, api.CompareKeys)
	objects, err := n.find(services)
	var found []*item[api.EndpointSlice]
	for _, o := range objects {
		i, _ := n.reduced(o)
		if i.value != nil {
			found = append(found, i)
		}
	}
	return found, err
}

// filter reports whether the watch of slices can do without those that lack the
// proxy's label.
func (n *selection) filter() bool { return n.selectorless == 0 && len(n.unlabelled) == 0 }

// adapt restarts the watch of slices if it has to list again, or if its filter
// is wrong. A service without a selector needs another one immediately. All else
// has time, as it may pass: the controller is about to label a slice, a service
// without a selector comes back.
func (n *selection) adapt(list bool) {
	switch {
	case n.restart == nil:
	case list:
		n.pause = true
		n.restart()
	case n.filtered && n.selectorless > 0:
		n.restart()
	case n.filtered != n.filter() && !n.waiting:
		n.waiting = true
		delay := filteredAfter
		if n.filtered {
			delay = labelledWithin
		}
		time.AfterFunc(delay, func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.waiting = false
			if n.filtered != n.filter() {
				n.restart()
			}
		})
	}
}

// begin says that slices are watched from now on. It reports whether the watch
// has to wait because a request failed.
func (n *selection) begin(restart func()) (pause bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watching, n.filtered, n.restart = true, restart != nil && n.filter(), restart
	pause, n.pause = n.pause, false
	return pause
}

// follow watches slices until ctx ends, one watch at a time. Each begins with a
// listing of its own, which replaces what its predecessor has brought at once.
func (n *selection) follow(ctx context.Context, reflect func(ctx context.Context, filtered, again bool)) {
	for again := false; ctx.Err() == nil; again = true {
		watching, stop := context.WithCancel(ctx)
		if n.begin(stop) {
			select {
			case <-time.After(retryAfter):
			case <-ctx.Done():
			}
		}
		reflect(watching, n.filtered, again)
		stop()
	}
}
