// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Recorder is a [sink.Sink] that stands in front of another one: it records
// what the driver delivers, passes it on, plays its script, and reports to its test
// every call that breaks the contract of [sink.Sink].
//
// It forwards the optional methods of the sink behind it.
type Recorder struct {
	sink.Forwarder
	tb   testing.TB
	sink sink.Sink

	mu      sync.Mutex
	running bool
	script  []Step
	syncs   []Sync
	moved   chan struct{} // closed and renewed when a Sync has ended
	acked   ledger
}

// Sync is one recorded call.
type Sync struct {
	// First, Last, Failing, Revision, Node and NodeChanged are those of the Changes,
	// and Services what its Services yielded.
	First, Last bool
	Failing     []types.NamespacedName
	Revision    uint64
	Services    []sink.Change
	Node        *api.Node
	NodeChanged bool
	// Err is what the sink answered. It is [ErrPanicked] if it panicked.
	Err error
	// Began and Ended are when Sync was called and when it returned.
	Began, Ended time.Time
}

// ErrPanicked is the Err of a recorded Sync that panicked.
var ErrPanicked = errors.New("sink panicked")

// NewRecorder returns a recorder in front of s, or in front of nothing if s is
// nil: then what the script does not say is acknowledged.
func NewRecorder(tb testing.TB, s sink.Sink) *Recorder {
	if s == nil {
		s = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	}
	return &Recorder{Forwarder: sink.Forwarder{To: s}, tb: tb, sink: s, moved: make(chan struct{}), acked: newLedger()}
}

// Script appends steps to what the next Syncs do, one step each. When there is
// none left, Syncs go straight to the sink.
func (r *Recorder) Script(steps ...Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.script = append(r.script, steps...)
}

// Syncs returns all calls that have ended, oldest first.
func (r *Recorder) Syncs() []Sync {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.syncs)
}

// Views returns what the sink acknowledged last, in order of keys.
func (r *Recorder) Views() []*api.ServiceEndpoints {
	r.mu.Lock()
	defer r.mu.Unlock()
	keys := slices.SortedFunc(maps.Keys(r.acked.views), api.CompareKeys)
	views := make([]*api.ServiceEndpoints, len(keys))
	for i, key := range keys {
		views[i] = r.acked.views[key]
	}
	return views
}

// Node returns the node that the sink acknowledged last.
func (r *Recorder) Node() *api.Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.acked.node
}

// Wait returns nil as soon as done is true of the calls that have ended, and the
// cause of ctx if that ends before.
func (r *Recorder) Wait(ctx context.Context, done func([]Sync) bool) error {
	for {
		r.mu.Lock()
		syncs, moved := slices.Clone(r.syncs), r.moved
		r.mu.Unlock()
		if done(syncs) {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// WaitSyncs waits until n calls have ended.
func (r *Recorder) WaitSyncs(ctx context.Context, n int) error {
	return r.Wait(ctx, func(syncs []Sync) bool { return len(syncs) >= n })
}

// Sync implements [sink.Sink].
func (r *Recorder) Sync(ctx context.Context, c *sink.Changes) error {
	call := Sync{
		First:       c.First,
		Last:        c.Last,
		Failing:     c.Failing,
		Revision:    c.Revision,
		Services:    slices.Collect(c.Services),
		Node:        c.Node,
		NodeChanged: c.NodeChanged,
		Err:         ErrPanicked,
		Began:       time.Now(),
	}
	r.mu.Lock()
	if r.running {
		r.tb.Errorf("Sync at revision %d is called while another one runs", c.Revision)
	}
	r.running = true
	for _, violation := range r.acked.check(&call) {
		r.tb.Errorf("Sync %d (first: %t, last: %t, revision %d): %s", len(r.syncs), call.First, call.Last, call.Revision, violation)
	}
	var step Step = func(ctx context.Context, c *sink.Changes, s sink.Sink) error { return s.Sync(ctx, c) }
	if len(r.script) > 0 {
		step, r.script = r.script[0], r.script[1:]
	}
	r.mu.Unlock()

	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running = false
		call.Ended = time.Now()
		r.acked.settle(&call)
		r.syncs = append(r.syncs, call)
		close(r.moved)
		r.moved = make(chan struct{})
	}()
	call.Err = step(ctx, c, r.sink)
	return call.Err
}
