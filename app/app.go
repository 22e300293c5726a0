// SPDX-License-Identifier: Apache-2.0

// Package app turns a sink into a complete command with flags, logging, metrics, health
// checks and signal handling.
//
//	func main() {
//		app.Main(mySink)
//	}
//
// To add flags of its own, a program either adds them to the command, or implements
// [Configurable] in its sink:
//
//	func main() {
//		cmd := app.Command("my-proxy", mySink)
//		cmd.Flags().StringVar(&mySink.table, "table", "my-proxy", "…")
//		app.Execute(cmd)
//	}
//
// The flags select the source of services (--kubeconfig or --manifests), the services
// (--service-proxy-name) and the node (--node-name). In a pod, the default source is the
// cluster's API server, with the pod's service account. With --api, the program reads the
// node's view from a kpng server instead. The command exits with status 0 on SIGINT or
// SIGTERM. With --once, it also exits with status 0 when everything has been programmed
// once. If the command cannot continue, it exits with status 1 and one line on standard
// error. If its arguments are wrong, the status is 2. On Windows, the service manager can
// run the program, which then logs to the event log or to a file.
//
// A program with several commands, such as kpng itself, builds them from the types
// [Source] and [Serving].
package app

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/remote/transport"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/status"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
)

// Main runs s as the whole program, with the program's arguments, and exits.
func Main(s sink.Sink) {
	Execute(Command(strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe"), s))
}

// Command returns a command that runs s until its context ends. The caller may add a
// description and flags, change defaults, and make the command part of a larger command.
// If s is a [sink.Cleaner], the command has the flag --cleanup.
func Command(name string, s sink.Sink) *cobra.Command { return command(name, s, &Source{}) }

// Client is like Command, but without flags that select a source or services, the command
// reads from the kpng server at [transport.DefaultAddress]. It is for programs that run
// beside a kpng server on the same machine, as those of the original kpng do.
func Client(name string, s sink.Sink) *cobra.Command {
	var source Source
	cmd := command(name, s, &source)
	fs := cmd.Flags()
	fs.Lookup("api").DefValue = transport.DefaultAddress
	kubeconfig := fs.Lookup("kubeconfig")
	kubeconfig.Usage, _, _ = strings.Cut(kubeconfig.Usage, " (")
	kubeconfig.Usage += " (default with flags that select services: " + defaultAPIServer + ")"
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !fs.Changed("api") && !source.selectsServices() {
			source.api.dial.Addresses = []string{transport.DefaultAddress}
		}
		return run(cmd, args)
	}
	return cmd
}

func command(name string, s sink.Sink, source *Source) *cobra.Command {
	cmd := source.Command(name, s)
	cmd.Version = Version()
	p, ok := sink.As[PortsOnly](s)
	source.Register(cmd, !ok || !p.PortsOnly())
	if _, ok := sink.As[sink.Cleaner](s); ok {
		AddCleanup(cmd, s)
	}
	RegisterLogging(cmd.Flags())
	return cmd
}

// AddCleanup adds the flag --cleanup to the command that runs s, a [sink.Cleaner]. With this
// flag, the command cleans up and exits.
func AddCleanup(cmd *cobra.Command, s sink.Sink) {
	cleanup := cmd.Flags().Bool("cleanup", false, "remove everything that this program ever programmed, and exit")
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !*cleanup {
			return run(cmd, args)
		}
		if err := configure(s); err != nil {
			return usage.Error(err)
		}
		if cleaner, ok := sink.As[sink.Cleaner](s); ok {
			return cleaner.Cleanup(cmd.Context())
		}
		return nil
	}
}

// Command returns a command that gets services from s and delivers this node's view of
// them to target. The command succeeds when its context ends or, with --once, when
// everything has been programmed once. The name is used for the command, and for the sink
// in logs and metrics. The caller adds the source's flags with a Register method of s.
func (s *Source) Command(name string, target sink.Sink) *cobra.Command {
	var (
		flags   sinkFlags
		serving Serving
	)
	cmd := &cobra.Command{
		Use:           name,
		Args:          usage.None,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := configure(target); err != nil {
				return usage.Error(err)
			}
			return flags.run(cmd.Context(), name, s, &serving, target)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	if c, ok := sink.As[Configurable](target); ok {
		c.Register(fs)
	}
	flags.register(fs)
	serving.Register(fs)
	return cmd
}

// Configurable is implemented by a sink with flags of its own.
type Configurable interface {
	// Register adds the flags.
	Register(*pflag.FlagSet)
	// Configure is called after the flags are parsed, and before any other method except
	// Register. It may be called several times. An error ends the command.
	Configure() error
}

// PortsOnly is implemented by a sink that cannot always proxy all-ports services. If
// PortsOnly returns true, the command has no flags for such services.
type PortsOnly interface {
	PortsOnly() bool
}

func configure(s sink.Sink) error {
	if c, ok := sink.As[Configurable](s); ok {
		return c.Configure()
	}
	return nil
}

// run gets services from source and delivers this node's view of them to s. It returns
// nil when ctx ends. With --once, it returns when everything has been programmed once.
// Logs and metrics identify the sink by name. If s is a [prometheus.Collector], its
// metrics are exported too.
func (f *sinkFlags) run(ctx context.Context, name string, source *Source, serving *Serving, s sink.Sink) error {
	registry := prometheus.NewRegistry()
	collected, err := metrics.New(registry, metrics.Options{KubeProxy: f.kubeProxyMetrics})
	if err != nil {
		return err
	}
	if c, ok := sink.As[prometheus.Collector](s); ok {
		if err := registry.Register(c); err != nil {
			return fmt.Errorf("register metrics of sink %s: %w", name, err)
		}
	}
	settings, err := f.get()
	if err != nil {
		return err
	}
	var p proxy // declared here, because the function passed to c.Companions refers to p
	var companions map[string]sink.Sink
	if c, ok := sink.As[Companion](s); ok {
		companions = c.Companions(func() bool {
			r := p.Health()
			return r.Synced && !r.Stuck
		})
	}
	node, err := kpng.NodeName(string(f.node))
	if err != nil {
		return err
	}
	opts := kpng.Options{NodeName: node}
	add := func(name string, s sink.Sink) {
		settings := settings
		settings.Name, settings.Observer = name, collected.Sink(name)
		opts.Sinks = append(opts.Sinks, kpng.Sink{Sink: s, Options: settings})
	}
	if r, ok := sink.As[RefusalRecorder](s); ok {
		opts.OnRefused = r.ServiceRefused
	}
	first := s
	if f.wait {
		serving.wait = true
		first, companions = startWhenFree(s, companions)
	}
	add(name, first)
	for _, suffix := range slices.Sorted(maps.Keys(companions)) {
		add(name+"-"+suffix, companions[suffix])
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
	page := &status.Handler{Program: Version(), Source: source.String(), NodeName: node, Health: p.Health, Sinks: p.Status}
	switch p := p.(type) {
	case *kpng.Proxy:
		page.State = p.State()
	case *remoteProxy:
		page.Client = p.clients[0]
	}
	if err := registry.Register(metrics.Source(page.SourceState)); err != nil {
		return err
	}
	if r, ok := sink.As[Reporter](s); ok {
		page.Problems = r.Problems
	}
	serving.Status, serving.Source = page, page.Source
	err = serving.Run(ctx, p.Health, registry, run)
	if errors.Is(err, sink.ErrOwned) {
		err = fmt.Errorf("%w; stop that process, run another instance, or wait for its end with --wait", err)
	}
	return err
}

// Companion is implemented by a sink with companions. Companions are further sinks with
// drivers of their own. If one sink fails, the other sinks continue. In logs and metrics,
// the name of a companion is the name of the sink, a hyphen, and its name in the map.
type Companion interface {
	// Companions returns the companion sinks by name. The function healthy reports whether every
	// service has been programmed once and the program is not stuck (see /livez). The sinks
	// must not call healthy before they run.
	Companions(healthy func() bool) map[string]sink.Sink
}

// Reporter is implemented by a sink that knows problems of the node. The [status.Handler]
// shows them.
type Reporter interface {
	// Problems returns a sentence for each present problem.
	Problems() []string
}

// RefusalRecorder is implemented by a sink that records which services are too large, see
// [kpng.Options]. If the source is a kpng server, it is not called.
type RefusalRecorder interface {
	// ServiceRefused records a service that became too large. It must not block.
	ServiceRefused(key types.NamespacedName, reason error)
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
	node                  nonEmpty
	once, wait            bool
	interval, onceTimeout time.Duration
	kubeProxyMetrics      bool
}

func (f *sinkFlags) register(fs *pflag.FlagSet) {
	fs.Var(&f.node, "node-name", "proxy for the node with this `name` (default: $NODE_NAME, else the host name in lower case)")
	fs.DurationVar(&f.interval, "min-sync-interval", 0, "minimum time from the end of one sync to the start of the next")
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
