// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/kpng-project/kpng/api"
)

// followServer fills the state from an API server until ctx is done.
func (w *watch) followServer(ctx context.Context, config *rest.Config) error {
	var err error
	if w.clients, err = newClients(config, w.opts.Compression); err != nil {
		return fmt.Errorf("client for API server %s: %w", config.Host, err)
	}
	defer w.clients.close()
	w.awaitLists(ctx)

	var toServices writer[api.Service] = serviceWriter{w.state}
	var toSlices writer[api.EndpointSlice] = sliceWriter{w.state}
	if w.opts.ServiceProxyName != "" {
		m := newMerger(w)
		defer m.close()
		m.startOwn = func(service types.NamespacedName, to viewWriter) context.CancelFunc {
			ctx, cancel := context.WithCancel(ctx)
			w.startMore(ctx, w.ownSource(service), to)
			return cancel
		}
		m.startShared = func(to viewWriter) { w.startMore(ctx, w.sharedSource(), to) }
		toServices, toSlices = mergedServices{m}, viewWriter{m, m.newView()}
	}
	w.running.Go(func() { reflect(ctx, w, w.serviceSource(), &corev1.Service{}, w.serviceStore(toServices)) })
	w.running.Go(func() {
		reflect(ctx, w, w.sliceSource(), &discoveryv1.EndpointSlice{}, w.sliceStore(toSlices))
	})
	w.running.Go(func() { reflect(ctx, w, w.nodeSource(), &corev1.Node{}, w.nodeStore(nodeWriter{w.state})) })
	w.running.Wait()

	if failed := new(Error); errors.As(context.Cause(ctx), &failed) {
		return failed
	}
	return nil
}

// startMore watches slices that the common watch leaves out.
func (w *watch) startMore(ctx context.Context, src source[*discoveryv1.EndpointSliceList], to viewWriter) {
	store := w.sliceStore(to)
	store.listed = func() {} // the gate waits for services instead
	w.running.Go(func() { reflect(ctx, w, src, &discoveryv1.EndpointSlice{}, store) })
}
