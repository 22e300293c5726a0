// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// queue passes the events of a reflector or informer to its store. It keeps the last
// event of each object until the store has converted and written the earlier events. So if
// several events of one object wait, they cost only one conversion. The memory for waiting
// events depends on the number of objects, not on the number of events. The objects are in
// the order of their first waiting events.
type queue struct {
	objectStore

	// writing is held while events or a listing are written.
	writing sync.Mutex

	mu      sync.Mutex
	waiting map[types.NamespacedName]event
	order   []types.NamespacedName // the keys of waiting
	wake    chan struct{}          // has an element if an event waits
}

// event is a new version of an object, or its deletion.
type event struct {
	object  any
	deleted bool
}

func newQueue(to objectStore) *queue {
	return &queue{objectStore: to, waiting: map[types.NamespacedName]event{}, wake: make(chan struct{}, 1)}
}

// Add queues an object.
func (q *queue) Add(obj any) error { return q.put(event{obj, false}) }

// Update queues an object.
func (q *queue) Update(obj any) error { return q.put(event{obj, false}) }

// Delete queues the deletion of an object.
func (q *queue) Delete(obj any) error { return q.put(event{obj, true}) }

// Replace drops the waiting events, which are older than the listing, and writes the
// listing.
func (q *queue) Replace(list []any, version string) error {
	q.writing.Lock()
	defer q.writing.Unlock()
	q.mu.Lock()
	clear(q.waiting)
	q.order = nil
	q.mu.Unlock()
	return q.objectStore.Replace(list, version)
}

func (q *queue) put(e event) error {
	key, err := q.keyOf(e.object)
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, waits := q.waiting[key]; !waits {
		q.order = append(q.order, key)
	}
	q.waiting[key] = e
	select {
	case q.wake <- struct{}{}:
	default:
	}
	return nil
}

// run writes the events as they arrive, until ctx ends.
func (q *queue) run(ctx context.Context) {
	for {
		select {
		case <-q.wake:
			q.drain(ctx)
		case <-ctx.Done():
			return
		}
	}
}

// drain writes all waiting events, unless ctx ends earlier.
func (q *queue) drain(ctx context.Context) {
	for ctx.Err() == nil && q.writeNext() {
	}
}

// writeNext writes the event that waits for the longest time. It returns false if there is
// none.
func (q *queue) writeNext() bool {
	q.writing.Lock()
	defer q.writing.Unlock()
	e, ok := q.take()
	switch {
	case !ok:
	case e.deleted:
		_ = q.objectStore.Delete(e.object) // keyOf has checked the object
	default:
		_ = q.objectStore.Update(e.object)
	}
	return ok
}

func (q *queue) take() (e event, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.order) == 0 {
		return event{}, false
	}
	key := q.order[0]
	e = q.waiting[key]
	delete(q.waiting, key)
	if q.order = q.order[1:]; len(q.order) == 0 {
		q.order = nil
	}
	return e, true
}
