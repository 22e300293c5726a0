// SPDX-License-Identifier: Apache-2.0

package kpng

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/diffstore"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/together"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/kube"
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

	// NodeName is the node to proxy for. Default and form: see [NodeName].
	NodeName string

	// Sinks are the sinks to drive. [Run] appends those that it is given.
	Sinks []Sink
}

// Sink is a sink and the settings of its driver. Each sink has a driver of its own: one that is
// slow or fails does not hold up the others.
type Sink struct {
	Sink sink.Sink
	// Options are the settings. The names of several sinks must differ; by default they are
	// numbered from 0. If all sinks have Once, the proxy ends when all are done.
	Options sink.Options
}

// NodeName returns the name of a node as kube-proxy works it out: the given one or, without it,
// the environment variable NODE_NAME or the host's name, without white space around it and in
// lower case.
func NodeName(given string) (string, error) {
	for _, name := range [...]string{given, os.Getenv("NODE_NAME")} {
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			return name, nil
		}
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("get the host's name, as no node name is given: %w", err)
	}
	return strings.ToLower(strings.TrimSpace(name)), nil
}

// Proxy watches a cluster and drives sinks. Its methods may be called at any
// time and from any goroutine.
type Proxy struct {
	nodeName string
	state    *cluster.State
	watch    func(context.Context, *cluster.State) error
	feeds    []*feed.Feed
	drivers  []*sink.Driver
	once     bool // all sinks have Options.Once

	started   atomic.Bool
	nodeKnown atomic.Bool   // the cluster had the node once
	ended     chan struct{} // closed when Run returns
}

// New returns a Proxy. It checks the options and reads the kubeconfig, if there is one, and does
// not connect to anything.
func New(opts Options) (*Proxy, error) {
	name, err := NodeName(opts.NodeName)
	if err != nil {
		return nil, err
	}
	opts.NodeName = name
	sinks, err := named(opts.Sinks)
	if err != nil {
		return nil, err
	}
	once := !slices.ContainsFunc(sinks, func(s Sink) bool { return !s.Options.Once })
	watch, err := source(opts, once)
	if err != nil {
		return nil, err
	}
	p := &Proxy{nodeName: name, state: cluster.New(cluster.Options{}), watch: watch, once: once, ended: make(chan struct{})}
	for _, s := range sinks {
		f := feed.New(p.state, name)
		p.feeds = append(p.feeds, f)
		p.drivers = append(p.drivers, sink.NewDriver(f, s.Sink, s.Options))
	}
	return p, nil
}

// named returns sinks with their default names.
func named(sinks []Sink) ([]Sink, error) {
	if len(sinks) == 0 {
		return nil, errors.New("no sink given")
	}
	sinks = slices.Clone(sinks)
	taken := map[string]bool{}
	for i := range sinks {
		s := &sinks[i]
		if s.Sink == nil {
			return nil, fmt.Errorf("sink %d (name %q) is nil", i, s.Options.Name)
		}
		if s.Options.Name == "" && len(sinks) > 1 {
			s.Options.Name = strconv.Itoa(i)
		}
		if taken[s.Options.Name] {
			return nil, fmt.Errorf("two sinks have the name %q", s.Options.Name)
		}
		taken[s.Options.Name] = true
	}
	return sinks, nil
}

// Run makes a Proxy with Options.Sinks and, with default settings, the given sinks, and runs it:
// see [New] and [Proxy.Run].
func Run(ctx context.Context, opts Options, sinks ...sink.Sink) error {
	opts.Sinks = slices.Clone(opts.Sinks)
	for _, s := range sinks {
		opts.Sinks = append(opts.Sinks, Sink{Sink: s})
	}
	p, err := New(opts)
	if err != nil {
		return err
	}
	return p.Run(ctx)
}

// Run programs the sinks until ctx ends; then it returns nil. If all sinks have Options.Once it
// ends as soon as all are done. It returns an error if it cannot go on: a sink that does not
// start, manifests that cannot be read to begin with, an API server that refuses what it needs
// where Once says not to wait. Errors of sinks that do not stop are joined to it. Whatever goes
// wrong later is logged and retried, and the dataplane keeps its state.
//
// A Proxy runs once.
func (p *Proxy) Run(ctx context.Context) error {
	if p.started.Swap(true) {
		return errors.New("proxy runs already, or has ended")
	}
	defer close(p.ended)
	defer func() {
		for _, f := range p.feeds {
			f.Close()
		}
	}()
	watching, stopWatching := context.WithCancel(ctx)
	defer stopWatching()
	var drivers []func(context.Context) error
	for _, d := range p.drivers {
		drivers = append(drivers, d.Run)
	}
	err := together.Run(watching,
		func(ctx context.Context) error { return p.watch(ctx, p.state) },
		p.followNode,
		func(ctx context.Context) error {
			err := together.Run(ctx, drivers...)
			stopWatching()
			return err
		})
	if err != nil && err == context.Cause(watching) && (ctx.Err() == nil || !p.once) {
		return nil
	}
	return err
}

// followNode waits until the cluster has the node, and warns if it does not have it to begin
// with: a misspelt name makes nothing local, and fails in no other way.
func (p *Proxy) followNode(ctx context.Context) error {
	var revision diffstore.Revision
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.state.Changed(revision):
		}
		snapshot := p.state.Snapshot()
		if _, ok := snapshot.Nodes.Get(p.nodeName); ok {
			p.nodeKnown.Store(true)
			return nil
		}
		if revision == 0 {
			klog.FromContext(ctx).Error(nil, "Node object not found; zone unknown, locality decided by node name", "node", p.nodeName)
		}
		revision = snapshot.Revision
	}
}

// State returns the state of the cluster, to be read.
func (p *Proxy) State() cluster.Reader { return p.state }

// NodeName returns the name of the node that is proxied for.
func (p *Proxy) NodeName() string { return p.nodeName }

// Node returns the node that is proxied for, nil while it is not known.
func (p *Proxy) Node() *api.Node {
	node, _ := p.state.Snapshot().Nodes.Get(p.nodeName)
	return node
}

// Status returns the status of each sink.
func (p *Proxy) Status() []sink.Status {
	var all []sink.Status
	for _, d := range p.drivers {
		all = append(all, d.Status())
	}
	return all
}

// Health returns what health checks report: see package health.
func (p *Proxy) Health() health.Report {
	return health.Of(p.Status(), p.Node(), p.nodeKnown.Load())
}

// StartOver makes every sink get all services again, in a pass: for a program that knows that
// the dataplane lost its state, as when a switch has reconnected. It returns immediately, and
// the passes begin as soon as no Sync runs.
func (p *Proxy) StartOver() {
	for _, d := range p.drivers {
		d.StartOver()
	}
}

// WaitSynced returns nil when every sink has programmed every service once, except services
// that fail. It returns an error if ctx ends before, or Run does. It may be called before Run.
func (p *Proxy) WaitSynced(ctx context.Context) error {
	for _, d := range p.drivers {
		if err := d.WaitSynced(ctx); err != nil {
			return err
		}
	}
	return nil
}

// WaitApplied returns nil when every sink has acknowledged the cluster's state as it is at the
// call. It returns an error if ctx ends before, or Run does. It may be called before Run.
func (p *Proxy) WaitApplied(ctx context.Context) error {
	select {
	case <-p.state.Synced():
	case <-p.ended:
		return errors.New("wait for the cluster's state to be read: the proxy has ended")
	case <-ctx.Done():
		return fmt.Errorf("wait for the cluster's state to be read: %w", context.Cause(ctx))
	}
	revision := p.state.Snapshot().Revision
	for _, d := range p.drivers {
		if err := d.WaitApplied(ctx, uint64(revision)); err != nil {
			return err
		}
	}
	return nil
}
