// SPDX-License-Identifier: Apache-2.0

package kpng

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/kube"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// Options say what to proxy, for which node, and where to learn it from. The
// zero value is a cluster's general proxy on this machine.
//
// At most one of Kubeconfig, Config, Informers and Manifests is set. Without
// any, the service account of the pod is used or, outside a cluster, what
// kubectl would use: $KUBECONFIG, else ~/.kube/config.
type Options struct {
	// Kubeconfig is the path of a kubeconfig file.
	Kubeconfig string
	// Config says how to reach the API server.
	Config *rest.Config
	// Informers are informers that the program runs already, for their objects
	// to be used instead of watching again.
	Informers *kube.Informers
	// Manifests is a file or folder of Kubernetes manifests to be used instead
	// of an API server, and followed.
	Manifests string

	// Services says which services to proxy, above all by the label
	// service.kubernetes.io/service-proxy-name, and what to keep of them.
	Services watcher.Options

	// NodeName is the node to proxy for. Default: see [DefaultNodeName].
	NodeName string

	// Sink are the settings of the sinks' drivers. If there are several sinks
	// their number, from 0, is appended to Name, and all of them call
	// Sink.Observer, from goroutines of their own.
	Sink sink.Options
	// Observe returns the observer of the sink of a name, in place of
	// Sink.Observer. It is called once for each sink, by Run. Default: none.
	Observe func(name string) sink.Observer
}

// DefaultNodeName returns the environment variable NODE_NAME or, if that is
// empty, the host's name in lower case, as the kubelet registers it.
func DefaultNodeName() (string, error) {
	if name := os.Getenv("NODE_NAME"); name != "" {
		return name, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("no node name given, and none to be had from the system: %w", err)
	}
	return strings.ToLower(strings.TrimSpace(name)), nil
}

// Proxy watches a cluster and drives sinks. Its methods may be called at any
// time and from any goroutine.
type Proxy struct {
	opts  Options
	state *cluster.State
	watch func(context.Context, *cluster.State) error

	mu      sync.Mutex
	started bool
	drivers []*sink.Driver
	ended   chan struct{} // closed when Run returns
}

// New returns a Proxy. It reads the kubeconfig, if there is one, but talks to
// nobody yet.
func New(opts Options) (*Proxy, error) {
	if opts.NodeName == "" {
		name, err := DefaultNodeName()
		if err != nil {
			return nil, err
		}
		opts.NodeName = name
	}
	watch, err := source(opts)
	if err != nil {
		return nil, err
	}
	return &Proxy{opts: opts, state: cluster.New(cluster.Options{}), watch: watch, ended: make(chan struct{})}, nil
}

// Run makes a Proxy and runs it: see [New] and [Proxy.Run].
func Run(ctx context.Context, opts Options, sinks ...sink.Sink) error {
	p, err := New(opts)
	if err != nil {
		return err
	}
	return p.Run(ctx, sinks...)
}

// Run brings what the cluster says to the sinks until ctx ends; then it returns
// nil. With Options.Sink.Once it ends as soon as every sink has been told
// everything once. It returns an error if it cannot go on: a sink that does not
// start, manifests that cannot be read to begin with, an API server that
// refuses what it needs where Once says not to wait. Whatever goes wrong later is
// logged and retried, and the dataplane keeps its state.
//
// A Proxy runs once.
func (p *Proxy) Run(ctx context.Context, sinks ...sink.Sink) error {
	if len(sinks) == 0 {
		return errors.New("nothing to run: no sink given")
	}
	if !p.start() {
		return errors.New("proxy runs already, or has ended")
	}
	defer close(p.ended)
	drive := p.newDrivers(sinks)

	group, running := errgroup.WithContext(ctx)
	watching, stopWatching := context.WithCancel(running)
	group.Go(func() error { return p.watch(watching, p.state) })
	group.Go(func() error {
		p.warnOfUnknownNode(watching)
		return nil
	})
	group.Go(func() error {
		defer stopWatching()
		return drive(running)
	})
	err := group.Wait()
	if err == context.Cause(ctx) && !p.opts.Sink.Once {
		return nil
	}
	return err
}

// warnOfUnknownNode says so if the cluster does not know the node: a name that is
// misspelt makes nothing local, and fails in no other way.
func (p *Proxy) warnOfUnknownNode(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-p.state.Synced():
	}
	if _, known := p.state.Snapshot().Nodes.Get(p.opts.NodeName); !known {
		klog.FromContext(ctx).Info("No such node, so far: no zone is known, and local is what names it", "node", p.opts.NodeName)
	}
}

// start reports whether the proxy had not been started before.
func (p *Proxy) start() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	started := p.started
	p.started = true
	return !started
}

// newDrivers gives each sink its driver, and returns what runs them until all
// have ended, or the first fails.
func (p *Proxy) newDrivers(sinks []sink.Sink) func(context.Context) error {
	var drivers []*sink.Driver
	var feeds []*feed.Feed
	for i, s := range sinks {
		opts := p.opts.Sink
		if len(sinks) > 1 {
			opts.Name += strconv.Itoa(i)
		}
		if p.opts.Observe != nil {
			opts.Observer = p.opts.Observe(opts.Name)
		}
		source := feed.New(p.state, p.opts.NodeName)
		feeds = append(feeds, source)
		drivers = append(drivers, sink.NewDriver(source, s, opts))
	}
	p.mu.Lock()
	p.drivers = drivers
	p.mu.Unlock()
	return func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		for i, d := range drivers {
			group.Go(func() error {
				defer feeds[i].Close()
				return d.Run(ctx)
			})
		}
		return group.Wait()
	}
}

// State returns the state of the cluster, to be read.
func (p *Proxy) State() cluster.Reader { return p.state }

// NodeName returns the name of the node that is proxied for.
func (p *Proxy) NodeName() string { return p.opts.NodeName }

// Node returns the node that is proxied for, nil while it is not known.
func (p *Proxy) Node() *api.Node {
	node, _ := p.state.Snapshot().Nodes.Get(p.opts.NodeName)
	return node
}

// Status returns where each sink stands; nothing before Run.
func (p *Proxy) Status() []sink.Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []sink.Status
	for _, d := range p.drivers {
		all = append(all, d.Status())
	}
	return all
}

// WaitApplied returns nil when every sink has acknowledged all that the cluster
// has said by now. It returns an error if ctx ends before, or Run does. It may be
// called before Run.
func (p *Proxy) WaitApplied(ctx context.Context) error {
	select {
	case <-p.state.Synced():
	case <-p.ended:
		return errors.New("waiting for the cluster's state to be read: the proxy has ended")
	case <-ctx.Done():
		return fmt.Errorf("waiting for the cluster's state to be read: %w", context.Cause(ctx))
	}
	revision := p.state.Snapshot().Revision
	p.mu.Lock()
	drivers := p.drivers
	p.mu.Unlock()
	for _, d := range drivers {
		if err := d.WaitApplied(ctx, uint64(revision)); err != nil {
			return err
		}
	}
	return nil
}
