// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"context"
	"slices"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Step is what one Sync does: c is what the driver delivers, s the sink behind the
// recorder.
type Step func(ctx context.Context, c *sink.Changes, s sink.Sink) error

// Fail answers err, and the sink is not called.
func Fail(err error) Step {
	return func(context.Context, *sink.Changes, sink.Sink) error { return err }
}

// FailServices lets the sink sync, and then answers that the services keys failed
// with err, besides those that failed by themselves.
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

// Panic panics with v, and the sink is not called.
func Panic(v any) Step {
	return func(context.Context, *sink.Changes, sink.Sink) error { panic(v) }
}

// Block waits until release is closed, then lets the sink sync. If ctx ends
// before, it answers with the cause of that, and the sink is not called.
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
