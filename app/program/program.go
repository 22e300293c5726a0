// SPDX-License-Identifier: Apache-2.0

// Package program makes programs from backends. For each backend, it adds flags, metrics,
// health-check node ports and other things that a node needs. Package app runs the
// programs:
//
//	app.Main(program.Userspace(userspace.LocalRoutes(userspace.RouteOptions{})))
//
// The packages of the backends do not import this package. So a program that imports only
// a backend links neither Prometheus nor a flag parser.
//
// For each backend, this package has a file with a function that returns a [Backend]. To
// add a backend, write such a file, and add a line to the list of backends of a command.
package program

import (
	"context"

	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
)

// Backend is a backend for a program. It is a [sink.Sink] and has all optional methods
// that package app knows, see [sink.As]. Call Configure before any of these methods.
//
// The exported fields describe the backend. Do not change them.
type Backend struct {
	// Name is the name of the backend in commands, logs and metrics.
	Name string
	// Short describes the backend in one line, and Long in a few sentences.
	Short, Long string
	// OnlyPorts reports that the backend does not support all-ports services.
	OnlyPorts bool
	// Flags adds the flags of the backend to a command. Default: no flags.
	Flags func(*pflag.FlagSet)
	// Make creates the backend from the values of its flags. It does not change the machine.
	Make func() (Parts, error)
	// Init makes the settings of the machine that need more privileges than the backend
	// itself. Call Configure first. The backend need not be started. Default: no settings.
	Init func(context.Context) error

	flags          *pflag.FlagSet // flags of the command, or nil
	parts          Parts
	unfollow       func()
	localEndpoints *localEndpoints
	leftovers      *leftovers // nil if the backend does not search for them
}

// Parts are the sink and the other running parts of a backend.
type Parts struct {
	// Sink programs the dataplane. It may also implement the optional interfaces of package
	// sink, and [backends.Inspector].
	Sink sink.Sink
	// Follow is called after Sink has started. The function that it returns is called before
	// Sink stops. Default: none.
	Follow func(context.Context) (stop func())
	// Companions returns sinks that run beside Sink, see app.Companion. Default: none.
	Companions func(healthy func() bool) map[string]sink.Sink
	// Refused records a service that is too large, see app.RefusalRecorder. Default: none.
	Refused func(key types.NamespacedName, reason error)
	// Collectors have the metrics of all parts.
	Collectors []prometheus.Collector
	// KubeProxyNames has metrics that kube-proxy also has. A key is the name of a metric of
	// kube-proxy, without the prefix "kubeproxy_". With the flag --kubeproxy-metrics of
	// package app, Backend also collects the metrics under the names of kube-proxy.
	KubeProxyNames map[string]prometheus.Collector
}

// Register adds the flags of the backend to fs.
func (b *Backend) Register(fs *pflag.FlagSet) {
	b.flags = fs
	if b.Flags != nil {
		b.Flags(fs)
	}
	if b.leftovers != nil {
		b.leftovers.register(fs)
	}
}

// Configure creates the backend from the values of its flags. If Configure has already
// succeeded, it does nothing.
func (b *Backend) Configure() (err error) {
	if b.parts.Sink != nil {
		return nil
	}
	if b.parts, err = b.Make(); err != nil {
		return err
	}
	b.localEndpoints = newLocalEndpoints()
	b.parts.Collectors = append(b.parts.Collectors, b.localEndpoints.missing)
	if b.leftovers != nil {
		b.parts.Collectors = append(b.parts.Collectors, b.leftovers.count)
	}
	if b.flags != nil && flagValue(b.flags, "kubeproxy-metrics") == "true" {
		b.parts.Collectors = append(b.parts.Collectors, kubeProxyNamed("sync_proxy_rules_no_local_endpoints_total", b.localEndpoints.missing, localEndpointsLabels...))
		for name, c := range b.parts.KubeProxyNames {
			b.parts.Collectors = append(b.parts.Collectors, kubeProxyNamed(name, c))
		}
	}
	return nil
}

// PortsOnly implements app.PortsOnly.
func (b *Backend) PortsOnly() bool { return b.OnlyPorts }

// Unwrap returns the sink that programs the dataplane, or nil before Configure.
func (b *Backend) Unwrap() sink.Sink { return b.parts.Sink }

// Sync implements sink.Sink.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) error {
	err := b.parts.Sink.Sync(ctx, c)
	failed, ok := sink.Acknowledged(err)
	if ok {
		b.localEndpoints.sync(c)
	}
	if ok && c.Last && len(failed)+len(c.Failing) == 0 && b.leftovers != nil {
		b.leftovers.setProgrammed()
	}
	return err
}

// Start implements sink.Starter.
func (b *Backend) Start(ctx context.Context) error {
	if s, ok := sink.As[sink.Starter](b.parts.Sink); ok {
		if err := s.Start(ctx); err != nil {
			return err
		}
	}
	var stops []func()
	if b.parts.Follow != nil {
		stops = append(stops, b.parts.Follow(ctx))
	}
	if b.leftovers != nil && b.flags != nil {
		stops = append(stops, b.leftovers.follow(ctx))
	}
	b.unfollow = func() {
		for _, stop := range stops {
			stop()
		}
	}
	return nil
}

// Stop implements sink.Stopper.
func (b *Backend) Stop(ctx context.Context) error {
	b.unfollow()
	if s, ok := sink.As[sink.Stopper](b.parts.Sink); ok {
		return s.Stop(ctx)
	}
	return nil
}

// Cleanup implements sink.Cleaner. It does nothing if Parts.Sink does not implement
// sink.Cleaner.
func (b *Backend) Cleanup(ctx context.Context) error {
	if s, ok := sink.As[sink.Cleaner](b.parts.Sink); ok {
		return s.Cleanup(ctx)
	}
	return nil
}

// Companions implements app.Companion.
func (b *Backend) Companions(healthy func() bool) map[string]sink.Sink {
	if b.parts.Companions == nil {
		return nil
	}
	return b.parts.Companions(healthy)
}

// ServiceRefused implements app.RefusalRecorder.
func (b *Backend) ServiceRefused(key types.NamespacedName, reason error) {
	if b.parts.Refused != nil {
		b.parts.Refused(key, reason)
	}
}

// Problems implements app.Reporter.
func (b *Backend) Problems() []string {
	if b.leftovers == nil {
		return nil
	}
	return b.leftovers.problems()
}

// Describe implements prometheus.Collector.
func (b *Backend) Describe(to chan<- *prometheus.Desc) {
	for _, c := range b.parts.Collectors {
		c.Describe(to)
	}
}

// Collect implements prometheus.Collector.
func (b *Backend) Collect(to chan<- prometheus.Metric) {
	for _, c := range b.parts.Collectors {
		c.Collect(to)
	}
}
