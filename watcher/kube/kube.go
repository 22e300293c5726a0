// SPDX-License-Identifier: Apache-2.0

// Package kube fills a cluster.State from a Kubernetes API server.
//
//	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
//	…
//	err = kube.Watch(ctx, state, kube.Options{Config: config, NodeName: node})
//
// Services and endpoint slices are filtered on the server, so that a proxy for
// some services pays for these only, however large the cluster is. Objects are
// converted as they arrive and go straight into the state: there is no second
// cache, and no object of the API is kept. A program that has informers anyway
// hands them in instead of a Config (see [Informers]).
//
// Readers see nothing before all kinds have been listed once. From then on a
// lost server changes nothing; when it is back, only what was missed is
// written.
//
// # Permissions
//
// The verbs list and watch on services, on endpointslices of API group
// discovery.k8s.io, and on nodes, all of them cluster-wide. An error names one
// that is missing.
//
// # Slices of a proxy with a name
//
// The endpoint-slice controller copies a service's labels to its slices, so the
// server filters slices by service.kubernetes.io/service-proxy-name. While a wanted
// service has slices without the label, which others than the controller made or
// which it has not labelled yet, there is no filter; slices of other services are
// dropped as they arrive. A service that becomes wanted goes into the state
// together with its slices.
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

// Options say what to watch and how. Exactly one of Config and Informers is
// required.
type Options struct {
	// Options select the services and what is kept of them.
	watcher.Options

	// Config says how to reach the API server. It is copied, with these changes:
	// protobuf as content type, no compression, which would make the first listing
	// two to three times slower, no timeout, which would end watches, and no
	// client-side rate limit unless QPS or RateLimiter is set.
	Config *rest.Config

	// Informers, if set, are the source instead.
	Informers *Informers

	// NodeName is the one node whose object is watched, exactly as the API has
	// the name. Empty means all nodes.
	NodeName string

	// FailFast makes Watch return the first error that it meets before
	// everything has been listed, instead of trying again. With Informers it has
	// no effect: their errors do not come here.
	FailFast bool
}

// Validate returns an error if Watch would refuse the options: those of package
// watcher are invalid, there is not exactly one of Config and Informers, or an
// informer is missing or is one of another kind.
func (o Options) Validate() error {
	if _, err := watcher.New(o.Options); err != nil {
		return err
	}
	if (o.Config == nil) == (o.Informers == nil) {
		return errors.New("exactly one of Config and Informers is required")
	}
	return o.Informers.validate()
}

// Watch keeps state equal to what the API server has, and calls its SetSynced
// when everything has been listed once. It returns nil when ctx is done, with
// nothing left running. Errors of the server are logged and retried with a backoff
// of up to a minute; Watch returns an error only if the options are invalid, if an
// informer delivers objects of another kind, or with Options.FailFast.
//
// A state takes one Watch in its life, and no other writer.
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

// watch is one call of Watch.
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
	// unlisted are the resources for whose first list the state waits.
	unlisted map[string]bool
	// failedSince has, by resource, since when all requests have failed.
	failedSince map[string]time.Time
}

// What is watched, by the names that the API has for it.
const (
	services       = "services"
	endpointSlices = "endpointslices"
	nodes          = "nodes"
)

// listed notes that a resource has been listed. The state is synced with the last.
func (w *watch) listed(resource string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.unlisted, resource)
	if len(w.unlisted) == 0 {
		w.state.SetSynced()
	}
}

// reportDelay logs once which resources have not been listed after a time.
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
