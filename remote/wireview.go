// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"k8s.io/apimachinery/pkg/types"
)

// wireView is a marshalled view. All streams to nodes of one class share it.
type wireView struct {
	id  uint64 // unique ID of this view; 0 means no view
	key types.NamespacedName
	// If the field set is FrontendsSet, the field service has the marshalled frontends, and
	// the list endpoints is empty. Otherwise the field service has the marshalled service.
	set       localv1.Set
	service   []byte
	endpoints []wireEndpoint // sorted by key

	values int // number of services and endpoints that were marshalled for this view
	size   int // approximate size in memory, including deltas and wholes

	mu     sync.Mutex
	deltas [2][2]memo // first index: the audience; second index: 1 if there is an old view
	wholes [2][]frame // by audience
}

type wireEndpoint struct {
	key   string
	value []byte
	// True if the endpoint has the Internal or the External scope and is not draining.
	elsewhere bool
}

func sortEndpoints(list []wireEndpoint) {
	slices.SortFunc(list, func(a, b wireEndpoint) int { return strings.Compare(a.key, b.key) })
}

// audience is a group of clients that receive the same endpoints.
type audience int

const (
	// standard: clients that receive only endpoints with elsewhere set.
	standard audience = iota
	// complete: clients that requested all endpoints.
	complete
)

func (a audience) receives(e *wireEndpoint) bool { return a == complete || e.elsewhere }

// memo caches the operations that turn the old view with this id into a new view.
type memo struct {
	id    uint64
	value *wireDelta
}

// marshalled lists a service's endpoints, each marshalled once. If an endpoint does not
// look the same to all nodes, the list contains each form of the endpoint.
type marshalled []*marshalledEndpoint // sorted by address and ports

type marshalledEndpoint struct {
	wireEndpoint
	endpoint api.Endpoint
	draining bool
}

// wire returns e in marshalled form. The bool is false if e was already marshalled.
func (m *marshalled) wire(e *api.Endpoint, draining bool) (wireEndpoint, bool) {
	list := *m
	i := sort.Search(len(list), func(i int) bool { return ordering.Endpoints(&list[i].endpoint, e) >= 0 })
	for ; i < len(list) && ordering.Endpoints(&list[i].endpoint, e) == 0; i++ {
		if list[i].draining == draining && list[i].endpoint.Equal(e) {
			return list[i].wireEndpoint, false
		}
	}
	w := newWireEndpoint(e, draining)
	*m = slices.Insert(list, i, &marshalledEndpoint{w, *e, draining})
	return w, true
}

func newWireEndpoint(e *api.Endpoint, draining bool) wireEndpoint {
	return wireEndpoint{
		key:       wireKey(e),
		value:     localv1.Marshal(localv1.FromEndpoint(e, draining)),
		elsewhere: !draining && (e.Scopes.Internal || e.Scopes.External),
	}
}

// wireKey returns the key of an endpoint as a string of protobuf, which has to be UTF-8.
func wireKey(e *api.Endpoint) string { return strings.ToValidUTF8(e.Key(), "\uFFFD") }

// newWireView marshals v. Endpoints that are in m are not marshalled again. If m is nil,
// all endpoints are marshalled.
func newWireView(id uint64, v *api.View, m *marshalled) (*wireView, error) {
	if len(v.Lost) > maxLost {
		v = withoutLost(v)
	}
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
	sortEndpoints(w.endpoints)
	largest := len(w.service)
	for i := range w.endpoints {
		largest = max(largest, len(w.endpoints[i].key)+len(w.endpoints[i].value))
	}
	if largest > maxObject {
		return nil, errTooLarge
	}
	return w, nil
}

func newWireFrontends(id uint64, v *api.View) (*wireView, error) {
	frontends, err := frontendsOf(v)
	if err != nil {
		return nil, err
	}
	w := &wireView{
		id:      id,
		key:     v.Key(),
		set:     localv1.Set_FrontendsSet,
		service: localv1.Marshal(frontends),
		values:  1,
	}
	if len(w.service) > maxObject {
		return nil, errTooLarge
	}
	w.size = 400 + 3*len(w.service)
	return w, nil
}

func (w *wireView) add(list []api.Endpoint, draining bool, m *marshalled) {
	for i := range list {
		if m == nil {
			w.endpoints = append(w.endpoints, newWireEndpoint(&list[i], draining))
			w.values++
			continue
		}
		e, fresh := m.wire(&list[i], draining)
		w.endpoints = append(w.endpoints, e)
		w.size += 60 + len(e.key) + len(e.value)
		if fresh {
			w.size += 400 + 2*(len(e.key)+len(e.value))
			w.values++
		}
	}
}

// wireDelta holds the operations that turn one view into another, by phase.
type wireDelta [4][]frame

// The phases of an answer. A service is set before its endpoints and deleted after them,
// because clients need this order.
const (
	setServices = iota
	setEndpoints
	deleteEndpoints
	deleteServices
)

// delta returns the operations that turn a view into a new view. Either view may be nil.
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
		sent := o != nil && who.receives(o)
		switch {
		case n != nil && who.receives(n) && !(sent && bytes.Equal(o.value, n.value)):
			d[setEndpoints] = append(d[setEndpoints], setFrame(localv1.Set_EndpointsSet, endpointPath(view.key, n.key), n.value))
		case sent && (n == nil || !who.receives(n)):
			d[deleteEndpoints] = append(d[deleteEndpoints], deleteFrame(localv1.Set_EndpointsSet, endpointPath(view.key, o.key)))
		}
	}
	return d
}

// pairs yields the endpoints of each key in two sorted lists; a missing endpoint is nil.
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

// maxObject is the maximum size of a marshalled object: a service, its frontends, an
// endpoint, or an object for other servers. A message has one object of this size, and at
// most batchBytes before it. So it is smaller than 4 MB, which gRPC clients accept by
// default.
const maxObject = 3 << 20

var errTooLarge = fmt.Errorf("a part of a message exceeds %d bytes", maxObject)

// maxLost is the maximum number of lost claims in a message. They take less than 1 MB.
const maxLost = 5000

// withoutLost returns v without the addresses and node ports of lost claims. The result has
// no lost claims.
func withoutLost(v *api.View) *api.View {
	type nodePort struct {
		protocol api.Protocol
		port     int32
	}
	addrs, nodePorts := map[netip.Addr]bool{}, map[nodePort]bool{}
	for i := range v.Lost {
		if l := &v.Lost[i]; l.IP.IsValid() {
			addrs[l.IP] = true
		} else {
			nodePorts[nodePort{l.Protocol, l.Port}] = true
		}
	}
	s := *v.Service
	s.IPFamilies = s.Families() // without cluster IPs, Families might return other families
	for _, set := range [...]*api.IPSet{&s.IPs.ClusterIPs, &s.IPs.LoadBalancerIPs, &s.IPs.ExternalIPs} {
		*set = api.NewIPSet(slices.DeleteFunc(slices.Collect(set.All()), func(a netip.Addr) bool { return addrs[a] })...)
	}
	s.Ports = slices.Clone(s.Ports)
	for i := range s.Ports {
		if p := &s.Ports[i]; nodePorts[nodePort{p.Protocol, p.NodePort}] {
			p.NodePort = 0
		}
	}
	out := *v
	out.Service, out.Lost = &s, nil
	return &out
}

// maxWhole is the approximate maximum size of a Replace. For a larger service, the
// Replace contains only some endpoints. The other endpoints follow in separate
// operations.
const maxWhole = 1 << 20

func (w *wireView) whole(who audience) []frame {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wholes[who] == nil {
		w.wholes[who] = w.newWhole(who)
	}
	return w.wholes[who]
}

// content returns the encoding of a view from which digests are computed.
func (w *wireView) content(who audience) []byte { return w.appendContent(nil, who) }

func (w *wireView) appendContent(b []byte, who audience) []byte {
	if w.set == localv1.Set_FrontendsSet {
		return append(b, w.service...)
	}
	return appendWhole(b, w.service, w.received(who))
}

// received returns the endpoints that an audience receives.
func (w *wireView) received(who audience) []wireEndpoint {
	missed := func(e wireEndpoint) bool { return !who.receives(&e) }
	if !slices.ContainsFunc(w.endpoints, missed) {
		return w.endpoints
	}
	return slices.DeleteFunc(slices.Clone(w.endpoints), missed)
}

func (w *wireView) newWhole(who audience) []frame {
	if w.set == localv1.Set_FrontendsSet {
		return []frame{setFrame(w.set, servicePath(w.key), w.service)}
	}
	all := w.received(who)
	listed, size := 0, len(w.service)
	for listed < len(all) && size+len(all[listed].key)+len(all[listed].value) <= maxWhole {
		size += len(all[listed].key) + len(all[listed].value)
		listed++
	}
	frames := make([]frame, 0, 1+len(all)-listed)
	frames = append(frames, replaceFrame(w.service, all[:listed]))
	for _, e := range all[listed:] {
		frames = append(frames, setFrame(localv1.Set_EndpointsSet, endpointPath(w.key, e.key), e.value))
	}
	return frames
}
