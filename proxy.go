// SPDX-License-Identifier: Apache-2.0

package kpng

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/together"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/kube"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// Options select the source of the cluster's state, the node, and the services to proxy.
// The zero value selects this machine's node and the services that kube-proxy serves.
//
// At most one of Kubeconfig, Config, Informers, Manifests and Source may be set. If none of
// them is set, kpng uses the pod's service account. Outside a cluster, it uses the same
// kubeconfig as kubectl: $KUBECONFIG, else ~/.kube/config.
type Options struct {
	// Kubeconfig is the path of a kubeconfig file.
	Kubeconfig string
	// Config describes the connection to the API server.
	Config *rest.Config
	// Informers are informers that the program already runs. The library then starts no
	// watches of its own.
	Informers *kube.Informers
	// Manifests is the path of a file or folder with Kubernetes manifests. The library
	// reads the manifests instead of an API server, and follows their changes.
	Manifests string
	// Source is your own source: a function that writes the services, slices and nodes to
	// state until ctx ends. It calls state.SetSynced when it has written all of them. If
	// it returns an error earlier, Run returns that error. With Source, Run ignores
	// Options.Services.
	Source func(ctx context.Context, state *cluster.State) error

	// Services selects the services to proxy, and the labels and annotations to keep. The
	// label service.kubernetes.io/service-proxy-name usually selects the services.
	Services watcher.Options

	// State limits the size of services. The snapshots of [Proxy.State] name the services
	// that exceed the limit. Set Resumable if a server of package remote sends the state to
	// other processes.
	State cluster.Options

	// NodeName is the name of the proxy's node. See the function [NodeName].
	NodeName string

	// Sinks are the sinks to drive. The function [Run] appends its sink arguments to Sinks.
	Sinks []Sink
}

// Sink combines a sink with the settings of its driver. Each sink has its own driver, so
// a slow or failing sink does not delay other sinks.
type Sink struct {
	Sink sink.Sink
	// Options are the driver's settings. Names of sinks must differ; by default they are
	// numbers. If Once is set for all sinks, the proxy ends when every sink is done.
	Options sink.Options
}

// NodeName returns the node name by kube-proxy's rules. This is the given name, or else
// the value of the environment variable NODE_NAME, or else the host name. The result is
// in lower case and has no surrounding white space.
func NodeName(given string) (string, error) {
	for _, name := range [...]string{given, os.Getenv("NODE_NAME")} {
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			return name, nil
		}
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("get host name (no node name is given): %w", err)
	}
	return strings.ToLower(strings.TrimSpace(name)), nil
}

// Proxy watches a cluster and drives sinks. Its methods are safe for concurrent use. The
// zero value is not usable; see [New].
type Proxy struct {
	nodeName string
	state    *cluster.State
	watch    func(context.Context, *cluster.State) error
	feeds    []sink.Source
	drivers  []*sink.Driver
	once     bool // every sink has Options.Once
	files    bool // Options.Manifests is set

	started   atomic.Bool
	nodeKnown atomic.Bool // the Node object exists or existed
	// The context life ends when Run returns. Its cause contains the error of Run.
	life context.Context
	end  context.CancelCauseFunc
}

// New returns a Proxy. It checks the options and the sinks. If there is a kubeconfig, it
// reads this file. It does not connect to the API server.
func New(opts Options) (*Proxy, error) {
	name, err := NodeName(opts.NodeName)
	if err != nil {
		return nil, err
	}
	opts.NodeName = name
	if opts.State.MaxElements < 0 {
		return nil, fmt.Errorf("option State.MaxElements is negative: %d", opts.State.MaxElements)
	}
	sinks, err := named(opts.Sinks)
	if err != nil {
		return nil, err
	}
	once := !slices.ContainsFunc(sinks, func(s Sink) bool { return !s.Options.Once })
	watch, err := source(opts, once)
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		nodeName: name, watch: watch, once: once, files: opts.Manifests != "",
		state: cluster.New(opts.State),
	}
	p.life, p.end = context.WithCancelCause(context.Background())
	p.feeds = feed.NewAll(p.state, name, len(sinks))
	for i, s := range sinks {
		d := sink.NewDriver(p.feeds[i], s.Sink, s.Options)
		if err := d.Validate(); err != nil {
			return nil, err
		}
		p.drivers = append(p.drivers, d)
	}
	return p, nil
}

// named returns a copy of sinks, with default names for sinks that have no name.
func named(sinks []Sink) ([]Sink, error) {
	if len(sinks) == 0 {
		return nil, errors.New("no sink given")
	}
	sinks = slices.Clone(sinks)
	taken := map[string]bool{}
	for i := range sinks {
		s := &sinks[i]
		if first := slices.IndexFunc(sinks[:i], func(o Sink) bool { return same(o.Sink, s.Sink) }); first >= 0 {
			return nil, fmt.Errorf("sinks %d and %d are the same %T; each driver needs its own sink", first, i, s.Sink)
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

// same reports whether both sinks are the same pointer. For pointers to values of size 0,
// it returns false, because Go does not distinguish such pointers.
func same(a, b sink.Sink) bool {
	t := reflect.TypeOf(a)
	return t != nil && t.Kind() == reflect.Pointer && t.Elem().Size() > 0 && a == b
}

// Run creates a Proxy and runs it. The given sinks are added to Options.Sinks and have
// default settings. See [New] and [Proxy.Run].
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

// Run drives the sinks until ctx ends and then returns nil. If Options.Once is set for
// all sinks, it returns nil when all sinks are done, or the cause of ctx if ctx ends
// first.
//
// Run returns an error if a sink cannot start. If the manifests cannot be read at the
// start, it starts no sink and returns an error. With Once, it also returns an error if
// the API server refuses a request. If sinks fail to stop, it returns their joined
// errors. Run logs all later failures and tries again. Meanwhile the dataplane keeps its
// state.
//
// A Proxy runs only once.
func (p *Proxy) Run(ctx context.Context) (err error) {
	if p.state == nil {
		return errors.New("run proxy: not created by New")
	}
	if p.started.Swap(true) {
		return errors.New("proxy is already running or has ended")
	}
	defer func() {
		end := errEnded
		if err != nil {
			end = fmt.Errorf("%w: %w", errEnded, err)
		}
		p.end(end)
	}()
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
	err = together.Run(watching,
		func(ctx context.Context) error { return p.watch(ctx, p.state) },
		p.followNode,
		func(ctx context.Context) error {
			if p.files { // no sink may run until the manifests were read
				select {
				case <-p.state.Changed(0):
				case <-ctx.Done():
					return nil
				}
			}
			err := together.Run(ctx, drivers...)
			stopWatching()
			return err
		})
	if err != nil && err == context.Cause(watching) && (ctx.Err() == nil || !p.once) {
		return nil
	}
	return err
}

// followNode waits for the Node object. If the object does not exist at first, followNode
// logs an error. If the node name is misspelt, only that error shows why no endpoint is
// local.
func (p *Proxy) followNode(ctx context.Context) error {
	var revision uint64
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.state.Changed(revision):
		}
		snapshot := p.state.Snapshot()
		if revision == 0 {
			services, slices := 0, 0
			for _, state := range snapshot.States.All() {
				if state.Service != nil {
					services++
				}
				slices += len(state.Slices)
			}
			klog.FromContext(ctx).Info("Read the state of the cluster", "node", p.nodeName, "services", services, "slices", slices)
		}
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

// State returns the state of the cluster. Only the proxy may write to it.
func (p *Proxy) State() *cluster.State { return p.state }

// NodeName returns the name of the proxy's node.
func (p *Proxy) NodeName() string { return p.nodeName }

// Status returns the status of each sink.
func (p *Proxy) Status() []sink.Status {
	var all []sink.Status
	for _, d := range p.drivers {
		all = append(all, d.Status())
	}
	return all
}

// Health returns the report for health checks. See package health.
func (p *Proxy) Health() health.Report {
	var node *api.Node
	if p.state.IsSynced() {
		if node, _ = p.state.Snapshot().Nodes.Get(p.nodeName); node == nil && p.files && !p.nodeKnown.Load() {
			node = &api.Node{Name: p.nodeName} // not an error: manifests need not contain Nodes
		}
	}
	return health.Of(p.Status(), node)
}

// StartOver makes every sink receive all services again, in a pass. Call it when the
// dataplane has lost its state, for example when a switch has restarted. StartOver
// returns immediately. If a Sync or a pass of a sink is running, the new pass begins after
// it. To wait for the pass, call [Proxy.WaitSynced]. See [sink.Driver.StartOver].
func (p *Proxy) StartOver() {
	for _, d := range p.drivers {
		d.StartOver()
	}
}

// WaitSynced returns nil when every sink has programmed every service, except failing
// services. If StartOver was called before, it waits for the requested passes. If ctx or
// Run ends earlier, the error names each sink that is not synced, with the reasons. It
// may be called before Run.
func (p *Proxy) WaitSynced(ctx context.Context) error {
	ctx, cancel := p.untilEnd(ctx)
	defer cancel()
	var errs []error
	for _, d := range p.drivers {
		errs = append(errs, d.WaitSynced(ctx))
	}
	return errors.Join(errs...)
}

// WaitApplied returns nil when every sink has acknowledged the present state of the
// cluster. So it also waits for services that fail. If ctx or Run ends earlier, the error
// names each sink that is not up to date, and the services that the sink lacks. It may be
// called before Run.
func (p *Proxy) WaitApplied(ctx context.Context) error {
	ctx, cancel := p.untilEnd(ctx)
	defer cancel()
	if !p.state.IsSynced() {
		select {
		case <-p.state.Changed(0):
		case <-ctx.Done():
			return fmt.Errorf("wait for the state of the cluster: %w", context.Cause(ctx))
		}
	}
	revision := p.state.Snapshot().Revision
	var errs []error
	for _, d := range p.drivers {
		errs = append(errs, d.WaitApplied(ctx, revision))
	}
	return errors.Join(errs...)
}

// untilEnd returns a context that also ends when Run returns.
func (p *Proxy) untilEnd(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.life, func() { cancel(context.Cause(p.life)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// errEnded is the cause of the end of Proxy.life.
var errEnded = errors.New("the proxy has ended")
