// SPDX-License-Identifier: Apache-2.0

// Package kube fills a cluster.State from a Kubernetes API server.
//
//	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
//	…
//	err = kube.Watch(ctx, state, kube.Options{Config: config, NodeName: node})
//
// The API server filters services and endpoint slices. So the cost of a proxy for some
// services depends on these only, and not on the size of the cluster. Watch converts
// objects as they arrive and writes them to the state. It keeps no second cache and no
// API objects. A program that already runs informers passes them instead of a Config (see
// [Informers]).
//
// Readers see nothing before all kinds have been listed once. If the server is lost after
// that, the state stays as it is. When the server returns, Watch writes only the
// differences.
//
// # Permissions
//
// Watch needs the verbs list and watch on services, on endpointslices of API group
// discovery.k8s.io, and on nodes, all of them cluster-wide. Errors name a missing
// permission.
//
// # Slices of a named proxy
//
// The endpoint-slice controller copies a service's labels to its slices. So the server
// can filter slices by service.kubernetes.io/service-proxy-name. Some slices of wanted
// services may lack the label: those that the controller did not create, and those that
// it has not labelled yet. While such slices exist, Watch requests all slices and drops
// those of other services. When a service becomes wanted, Watch writes the service and
// its slices in one commit.
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

// Options configure Watch. Exactly one of Config and Informers is required.
type Options struct {
	// Options select the services and the metadata to keep.
	watcher.Options

	// Config is the connection to the API server. Watch copies it and changes the content
	// type to protobuf. It disables compression, which makes the first listing two to three
	// times slower, and the timeout, which ends watches. It disables the client-side rate
	// limit unless QPS or RateLimiter is set.
	Config *rest.Config

	// Informers, if set, replace the connection.
	Informers *Informers

	// NodeName is the name of the only Node object to watch, exactly as in the API. Empty
	// means all nodes.
	NodeName string

	// FailFast makes Watch return the first error before everything has been listed, instead
	// of retrying. It has no effect with Informers, which handle their own errors.
	FailFast bool
}

// Validate returns the error that Watch would return for invalid options: invalid options
// of package watcher, not exactly one of Config and Informers, or an informer that is
// missing or has the wrong kind.
func (o Options) Validate() error {
	if _, err := watcher.New(o.Options); err != nil {
		return err
	}
	if (o.Config == nil) == (o.Informers == nil) {
		return errors.New("exactly one of Config and Informers is required")
	}
	return o.Informers.validate()
}

// Watch keeps state equal to the API server's state. It calls state.SetSynced when
// everything has been listed once. It returns nil when ctx ends, with all its goroutines
// stopped. It logs errors of the server and retries with a backoff of up to a minute.
// Watch returns an error only for invalid options, for an informer that delivers objects
// of the wrong kind, or with Options.FailFast.
//
// A state supports only one Watch in its lifetime and no other writer.
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
	w := &watch{opts: opts, state: state, converter: converter, logger: klog.FromContext(ctx), end: end}
	w.unlisted = map[string]bool{services: true, endpointSlices: true, nodes: true}
	w.failedSince = map[string]time.Time{}
	if opts.Informers != nil {
		err = w.followInformers(running, opts.Informers)
	} else {
		err = w.followServer(running, opts.Config)
	}
	if err == nil && ctx.Err() == nil {
		err = context.Cause(running)
	}
	end(nil)
	w.running.Wait()
	return err
}

type watch struct {
	opts      Options
	state     *cluster.State
	converter *watcher.Converter
	client    *client // nil with informers
	logger    klog.Logger
	// end ends the watch with an error.
	end     func(error)
	running sync.WaitGroup

	mu sync.Mutex
	// unlisted are the resources whose first list is missing.
	unlisted map[string]bool
	// failedSince maps a resource to the time since which all its requests have failed.
	failedSince map[string]time.Time
}

// The resources, with their names in the API.
const (
	services       = "services"
	endpointSlices = "endpointslices"
	nodes          = "nodes"
)

// listed records that a resource was listed. After the last one, the state is synced.
func (w *watch) listed(resource string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.unlisted, resource)
	if len(w.unlisted) == 0 {
		w.state.SetSynced()
	}
}

// reportDelay logs once, after a delay, which resources have not been listed.
func (w *watch) reportDelay(ctx context.Context, after time.Duration, message string) {
	select {
	case <-w.state.Synced():
	case <-ctx.Done():
	case <-time.After(after):
		w.mu.Lock()
		defer w.mu.Unlock()
		w.logger.Info(message, "of", slices.Sorted(maps.Keys(w.unlisted)), "waited", after)
	}
}
