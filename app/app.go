// SPDX-License-Identifier: Apache-2.0

// Package app makes a whole command of a sink: flags, logging, metrics, health
// and signals.
//
//	func main() {
//		app.Main(mySink)
//	}
//
// A program with flags of its own adds them to its command, or has a sink that is
// [Configurable]:
//
//	func main() {
//		cmd := app.Command("my-proxy", mySink)
//		cmd.Flags().StringVar(&mySink.table, "table", "my-proxy", "…")
//		app.Execute(cmd)
//	}
//
// The flags say where services come from (--kubeconfig, --manifests; in a pod,
// its service account), which of them (--service-proxy-name) and for which node
// (--node-name); or which server has worked that out (--api). The command ends
// with status 0 on SIGINT or SIGTERM, and with --once when everything has been
// programmed once; with status 1 and a line on standard error if it cannot go on.
// On Windows it can be a service, which ends when the service manager says so, and
// whose log is the event log or a file.
//
// A program of several commands, such as kpng itself, puts them together from
// what a Command is made of: [Source] and [Serving].
package app

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// Main runs s as the whole program, with the program's arguments, and exits.
func Main(s sink.Sink) {
	Execute(Command(strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe"), s))
}

// Command returns the command that runs s until its context ends. The caller
// may give it a description, more flags and other defaults, and make it part of
// a larger one. If s is a [sink.Cleaner], the command can also clean up
// (--cleanup).
func Command(name string, s sink.Sink) *cobra.Command {
	var source Source
	cmd := source.Command(name, s)
	cmd.Version = Version()
	p, ok := s.(PortsOnly)
	source.Register(cmd, !ok || !p.PortsOnly())
	if cleaner := sink.CleanerOf(s); cleaner != nil {
		AddCleanup(cmd, cleaner)
	}
	RegisterLogging(cmd.Flags())
	return cmd
}

// AddCleanup adds the flag --cleanup to the command that runs s: the command then
// cleans up instead.
func AddCleanup(cmd *cobra.Command, s sink.Cleaner) {
	cleanup := cmd.Flags().Bool("cleanup", false, "remove all that this program has ever programmed, and end")
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !*cleanup {
			return run(cmd, args)
		}
		if err := configure(s); err != nil {
			return err
		}
		return s.Cleanup(cmd.Context())
	}
}

// Command returns the command that brings the services of s for this node to to until
// its context ends; then it ends without an error. With --once it ends when everything
// has been programmed once. The name is that of the command, and of the sink in logs
// and metrics. The flags of the source itself are added by one of its Register methods.
func (s *Source) Command(name string, to sink.Sink) *cobra.Command {
	var (
		flags   sinkFlags
		serving Serving
	)
	cmd := &cobra.Command{
		Use:           name,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := configure(to); err != nil {
				return err
			}
			return flags.run(cmd.Context(), name, s, &serving, to)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	if c, ok := to.(Configurable); ok {
		c.Register(fs)
	}
	flags.register(fs)
	serving.Register(fs)
	return cmd
}

// Configurable is implemented by a sink that has flags of its own.
type Configurable interface {
	// Register adds the flags.
	Register(*pflag.FlagSet)
	// Configure is called when the flags have their values, before any method except
	// Register. It may be called again. An error ends the command.
	Configure() error
}

// PortsOnly is implemented by a sink that may not proxy all-ports services. If it does
// not, its command has no flags that make such services.
type PortsOnly interface {
	PortsOnly() bool
}

func configure(s any) error {
	if c, ok := s.(Configurable); ok {
		return c.Configure()
	}
	return nil
}

// run brings the services of source for this node to s until ctx ends; then it
// returns nil. With --once it ends when everything has been programmed once. The
// name is that of the sink in logs and metrics; an s that is a
// [prometheus.Collector] has its own metrics among them.
func (f *sinkFlags) run(ctx context.Context, name string, source *Source, serving *Serving, s sink.Sink) error {
	registry := prometheus.NewRegistry()
	collected, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		return err
	}
	if c, ok := s.(prometheus.Collector); ok {
		if err := registry.Register(c); err != nil {
			return fmt.Errorf("register the metrics of sink %s: %w", name, err)
		}
	}
	settings, err := f.get()
	if err != nil {
		return err
	}
	var p proxy // which the companions of s ask for its health
	sinks := []sink.Sink{s}
	if c, ok := s.(Companion); ok {
		sinks = append(sinks, c.Beside(func() bool {
			r := p.Health()
			return r.Synced && !r.Stuck
		})...)
	}
	node, err := kpng.NodeName(string(f.node))
	if err != nil {
		return err
	}
	opts := kpng.Options{NodeName: node}
	for i, s := range sinks {
		settings.Name = name
		if len(sinks) > 1 {
			settings.Name += strconv.Itoa(i)
		}
		settings.Observer = collected.Sink(settings.Name)
		opts.Sinks = append(opts.Sinks, kpng.Sink{Sink: s, Options: settings})
	}
	if p, err = source.proxy(opts); err != nil {
		return err
	}
	klog.FromContext(ctx).V(1).Info("Starting", "node", node, "serviceProxyName", source.Services().ServiceProxyName)
	run := p.Run
	if settings.Once && f.onceTimeout > 0 {
		run = func(ctx context.Context) error { return runOnce(ctx, p, f.onceTimeout) }
	}
	return serving.Run(ctx, p.Health, registry, run)
}

// Companion is implemented by a sink that has others run beside it, each with a
// driver of its own, so that they go on where one fails. In logs and metrics
// they are numbered then: the sink itself is NAME0.
type Companion interface {
	// Beside returns the others. Healthy reports whether the program is not stuck, as /livez
	// does, and has programmed every service once. It must not be called before the others run.
	Beside(healthy func() bool) []sink.Sink
}

// proxy brings the services of a node to its sinks.
type proxy interface {
	// Run does so until its context ends; it returns nil then.
	Run(context.Context) error
	Status() []sink.Status
	Health() health.Report
}

// sinkFlags are the settings of a sink's driver, and for which node it is.
type sinkFlags struct {
	node                  given
	once                  bool
	interval, onceTimeout time.Duration
}

func (f *sinkFlags) register(fs *pflag.FlagSet) {
	fs.Var(&f.node, "node-name", "serve the node of this `name`; without it, $NODE_NAME or the host's name in lower case")
	fs.DurationVar(&f.interval, "min-sync-interval", 0, "the least time from the end of one sync to the start of the next")
	fs.BoolVar(&f.once, "once", false, "end when everything has been programmed once")
	fs.DurationVar(&f.onceTimeout, "once-timeout", time.Minute, "with --once: fail after this time without progress, and say which services are missing; 0 is never")
}

func (f *sinkFlags) get() (sink.Options, error) {
	if f.interval < 0 || f.onceTimeout < 0 {
		return sink.Options{}, fmt.Errorf("--min-sync-interval %v or --once-timeout %v is negative", f.interval, f.onceTimeout)
	}
	return sink.Options{MinInterval: f.interval, Once: f.once}, nil
}

// Version returns what the program was built from, in one line: version, with the revision
// and +dirty if it was built from a modified checkout, Go and platform.
func Version() string {
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
	}
	return fmt.Sprintf("%s %s %s/%s", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
