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
	// labelledWithin is the time that the EndpointSlice controller has for labelling
	// slices. If slices still lack the label after this time, a watch without a filter
	// begins.
	labelledWithin = 5 * time.Second
	// filteredAfter is how long the watch stays unfiltered after a filter becomes possible.
	// The delay saves listings, because a new watch lists the slices again.
	filteredAfter = 5 * time.Minute
)

// managedByController is the value of the label endpointslice.kubernetes.io/managed-by
// with which the EndpointSlice controller marks its slices.
const managedByController = "endpointslice-controller.k8s.io"

// origin describes an EndpointSlice without the proxy's label.
type origin struct {
	service types.NamespacedName
	managed bool // managed by the EndpointSlice controller
}

// selection decides which EndpointSlices a named proxy keeps. It keeps slices with the
// proxy's label, slices of wanted services without a selector, and slices that the
// EndpointSlice controller made for wanted services but has not labelled yet. One lock
// covers writes of services and slices, so that each slice that is written is checked
// against the current services. No request is sent while the lock is held. Slices are also
// checked when they are decoded, so that unneeded slices use no memory.
//
// A service that becomes wanted or loses its selector may need slices that were dropped
// or not requested. A lookUp requests them; see type lookUp.
type selection struct {
	*watch
	serviceTable table[api.Service]
	sliceTable   table[api.EndpointSlice]
	reduced      func(*discoveryv1.EndpointSlice) (*item[api.EndpointSlice], error)

	mu sync.Mutex
	// services contains the wanted services.
	services     map[types.NamespacedName]*wanted
	selectorless int // number of services without a selector
	// unlabelled contains the slices in the state that lack the proxy's label.
	unlabelled map[types.NamespacedName]origin
	// ofService contains the keys of unlabelled by service.
	ofService map[types.NamespacedName]map[types.NamespacedName]struct{}
	lookUp    lookUp

	// watching is true if a watch of slices has begun. filtered is true if this watch omits
	// slices without the proxy's label.
	watching, filtered bool
	// restart ends the current watch of slices, so that a new watch begins. It is nil if
	// informers deliver the slices, because informers have no filter.
	restart func()
	// timer, if not nil, calls adapt later.
	timer *time.Timer
	// ready is closed when the services have been listed.
	ready chan struct{}
}

// wanted is a service that the proxy wants.
type wanted struct {
	key          types.NamespacedName
	selectorless bool
	queued       bool // waits for a look-up
	// held, if not nil, is the service while it waits to be written with its slices.
	held *item[api.Service]
}

// The two writers of a selection: serviceSelection for services, sliceSelection for
// slices.
type (
	serviceSelection struct{ *selection }
	sliceSelection   struct{ *selection }
)

func newSelection(w *watch, s *stores, find finder, gather time.Duration) *selection {
	n := &selection{
		watch: w, serviceTable: s.services.to.(table[api.Service]), sliceTable: s.slices.to.(table[api.EndpointSlice]),
		reduced:  func(o *discoveryv1.EndpointSlice) (*item[api.EndpointSlice], error) { return s.slices.item(o) },
		services: map[types.NamespacedName]*wanted{}, unlabelled: map[types.NamespacedName]origin{}, ready: make(chan struct{}),
		ofService: map[types.NamespacedName]map[types.NamespacedName]struct{}{},
		lookUp:    lookUp{find: find, gather: gather, wake: make(chan struct{}, 1)},
	}
	s.services.listed = sync.OnceFunc(func() {
		w.listed(services)
		close(n.ready)
	})
	s.services.mu, s.services.to = &n.mu, serviceSelection{n}
	s.slices.mu, s.slices.to, s.slices.reduce = &n.mu, sliceSelection{n}, n.reduceSlice
	return n
}

// reduceSlice converts a slice if the proxy keeps it. The caller must not hold mu.
func (n *selection) reduceSlice(s *discoveryv1.EndpointSlice, i *item[api.EndpointSlice]) {
	if !n.converter.WantsSlice(s) {
		service := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[n.serviceLabel()]}
		i.unlabelled = &origin{service, s.Labels[discoveryv1.LabelManagedBy] == managedByController}
		n.mu.Lock()
		i.dropped = !n.selects(i.unlabelled)
		n.mu.Unlock()
		if i.dropped {
			return
		}
	}
	i.value, i.problems = n.converter.EndpointSlice(s)
}

// selects reports whether the proxy keeps a slice that lacks the proxy's label.
func (n *selection) selects(o *origin) bool {
	s := n.services[o.service]
	return s != nil && (s.selectorless || o.managed)
}

func (n serviceSelection) write(i *item[api.Service]) {
	now, excess := n.note(i)
	n.commit(func(tx *cluster.Tx) {
		if now {
			n.serviceTable.writeIn(tx, i)
		}
		if excess {
			n.dropExcess(tx, i.key)
		}
	})
}

func (n serviceSelection) replace(all []*item[api.Service]) {
	gone := maps.Clone(n.services)
	var services []*item[api.Service]
	for _, i := range all {
		if now, _ := n.note(i); now {
			services = append(services, i)
		}
		if i.value != nil {
			delete(gone, i.key)
		}
	}
	for key := range gone {
		n.note(&item[api.Service]{key: key})
	}
	n.commit(func(tx *cluster.Tx) {
		n.serviceTable.replaceIn(tx, services)
		for service := range n.ofService {
			n.dropExcess(tx, service)
		}
	})
}

// note records a new version of a service. It returns whether to write the service now. If
// the state may have slices that the proxy must no longer keep, excess is true.
func (n *selection) note(i *item[api.Service]) (now, excess bool) {
	s := n.services[i.key]
	if i.value == nil {
		if s != nil && s.selectorless {
			n.selectorless--
		}
		delete(n.services, i.key)
		return true, s != nil
	}
	isNew := s == nil
	if isNew {
		s = &wanted{key: i.key}
		n.services[i.key] = s
	}
	was := s.selectorless
	switch s.selectorless = i.selectorless; {
	case s.selectorless && !was:
		n.selectorless++
	case was && !s.selectorless:
		n.selectorless--
	}
	if n.watching && i.value.Type != api.ExternalName && (isNew || s.selectorless && !was) && n.needsLookUp(s) {
		n.enqueue(s)
		if isNew && !n.lookUp.failing {
			s.held = i
		}
	}
	if s.held != nil {
		s.held = i
	}
	return s.held == nil, was && !s.selectorless
}

// commit calls the function write in a commit.
func (n *selection) commit(write func(*cluster.Tx)) {
	n.state.Update(write)
	n.adapt()
}

// dropExcess deletes slices of a service that the proxy no longer keeps.
func (n *selection) dropExcess(tx *cluster.Tx, service types.NamespacedName) {
	for key := range n.ofService[service] {
		if o := n.unlabelled[key]; !n.selects(&o) {
			n.put(tx, &item[api.EndpointSlice]{key: key})
		}
	}
}

func (n sliceSelection) write(i *item[api.EndpointSlice]) {
	if i.unlabelled != nil {
		if !n.selects(i.unlabelled) {
			i.value = nil
		} else if i.dropped {
			return // the service became wanted after decoding, so its look-up finds this version or a newer one
		}
	}
	n.lookUp.noteChange(i.key)
	n.commit(func(tx *cluster.Tx) {
		n.put(tx, i)
		if i.value != nil && i.unlabelled == nil {
			// The controller has begun to label the slices.
			key := types.NamespacedName{Namespace: i.value.Namespace, Name: i.value.ServiceName}
			if s := n.services[key]; s != nil && !s.selectorless {
				n.release(tx, s)
			}
		}
	})
}

func (n sliceSelection) replace(all []*item[api.EndpointSlice]) {
	n.lookUp.relisted = true
	found := maps.Clone(n.unlabelled)
	for _, i := range all {
		if i.unlabelled != nil {
			switch o, ok := found[i.key]; {
			case !n.selects(i.unlabelled):
				i.value = nil
			case i.dropped && ok && o.service == i.unlabelled.service:
				// The service became wanted after the slice was decoded, and a look-up has
				// found the slice.
				i.value = n.sliceInState(i.key, o.service)
			}
		}
		delete(found, i.key)
	}
	for key, o := range found {
		if n.filtered && n.selects(&o) { // the list has no slices without the label
			all = append(all, &item[api.EndpointSlice]{key: key, value: n.sliceInState(key, o.service), unlabelled: &o})
		}
	}
	clear(n.unlabelled)
	clear(n.ofService)
	n.state.Update(func(tx *cluster.Tx) {
		n.sliceTable.replaceIn(tx, all)
		for _, i := range all {
			n.noteSlice(i)
		}
	})
	n.adapt()
}

// sliceInState returns a slice of a service from the state.
func (n *selection) sliceInState(key, service types.NamespacedName) *api.EndpointSlice {
	if state, _ := n.state.Snapshot().States.Get(service); state != nil {
		if i := slices.IndexFunc(state.Slices, func(s *api.EndpointSlice) bool { return s.Name == key.Name }); i >= 0 {
			return state.Slices[i]
		}
	}
	return nil
}

// put writes a slice to the state, or deletes the slice if its value is nil.
func (n *selection) put(tx *cluster.Tx, i *item[api.EndpointSlice]) {
	n.sliceTable.writeIn(tx, i)
	n.noteSlice(i)
}

func (n *selection) noteSlice(i *item[api.EndpointSlice]) {
	if was, ok := n.unlabelled[i.key]; ok {
		delete(n.unlabelled, i.key)
		if delete(n.ofService[was.service], i.key); len(n.ofService[was.service]) == 0 {
			delete(n.ofService, was.service)
		}
	}
	if i.value == nil || i.unlabelled == nil {
		return
	}
	service := i.unlabelled.service
	n.unlabelled[i.key] = *i.unlabelled
	if n.ofService[service] == nil {
		n.ofService[service] = map[types.NamespacedName]struct{}{}
	}
	n.ofService[service][i.key] = struct{}{}
}

// filter reports whether a watch may omit slices without the proxy's label.
func (n *selection) filter() bool { return n.selectorless == 0 && len(n.unlabelled) == 0 }

// adapt restarts the watch of slices if the watch has a filter although a service has
// no selector. If the filter is wrong for another reason, adapt restarts the watch
// after a delay, because this reason may disappear. For example, the controller may
// label the slice, or a service without a selector may be created again.
func (n *selection) adapt() {
	switch {
	case n.restart == nil:
	case n.filtered && n.selectorless > 0:
		n.restart()
	case n.filtered != n.filter() && n.timer == nil:
		delay := filteredAfter
		if n.filtered {
			delay = labelledWithin
		}
		n.timer = time.AfterFunc(delay, func() {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.timer = nil
			if n.restart != nil && n.filtered != n.filter() {
				n.restart()
			}
		})
	}
}

// begin records that a watch of slices begins. It returns whether the watch has a filter.
func (n *selection) begin(restart func()) (filtered bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watching, n.filtered, n.restart = true, restart != nil && n.filter(), restart
	return n.filtered
}

// end stops the timer, so that it does not keep the selection in memory.
func (n *selection) end() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.restart = nil
	if n.timer != nil {
		n.timer.Stop()
	}
}

// follow watches slices until ctx ends. When a watch ends, follow begins the next. The
// listing at the start of each watch replaces all slices of the previous watch.
func (n *selection) follow(ctx context.Context, reflect func(ctx context.Context, filtered, again bool)) {
	defer n.end()
	for again := false; ctx.Err() == nil; again = true {
		watching, stop := context.WithCancel(ctx)
		reflect(watching, n.begin(stop), again)
		stop()
	}
}
