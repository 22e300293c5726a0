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

// Recorder is a [sink.Sink] in front of another one. It records what the driver delivers,
// passes it on, and plays its script. It reports every call that breaks the contract of
// [sink.Sink] to its test.
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
	moved   chan struct{} // closed and replaced after each Sync
	acked   ledger
}

// Sync is one recorded call.
type Sync struct {
	// First, Last, Failing, Revision, Node and NodeChanged are those of the Changes.
	// Services are the changes that its Services yielded.
	First, Last bool
	Failing     []types.NamespacedName
	Revision    uint64
	Services    []sink.Change
	Node        *api.Node
	NodeChanged bool
	// Err is the result of the sink, or [ErrPanicked] if it panicked.
	Err error
	// Began is when Sync was called, and Ended when it returned.
	Began, Ended time.Time
}

// ErrPanicked is the Err of a recorded Sync that panicked.
var ErrPanicked = errors.New("sink panicked")

// NewRecorder returns a recorder in front of s. If s is nil, the recorder acknowledges
// everything that the script does not handle.
func NewRecorder(tb testing.TB, s sink.Sink) *Recorder {
	if s == nil {
		s = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	}
	return &Recorder{Forwarder: sink.Forwarder{To: s}, tb: tb, sink: s, moved: make(chan struct{}), acked: newLedger()}
}

// Script appends steps to the script. Each Sync plays one step. After the last step,
// Syncs go straight to the sink.
func (r *Recorder) Script(steps ...Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.script = append(r.script, steps...)
}

// Syncs returns all completed calls, oldest first.
func (r *Recorder) Syncs() []Sync {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.syncs)
}

// Views returns the views that the sink acknowledged last, in order of keys.
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

// Wait returns nil when done returns true for the completed calls, and the cause of ctx
// if ctx ends before that.
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

// WaitSyncs waits until n calls are complete.
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
		r.tb.Errorf("Sync at revision %d overlaps another call", c.Revision)
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
		r.acked.record(&call)
		r.syncs = append(r.syncs, call)
		close(r.moved)
		r.moved = make(chan struct{})
	}()
	call.Err = step(ctx, c, r.sink)
	return call.Err
}
