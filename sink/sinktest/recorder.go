// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/sink"
)

// Recorder is a [sink.Sink] between the driver and another sink. It records each Sync, and
// forwards it to the other sink. If the driver breaks the rules of [sink.Sink], the test
// fails.
//
// The driver finds the optional methods of the other sink with [sink.As].
type Recorder struct {
	tb   testing.TB
	sink sink.Sink

	mu      sync.Mutex
	running bool
	syncs   []Sync
	moved   chan struct{} // closed and replaced after each Sync
	acked   ledger
}

// Sync is one recorded call of the method Sync.
type Sync struct {
	// Changes is a copy of the Changes that Sync received.
	sink.Changes
	// Err is the error that Sync returned. If Sync panicked, Err is not nil.
	Err error
}

var errPanicked = errors.New("sink panicked")

// NewRecorder returns a recorder that forwards to s. If s is nil, the recorder
// acknowledges every Sync.
func NewRecorder(tb testing.TB, s sink.Sink) *Recorder {
	if s == nil {
		s = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	}
	return &Recorder{tb: tb, sink: s, moved: make(chan struct{}), acked: newLedger()}
}

// Syncs returns all calls of Sync that have returned, oldest first.
func (r *Recorder) Syncs() []Sync {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.syncs)
}

// Views returns the last acknowledged view of each service, in the order of the keys.
func (r *Recorder) Views() []*api.View {
	r.mu.Lock()
	defer r.mu.Unlock()
	keys := slices.SortedFunc(maps.Keys(r.acked.views), ordering.Keys)
	views := make([]*api.View, len(keys))
	for i, key := range keys {
		views[i] = r.acked.views[key]
	}
	return views
}

// Node returns the last acknowledged node.
func (r *Recorder) Node() *api.Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.acked.node
}

// Wait passes the recorded Syncs to isDone, immediately and after each Sync. It returns
// nil when isDone returns true. If ctx ends earlier, Wait returns the cause of ctx.
func (r *Recorder) Wait(ctx context.Context, isDone func([]Sync) bool) error {
	for {
		r.mu.Lock()
		syncs, moved := slices.Clone(r.syncs), r.moved
		r.mu.Unlock()
		if isDone(syncs) {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Unwrap returns the other sink.
func (r *Recorder) Unwrap() sink.Sink { return r.sink }

// Sync implements [sink.Sink].
func (r *Recorder) Sync(ctx context.Context, c *sink.Changes) error {
	call := Sync{Changes: *c, Err: errPanicked}
	call.Services = slices.Values(slices.Collect(c.Services))
	r.mu.Lock()
	if r.running {
		r.tb.Errorf("Sync at revision %d overlaps another call", c.Revision)
	}
	r.running = true
	for _, violation := range r.acked.check(&call.Changes) {
		r.tb.Errorf("Sync %d (first: %t, last: %t, revision %d): %s", len(r.syncs), call.First, call.Last, call.Revision, violation)
	}
	r.mu.Unlock()

	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running = false
		r.acked.record(&call.Changes, call.Err)
		r.syncs = append(r.syncs, call)
		close(r.moved)
		r.moved = make(chan struct{})
	}()
	call.Err = r.sink.Sync(ctx, c)
	return call.Err
}
