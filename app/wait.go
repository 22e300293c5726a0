// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"time"

	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// ownerInterval is the time between two attempts to take over from another process.
const ownerInterval = 100 * time.Millisecond

// startWhenFree returns sinks in place of main and its companions. The first one starts
// when no other process owns its dataplane any more. The companions start afterwards,
// because the other process has the same ports.
func startWhenFree(main sink.Sink, companions map[string]sink.Sink) (sink.Sink, map[string]sink.Sink) {
	free := make(chan struct{})
	start := sink.Forwarder{To: main}.Start
	later := map[string]sink.Sink{}
	for name, s := range companions {
		start := sink.Forwarder{To: s}.Start
		later[name] = startingSink{sink.Forwarder{To: s}, s, func(ctx context.Context) error {
			select {
			case <-free:
				return start(ctx)
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}}
	}
	return startingSink{sink.Forwarder{To: main}, main, func(ctx context.Context) error {
		err := retryOwned(ctx, start)
		if err == nil {
			close(free)
		}
		return err
	}}, later
}

// retryOwned calls start until it returns no error that wraps sink.ErrOwned.
func retryOwned(ctx context.Context, start func(context.Context) error) error {
	logged := ""
	for {
		err := start(ctx)
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

// startingSink is a sink with another method Start.
type startingSink struct {
	sink.Forwarder
	sink.Sink
	start func(context.Context) error
}

// Start implements sink.Starter.
func (s startingSink) Start(ctx context.Context) error { return s.start(ctx) }

// VerifyInterval implements sink.Poller. It returns -1 if the sink has no method Verify, so
// that the driver does not call the method of the Forwarder.
func (s startingSink) VerifyInterval() time.Duration {
	if _, ok := s.To.(sink.Verifier); !ok {
		return -1
	}
	return s.Forwarder.VerifyInterval()
}
