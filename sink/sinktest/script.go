// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"context"
	"slices"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Step plays one Sync: c is the driver's delivery, s the sink behind the recorder.
type Step func(ctx context.Context, c *sink.Changes, s sink.Sink) error

// Fail returns a step that fails with err without calling the sink.
func Fail(err error) Step {
	return func(context.Context, *sink.Changes, sink.Sink) error { return err }
}

// FailServices returns a step that calls the sink and then reports that the services in
// keys failed with err, in addition to the sink's own failures.
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

// Panic returns a step that panics with v without calling the sink.
func Panic(v any) Step {
	return func(context.Context, *sink.Changes, sink.Sink) error { panic(v) }
}

// Block returns a step that waits until release is closed and then calls the sink. If ctx
// ends before that, the step fails with its cause without calling the sink.
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

// Repeat returns step n times.
func Repeat(n int, step Step) []Step { return slices.Repeat([]Step{step}, n) }
