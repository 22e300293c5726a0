// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernelnode

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/conntrack"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/klog/v2"
)

// Tasks are the tasks of a backend beside its dataplane: connection tracking, a watcher
// of the node's addresses, and the backend's own goroutines. The zero value has no tasks.
type Tasks struct {
	// Addresses are the addresses of node ports. Start sets the field.
	Addresses nodeaddr.Source

	connections sink.Sink
	running     sync.WaitGroup
	ctx         context.Context // Stop cancels it
	stop        context.CancelFunc
}

// Start starts connection tracking and the watcher. If the options provide their own sink
// or source of addresses, Start uses this one instead. If Start fails, no goroutine is
// left.
func (t *Tasks) Start(ctx context.Context, o *backends.Options) error {
	t.ctx, t.stop = context.WithCancel(context.WithoutCancel(ctx))
	if t.Addresses = o.NodeAddresses; t.Addresses == nil {
		watcher, err := t.Watch(nodeaddrs.Options{NetNS: o.NetNS})
		if err != nil {
			return err
		}
		t.Addresses = watcher
	}
	if t.connections = o.Conntrack; t.connections == nil {
		t.connections = conntrack.New(conntrack.Options{NodeAddresses: t.Addresses, NetNS: o.NetNS})
	}
	if s, ok := sink.As[sink.Starter](t.connections); ok {
		if err := s.Start(ctx); err != nil {
			t.EndGoroutines()
			return err
		}
	}
	return nil
}

// Resets reports whether connection tracking with these options resets connections to
// lost endpoints (nodeview.Existing.Resets). If Options.Conntrack is set, the result is
// false, because that sink itself says whether it resets connections.
func Resets(o *backends.Options) bool {
	if o.Conntrack == nil {
		return true
	}
	c, ok := sink.As[backends.Capable](o.Conntrack)
	return ok && c.Honours().Resets
}

// Watch returns a watcher of addresses that runs until Stop.
func (t *Tasks) Watch(opts nodeaddrs.Options) (*nodeaddrs.Watcher, error) {
	watcher, err := nodeaddrs.New(opts)
	if err == nil {
		t.Go(func(ctx context.Context) {
			stop := watcher.Start(ctx)
			<-ctx.Done()
			stop()
		})
	}
	return watcher, err
}

// Go calls f on a new goroutine. Stop ends the context of f and waits for f.
func (t *Tasks) Go(f func(context.Context)) { t.running.Go(func() { f(t.ctx) }) }

// FollowAddresses calls update now and after each change of Addresses, until Stop. If
// update fails, FollowAddresses logs the error with keysAndValues and calls update again
// after a second.
func (t *Tasks) FollowAddresses(update func(context.Context) error, keysAndValues ...any) {
	t.Go(func(ctx context.Context) {
		for {
			_, changed := t.Addresses.Addresses()
			var retry <-chan time.Time
			if err := update(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Cannot update the addresses of node ports; retrying", keysAndValues...)
				retry = time.After(time.Second)
			}
			select {
			case <-ctx.Done():
				return
			case <-changed:
			case <-retry:
			}
		}
	})
}

// Sync passes changes on to connection tracking, and returns the error that the backend's
// Sync has to return. The argument err is the result of programming the dataplane. If err
// makes the driver deliver the changes again, Sync does not pass them on yet.
func (t *Tasks) Sync(ctx context.Context, c *sink.Changes, err error) error {
	if _, ok := sink.Acknowledged(err); !ok {
		return err
	}
	if err := t.connections.Sync(ctx, c); err != nil {
		// The dataplane has the changes, but connection tracking does not. A new pass delivers
		// all services again.
		return fmt.Errorf("connection tracking: %w (%w)", err, sink.ErrStartOver)
	}
	return err
}

// EndGoroutines ends the goroutines and waits for them.
func (t *Tasks) EndGoroutines() {
	if t.stop != nil {
		t.stop()
	}
	t.running.Wait()
}

// Stop ends the goroutines and stops connection tracking. It may be called without Start.
func (t *Tasks) Stop(ctx context.Context) error {
	t.EndGoroutines()
	if s, ok := sink.As[sink.Stopper](t.connections); ok {
		return s.Stop(ctx)
	}
	return nil
}
