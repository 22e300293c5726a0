// SPDX-License-Identifier: Apache-2.0

// Package app makes a whole command of a sink: flags, logging, metrics, health
// and signals.
//
//	func main() {
//		app.Main(mySink)
//	}
//
// A program with flags of its own adds them to its command:
//
//	func main() {
//		cmd := app.Command("my-proxy", mySink)
//		cmd.Flags().StringVar(&mySink.table, "table", "my-proxy", "…")
//		app.Execute(cmd)
//	}
//
// The flags say where services come from (--kubeconfig, --manifests; in a pod,
// its service account), which of them (--service-proxy-name) and for which node
// (--node-name); or which server has worked that out (--api). The command ends with status 0 on SIGINT or SIGTERM, and with
// --once when everything has been programmed once; with status 1 and a line on
// standard error if it cannot go on.
package app

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// Main runs s as the whole program, with the program's arguments, and exits.
func Main(s sink.Sink) {
	Execute(Command(strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe"), s))
}

// Execute runs cmd as the whole program, with the program's arguments, and exits.
func Execute(cmd *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // so that a second signal kills
	err := cmd.ExecuteContext(ctx)
	stop()
	klog.Flush()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", cmd.Name(), err)
		os.Exit(1)
	}
}

// Command returns the command that runs s until its context ends. The caller
// may give it a description, more flags and other defaults, and make it part of
// a larger one. If s is a [sink.Cleaner], the command can also clean up
// (--cleanup).
func Command(name string, s sink.Sink) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:           name,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(cmd); err != nil {
				return err
			}
			return f.run(cmd.Context(), name, s)
		},
	}
	f.register(cmd)
	if cleaner, ok := s.(sink.Cleaner); ok {
		cleanup := cmd.Flags().Bool("cleanup", false, "remove all that this program has ever programmed, and end")
		run := cmd.RunE
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			if *cleanup {
				return cleaner.Cleanup(cmd.Context())
			}
			return run(cmd, args)
		}
	}
	return cmd
}

// flags are the command's settings.
type flags struct {
	proxy       kpng.Options
	api         apiFlags
	mapIP       string
	mapAllIPs   bool
	healthz     string
	metricsAddr string
}

func (f *flags) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringVar(&f.proxy.Kubeconfig, "kubeconfig", "", "watch the API server of this kubeconfig `file`; without it and --manifests, that of the pod or of $KUBECONFIG or ~/.kube/config")
	fs.StringVar(&f.proxy.Manifests, "manifests", "", "read services, endpoint slices and nodes from this `file or folder` of Kubernetes manifests, and follow it; - is standard input, read once")
	fs.StringVar(&f.proxy.Services.ServiceProxyName, "service-proxy-name", "", "serve the services whose label service.kubernetes.io/service-proxy-name is this `name`, headless ones included; without it, those that have no such label")
	fs.StringVar(&f.proxy.NodeName, "node-name", "", "serve the node of this `name`; without it, $NODE_NAME or the host's name in lower case")
	fs.StringSliceVar(&f.proxy.Services.KeepLabels, "keep-labels", nil, "hand on the service labels that match these `patterns`, such as app or example.com/*")
	fs.StringSliceVar(&f.proxy.Services.KeepAnnotations, "keep-annotations", nil, "hand on the service annotations that match these `patterns`, such as example.com/*")
	fs.StringVar(&f.mapIP, "all-ports-annotation", "", "make an all-ports service of each that has this `annotation` with the value true")
	fs.BoolVar(&f.mapAllIPs, "all-ports", false, "make an all-ports service of each")
	fs.DurationVar(&f.proxy.Sink.MinInterval, "min-sync-interval", 0, "the least time from the end of one sync to the start of the next")
	fs.BoolVar(&f.proxy.Sink.Once, "once", false, "end when everything has been programmed once")
	fs.StringVar(&f.healthz, "healthz-bind-address", "", "serve /healthz, /livez and /readyz on this `host:port`; without a host, on loopback only (off by default)")
	fs.StringVar(&f.metricsAddr, "metrics-bind-address", "", "serve /metrics on this `host:port`; without a host, on loopback only (off by default)")

	var logging flag.FlagSet
	klog.InitFlags(&logging)
	fs.AddGoFlag(logging.Lookup("v"))
	fs.AddGoFlag(logging.Lookup("vmodule"))
	f.api.register(cmd)
}

// check refuses flags that make no sense, above all a source that is given and
// empty: whoever wrote "$FILE" did not mean the API server at hand.
func (f *flags) check(cmd *cobra.Command) error {
	for _, name := range [...]string{"kubeconfig", "manifests", "node-name"} {
		if flag := cmd.Flags().Lookup(name); flag.Changed && strings.TrimSpace(flag.Value.String()) == "" {
			return fmt.Errorf("--%s is given, but empty", name)
		}
	}
	if f.proxy.Kubeconfig != "" && f.proxy.Manifests != "" {
		return errors.New("--kubeconfig and --manifests exclude each other")
	}
	if f.proxy.Sink.MinInterval < 0 {
		return fmt.Errorf("--min-sync-interval is negative: %v", f.proxy.Sink.MinInterval)
	}
	return nil
}

func (f *flags) run(ctx context.Context, name string, s sink.Sink) error {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	collected, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		return err
	}
	opts := f.proxy
	opts.Sink.Name = name
	opts.Observe = collected.Sink
	switch {
	case f.mapAllIPs:
		opts.Services.MapIP = func(*corev1.Service) bool { return true }
	case f.mapIP != "":
		opts.Services.MapIP = watcher.MapIPAnnotated(f.mapIP)
	}
	src, err := f.source(opts)
	if err != nil {
		return err
	}
	servers, err := listen(f.healthz, f.metricsAddr, newHealth(src), registry)
	if err != nil {
		return err
	}
	log := klog.FromContext(ctx)
	log.V(1).Info("Starting", "node", src.NodeName(), "serviceProxyName", opts.Services.ServiceProxyName)
	for _, server := range servers {
		log.V(1).Info("Serving health or metrics", "address", server.listener.Addr())
	}

	group, running := errgroup.WithContext(ctx)
	serving, stopServing := context.WithCancel(running)
	for _, server := range servers {
		group.Go(func() error { return server.serve(serving) })
	}
	group.Go(func() error {
		defer stopServing()
		return src.Run(running, s)
	})
	return group.Wait()
}

// source returns where the services come from.
func (f *flags) source(opts kpng.Options) (source, error) {
	if err := f.api.check(); err != nil {
		return nil, err
	}
	if len(f.api.addresses) > 0 {
		return newServed(f.api.options(), opts)
	}
	return kpng.New(opts)
}

// source is where services come from.
type source interface {
	// Run brings them to the sinks until its context ends; it returns nil then.
	Run(context.Context, ...sink.Sink) error
	// Status says where each sink stands.
	Status() []sink.Status
	// NodeName is the name of the node that is served, and Node its object, nil
	// while it is not known.
	NodeName() string
	Node() *api.Node
}
