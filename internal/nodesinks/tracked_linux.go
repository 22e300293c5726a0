// SPDX-License-Identifier: Apache-2.0

package nodesinks

import (
	"context"
	"errors"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/conntrack"
	"github.com/kpng-project/kpng/internal/kernelnode"
	"github.com/kpng-project/kpng/sink"
)

// KeepConnections is a sink in place of connection tracking. It keeps all connections.
var KeepConnections = sink.Func(func(context.Context, *sink.Changes) error { return nil })

// connections returns a sink that deletes the connections to removed endpoints.
func (n *Node) connections() sink.Sink {
	if n.opts.KeepConnections {
		return KeepConnections
	}
	return conntrack.New(conntrack.Options{NodeAddresses: n.opts.Addresses, Observe: n.opts.Metrics.Conntrack()})
}

// tracked returns a sink like s with connection tracking.
func (n *Node) tracked(s sink.Sink) sink.Sink {
	return &tracked{Sink: s, opts: backends.Options{NodeAddresses: n.opts.Addresses, Conntrack: n.connections()}}
}

type tracked struct {
	sink.Sink
	opts  backends.Options
	tasks kernelnode.Tasks
}

// Unwrap returns the sink without connection tracking, see sink.As.
func (t *tracked) Unwrap() sink.Sink { return t.Sink }

// Start implements sink.Starter.
func (t *tracked) Start(ctx context.Context) error {
	if s, ok := sink.As[sink.Starter](t.Sink); ok {
		if err := s.Start(ctx); err != nil {
			return err
		}
	}
	return t.tasks.Start(ctx, &t.opts)
}

// Sync implements sink.Sink.
func (t *tracked) Sync(ctx context.Context, c *sink.Changes) error {
	return t.tasks.Sync(ctx, c, t.Sink.Sync(ctx, c))
}

// Stop implements sink.Stopper.
func (t *tracked) Stop(ctx context.Context) error {
	err := t.tasks.Stop(ctx)
	if s, ok := sink.As[sink.Stopper](t.Sink); ok {
		err = errors.Join(err, s.Stop(ctx))
	}
	return err
}
