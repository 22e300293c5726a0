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
	// If a service becomes wanted within this time after its creation, it was created with
	// the proxy's label. So its slices have the label too.
	createdLabelled = 10 * time.Second
	// labelledWithin is the time that the EndpointSlice controller has for labelling slices.
	// If slices still lack the label then, a watch without a filter begins.
	labelledWithin = 5 * time.Second
	// filteredAfter is how long the watch stays unfiltered after a filter becomes possible.
	// The delay saves listings, because a new watch lists the slices again.
	filteredAfter = 5 * time.Minute
	// retryAfter delays a new watch of slices if a request for the slices of some services
	// has failed.
	retryAfter = time.Second
	// findTimeout limits a request for the slices of some services. During the request, no
	// changes of services and slices are handled.
	findTimeout = 5 * time.Second
)

// managedByController is the value of the label endpointslice.kubernetes.io/managed-by
// with which the EndpointSlice controller marks its slices.
const managedByController = "endpointslice-controller.k8s.io"

// finder returns all slices without the proxy's label that belong to the given services.
// It may also return other slices. Each returned slice includes all changes whose events
// came before the call.
type finder func(services []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error)

// origin describes an EndpointSlice without the proxy's label.
type origin struct {
	service types.NamespacedName
	managed bool // managed by the EndpointSlice controller
}

// selection decides which EndpointSlices a named proxy keeps. It keeps slices with the
// proxy's label, slices of wanted services without a selector, and slices that the
// EndpointSlice controller made for wanted services but has not labelled yet. One lock
// covers writes of services and slices, so that each slice that is written is checked
// against the current services. Slices are also checked when they are decoded, so that
// unneeded slices use no memory.
//
// A service that becomes wanted or loses its selector may need slices that were dropped
// or not requested. The selection then requests them, and holds the lock from the request
// to the write. Events handled before the request are not newer than the response. Other
// events are handled after the write. So the response never replaces a newer slice.
type selection struct {
	*watch
	serviceTable table[api.Service]
	sliceTable   table[api.EndpointSlice]
	reduced      func(*discoveryv1.EndpointSlice) (*item[api.EndpointSlice], error)
	find         finder

	mu turn
	// Writers of the field services lock mu and servicesMu, and readers lock one of them. No
	// request is sent while servicesMu is locked, so decoding does not wait for requests.
	servicesMu sync.Mutex
	// services maps each wanted service to true if the service has no selector.
	services     map[types.NamespacedName]bool
	selectorless int // number of services without a selector
	// unlabelled contains the slices in the state that lack the proxy's label.
	unlabelled map[types.NamespacedName]origin

	// watching is true if a watch of slices has begun. filtered is true if this watch omits
	// slices without the proxy's label.
	watching, filtered bool
	// restart ends the current watch of slices, so that a new watch begins. It is nil if
	// informers deliver the slices, because informers have no filter.
	restart func()
	// If pause is true, a request has failed, and the next watch must wait.
	pause bool
	// waiting is true while a timer runs. When the timer ends, adapt checks the filter.
	waiting bool
	// ready is closed when the services have been listed.
	ready chan struct{}
}

// turn is a lock for long operations. In a synctest bubble, time does not advance while
// goroutines wait for a mutex, but time advances while they wait for a turn.
type turn chan struct{}

// Lock implements sync.Locker.
func (t turn) Lock() { t <- struct{}{} }

// Unlock implements sync.Locker.
func (t turn) Unlock() { <-t }

// The two writers of a selection: serviceSelection for services, sliceSelection for
// slices.
type (
	serviceSelection struct{ *selection }
	sliceSelection   struct{ *selection }
)

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

// reduceSlice converts a slice if the proxy keeps it. The caller need not hold mu.
func (n *selection) reduceSlice(s *discoveryv1.EndpointSlice, i *item[api.EndpointSlice]) {
	if !n.converter.WantsSlice(s) {
		service := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[n.serviceLabel()]}
		i.unlabelled = &origin{service, s.Labels[discoveryv1.LabelManagedBy] == managedByController}
		if i.dropped = !n.selects(i.unlabelled); i.dropped {
			return
		}
	}
	i.value, i.problems = n.converter.EndpointSlice(s)
}

// selects reports whether the proxy keeps a slice that lacks the proxy's label.
func (n *selection) selects(o *origin) bool {
	n.servicesMu.Lock()
	defer n.servicesMu.Unlock()
	selectorless, wanted := n.services[o.service]
	return selectorless || wanted && o.managed
}

func (n serviceSelection) write(i *item[api.Service]) {
	missing, excess := n.note(i)
	n.commit(missing, excess, func(tx *cluster.Tx) { n.serviceTable.writeIn(tx, i) })
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

// note records a new version of a service. If the state may lack slices that the proxy
// must now keep, missing contains the service. If the state may have slices that the
// proxy must no longer keep, excess is true.
func (n *selection) note(i *item[api.Service]) (missing []types.NamespacedName, excess bool) {
	n.servicesMu.Lock()
	defer n.servicesMu.Unlock()
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

// commit makes one commit. It calls write, and adds slices of the services in missing. If
// excess is true, it also deletes slices that the proxy no longer keeps.
func (n *selection) commit(missing []types.NamespacedName, excess bool, write func(*cluster.Tx)) {
	found, err := n.lookUp(missing)
	n.state.Update(func(tx *cluster.Tx) {
		write(tx)
		if excess {
			for key, o := range n.unlabelled {
				if !n.selects(&o) {
					n.put(tx, &item[api.EndpointSlice]{key: key})
				}
			}
		}
		for _, i := range found {
			n.put(tx, i)
		}
	})
	if err != nil {
		n.logger.Error(err, "Cannot list endpoint slices of new services; listing all")
	}
	n.adapt(err != nil)
}

func (n sliceSelection) write(i *item[api.EndpointSlice]) {
	all := []*item[api.EndpointSlice]{i}
	if n.decideAgain(i) {
		if n.pause {
			return // the next watch will list the slice
		}
		found, err := n.lookUp([]types.NamespacedName{i.unlabelled.service})
		if err != nil {
			n.logger.Error(err, "Cannot list endpoint slices of a new service; listing all")
			n.adapt(true)
			return
		}
		if slices.ContainsFunc(found, func(o *item[api.EndpointSlice]) bool { return o.key == i.key }) {
			all = nil // the response contains a newer version of the slice
		}
		all = append(all, found...)
	}
	n.state.Update(func(tx *cluster.Tx) {
		for _, i := range all {
			n.put(tx, i)
		}
	})
	n.adapt(false)
}

// decideAgain decides again about a slice without the proxy's label, because services may
// have changed since the slice was decoded. It returns true if the slice was dropped, but
// the proxy must keep it.
func (n *selection) decideAgain(i *item[api.EndpointSlice]) (missing bool) {
	if i.unlabelled == nil {
		return false
	}
	if !n.selects(i.unlabelled) {
		i.value = nil
		return false
	}
	return i.dropped
}

func (n sliceSelection) replace(all []*item[api.EndpointSlice]) bool {
	missing := map[types.NamespacedName]bool{}
	for _, i := range all {
		if n.decideAgain(i) {
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
		n.logger.Error(err, "Cannot list endpoint slices of new services; listing all again")
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

// put writes a slice to the state, or deletes the slice if its value is nil.
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

// lookUp requests the EndpointSlices of services, and returns the EndpointSlices that the
// proxy keeps.
func (n *selection) lookUp(services []types.NamespacedName) ([]*item[api.EndpointSlice], error) {
	if len(services) == 0 {
		return nil, nil
	}
	slices.SortFunc(services, api.CompareKeys)
	objects, err := n.find(services)
	var found []*item[api.EndpointSlice]
	for _, o := range objects {
		i, _ := n.reduced(o)
		n.log(i.problems)
		if i.value != nil {
			found = append(found, i)
		}
	}
	return found, err
}

// filter reports whether a watch may omit slices without the proxy's label.
func (n *selection) filter() bool { return n.selectorless == 0 && len(n.unlabelled) == 0 }

// adapt restarts the watch of slices if the argument list is true, or if the watch has a
// filter although a service has no selector. If the filter is wrong for another reason,
// adapt restarts the watch after a delay, because this reason may disappear: the
// controller may label the slice, or a service without a selector may be created again.
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

// begin records that a watch of slices begins. If pause is true, a request has failed. Then
// the watch must wait, and it has no filter.
func (n *selection) begin(restart func()) (pause bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watching, n.filtered, n.restart = true, restart != nil && !n.pause && n.filter(), restart
	pause, n.pause = n.pause, false
	return pause
}

// follow watches slices until ctx ends. When a watch ends, follow begins the next. The
// listing at the start of each watch replaces all slices of the previous watch.
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
