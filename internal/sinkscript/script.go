// SPDX-License-Identifier: Apache-2.0

// Package sinkscript makes sinks and sources fail, for the tests of drivers and of wrappers.
package sinkscript

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Sink is a sink that executes the steps of a script, and then forwards each Sync to
// another sink.
type Sink struct {
	sink sink.Sink

	mu    sync.Mutex
	steps []Step
	times []Times
}

// Times are the times at which a call of Sync began and ended.
type Times struct{ Began, Ended time.Time }

// New returns a sink that forwards to s. If s is nil, it acknowledges every Sync for which
// the script has no step.
func New(s sink.Sink) *Sink {
	if s == nil {
		s = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	}
	return &Sink{sink: s}
}

// Add appends steps to the script. Each Sync executes the next step.
func (s *Sink) Add(steps ...Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps = append(s.steps, steps...)
}

// Times returns the times of all calls of Sync that have returned, oldest first.
func (s *Sink) Times() []Times {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.times)
}

// Sync implements [sink.Sink].
func (s *Sink) Sync(ctx context.Context, c *sink.Changes) error {
	began := time.Now()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.times = append(s.times, Times{began, time.Now()})
	}()
	s.mu.Lock()
	if len(s.steps) == 0 {
		s.mu.Unlock()
		return s.sink.Sync(ctx, c)
	}
	step := s.steps[0]
	s.steps = s.steps[1:]
	s.mu.Unlock()
	return step(ctx, c, s.sink)
}

// Unwrap returns the other sink.
func (s *Sink) Unwrap() sink.Sink { return s.sink }

// Step replaces one call of Sync. The argument s is the sink that the Sink wraps.
type Step func(ctx context.Context, c *sink.Changes, s sink.Sink) error

// Fail returns a step that does not call the sink and returns err.
func Fail(err error) Step {
	return func(context.Context, *sink.Changes, sink.Sink) error { return err }
}

// FailServices returns a step that calls the sink. Then the step reports that the
// services in keys failed with err, in addition to services that failed in the sink.
func FailServices(err error, keys ...types.NamespacedName) Step {
	return func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
		var failed sink.Failed
		if syncErr := s.Sync(ctx, c); syncErr != nil {
			f, ok := sink.Acknowledged(syncErr)
			if !ok {
				return syncErr
			}
			for key, err := range f {
				failed.Add(key, err)
			}
		}
		for _, key := range keys {
			failed.Add(key, err)
		}
		return failed.Err()
	}
}

// Panic returns a step that panics with v and does not call the sink.
func Panic(v any) Step {
	return func(context.Context, *sink.Changes, sink.Sink) error { panic(v) }
}

// Block returns a step that waits until release is closed and then calls the sink. If ctx
// ends earlier, the step returns the cause of ctx and does not call the sink.
func Block(release <-chan struct{}) Step {
	return func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
		select {
		case <-release:
			return s.Sync(ctx, c)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Repeat returns n copies of step.
func Repeat(n int, step Step) []Step { return slices.Repeat([]Step{step}, n) }
