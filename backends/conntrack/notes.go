// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"maps"
	"net/netip"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// notes are the places whose flows have to be looked at. Sync writes them, and
// who looks reads them.
type notes struct {
	// places are the UDP places of each service, as it was delivered last, and owners
	// whose each of them is. A place that was taken over is in places of two services
	// until the first of them is delivered or pruned.
	places map[types.NamespacedName][]place
	owners map[place]types.NamespacedName
	pass   sink.Pass

	mu  sync.Mutex
	due map[place]note
	// count is the number of what was noted last.
	count uint64
}

// note is a place to be looked at. While it is, its verdict is kept up to date:
// a flow to an endpoint that has just come is not ended for the sake of one that
// went before.
type note struct {
	verdict
	count uint64
}

func newNotes() *notes {
	return &notes{
		places: map[types.NamespacedName][]place{},
		owners: map[place]types.NamespacedName{},
		due:    map[place]note{},
	}
}

// add notes what c may have made stale, and reports whether that is anything.
// It is not called twice at once.
func (n *notes) add(c *sink.Changes) bool {
	due := map[place]verdict{}     // what has to be looked at
	present := map[place]verdict{} // what has not, as far as c says
	var left []place
	n.pass.Begin(c)
	for s := range c.Services {
		now := verdictsOf(s.New)
		var before map[place]verdict
		if !s.Unsure {
			before = verdictsOf(s.Old)
		}
		for p, v := range now {
			old, had := before[p]
			if v.outdates(old, p) || !had && p.protocol == unix.IPPROTO_UDP {
				due[p] = v
			} else {
				present[p] = v
			}
		}
		left = append(left, n.replace(s.Key, now)...)
	}
	if c.Last {
		for key := range n.places {
			if n.pass.Stale(key) {
				left = append(left, n.replace(key, nil)...)
			}
		}
	}
	for _, p := range left {
		if _, taken := n.owners[p]; !taken {
			due[p] = verdict{} // which is nobody's
		}
	}

	n.mu.Lock()
	defer n.mu.Unlock()
	for p, v := range present {
		if old, ok := n.due[p]; ok {
			n.due[p] = note{v, old.count}
		}
	}
	if len(due) == 0 {
		return false
	}
	n.count++
	for p, v := range due {
		n.due[p] = note{v, n.count}
	}
	return true
}

// replace notes which UDP places a service has now, and returns those that it no longer
// has, except what another service has taken over.
func (n *notes) replace(key types.NamespacedName, now map[place]verdict) (left []place) {
	for _, p := range n.places[key] {
		if _, keeps := now[p]; !keeps && n.owners[p] == key {
			delete(n.owners, p)
			left = append(left, p)
		}
	}
	var places []place
	for p := range now {
		if p.protocol == unix.IPPROTO_UDP {
			places = append(places, p)
			n.owners[p] = key
		}
	}
	if places == nil {
		delete(n.places, key)
		return left
	}
	n.places[key] = places
	return left
}

// stale reports whether a flow has to end. Of the places that it may be a flow
// to, the one that names most counts. The node ports are those of nodeAddrs.
func (n *notes) stale(f flow, nodeAddrs map[netip.Addr]bool) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	addr, port := f.to.Addr(), f.to.Port()
	if note, ok := n.due[place{f.to, f.protocol}]; ok {
		return note.stale(f)
	}
	if note, ok := n.due[place{netip.AddrPortFrom(addr, 0), f.protocol}]; ok {
		return note.stale(f)
	}
	if nodeAddrs[addr] {
		if note, ok := n.due[place{netip.AddrPortFrom(api.Unspecified(api.FamilyOf(addr)), port), f.protocol}]; ok {
			return note.stale(f)
		}
	}
	return false
}

// open returns the places that are due, and the number up to which they were
// noted.
func (n *notes) open() (places []place, count uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for p := range n.due {
		places = append(places, p)
	}
	return places, n.count
}

// done forgets what was noted up to count.
func (n *notes) done(count uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.DeleteFunc(n.due, func(_ place, d note) bool { return d.count <= count })
	if len(n.due) == 0 {
		n.due = map[place]note{} // a map keeps its memory, and a pass may have noted every service
	}
}
