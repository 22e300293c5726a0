// SPDX-License-Identifier: Apache-2.0

// Package kube fills a cluster.State from a Kubernetes API server.
//
//	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
//	…
//	err = kube.Watch(ctx, state, kube.Options{Config: config, NodeName: node})
//
// The API server filters Services and EndpointSlices. So the cost of a proxy depends only
// on the services for this proxy, not on the size of the cluster. Watch converts each
// object when it arrives, and writes the result to the state. It keeps no API objects and
// no other cache. A program that already runs informers passes its informers instead of a
// Config (see [Informers]).
//
// The state is not synced until all kinds of objects have been listed once. If the server
// becomes unreachable later, the state keeps its content. When the server is reachable
// again, Watch writes only the differences.
//
// # Permissions
//
// Watch needs the verbs list and watch, cluster-wide, on services, on nodes, and on
// endpointslices of API group discovery.k8s.io. FollowServiceCIDRs needs them on servicecidrs
// of API group networking.k8s.io. Errors name a missing permission.
//
// # Slices of a named proxy
//
// The EndpointSlice controller copies a service's labels to its slices. So the server can
// filter slices by the label service.kubernetes.io/service-proxy-name. But slices of a
// wanted service may lack the label, because the controller did not create them or has
// not labelled them yet. While such slices exist, Watch requests all slices and drops the
// slices of other services.
//
// When a service becomes wanted, Watch writes the service together with its slices. It first
// waits for a slice with the label. The wait is less than a second, or up to six seconds if
// many services become wanted. If no such slice arrives, it requests the slices. If a request
// fails, Watch writes the service without them, and repeats the request with a backoff of up
// to a minute. Other services and slices never wait for a request.
package kube

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// Options configures Watch. Either Config or Informers is required, but not both.
type Options struct {
	// These options select the services for the proxy, and the metadata to keep.
	watcher.Options

	// Config configures connections to the API server. Watch uses a copy with four changes.
	// The content type is protobuf. Compression is off, because with it the first listing
	// takes two to three times longer. The timeout is off, because it would end watches. The
	// client-side rate limit is off unless QPS or RateLimiter is set.
	Config *rest.Config

	// Informers, if set, are the source of objects instead of an API server.
	Informers *Informers

	// NodeName is the name of the only Node object to watch. Empty means all Node objects.
	NodeName string

	// FailFast makes Watch return an error that occurs before the state is synced, instead
	// of retrying. It has no effect with Informers, which handle errors themselves.
	FailFast bool

	// StaleAfter is the time after which the state is stale (see cluster.Tx.SetStale). It
	// begins when the watch for a kind of objects ends, and lasts until a request for this
	// kind succeeds. Default: 3 minutes.
	StaleAfter time.Duration
}

// Validate returns the error that Watch would return for o. The options of package
// watcher must be valid. Exactly one of Config and Informers must be set. No informer may
// be missing or have objects of the wrong kind.
func (o Options) Validate() error {
	if _, err := watcher.New(o.Options); err != nil {
		return err
	}
	if (o.Config == nil) == (o.Informers == nil) {
		return errors.New("exactly one of Config and Informers is required")
	}
	return o.Informers.validate()
}

// Watch keeps state equal to the API server's state until ctx ends. It then stops its
// goroutines and returns nil. It calls state.SetSynced when all kinds of objects have
// been listed. If a request fails, it logs the error and retries with a backoff of up to
// a minute. Watch returns an error only if options are invalid, if an informer delivers
// objects of the wrong kind, or because of Options.FailFast.
//
// A state may be passed to Watch only once, and must have no other writer.
func Watch(ctx context.Context, state *cluster.State, opts Options) error {
	if err := opts.Validate(); err != nil {
		return err
	}
	converter, err := watcher.New(opts.Options)
	if err != nil {
		return err
	}
	running, end := context.WithCancelCause(ctx)
	defer end(nil)
	w := newWatch(ctx, state, opts)
	w.converter, w.end = converter, end
	w.unlisted = map[string]bool{services: true, endpointSlices: true, nodes: true}
	if opts.Informers != nil {
		err = w.followInformers(running, opts.Informers)
	} else {
		err = w.followServer(running, opts.Config)
	}
	if err == nil && ctx.Err() == nil {
		err = context.Cause(running)
	}
	end(nil)
	w.close()
	return err
}

func newWatch(ctx context.Context, state *cluster.State, opts Options) *watch {
	return &watch{opts: opts, state: state, logger: klog.FromContext(ctx), outages: map[string]*outage{}}
}

// close waits for the goroutines of the watch. The context of the watch has ended.
func (w *watch) close() {
	w.running.Wait()
	w.decoding.Lock()
	defer w.decoding.Unlock()
	w.ended = true
	for _, o := range w.outages {
		o.timer.Stop()
	}
}

// whileRunning calls f unless Watch has ended. Watch does not return while f runs.
func (w *watch) whileRunning(f func()) {
	w.decoding.RLock()
	defer w.decoding.RUnlock()
	if !w.ended {
		f()
	}
}

type watch struct {
	opts      Options
	state     *cluster.State
	converter *watcher.Converter
	client    *client // nil if Options.Informers is set
	logger    klog.Logger
	// end makes Watch return an error.
	end     func(error)
	running sync.WaitGroup

	// The lock decoding is held while goroutines of client-go decode objects. These
	// goroutines may outlive Watch. If ended is true, they decode no more objects.
	decoding sync.RWMutex
	ended    bool

	mu sync.Mutex
	// unlisted contains the resources that have not been listed yet.
	unlisted map[string]bool
	// outages contains each resource whose last request failed, or whose watch ended.
	outages map[string]*outage
}

// The API's names of the resources.
const (
	services       = "services"
	endpointSlices = "endpointslices"
	nodes          = "nodes"
	serviceCIDRs   = "servicecidrs"
)

func isClusterScoped(resource string) bool { return resource == nodes || resource == serviceCIDRs }

// listed records that a resource was listed. When all resources were listed, it marks the
// state as synced.
func (w *watch) listed(resource string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.unlisted, resource)
	if len(w.unlisted) == 0 && !w.state.IsSynced() {
		w.state.SetSynced()
		w.warnOfName()
	}
}

// warnOfName logs a warning if a named proxy has no services, because the name may be
// misspelled.
func (w *watch) warnOfName() {
	if w.opts.ServiceProxyName == "" {
		return
	}
	for _, s := range w.state.Snapshot().States.All() {
		if s.Service != nil {
			return
		}
	}
	w.logger.Info("Warning: no Service is for this proxy; is its name right?",
		"label", watcher.LabelServiceProxyName, "value", w.opts.ServiceProxyName)
}

// reportDelay logs the resources that are not listed within the given time, if any.
func (w *watch) reportDelay(ctx context.Context, after time.Duration, message string) {
	select {
	case <-w.state.Changed(0):
	case <-ctx.Done():
	case <-time.After(after):
		w.mu.Lock()
		defer w.mu.Unlock()
		w.logger.Info(message, "of", slices.Sorted(maps.Keys(w.unlisted)), "waited", after)
	}
}
