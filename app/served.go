// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"strconv"
	"sync"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/remote/transport"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sync/errgroup"
)

// served is a proxy that another kpng serves. Each sink has a connection of its
// own.
type served struct {
	dial remote.ClientOptions
	opts kpng.Options // of which those of the node and of sinks count
	// first is the client of the first sink, which knows the node.
	first *remote.Client

	mu      sync.Mutex
	drivers []*sink.Driver
}

func newServed(dial transport.DialOptions, opts kpng.Options) (*served, error) {
	if opts.NodeName == "" {
		name, err := kpng.DefaultNodeName()
		if err != nil {
			return nil, err
		}
		opts.NodeName = name
	}
	dial.FailFast = opts.Sink.Once
	v := &served{dial: remote.ClientOptions{DialOptions: dial, NodeName: opts.NodeName}, opts: opts}
	var err error
	v.first, err = remote.NewClient(v.dial)
	return v, err
}

// Run implements proxy.
func (v *served) Run(ctx context.Context, sinks ...sink.Sink) error {
	group, running := errgroup.WithContext(ctx)
	for i, s := range sinks {
		client := v.first
		if i > 0 {
			var err error
			if client, err = remote.NewClient(v.dial); err != nil {
				return err // as the first one was made, so can this be
			}
		}
		opts := v.opts.Sink
		if len(sinks) > 1 {
			opts.Name += strconv.Itoa(i)
		}
		opts.Observer = v.opts.Observe(opts.Name)
		driver := sink.NewDriver(client, s, opts)
		v.mu.Lock()
		v.drivers = append(v.drivers, driver)
		v.mu.Unlock()
		group.Go(func() error { return drive(running, client, driver) })
	}
	err := group.Wait()
	if err == context.Cause(ctx) && !v.opts.Sink.Once {
		return nil
	}
	return err
}

// drive runs a driver, and its client as long.
func drive(ctx context.Context, client *remote.Client, driver *sink.Driver) error {
	defer client.Close()
	group, running := errgroup.WithContext(ctx)
	following, stopFollowing := context.WithCancel(running)
	group.Go(func() error {
		err := client.Run(following)
		if following.Err() != nil {
			return nil
		}
		return err
	})
	group.Go(func() error {
		defer stopFollowing()
		return driver.Run(running)
	})
	return group.Wait()
}

// Status implements proxy.
func (v *served) Status() []sink.Status {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []sink.Status
	for _, d := range v.drivers {
		all = append(all, d.Status())
	}
	return all
}

// Node implements proxy.
func (v *served) Node() *api.Node { return v.first.Node() }

// NodeName implements proxy.
func (v *served) NodeName() string { return v.opts.NodeName }
