// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"sync"

	"github.com/kpng-project/kpng/api"
)

// maxShared is the maximum size of each map of shared values. A full map is replaced by
// an empty map. Then some values exist twice in memory.
const maxShared = 1 << 16

// shared keeps one copy of each value that many objects contain. Lookups of equal values
// return the same copy.
type shared struct {
	mu      sync.Mutex
	strings map[string]string
	hints   map[hintKey]*api.Hints
	details map[api.EndpointDetails]*api.EndpointDetails
	// The lists with only one port, by this port.
	servicePorts  map[api.PortMapping][]api.PortMapping
	endpointPorts map[api.EndpointPort][]api.EndpointPort
}

// hintKey represents hints with at most one node and at most one zone. These hints are the
// most common.
type hintKey struct{ node, zone string }

// sharedValue returns the value for key in the map m. If there is none, it adds the result
// of the function create.
func sharedValue[K comparable, V any](m *map[K]V, key K, create func() V) V {
	if v, ok := (*m)[key]; ok {
		return v
	}
	if *m == nil || len(*m) >= maxShared {
		*m = map[K]V{}
	}
	v := create()
	(*m)[key] = v
	return v
}

// string returns the shared copy of s. The caller holds mu.
func (t *shared) string(s string) string {
	if s == "" {
		return ""
	}
	return sharedValue(&t.strings, s, func() string { return s })
}

// sharedList returns a copy of list. Equal lists with one element share a copy.
func sharedList[T comparable](m *map[T][]T, list []T) []T {
	if len(list) != 1 {
		return append([]T(nil), list...)
	}
	element := list[0]
	return sharedValue(m, element, func() []T { return []T{element} })
}

// hint returns the shared hints with the node and the zone in k. The node or the zone may
// be empty. The caller holds mu.
func (t *shared) hint(k hintKey) *api.Hints {
	return sharedValue(&t.hints, k, func() *api.Hints {
		h := &api.Hints{}
		if k.node != "" {
			h.ForNodes = []string{t.string(k.node)}
		}
		if k.zone != "" {
			h.ForZones = []string{t.string(k.zone)}
		}
		return h
	})
}
