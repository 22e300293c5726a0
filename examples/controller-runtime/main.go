// SPDX-License-Identifier: Apache-2.0

// Command controller-runtime runs a service proxy in a manager of controller-runtime. The
// proxy reads the informers of the manager's cache, so the process has one watch for each
// kind of object. The proxy serves the services whose label
// service.kubernetes.io/service-proxy-name has the value "example". This sink prints the
// frontends. A real sink, such as that of package backends/nftables, programs them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/kube"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	node := flag.String("node-name", "", "the `name` of the node (default: $NODE_NAME, else the host name)")
	leader := flag.String("leader-election", "", "elect a leader with the Lease of this `name`, in the namespace default")
	leaderOnly := flag.Bool("leader-only", false, "run the proxy only while this program is the leader")
	namespaces := flag.Bool("two-namespaces", false, "cache only the namespaces default and kube-system, which is an error")
	probes := flag.String("health-probe-bind-address", "0", "`address` of the health checks")
	flag.Parse() // controller-runtime adds -kubeconfig
	log := logr.FromSlogHandler(slog.NewTextHandler(os.Stderr, nil))
	ctrl.SetLogger(log)
	klog.SetLogger(log)
	opts := ctrl.Options{
		Metrics:                metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress: *probes,
		LeaderElection:         *leader != "", LeaderElectionID: *leader, LeaderElectionNamespace: "default", LeaderElectionReleaseOnCancel: true,
	}
	if *namespaces {
		opts.Cache.DefaultNamespaces = map[string]ctrlcache.Config{"default": {}, "kube-system": {}}
	}
	if err := run(ctrl.SetupSignalHandler(), opts, *node, *leaderOnly); err != nil {
		log.Error(err, "The program ended")
		os.Exit(1)
	}
}

func run(ctx context.Context, opts ctrl.Options, node string, leaderOnly bool) error {
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	manager, err := ctrl.NewManager(config, opts)
	if err != nil {
		return err
	}
	informers, err := informersOf(ctx, manager.GetCache())
	if err != nil {
		return err
	}
	p := newProxy(node, informers, leaderOnly)
	if err := manager.Add(p); err != nil {
		return err
	}
	if err := manager.AddReadyzCheck("kpng", healthz.Checker(p.ready)); err != nil {
		return err
	}
	return manager.Start(ctx)
}

// informersOf returns the informers of a manager's cache.
func informersOf(ctx context.Context, c ctrlcache.Cache) (*kube.Informers, error) {
	var informers kube.Informers
	for _, kind := range []struct {
		object client.Object
		to     *cache.SharedInformer
	}{
		{&corev1.Service{}, &informers.Services}, {&discoveryv1.EndpointSlice{}, &informers.EndpointSlices}, {&corev1.Node{}, &informers.Nodes},
	} {
		informer, err := c.GetInformer(ctx, kind.object, ctrlcache.BlockUntilSynced(false))
		if err != nil {
			return nil, fmt.Errorf("get the informer of %T: %w", kind.object, err)
		}
		// An informer of controller-runtime is an informer of client-go, except in a cache that
		// is limited to several namespaces. That cache has one informer for each namespace.
		shared, ok := informer.(cache.SharedInformer)
		if !ok {
			return nil, fmt.Errorf("the cache has no single informer of %T (it has a %T): a service proxy needs a cache of all namespaces", kind.object, informer)
		}
		*kind.to = shared
	}
	return &informers, nil
}

// proxy is a Runnable of a manager. A kpng.Proxy runs only once, so each Start makes a new
// one, for example for each term of a leader.
type proxy struct {
	options    kpng.Options
	leaderOnly bool
	running    atomic.Pointer[kpng.Proxy] // the proxy of the last Start
}

func newProxy(node string, informers *kube.Informers, leaderOnly bool) *proxy {
	return &proxy{leaderOnly: leaderOnly, options: kpng.Options{
		NodeName:  node,
		Informers: informers,
		Services:  watcher.Options{ServiceProxyName: "example"},
		Sinks:     []kpng.Sink{{Sink: sink.FullState(printFrontends), Options: sink.Options{Name: "printer"}}},
	}}
}

// Start implements manager.Runnable. It returns after the sink has stopped.
func (p *proxy) Start(ctx context.Context) error {
	running, err := kpng.New(p.options)
	if err != nil {
		return err
	}
	p.running.Store(running)
	return running.Run(klog.NewContext(ctx, klog.Background().WithName("kpng")))
}

// NeedLeaderElection implements manager.LeaderElectionRunnable. A service proxy runs on
// each node, so it usually does not wait for a leadership. Without this method, a manager
// with leader election would start the proxy only on one node.
func (p *proxy) NeedLeaderElection() bool { return p.leaderOnly }

func (p *proxy) ready(*http.Request) error {
	running := p.running.Load()
	if running == nil {
		return errors.New("the proxy is not running")
	}
	if h := running.Health(); !h.Synced || h.Stuck {
		return fmt.Errorf("the proxy is not ready: %+v", h)
	}
	return nil
}

func printFrontends(_ context.Context, services []*api.View) error {
	for _, view := range services {
		for f := range nodeview.Frontends(view) {
			fmt.Println(view.Key(), f.FrontendKey, "→", f.Elsewhere)
		}
	}
	return nil
}
