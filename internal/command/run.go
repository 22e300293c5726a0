// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// AddCleanup adds the flag --cleanup to the command that runs s, if s is a sink.Cleaner.
// With this flag, the command cleans up and exits.
func AddCleanup(cmd *cobra.Command, s sink.Sink) {
	cleaner, ok := sink.As[sink.Cleaner](s)
	if !ok {
		return
	}
	cleanup := cmd.Flags().Bool("cleanup", false, "remove everything that this program ever programmed, and exit")
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !*cleanup {
			return run(cmd, args)
		}
		if err := configure(s); err != nil {
			return usage.Error(err)
		}
		return cleaner.Cleanup(cmd.Context())
	}
}

// Command returns a command that gets services from s and delivers this node's view of
// them to target. The command succeeds when its context ends or, with --once, when
// everything has been programmed once. The name is used for the command, and for the sink
// in logs and metrics. The sinks in beside run as well, see app.Options. The caller adds the
// source's flags with a Register method of s.
func (s *Source) Command(name string, target sink.Sink, beside map[string]sink.Sink) *cobra.Command {
	flags, serving := sinkFlags{beside: beside}, Serving{}
	cmd := &cobra.Command{
		Use:           name,
		Args:          usage.None,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			registry := prometheus.NewRegistry()
			collected, err := metrics.New(registry, metrics.Options{KubeProxy: flags.kubeProxyMetrics})
			if err != nil {
				return err
			}
			if b, ok := sink.As[*Backend](target); ok {
				b.Metrics = collected
			}
			if err := configure(target); err != nil {
				return usage.Error(err)
			}
			return flags.run(cmd.Context(), name, s, &serving, target, registry, collected)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	if c, ok := sink.As[configurable](target); ok {
		c.Register(fs)
	}
	flags.register(fs)
	serving.Register(fs)
	return cmd
}

// configurable is app.Configurable.
type configurable interface {
	Register(*pflag.FlagSet)
	Configure() error
}

func configure(s sink.Sink) error {
	if c, ok := sink.As[configurable](s); ok {
		return c.Configure()
	}
	return nil
}

// SetCollection lets garbage grow to half of the used heap instead of the whole used heap,
// unless GOGC is set. Proxies run on each node, so their memory counts more than the
// processor time at the start. Later, a proxy makes little garbage. A server makes most of
// its garbage when many clients connect at the same time.
func SetCollection() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

// run gets services from source and delivers this node's view of them to s. It returns
// nil when ctx ends. With --once, it returns when everything has been programmed once.
// Logs and metrics identify the sink by name. If s is a [prometheus.Collector], its
// metrics are exported too. If s is a [Backend], the metrics of its parts are exported, too.
// The registry has the metrics in collected.
func (f *sinkFlags) run(ctx context.Context, name string, source *Source, serving *Serving, s sink.Sink, registry *prometheus.Registry, collected *metrics.Metrics) error {
	SetCollection()
	var parts Parts
	backend, isBackend := sink.As[*Backend](s)
	if isBackend {
		parts = backend.parts
	}
	own := parts.Collectors
	if f.kubeProxyMetrics {
		own = append(own, parts.KubeProxy...)
	}
	if c, ok := sink.As[prometheus.Collector](s); ok {
		own = append(own, c)
	}
	for _, c := range own {
		if err := registry.Register(c); err != nil {
			return fmt.Errorf("register metrics of sink %s: %w", name, err)
		}
	}
	settings, err := f.get()
	if err != nil {
		return err
	}
	var p proxy // declared here, because a backend's function healthy refers to p
	if isBackend {
		backend.healthy = func() bool {
			r := p.Health()
			return r.Synced && !r.Stuck
		}
	}
	node, err := kpng.NodeName(string(f.node))
	if err != nil {
		return err
	}
	opts := kpng.Options{NodeName: node, State: cluster.Options{OnRefused: parts.Refused}}
	add := func(name string, s sink.Sink) {
		settings := settings
		settings.Name, settings.Observer = name, collected.Sink(name)
		opts.Sinks = append(opts.Sinks, kpng.Sink{Sink: s, Options: settings})
	}
	first, beside := s, map[string]sink.Sink{}
	maps.Copy(beside, parts.Beside)
	maps.Copy(beside, f.beside)
	if f.wait {
		serving.wait = true
		first, beside = startWhenFree(s, beside)
	}
	add(name, first)
	for _, suffix := range slices.Sorted(maps.Keys(beside)) {
		add(name+"-"+suffix, beside[suffix])
	}
	if p, err = source.proxy(opts); err != nil {
		return err
	}
	run := p.Run
	if settings.Once && f.onceTimeout > 0 {
		run = func(ctx context.Context) error { return runOnce(ctx, p, f.onceTimeout) }
	}
	if f.kubeProxyMetrics {
		serving.proxyMode = name
	}
	page := &statuspage.Handler{Program: Version(), Source: source.String(), NodeName: node, Health: p.Health, Sinks: p.Status}
	switch p := p.(type) {
	case *kpng.Proxy:
		page.State = p.State()
	case *remoteProxy:
		page.Client = p.client
	}
	if err := registry.Register(SourceMetrics(page.SourceState)); err != nil {
		return err
	}
	page.Problems = parts.Problems
	if parts.Counter != nil {
		page.Traffic = statuspage.TrafficOf(parts.Counter)
	}
	serving.Status, serving.Source = page, page.Source
	err = serving.Run(ctx, p.Health, registry, run)
	if errors.Is(err, sink.ErrOwned) {
		err = fmt.Errorf("%w; stop that process, run another instance, or wait for its end with --wait", err)
	}
	return err
}

// A proxy delivers the services of a node to sinks.
type proxy interface {
	// Run drives the sinks until its context ends and then returns nil.
	Run(context.Context) error
	Status() []sink.Status
	Health() health.Report
}

// sinkFlags holds the node's name and the settings of a sink's driver.
type sinkFlags struct {
	beside                map[string]sink.Sink // see app.Options
	node                  nonEmpty
	once, wait            bool
	interval, onceTimeout time.Duration
	kubeProxyMetrics      bool
}

func (f *sinkFlags) register(fs *pflag.FlagSet) {
	fs.Var(&f.node, "node-name", "proxy for the node with this `name` (default: $NODE_NAME, else the host name in lower case)")
	fs.DurationVar(&f.interval, "min-sync-interval", 0, "minimum time from the end of one sync to the start of the next; 0: none while changes are rare, and as long as the last sync took while they are many, at most 20ms")
	fs.BoolVar(&f.kubeProxyMetrics, "kubeproxy-metrics", false, "also serve metrics with kube-proxy's names, and /proxyMode")
	fs.BoolVar(&f.wait, "wait", false, "while another process programs the same dataplane, or listens on the addresses for health checks and metrics, wait for its end instead of failing")
	fs.BoolVar(&f.once, "once", false, "exit when everything has been programmed once")
	fs.DurationVar(&f.onceTimeout, "once-timeout", time.Minute, "with --once: fail after this time without progress and list the missing services; 0 means never")
}

func (f *sinkFlags) get() (sink.Options, error) {
	if f.interval < 0 || f.onceTimeout < 0 {
		return sink.Options{}, usage.Errorf("--min-sync-interval %v or --once-timeout %v is negative", f.interval, f.onceTimeout)
	}
	return sink.Options{MinInterval: f.interval, Once: f.once}, nil
}

// Version returns the program's version in one line: the module version (with the
// revision, and +dirty for a modified checkout), the Go version and the platform.
func Version() string {
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
	}
	return fmt.Sprintf("%s %s %s/%s", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
