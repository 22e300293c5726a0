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
}

// hintKey represents hints with at most one node and at most one zone, which are the most
// common.
type hintKey struct{ node, zone string }

// string returns the shared copy of s. The caller holds mu.
func (t *shared) string(s string) string {
	if s == "" {
		return ""
	}
	if c, ok := t.strings[s]; ok {
		return c
	}
	if t.strings == nil || len(t.strings) >= maxShared {
		t.strings = map[string]string{}
	}
	t.strings[s] = s
	return s
}

// hint returns the shared hints with the node and the zone in k. The node or the zone may
// be empty. The caller holds mu.
func (t *shared) hint(k hintKey) *api.Hints {
	if h, ok := t.hints[k]; ok {
		return h
	}
	if t.hints == nil || len(t.hints) >= maxShared {
		t.hints = map[hintKey]*api.Hints{}
	}
	k = hintKey{t.string(k.node), t.string(k.zone)}
	h := &api.Hints{}
	if k.node != "" {
		h.ForNodes = []string{k.node}
	}
	if k.zone != "" {
		h.ForZones = []string{k.zone}
	}
	t.hints[k] = h
	return h
}
