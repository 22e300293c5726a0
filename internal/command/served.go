// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"slices"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/together"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
)

// remoteProxy is a proxy that gets its services from a kpng server. Each sink has its own
// connection.
type remoteProxy struct {
	clients []*remote.Client
	drivers []*sink.Driver
	once    bool
}

func newRemoteProxy(dial remote.DialOptions, opts kpng.Options) (*remoteProxy, error) {
	v := &remoteProxy{once: !slices.ContainsFunc(opts.Sinks, func(s kpng.Sink) bool { return !s.Options.Once })}
	dial.FailFast = v.once
	for _, s := range opts.Sinks {
		client, err := remote.NewClient(remote.ClientOptions{DialOptions: dial, NodeName: opts.NodeName, MaxElements: opts.State.MaxElements})
		if err != nil {
			return nil, err
		}
		v.clients = append(v.clients, client)
		v.drivers = append(v.drivers, sink.NewDriver(client, s.Sink, s.Options))
	}
	return v, nil
}

func (v *remoteProxy) Run(ctx context.Context) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	var clients, drivers []func(context.Context) error
	for i := range v.drivers {
		defer v.clients[i].Close()
		clients, drivers = append(clients, v.clients[i].Run), append(drivers, v.drivers[i].Run)
	}
	err := together.Run(running, append(clients, func(ctx context.Context) error {
		defer stop()
		return together.Run(ctx, drivers...)
	})...)
	if err != nil && err == context.Cause(running) && (ctx.Err() == nil || !v.once) {
		return nil
	}
	return err
}

func (v *remoteProxy) Status() []sink.Status {
	var all []sink.Status
	for _, d := range v.drivers {
		all = append(all, d.Status())
	}
	return all
}

func (v *remoteProxy) Health() health.Report {
	var node *api.Node
	if update := v.clients[0].Views(); update != nil {
		node = update.Node
	}
	return health.Of(v.Status(), node)
}
