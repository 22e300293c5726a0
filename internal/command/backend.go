// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
)

// Backend describes a backend: its texts and flags, and how to make its sinks. It is a
// [sink.Sink], so that a program can have it in place of a sink. Its flags are registered
// and its sinks are made once.
type Backend struct {
	// Name is the name of the backend in commands, logs and metrics.
	Name string
	// Short describes the backend in one line, and Long in a few sentences.
	Short, Long string
	// OnlyPorts reports that the backend does not support all-ports services.
	OnlyPorts bool
	// Flags adds the flags of the backend to a command. Default: no flags.
	Flags func(*pflag.FlagSet)
	// Make makes the sinks from the values of the flags. It does not change the machine.
	Make func(Run) (Parts, error)
	// Init makes the settings of the machine that need more privileges than the backend
	// itself. Call Configure first. The backend need not be started. Default: no settings.
	Init func(context.Context) error

	// Check finds problems on this machine that would keep the backend from working, and
	// changes if the backend replaces another proxy. It changes nothing. Call it before
	// Configure. Default: it finds nothing.
	Check func(context.Context) []Finding

	// Metrics provides observers to Make. Default: the observers of a new registry.
	Metrics *metrics.Metrics

	parts   Parts
	healthy func() bool // nil means always healthy
}

// Finding is a result of a check of a machine or of a cluster.
type Finding struct {
	Level Level
	// Subject names the checked object, such as a kernel setting or a service.
	Subject string
	// Text says what was found, and what to do.
	Text string
}

// Level says how important a Finding is.
type Level string

// Levels of findings.
const (
	Note    Level = "note"    // nothing changes
	Change  Level = "change"  // something changes, or an administrator has to do something
	Problem Level = "problem" // kpng would not work
)

// Run has the values that the program provides for the sinks of a backend.
type Run struct {
	// Healthy reports whether every service has been programmed once and the program is not
	// stuck (see /livez). The sinks must not call it before they run.
	Healthy func() bool
	Metrics *metrics.Metrics
}

// Parts has the sinks of a backend, and the reports of the program about them.
type Parts struct {
	// Sink programs the dataplane.
	Sink sink.Sink
	// Beside are sinks that run beside Sink. Each has a driver of its own, so if one fails,
	// the others continue. In logs and metrics, the name of such a sink is the name of the
	// backend, a hyphen, and its key. Default: none.
	Beside map[string]sink.Sink
	// Refused is cluster.Options.OnRefused. Default: none.
	Refused func(key types.NamespacedName, reason error)
	// Problems return a sentence for each present problem of the node, for the status page.
	Problems []func() []string
	// Counter counts the traffic of the sinks, for the status page. Default: none.
	Counter backends.Counter
	// Collectors have further metrics.
	Collectors []prometheus.Collector
	// KubeProxy has further metrics with kube-proxy's names, which the program serves with the
	// flag --kubeproxy-metrics.
	KubeProxy []prometheus.Collector
}

// Register implements app.Configurable. It adds the flags of the backend.
func (b *Backend) Register(fs *pflag.FlagSet) {
	if b.Flags != nil {
		b.Flags(fs)
	}
}

// Configure implements app.Configurable. It makes the sinks from the values of the flags.
// If Configure has already succeeded, it does nothing.
func (b *Backend) Configure() error {
	if b.parts.Sink != nil {
		return nil
	}
	if b.Metrics == nil {
		var err error
		if b.Metrics, err = metrics.New(prometheus.NewRegistry(), metrics.Options{}); err != nil {
			return err
		}
	}
	parts, err := b.Make(Run{func() bool { return b.healthy == nil || b.healthy() }, b.Metrics})
	if err == nil {
		b.parts = parts
	}
	return err
}

// Unwrap returns the sink that programs the dataplane, or nil before Configure.
func (b *Backend) Unwrap() sink.Sink { return b.parts.Sink }

// Parts returns the parts that Configure has made.
func (b *Backend) Parts() Parts { return b.parts }

// Sync implements sink.Sink.
func (b *Backend) Sync(ctx context.Context, c *sink.Changes) error { return b.parts.Sink.Sync(ctx, c) }

// Cleanup implements sink.Cleaner. Call Configure first. It does nothing if the sink that
// programs the dataplane has nothing to clean up.
func (b *Backend) Cleanup(ctx context.Context) error {
	if c, ok := sink.As[sink.Cleaner](b.parts.Sink); ok {
		return c.Cleanup(ctx)
	}
	return nil
}
