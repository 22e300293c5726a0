// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"slices"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/together"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
)

// remoteProxy is a proxy that gets its services from a kpng server. All sinks share one
// connection.
type remoteProxy struct {
	client  *remote.Client
	sources []sink.Source
	drivers []*sink.Driver
	once    bool
}

func newRemoteProxy(dial remote.DialOptions, fallback *remote.Fallback, opts kpng.Options) (*remoteProxy, error) {
	v := &remoteProxy{once: !slices.ContainsFunc(opts.Sinks, func(s kpng.Sink) bool { return !s.Options.Once })}
	dial.FailFast = v.once
	var err error
	v.client, err = remote.NewClient(remote.ClientOptions{DialOptions: dial, Fallback: fallback, NodeName: opts.NodeName, MaxElements: opts.State.MaxElements})
	if err != nil {
		return nil, err
	}
	for _, s := range opts.Sinks {
		source := v.client.Source()
		v.sources = append(v.sources, source)
		v.drivers = append(v.drivers, sink.NewDriver(source, s.Sink, s.Options))
	}
	return v, nil
}

func (v *remoteProxy) Run(ctx context.Context) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	var drivers []func(context.Context) error
	for i := range v.drivers {
		defer v.sources[i].Close()
		drivers = append(drivers, v.drivers[i].Run)
	}
	err := together.Run(running, v.client.Run, func(ctx context.Context) error {
		defer stop()
		return together.Run(ctx, drivers...)
	})
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
	return health.Of(v.Status(), v.client.Node())
}
