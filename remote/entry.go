// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/elements"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/internal/wire/localv1"
)

// entry is the client's copy of one service. It is immutable.
type entry struct {
	// The server's view.
	view *api.View
	// The server's keys for view.Endpoints, followed by its keys for view.Draining.
	keys []string
	// The view that readers get. If refused is empty, this is the server's view.
	// Otherwise it is the last view that the client accepted, or nil.
	shown *api.View
	// Why the client refuses the server's view, or empty.
	refused string
}

// keyedEndpoint is an endpoint, together with the key that the server uses for the
// endpoint.
type keyedEndpoint struct {
	key string
	api.Endpoint
	draining bool
}

func newKeyedEndpoint(key string, m *localv1.Endpoint) (keyedEndpoint, error) {
	e, draining, err := m.ToEndpoint()
	return keyedEndpoint{key, e, draining}, err
}

// newEntry returns the entry of a service. The entry has the endpoints in list, but not
// the endpoints in the argument service. newEntry sorts list.
func newEntry(service *api.View, list []keyedEndpoint) *entry {
	slices.SortFunc(list, func(a, b keyedEndpoint) int {
		switch {
		case a.draining != b.draining && b.draining:
			return -1
		case a.draining != b.draining:
			return 1
		}
		if c := ordering.Endpoints(&a.Endpoint, &b.Endpoint); c != 0 {
			return c
		}
		return strings.Compare(a.key, b.key)
	})
	view := *service
	view.Endpoints, view.Draining = nil, nil
	keys := make([]string, len(list))
	endpoints := make([]api.Endpoint, len(list))
	serving := 0 // number of endpoints that are not draining; the list has them first
	for i, e := range list {
		keys[i], endpoints[i] = e.key, e.Endpoint
		if !e.draining {
			serving++
		}
	}
	if serving > 0 {
		view.Endpoints = endpoints[:serving:serving]
	}
	if serving < len(list) {
		view.Draining = endpoints[serving:]
	}
	return &entry{view: &view, keys: keys, shown: &view}
}

// limit refuses the view of e if the view has too many elements. The argument before is
// the earlier entry of the service, or nil.
func (e *entry) limit(maxElements int, before *entry) {
	err := elements.OfView(e.view).Check(maxElements)
	if err == nil {
		return
	}
	e.refused, e.shown = err.Error(), before.viewOrNil()
	if e.shown != nil && e.shown.Service.UID != e.view.Service.UID {
		e.shown = nil // the view is of a deleted service with the same name
	}
}

// content returns the content of e in the server's encoding.
func (e *entry) content() []byte {
	endpoints := make([]wireEndpoint, len(e.keys))
	for i, key := range e.keys {
		endpoint, draining := e.endpoint(i)
		endpoints[i] = wireEndpoint{key: key, value: localv1.Marshal(localv1.FromEndpoint(endpoint, draining))}
	}
	sortEndpoints(endpoints)
	return encodeWhole(localv1.Marshal(localv1.FromView(e.view)), endpoints)
}

// endpoint returns the endpoint with the key e.keys[i], and reports whether this endpoint
// is draining.
func (e *entry) endpoint(i int) (_ *api.Endpoint, draining bool) {
	if n := len(e.view.Endpoints); i >= n {
		return &e.view.Draining[i-n], true
	}
	return &e.view.Endpoints[i], false
}

func (e *entry) equal(o *entry) bool { return e.view.Equal(o.view) && slices.Equal(e.keys, o.keys) }

func (e *entry) viewOrNil() *api.View {
	if e == nil {
		return nil
	}
	return e.shown
}

// draft is a service in an answer. It contains an entry at first. The method open
// replaces the entry by its parts, so that single endpoints can change.
type draft struct {
	entry *entry // nil if the draft is new or open

	service   *api.View // nil if not received, or unreadable
	endpoints map[string]keyedEndpoint
}

// open turns an existing entry into parts that can be changed.
func (d *draft) open() {
	if d.endpoints != nil {
		return
	}
	d.endpoints = map[string]keyedEndpoint{}
	if d.entry == nil {
		return
	}
	d.service = d.entry.view
	for i, key := range d.entry.keys {
		endpoint, draining := d.entry.endpoint(i)
		d.endpoints[key] = keyedEndpoint{key, *endpoint, draining}
	}
	d.entry = nil
}
