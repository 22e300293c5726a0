// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"time"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// ownerInterval is the time between two attempts to take over from another process.
const ownerInterval = 100 * time.Millisecond

// startWhenFree returns sinks that replace main and the sinks beside it. The replacement of
// main starts when no other process owns the dataplane any more. The others start
// afterwards, because the other process has the same ports.
func startWhenFree(main sink.Sink, beside map[string]sink.Sink) (sink.Sink, map[string]sink.Sink) {
	free := make(chan struct{})
	later := map[string]sink.Sink{}
	for name, s := range beside {
		later[name] = &startingSink{s, func(ctx context.Context) error {
			select {
			case <-free:
				return start(ctx, s)
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}}
	}
	return &startingSink{main, func(ctx context.Context) error {
		err := retryOwned(ctx, main)
		if err == nil {
			close(free)
		}
		return err
	}}, later
}

// start starts s if it is a sink.Starter.
func start(ctx context.Context, s sink.Sink) error {
	if s, ok := sink.As[sink.Starter](s); ok {
		return s.Start(ctx)
	}
	return nil
}

// retryOwned starts s until no error wraps sink.ErrOwned.
func retryOwned(ctx context.Context, s sink.Sink) error {
	logged := ""
	for {
		err := start(ctx, s)
		if !errors.Is(err, sink.ErrOwned) {
			return err
		}
		if logged != err.Error() {
			logged = err.Error()
			klog.FromContext(ctx).Info("Waiting for the end of another process", "reason", logged)
		}
		select {
		case <-time.After(ownerInterval):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// startingSink is a sink whose method Start is replaced.
type startingSink struct {
	sink.Sink
	start func(context.Context) error
}

// Unwrap returns the sink with its own method Start, see sink.As.
func (s *startingSink) Unwrap() sink.Sink { return s.Sink }

// Start implements sink.Starter.
func (s *startingSink) Start(ctx context.Context) error { return s.start(ctx) }
