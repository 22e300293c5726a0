// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/together"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/remote/transport"
	"github.com/kpng-project/kpng/sink"
)

// served is a proxy that another kpng serves. Each sink has a connection of its own.
type served struct {
	nodeName  string
	clients   []*remote.Client
	drivers   []*sink.Driver
	once      bool
	nodeKnown atomic.Bool // the server had the node once
}

func newServed(dial transport.DialOptions, opts kpng.Options) (*served, error) {
	name, err := kpng.NodeName(opts.NodeName)
	if err != nil {
		return nil, err
	}
	v := &served{nodeName: name, once: !slices.ContainsFunc(opts.Sinks, func(s kpng.Sink) bool { return !s.Options.Once })}
	dial.FailFast = v.once
	for _, s := range opts.Sinks {
		client, err := remote.NewClient(remote.ClientOptions{DialOptions: dial, NodeName: name})
		if err != nil {
			return nil, err
		}
		v.clients = append(v.clients, client)
		v.drivers = append(v.drivers, sink.NewDriver(knownNode{client, &v.nodeKnown}, s.Sink, s.Options))
	}
	return v, nil
}

// knownNode is a source that notes whether it ever had the node.
type knownNode struct {
	sink.Source
	known *atomic.Bool
}

// Next implements [sink.Source].
func (s knownNode) Next() (*sink.Update, error) {
	u, err := s.Source.Next()
	if u != nil && u.Node != nil {
		s.known.Store(true)
	}
	return u, err
}

// Run implements proxy.
func (v *served) Run(ctx context.Context) error {
	var all []func(context.Context) error
	for i := range v.drivers {
		all = append(all, func(ctx context.Context) error { return drive(ctx, v.clients[i], v.drivers[i]) })
	}
	err := together.Run(ctx, all...)
	if err == context.Cause(ctx) && !v.once {
		return nil
	}
	return err
}

// drive runs a driver, and its client as long. A client that cannot go on ends the driver.
func drive(ctx context.Context, client *remote.Client, driver *sink.Driver) error {
	defer client.Close()
	ctx, stop := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := client.Run(ctx); err != nil {
			stop(err)
		}
	}()
	defer func() {
		stop(nil)
		<-ended
	}()
	return driver.Run(ctx)
}

// Status implements proxy.
func (v *served) Status() []sink.Status {
	var all []sink.Status
	for _, d := range v.drivers {
		all = append(all, d.Status())
	}
	return all
}

// Health implements proxy.
func (v *served) Health() health.Report {
	return health.Of(v.Status(), v.clients[0].Node(), v.nodeKnown.Load())
}

// NodeName implements proxy.
func (v *served) NodeName() string { return v.nodeName }
