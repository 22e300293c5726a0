// SPDX-License-Identifier: Apache-2.0

// Package nodesinks makes the sinks of a node's service proxy: its dataplanes, the server
// of health-check node ports, and node ports on localhost. It also makes the parts that
// the dataplanes share.
package nodesinks

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/kpng-project/kpng/internal/backendoptions"
	"github.com/kpng-project/kpng/internal/healthcheck"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Options are the settings of a node.
type Options struct {
	// Addresses are the addresses of node ports and health checks. Default: the addresses
	// that NodePorts selects. The interfaces in ExcludeInterfaces have addresses that do
	// not belong to the node, such as addresses of services.
	Addresses         nodeaddr.Source
	NodePorts         nodeaddr.Selection
	ExcludeInterfaces []string
	// Stats makes Localhost count traffic.
	Stats bool
	// KeepConnections keeps connections to removed endpoints.
	KeepConnections bool
	// Settings are kernel settings that are checked when the tasks begin. Sysctls says
	// what happens to wrong settings.
	Settings []sysctl.Setting
	Sysctls  backends.SysctlMode
	// Healthy reports whether the proxy has programmed all services and is not stuck.
	Healthy func() bool
	// Metrics provides observers. Default: none.
	Metrics Metrics
	// Follow starts a further task. Default: none.
	Follow func(context.Context) (stop func())
}

// Metrics provides observers of the parts of a node, see package node.
type Metrics interface {
	Backend(name string) backends.Observer
	Conntrack() func(seen, deleted int, took time.Duration, err error)
	HealthChecks() (ports func(open, failing int), failed func(types.NamespacedName, netip.AddrPort, error))
}

// none is a Metrics without observers.
type none struct{}

func (none) Backend(string) backends.Observer                { return nil }
func (none) Conntrack() func(int, int, time.Duration, error) { return nil }
func (none) HealthChecks() (func(int, int), func(types.NamespacedName, netip.AddrPort, error)) {
	return nil, nil
}

// Node makes the sinks of a node. Each sink needs a driver of its own.
type Node struct {
	opts    Options
	watcher *nodeaddrs.Watcher // nil if Options.Addresses is set
	// forwards is true if a dataplane does not itself check the settings for forwarding.
	forwards bool
	drifts   []*drifts // of each backend
}

// New returns a Node. It reads the addresses of the machine, but does not change the machine.
func New(opts Options) (*Node, error) {
	if opts.Metrics == nil {
		opts.Metrics = none{}
	}
	n := &Node{opts: opts}
	if n.opts.Addresses == nil {
		var err error
		exclude := append(slices.Clone(opts.ExcludeInterfaces), "kube-ipvs0")
		if n.watcher, err = nodeaddrs.New(nodeaddrs.Options{Selection: opts.NodePorts, ExcludeInterfaces: exclude}); err != nil {
			return nil, fmt.Errorf("find the addresses of the node: %w", err)
		}
		n.opts.Addresses = n.watcher
	}
	return n, nil
}

// Addresses returns the addresses of the node.
func (n *Node) Addresses() nodeaddr.Source { return n.opts.Addresses }

// Dataplane returns a sink like s that uses the parts of the node. If s contains backends of
// kpng, Dataplane sets all options of these backends that are unset and that the node
// provides. Then the second result is the name of the outermost backend. Otherwise, the
// second result is empty, and the returned sink also deletes stale connections after each
// Sync.
func (n *Node) Dataplane(s sink.Sink) (dataplane sink.Sink, name string) {
	for backend, o := range backendoptions.Backends(s) {
		if name == "" {
			name = backend
		}
		if o.NodeAddresses == nil {
			o.NodeAddresses = n.opts.Addresses
		}
		if o.Conntrack == nil {
			o.Conntrack = n.connections()
		}
		if o.Sysctls == backends.ReportSysctls {
			o.Sysctls = n.opts.Sysctls
		}
		d := &drifts{Observer: backendoptions.Observe(n.opts.Metrics.Backend(backend)), backend: backend}
		n.drifts = append(n.drifts, d)
		backendoptions.SetObserver(o, d)
	}
	if name == "" {
		n.forwards = true
		return n.tracked(s), ""
	}
	return s, name
}

// HealthChecks returns a sink that serves health-check node ports.
func (n *Node) HealthChecks() sink.Sink {
	ports, failed := n.opts.Metrics.HealthChecks()
	return healthcheck.New(healthcheck.Options{NodeAddresses: n.opts.Addresses, Healthy: n.opts.Healthy, Failed: failed, Observe: ports})
}

// localhostDrain is how long connections through [Node.Localhost] may continue after their
// frontend was deleted or the proxy began to stop.
const localhostDrain = 5 * time.Second

// Localhost returns a sink that serves node ports with sockets of this process, at those
// addresses of the node that are loopback addresses. Dataplanes that forward packets
// cannot do this without the kernel setting route_localnet. Localhost returns nil if no
// loopback address is selected.
func (n *Node) Localhost() (sink.Sink, error) {
	loopback := nodeaddrs.Loopback{Of: n.opts.Addresses}
	if !loopback.Selected() {
		return nil, nil
	}
	return userspace.New(userspace.Options{OnlyNodePorts: true, DrainTimeout: localhostDrain, Options: backends.Options{NodeAddresses: loopback, Stats: n.opts.Stats}})
}

// WithTasks returns a sink like s with the tasks of the node. Exactly one dataplane must
// have these tasks.
func (n *Node) WithTasks(s sink.Sink) sink.Sink { return WithTask(s, n.begin) }

// begin applies kernel settings and starts the tasks of a node. The result ends the tasks.
func (n *Node) begin(ctx context.Context) (end func()) {
	settings := n.opts.Settings
	if n.forwards {
		settings = slices.Concat(sysctl.Forwarding, settings)
	}
	if n.opts.Sysctls != backends.IgnoreSysctls {
		sysctl.Kernel.Apply(ctx, settings, n.opts.Sysctls == backends.SetSysctls)
	}
	var ends []func()
	if n.watcher != nil {
		ends = append(ends, n.watcher.Start(ctx))
	}
	if n.opts.Follow != nil {
		ends = append(ends, n.opts.Follow(ctx))
	}
	return func() {
		for _, end := range ends {
			end()
		}
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
