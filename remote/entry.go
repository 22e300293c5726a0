// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/api/localv1"
)

// entry is what a client has of one service. It is immutable.
type entry struct {
	view *api.ServiceEndpoints
	// keys are those by which the server names the endpoints: of view.Endpoints
	// and then of view.Draining, in their order.
	keys []string
}

// keyedEndpoint is an endpoint and what the server calls it.
type keyedEndpoint struct {
	key string
	api.Endpoint
	draining bool
}

func newKeyedEndpoint(key string, m *localv1.Endpoint) (keyedEndpoint, error) {
	e, draining, err := m.ToEndpoint()
	return keyedEndpoint{key, e, draining}, err
}

// newEntry returns the entry of a service, which is told by a view without
// endpoints, and its endpoints. It sorts the list.
func newEntry(service *api.ServiceEndpoints, list []keyedEndpoint) *entry {
	slices.SortFunc(list, func(a, b keyedEndpoint) int {
		switch {
		case a.draining != b.draining && b.draining:
			return -1
		case a.draining != b.draining:
			return 1
		}
		if c := a.Compare(&b.Endpoint); c != 0 {
			return c
		}
		return strings.Compare(a.key, b.key)
	})
	view := *service
	view.Endpoints, view.Draining = nil, nil
	keys := make([]string, len(list))
	endpoints := make([]api.Endpoint, len(list))
	serving := 0 // those that do not drain come first
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
	return &entry{&view, keys}
}

func (e *entry) equal(o *entry) bool { return e.view.Equal(o.view) && slices.Equal(e.keys, o.keys) }

// viewOrNil returns the view; a nil entry has none.
func (e *entry) viewOrNil() *api.ServiceEndpoints {
	if e == nil {
		return nil
	}
	return e.view
}

// draft is a service that an answer names: an entry or, while single endpoints of
// it are changed, what one will be made of.
type draft struct {
	entry *entry // nil if there is none, and while the draft is open

	service   *api.ServiceEndpoints // nil if it was not sent, or cannot be read
	endpoints map[string]keyedEndpoint
}

// open lets the parts of the draft be changed.
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
		if n := len(d.service.Endpoints); i < n {
			d.endpoints[key] = keyedEndpoint{key, d.service.Endpoints[i], false}
		} else {
			d.endpoints[key] = keyedEndpoint{key, d.service.Draining[i-n], true}
		}
	}
	d.entry = nil
}
