// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"container/list"
	"sync"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/klog/v2"
)

// class represents all nodes that have the same view of a service. A node has its own
// class if it has an endpoint or if a hint names it. If a hint names a zone, the other
// nodes of this zone share a class. Clients that receive frontends have other classes.
type class struct {
	node, zone string
	frontends  bool
}

// views computes and marshals each view once. It caches recently used views. The keys are
// the class and the ServiceState, which represents a service at a revision.
type views struct {
	limit int // maximum size of the cache, in bytes

	mu     sync.Mutex
	states map[*api.ServiceState]*list.Element
	lru    *list.List // list of *sharedState, the most recently used first
	size   int        // size of the cache, in bytes

	ids      atomic.Uint64
	computed atomic.Uint64 // number of views
	values   atomic.Uint64 // number of marshalled services and endpoints
}

func newViews(limit int) *views {
	return &views{limit: limit, states: map[*api.ServiceState]*list.Element{}, lru: list.New()}
}

// viewFor returns the view that a node in a zone has of a state in snapshot. If there is
// no view, it returns nil.
func (v *views) viewFor(snapshot *cluster.Snapshot, state *api.ServiceState, node, zone string, frontends bool) *wireView {
	if state == nil {
		return nil
	}
	s := v.shared(state)
	c := s.classOf(node, zone, frontends)
	s.mu.Lock()
	w, ok := s.views[c]
	if !ok {
		w = v.compute(snapshot, s, c)
		s.views[c] = w
	}
	s.mu.Unlock()
	if !ok && w != nil {
		v.grow(s, w.size)
	}
	return w
}

// compute computes the view of s for a class. The result is nil if there is no view, or if
// a message cannot contain it. The caller holds s.mu.
func (v *views) compute(snapshot *cluster.Snapshot, s *sharedState, c class) *wireView {
	return v.marshal(s, c, c.view(snapshot, s.state), &s.endpoints)
}

// view returns the view of a state for the nodes of the class. If there is no view, it
// returns nil.
func (c class) view(snapshot *cluster.Snapshot, state *api.ServiceState) *api.View {
	node := &api.Node{Name: c.node}
	if c.zone != "" {
		node.Labels = map[string]string{"topology.kubernetes.io/zone": c.zone}
	}
	return nodeview.View(snapshot.WithWinners(state), node)
}

// marshal marshals a view of s. The result is nil if view is nil, or if a message cannot
// contain it. If m already has an endpoint, this endpoint is not marshalled again. The
// argument m may be nil. The caller holds s.mu.
func (v *views) marshal(s *sharedState, c class, view *api.View, m *marshalled) *wireView {
	if view == nil {
		return nil
	}
	v.computed.Add(1)
	var w *wireView
	var err error
	if c.frontends {
		w, err = newWireFrontends(v.ids.Add(1), view)
	} else {
		w, err = newWireView(v.ids.Add(1), view, m)
	}
	if err != nil {
		if !s.reported {
			s.reported = true
			klog.Background().Error(err, "Service too large for a message; clients do not receive it", "service", view.Key())
		}
		return nil
	}
	v.values.Add(uint64(w.values))
	return w
}

func (v *views) shared(state *api.ServiceState) *sharedState {
	v.mu.Lock()
	defer v.mu.Unlock()
	if e, ok := v.states[state]; ok {
		v.lru.MoveToFront(e)
		return e.Value.(*sharedState)
	}
	s := newSharedState(state)
	v.states[state] = v.lru.PushFront(s)
	v.size += s.size
	v.evict()
	return s
}

// grow adds a number of bytes to the size of s and to the size of the cache.
func (v *views) grow(s *sharedState, by int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if e, ok := v.states[s.state]; ok && e.Value == s { // s is still in the cache
		s.size += by
		v.size += by
	}
	v.evict()
}

// evict drops the least recently used states until the cache is small enough.
func (v *views) evict() {
	for v.size > v.limit && v.lru.Len() > 1 {
		oldest := v.lru.Remove(v.lru.Back()).(*sharedState)
		delete(v.states, oldest.state)
		v.size -= oldest.size
	}
}

// sharedState contains the cached views of one ServiceState.
type sharedState struct {
	state *api.ServiceState
	// The nodes that have endpoints, and the nodes and zones that occur in hints.
	nodes, zones map[string]struct{}

	size int // guarded by views.mu

	mu        sync.Mutex
	views     map[class]*wireView
	endpoints marshalled
	reported  bool // true if a log line has said that a view is too large
}

func newSharedState(state *api.ServiceState) *sharedState {
	s := &sharedState{
		state: state,
		nodes: map[string]struct{}{},
		zones: map[string]struct{}{},
		views: map[class]*wireView{},
	}
	for _, slice := range state.Slices {
		for i := range slice.Endpoints {
			d := slice.Endpoints[i].Details.Value()
			s.nodes[d.NodeName] = struct{}{}
			if d.Hints == nil {
				continue
			}
			for _, node := range d.Hints.ForNodes {
				s.nodes[node] = struct{}{}
			}
			for _, zone := range d.Hints.ForZones {
				s.zones[zone] = struct{}{}
			}
		}
	}
	s.size = 500 + 50*(len(s.nodes)+len(s.zones))
	return s
}

func (s *sharedState) classOf(node, zone string, frontends bool) class {
	c := class{frontends: frontends}
	if _, ok := s.nodes[node]; ok {
		c.node = node
	}
	if _, ok := s.zones[zone]; ok {
		c.zone = zone
	}
	return c
}
