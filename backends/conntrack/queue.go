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

// queue has the destinations whose flows the next pass checks. Sync adds destinations.
type queue struct {
	// destinationsOf maps each service to the UDP destinations of its last delivery. ownerOf
	// maps each of these destinations to the last service that was delivered with it. If a
	// service takes over a destination of another service, destinationsOf lists the
	// destination for both services, until the driver delivers or prunes the previous owner.
	destinationsOf map[types.NamespacedName][]destination
	ownerOf        map[destination]types.NamespacedName
	pass           sink.Pass

	mu  sync.Mutex
	due map[destination]item
	// count is the number of calls of the method add that queued destinations.
	count uint64
}

// item has the verdict of a queued destination. Later changes update the verdict. So a
// pass keeps flows to an endpoint that was added after the destination was queued.
type item struct {
	verdict
	count uint64 // queue.count after the call of add that queued the destination
}

func newQueue() *queue {
	return &queue{
		destinationsOf: map[types.NamespacedName][]destination{},
		ownerOf:        map[destination]types.NamespacedName{},
		due:            map[destination]item{},
	}
}

// add queues the destinations of flows that may be stale after the changes c. It reports
// whether it queued a destination. Calls must not overlap.
func (q *queue) add(c *sink.Changes) bool {
	due := map[destination]verdict{}     // destinations to check
	present := map[destination]verdict{} // destinations that need no check
	var removed []destination
	q.pass.Begin(c)
	for s := range c.Services {
		now := verdictsOf(s.New)
		var before map[destination]verdict
		if !s.Unsure {
			before = verdictsOf(s.Old)
		}
		var compared comparison
		for d, v := range now {
			old, had := before[d]
			if compared.makesStale(old, v, d) || !had && d.protocol == unix.IPPROTO_UDP {
				due[d] = v
			} else {
				present[d] = v
			}
		}
		removed = append(removed, q.replace(s.Key, now)...)
	}
	if c.Last {
		for key := range q.destinationsOf {
			if q.pass.Stale(key) {
				removed = append(removed, q.replace(key, nil)...)
			}
		}
	}
	for _, d := range removed {
		if _, taken := q.ownerOf[d]; !taken {
			due[d] = verdict{}
		}
	}

	q.mu.Lock()
	defer q.mu.Unlock()
	for d, v := range present {
		if old, ok := q.due[d]; ok {
			q.due[d] = item{v, old.count}
		}
	}
	if len(due) == 0 {
		return false
	}
	q.count++
	for d, v := range due {
		q.due[d] = item{v, q.count}
	}
	return true
}

// replace records the present UDP destinations of a service. It returns the removed
// destinations, except those that another service has taken over.
func (q *queue) replace(key types.NamespacedName, now map[destination]verdict) (removed []destination) {
	for _, d := range q.destinationsOf[key] {
		if _, keeps := now[d]; !keeps && q.ownerOf[d] == key {
			delete(q.ownerOf, d)
			removed = append(removed, d)
		}
	}
	var destinations []destination
	for d := range now {
		if d.protocol == unix.IPPROTO_UDP {
			destinations = append(destinations, d)
			q.ownerOf[d] = key
		}
	}
	if destinations == nil {
		delete(q.destinationsOf, key)
		return removed
	}
	q.destinationsOf[key] = destinations
	return removed
}

// isStale reports whether a flow has to be deleted. The most specific queued destination
// decides. The function first looks up the flow's address and port, then the address
// without a port. If nodeAddrs contains the address, it finally looks up the node port.
func (q *queue) isStale(f flow, nodeAddrs map[netip.Addr]bool) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	addr, port := f.to.Addr(), f.to.Port()
	family := api.FamilyOf(addr)
	if item, ok := q.due[destination{family, addr, port, f.protocol}]; ok {
		return item.isStale(f)
	}
	if item, ok := q.due[destination{family, addr, 0, f.protocol}]; ok {
		return item.isStale(f)
	}
	if nodeAddrs[addr] {
		if item, ok := q.due[destination{family, netip.Addr{}, port, f.protocol}]; ok {
			return item.isStale(f)
		}
	}
	return false
}

// pending returns the queued destinations and the present value of q.count.
func (q *queue) pending() (destinations []destination, count uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for d := range q.due {
		destinations = append(destinations, d)
	}
	return destinations, q.count
}

// removeUpTo removes the destinations whose item.count is at most the argument count.
func (q *queue) removeUpTo(count uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	maps.DeleteFunc(q.due, func(_ destination, i item) bool { return i.count <= count })
	if len(q.due) == 0 {
		q.due = map[destination]item{} // free the memory, which is large if a sink pass queued every service
	}
}
