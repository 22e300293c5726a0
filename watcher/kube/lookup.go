// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// gatherFor is the minimum time from the moment when a service becomes wanted to the
	// request for its slices. Usually a slice with the proxy's label arrives in this
	// time, and no request is needed. One request serves all services that became wanted
	// in this time.
	gatherFor = 500 * time.Millisecond
	// findTimeout limits the requests for the slices of all queued services. After a
	// failure, the longer slowFindTimeout applies, because then no service is held back
	// until the answer arrives.
	findTimeout     = 5 * time.Second
	slowFindTimeout = 30 * time.Second
	// The pause between requests doubles, up to busyPause while requests succeed, and up to
	// failingPause while they fail. It is short again after a minute without a request.
	busyPause    = 4 * time.Second
	failingPause = time.Minute
	// servicesPerRequest is the maximum number of services in the URL of a request.
	servicesPerRequest = 50
)

// finder returns all slices without the proxy's label that belong to the given services.
// It may also return other slices. Each returned slice includes all changes whose events
// came before the call.
type finder func(ctx context.Context, services []types.NamespacedName) ([]*discoveryv1.EndpointSlice, error)

// lookUp requests the slices of services that have become wanted or have lost their
// selector. A service that has become wanted is held back until the answer, so that it
// appears together with its endpoints. It is written even if the request fails, so it
// waits for about 15 seconds at most. Other services and slices never wait.
//
// Slices change during a request. The answer does not replace a slice that was written
// during the request, because it is unknown which of the two versions is newer. A watch
// without a filter delivers the newest version anyway. With a filter, the service is
// looked up again.
type lookUp struct {
	find finder
	// gather is the time to collect services for one request.
	gather time.Duration

	// The lock of the selection protects these fields.
	queue   []*wanted
	failing bool // true from a failed request until all queued services were requested
	// changed contains the slices that were written since the present request began. It is
	// nil if there is no request. relisted is true if all slices were replaced.
	changed  map[types.NamespacedName]bool
	relisted bool

	// wake has an element if queue is not empty.
	wake chan struct{}
}

// noteChange records that a slice was written.
func (l *lookUp) noteChange(key types.NamespacedName) {
	if l.changed != nil {
		l.changed[key] = true
	}
}

func (l *lookUp) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// enqueue arranges a look-up for a wanted service.
func (n *selection) enqueue(s *wanted) {
	if s.queued {
		return
	}
	s.queued = true
	n.lookUp.queue = append(n.lookUp.queue, s)
	n.lookUp.signal()
}

// needsLookUp reports whether the state may lack slices of a service. If the controller
// has labelled one of a service's slices, it labels the remaining slices, too.
func (n *selection) needsLookUp(s *wanted) bool {
	state, _ := n.state.Snapshot().States.Get(s.key)
	return s.selectorless || state == nil || !slices.ContainsFunc(state.Slices, func(slice *api.EndpointSlice) bool {
		_, unlabelled := n.unlabelled[types.NamespacedName{Namespace: slice.Namespace, Name: slice.Name}]
		return !unlabelled
	})
}

// release writes a service that is held back.
func (n *selection) release(tx *cluster.Tx, s *wanted) {
	if s.held != nil {
		n.serviceTable.writeIn(tx, s.held)
		s.held = nil
	}
}

// lookUps requests the slices of queued services until ctx ends.
func (n *selection) lookUps(ctx context.Context) {
	var pause time.Duration
	var last time.Time
	for {
		select {
		case <-n.lookUp.wake:
		case <-ctx.Done():
			return
		}
		if time.Since(last) > time.Minute {
			pause = 0
		}
		select {
		case <-time.After(wait.Jitter(max(pause, n.lookUp.gather), 0.5)):
		case <-ctx.Done():
			return
		}
		limit := busyPause
		if !n.lookUpQueued(ctx) {
			limit = failingPause
		}
		pause, last = min(max(2*pause, n.lookUp.gather), limit), time.Now()
	}
}

// lookUpQueued requests the slices of the services that are in the queue now. It reports
// whether it was successful.
func (n *selection) lookUpQueued(ctx context.Context) bool {
	n.mu.Lock()
	queue, timeout := n.lookUp.queue, findTimeout
	n.lookUp.queue = nil
	if n.lookUp.failing {
		timeout = slowFindTimeout
	}
	n.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for len(queue) > 0 {
		count := min(len(queue), servicesPerRequest)
		services := n.beginRequest(queue[:count])
		queue = queue[count:]
		if len(services) == 0 {
			continue
		}
		found, err := n.request(limited, services)
		if ctx.Err() != nil {
			return true // Watch ends
		}
		if n.endRequest(services, found, len(queue) > 0, err); err != nil {
			if reported := new(requestError); !errors.As(err, &reported) {
				n.logger.Error(err, "Cannot list the slices of services; retrying", "services", len(services), "first", services[0].key)
			}
			n.mu.Lock()
			defer n.mu.Unlock()
			n.lookUp.queue = append(queue, n.lookUp.queue...) // before the services of the failed request
			n.lookUp.signal()
			return false
		}
	}
	return true
}

// beginRequest returns the services that still need a look-up.
func (n *selection) beginRequest(queued []*wanted) (services []*wanted) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var ready []*wanted
	for _, s := range queued {
		s.queued = false
		switch {
		case n.services[s.key] != s: // no longer wanted
		case n.needsLookUp(s):
			services = append(services, s)
		default:
			ready = append(ready, s)
		}
	}
	n.commit(func(tx *cluster.Tx) {
		for _, s := range ready {
			n.release(tx, s)
		}
	})
	if len(services) > 0 { // otherwise there is no request
		n.lookUp.changed, n.lookUp.relisted = map[types.NamespacedName]bool{}, false
	}
	return services
}

func (n *selection) request(ctx context.Context, services []*wanted) ([]*item[api.EndpointSlice], error) {
	keys := make([]types.NamespacedName, len(services))
	for i, s := range services {
		keys[i] = s.key
	}
	objects, err := n.lookUp.find(ctx, keys)
	found := make([]*item[api.EndpointSlice], len(objects))
	for i, o := range objects {
		found[i], _ = n.reduced(o)
		n.logProblems("EndpointSlice", found[i].key, found[i].problems)
	}
	return found, err
}

// endRequest writes the answer to a request, and the services that were held back for it.
// If the request has failed, it writes all services that are held back. The argument more
// reports whether other services were queued before the request.
func (n *selection) endRequest(services []*wanted, found []*item[api.EndpointSlice], more bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := &n.lookUp
	changed, again := l.changed, err != nil || l.relisted
	l.changed, l.failing = nil, l.failing && more || err != nil
	if again {
		found = nil
	}
	n.commit(func(tx *cluster.Tx) {
		for _, i := range found {
			switch {
			case i.value == nil || i.unlabelled != nil && !n.selects(i.unlabelled):
			case !changed[i.key]:
				n.put(tx, i)
			case n.filtered && i.unlabelled != nil:
				n.enqueue(n.services[i.unlabelled.service])
			}
		}
		for _, s := range services {
			if n.services[s.key] != s {
				continue
			}
			n.release(tx, s)
			if again {
				n.enqueue(s)
			}
		}
		if err != nil {
			for _, s := range n.services {
				n.release(tx, s)
			}
		}
	})
}
