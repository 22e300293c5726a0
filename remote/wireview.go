// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"cmp"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/api/localv1"
	"k8s.io/apimachinery/pkg/types"
)

// wireView is a view as it goes over the wire. All streams of one class share it.
type wireView struct {
	id  uint64 // of this view and no other; 0 is no view
	key types.NamespacedName
	// service is the value that the service has in set: the service itself, or its
	// frontends, which come without endpoints.
	set       localv1.Set
	service   []byte
	endpoints []wireEndpoint // in order of their keys

	values int // that were marshalled for it
	size   int // in memory, with what is worked out of it, about

	mu     sync.Mutex
	deltas [2][2]memo // by audience, and by whether it is from nothing
	wholes [2][]frame // by audience
}

// wireEndpoint is an endpoint, marshalled.
type wireEndpoint struct {
	key   string
	value []byte
	// elsewhere says that it takes traffic from elsewhere: that it has the
	// Internal or the External scope.
	elsewhere bool
}

// audience is who is told: index into what differs by that.
type audience int

const (
	// anybody is told of endpoints that take traffic from elsewhere only.
	anybody audience = iota
	// askers are the clients that asked for all endpoints.
	askers
)

func (a audience) hears(e *wireEndpoint) bool { return a == askers || e.elsewhere }

// memo is the difference from the view of an id.
type memo struct {
	id    uint64
	value *wireDelta
}

// marshalled are the endpoints of a service in all the forms in which nodes see them,
// each marshalled once: most look the same to all but the node on which they run.
type marshalled []*marshalledEndpoint // in order of address and ports

type marshalledEndpoint struct {
	wireEndpoint
	endpoint api.Endpoint
	draining bool
}

// wire returns e as it goes over the wire, and whether it was not marshalled before.
func (m *marshalled) wire(e *api.Endpoint, draining bool) (wireEndpoint, bool) {
	list := *m
	i := sort.Search(len(list), func(i int) bool { return list[i].endpoint.Compare(e) >= 0 })
	for ; i < len(list) && list[i].endpoint.Compare(e) == 0; i++ {
		if list[i].draining == draining && list[i].endpoint.Equal(e) {
			return list[i].wireEndpoint, false
		}
	}
	w := wireEndpoint{
		key:       strings.ToValidUTF8(e.Key(), "\uFFFD"), // as localv1.Marshal does it
		value:     localv1.Marshal(localv1.FromEndpoint(e, draining)),
		elsewhere: !draining && (e.Scopes.Internal || e.Scopes.External),
	}
	*m = slices.Insert(list, i, &marshalledEndpoint{w, *e, draining})
	return w, true
}

// newWireView marshals v, but for the endpoints that are marshalled already.
func newWireView(id uint64, v *api.ServiceEndpoints, m *marshalled) *wireView {
	w := &wireView{
		id:        id,
		key:       v.Key(),
		set:       localv1.Set_ServicesSet,
		service:   localv1.Marshal(localv1.FromView(v)),
		endpoints: make([]wireEndpoint, 0, len(v.Endpoints)+len(v.Draining)),
		values:    1,
	}
	w.size = 400 + 3*len(w.service)
	w.add(v.Endpoints, false, m)
	w.add(v.Draining, true, m)
	slices.SortFunc(w.endpoints, func(a, b wireEndpoint) int { return strings.Compare(a.key, b.key) })
	return w
}

// newWireFrontends marshals the frontends of v.
func newWireFrontends(id uint64, v *api.ServiceEndpoints) *wireView {
	w := &wireView{
		id:      id,
		key:     v.Key(),
		set:     localv1.Set_FrontendsSet,
		service: localv1.Marshal(frontendsOf(v)),
		values:  1,
	}
	w.size = 400 + 3*len(w.service)
	return w
}

func (w *wireView) add(list []api.Endpoint, draining bool, m *marshalled) {
	for i := range list {
		e, fresh := m.wire(&list[i], draining)
		w.endpoints = append(w.endpoints, e)
		w.size += 60 + len(e.key) + len(e.value)
		if fresh {
			w.size += 400 + 2*(len(e.key)+len(e.value))
			w.values++
		}
	}
}

// wireDelta is the difference of two views in single operations, by phase.
type wireDelta [4][]frame

// The phases of an answer: a service comes before its endpoints and goes after
// them.
const (
	setServices = iota
	setEndpoints
	deleteEndpoints
	deleteServices
)

// delta returns what leads from old to new, two views of one service, of which one
// may be nil.
func delta(old, new *wireView, who audience) *wireDelta {
	if new == nil {
		return newDelta(old, nil, who)
	}
	from, slot := uint64(0), 0
	if old != nil {
		from, slot = old.id, 1
	}
	new.mu.Lock()
	defer new.mu.Unlock()
	m := &new.deltas[who][slot]
	if m.value == nil || m.id != from {
		*m = memo{from, newDelta(old, new, who)}
	}
	return m.value
}

func newDelta(old, new *wireView, who audience) *wireDelta {
	d := &wireDelta{}
	var before, after []wireEndpoint
	if old != nil {
		before = old.endpoints
	}
	view := cmp.Or(new, old)
	switch {
	case new == nil:
		d[deleteServices] = []frame{deleteFrame(view.set, servicePath(view.key))}
	case old == nil || !bytes.Equal(old.service, new.service):
		d[setServices] = []frame{setFrame(view.set, servicePath(view.key), new.service)}
	}
	if new != nil {
		after = new.endpoints
	}
	for o, n := range pairs(before, after) {
		told := o != nil && who.hears(o)
		switch {
		case n != nil && who.hears(n) && !(told && bytes.Equal(o.value, n.value)):
			d[setEndpoints] = append(d[setEndpoints], setFrame(localv1.Set_EndpointsSet, endpointPath(view.key, n.key), n.value))
		case told && (n == nil || !who.hears(n)):
			d[deleteEndpoints] = append(d[deleteEndpoints], deleteFrame(localv1.Set_EndpointsSet, endpointPath(view.key, o.key)))
		}
	}
	return d
}

// pairs yields the endpoints of two lists in order of their keys, those with one
// key together.
func pairs(before, after []wireEndpoint) func(yield func(old, new *wireEndpoint) bool) {
	return func(yield func(old, new *wireEndpoint) bool) {
		for len(before) > 0 || len(after) > 0 {
			var old, new *wireEndpoint
			order := 0
			switch {
			case len(before) == 0:
				order = 1
			case len(after) == 0:
				order = -1
			default:
				order = strings.Compare(before[0].key, after[0].key)
			}
			if order <= 0 {
				old, before = &before[0], before[1:]
			}
			if order >= 0 {
				new, after = &after[0], after[1:]
			}
			if !yield(old, new) {
				return
			}
		}
	}
}

// maxWhole is about how large an operation gets. A service with more endpoints
// than go into it is told as a whole with some of them, and the others are set.
const maxWhole = 1 << 20

// whole returns what tells the view as a whole.
func (w *wireView) whole(who audience) []frame {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wholes[who] == nil {
		w.wholes[who] = w.newWhole(who)
	}
	return w.wholes[who]
}

func (w *wireView) newWhole(who audience) []frame {
	if w.set == localv1.Set_FrontendsSet {
		return []frame{setFrame(w.set, servicePath(w.key), w.service)}
	}
	var listed []wireEndpoint
	var rest []frame
	size := len(w.service)
	for i := range w.endpoints {
		e := &w.endpoints[i]
		if !who.hears(e) {
			continue
		}
		if size += len(e.key) + len(e.value); size <= maxWhole {
			listed = append(listed, *e)
		} else {
			rest = append(rest, setFrame(localv1.Set_EndpointsSet, endpointPath(w.key, e.key), e.value))
		}
	}
	return append([]frame{replaceFrame(w.service, listed)}, rest...)
}
