// SPDX-License-Identifier: Apache-2.0

// Package nodesinks makes the sinks of a node's service proxy: its dataplanes, with what
// they share, and the server of health-check node ports.
package nodesinks

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/healthcheck"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Options say which sinks a node has.
type Options struct {
	// Dataplanes make the sinks that program services. The argument of such a function has
	// the options that the node sets: NodeAddresses, Conntrack and Sysctls.
	Dataplanes []func(backends.Options) (sink.Sink, error)
	// NodePorts selects the addresses of node ports and health checks. ExcludeInterfaces
	// have addresses that do not belong to the node, such as those of services.
	NodePorts         nodeaddr.Selection
	ExcludeInterfaces []string
	// KeepConnections keeps connections to removed endpoints.
	KeepConnections bool
	// Settings are kernel settings that are checked when a dataplane has started, and
	// Sysctls selects what happens to wrong ones.
	Settings []sysctl.Setting
	Sysctls  backends.SysctlMode
	// NoHealthChecks disables health-check node ports.
	NoHealthChecks bool
	// Healthy reports whether the proxy has programmed all services and is not stuck.
	Healthy func() bool
	// Flows, Ports and PortFailed receive events for metrics. See packages conntrack and
	// healthcheck.
	Flows      func(seen, ended int, took time.Duration, err error)
	Ports      func(open, failing int)
	PortFailed func(types.NamespacedName, netip.AddrPort, error)
	// Follow starts a further task when a dataplane has started. Default: none.
	Follow func(context.Context) (stop func())
}

// Sinks are the sinks of a node. Each needs a driver of its own.
type Sinks struct {
	Dataplanes []sink.Sink // one for each of Options.Dataplanes
	// HealthChecks serves health-check node ports, or is nil.
	HealthChecks sink.Sink
}

// New returns the sinks. It does not change the machine.
func New(opts Options) (*Sinks, error) {
	addrs, err := nodeaddrs.New(nodeaddrs.Options{Selection: opts.NodePorts, ExcludeInterfaces: append(opts.ExcludeInterfaces, "kube-ipvs0")})
	if err != nil {
		return nil, fmt.Errorf("find the addresses of the node: %w", err)
	}
	var sinks Sinks
	for i, create := range opts.Dataplanes {
		shared := backends.Options{
			NodeAddresses: addrs,
			Conntrack:     connections(&opts, addrs),
			Sysctls:       opts.Sysctls,
		}
		s, err := create(shared)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			s = WithTask(s, func(ctx context.Context) func() { return begin(ctx, &opts, addrs) })
		}
		sinks.Dataplanes = append(sinks.Dataplanes, s)
	}
	if !opts.NoHealthChecks {
		sinks.HealthChecks = healthcheck.New(healthcheck.Options{NodeAddresses: addrs, Healthy: opts.Healthy, Failed: opts.PortFailed, Observe: opts.Ports})
	}
	return &sinks, nil
}

// begin applies kernel settings and starts the tasks of a node. The result ends the tasks.
func begin(ctx context.Context, opts *Options, addrs *nodeaddrs.Watcher) (end func()) {
	if opts.Sysctls != backends.IgnoreSysctls {
		sysctl.Kernel.Apply(ctx, opts.Settings, opts.Sysctls == backends.SetSysctls)
	}
	stopAddrs := addrs.Start(ctx)
	if opts.Follow == nil {
		return stopAddrs
	}
	stop := opts.Follow(ctx)
	return func() {
		stop()
		stopAddrs()
	}
}

// WithTask returns a sink like s with a task beside it. Start of the sink calls begin after
// it has started s. The function that begin returns ends the task. Stop calls this function
// before it stops s.
func WithTask(s sink.Sink, begin func(context.Context) (end func())) sink.Sink {
	return &withTask{Sink: s, begin: begin, end: func() {}}
}

type withTask struct {
	sink.Sink
	begin func(context.Context) (end func())
	end   func()
}

// Unwrap returns the sink without the task, see sink.As.
func (w *withTask) Unwrap() sink.Sink { return w.Sink }

// Start implements sink.Starter.
func (w *withTask) Start(ctx context.Context) error {
	if s, ok := sink.As[sink.Starter](w.Sink); ok {
		if err := s.Start(ctx); err != nil {
			return err
		}
	}
	w.end = w.begin(ctx)
	return nil
}

// Stop implements sink.Stopper.
func (w *withTask) Stop(ctx context.Context) error {
	w.end()
	if s, ok := sink.As[sink.Stopper](w.Sink); ok {
		return s.Stop(ctx)
	}
	return nil
}
