// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
)

// Options say what to watch and how. Exactly one of Config and Informers is
// required.
type Options struct {
	// Options select the services and what is kept of them.
	watcher.Options

	// Config says how to reach the API server. It is copied, with these changes:
	// protobuf as content type, no compression (see Compression), no timeout,
	// which would end watches, and no client-side rate limit unless QPS or
	// RateLimiter is set.
	Config *rest.Config

	// Informers, if set, are the source instead.
	Informers *Informers

	// NodeName is the one node whose object is watched. Empty means all nodes.
	NodeName string

	// Compression lets the API server compress its answers. It saves network
	// traffic and makes the first listing two to three times slower. Default:
	// false.
	Compression bool

	// FailFast makes Watch return the first error that it meets before
	// everything has been listed, instead of trying again. With Informers it has
	// no effect: their errors do not come here.
	FailFast bool

	// OnError, if set, is told each failed list or watch request. It is called
	// from several goroutines and must return soon.
	OnError func(*Error)
}

// Watch keeps state equal to what the API server has, and calls its SetSynced
// when everything has been listed once. It returns nil when ctx is done, with
// nothing left running. Errors of the server are logged, told to
// Options.OnError, and retried with a backoff of up to a minute; Watch returns
// an error only if the options are invalid, or with Options.FailFast, which
// returns an [*Error].
//
// A state takes one Watch in its life, and other writers only if they leave
// alone what Watch writes, all of it in scope 0.
func Watch(ctx context.Context, state *cluster.State, opts Options) error {
	converter, err := watcher.New(opts.Options)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &watch{
		opts:      opts,
		state:     state,
		converter: converter,
		logger:    klog.FromContext(ctx),
		end:       cancel,
		gate:      gate{open: state.SetSynced},
	}
	switch {
	case (opts.Config == nil) == (opts.Informers == nil):
		return errors.New("exactly one of Config and Informers is required")
	case opts.Informers != nil:
		return w.followInformers(ctx, opts.Informers)
	default:
		return w.followServer(ctx, opts.Config)
	}
}

// watch is one call of Watch.
type watch struct {
	opts      Options
	state     *cluster.State
	converter *watcher.Converter
	clients   *clients // nil with informers
	logger    klog.Logger
	// end ends the watch with an error.
	end     func(error)
	gate    gate
	running sync.WaitGroup
}

// What is watched, by the names that the API has for it.
const (
	services       = "services"
	endpointSlices = "endpointslices"
	nodes          = "nodes"
)

// noticeAfter is how long the first lists may take before it is said which ones
// are missing, and giveUpAfter before Options.FailFast calls it an error.
// Informers that nobody has started say nothing, nor does client-go of a server
// that hangs up without an answer.
const (
	noticeAfter = 10 * time.Second
	giveUpAfter = time.Minute
)

// awaitLists makes the state wait for the first list of each kind.
func (w *watch) awaitLists(ctx context.Context) {
	w.gate.wait(services, endpointSlices, nodes)
	late := func(after time.Duration) bool {
		select {
		case <-w.state.Synced():
		case <-ctx.Done():
		case <-time.After(after):
			return true
		}
		return false
	}
	w.running.Go(func() {
		if !late(noticeAfter) {
			return
		}
		w.logger.Info("Still waiting for the first list", "of", w.gate.pending(), "waited", noticeAfter)
		if w.opts.FailFast && w.clients != nil && late(giveUpAfter-noticeAfter) {
			for _, resource := range w.gate.pending() {
				w.end(&Error{Verb: "list", Resource: schema.GroupResource{Resource: resource}, Server: w.clients.server(),
					Err: fmt.Errorf("nothing listed within %v", giveUpAfter)})
			}
		}
	})
}

// serviceStore returns the store for the services that the proxy wants.
func (w *watch) serviceStore(to writer[api.Service]) *store[*corev1.Service, api.Service] {
	return newStore(w, services, to, func(s *corev1.Service, i *item[api.Service]) {
		if !w.converter.WantsService(s) {
			return
		}
		service, problems := w.converter.Service(s)
		w.log(problems)
		i.value, i.selectorless = service, watcher.Selectorless(s)
	})
}

// sliceStore returns a store for the slices that the proxy wants. With a
// ServiceProxyName it takes all: which ones are wanted the merger knows.
func (w *watch) sliceStore(to writer[api.EndpointSlice]) *store[*discoveryv1.EndpointSlice, api.EndpointSlice] {
	return newStore(w, endpointSlices, to, func(s *discoveryv1.EndpointSlice, i *item[api.EndpointSlice]) {
		i.labelled = w.converter.WantsSlice(s)
		if !i.labelled && w.opts.ServiceProxyName == "" {
			return
		}
		slice, problems := w.converter.EndpointSlice(s)
		w.log(problems)
		i.value = slice
	})
}

// nodeStore returns the store for the node, or nodes, that Options.NodeName says.
func (w *watch) nodeStore(to writer[api.Node]) *store[*corev1.Node, api.Node] {
	return newStore(w, nodes, to, func(n *corev1.Node, i *item[api.Node]) {
		if w.opts.NodeName != "" && n.Name != w.opts.NodeName {
			return
		}
		node, problems := w.converter.Node(n)
		w.log(problems)
		i.value = node
	})
}

func (w *watch) log(problems []watcher.Problem) {
	for _, p := range problems {
		w.logger.Info("Left out what cannot be used", "kind", p.Kind, "object", klog.KRef(p.Object.Namespace, p.Object.Name),
			"field", p.Field, "problem", p.Message)
	}
}
