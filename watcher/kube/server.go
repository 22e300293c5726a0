// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
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
	w.gate.wait(services, endpointSlices, nodes)

	var toServices writer[api.Service] = serviceWriter{w.state}
	if w.opts.ServiceProxyName != "" {
		h := newHandmade(w)
		defer h.close()
		h.startOwn = func(own *ownService) context.CancelFunc { return w.startOwn(ctx, h, own) }
		h.startSingle = func() { w.startSingle(ctx, h) }
		toServices = handmadeServices{h}
	}
	w.running.Go(func() { reflect(ctx, w, w.serviceSource(), &corev1.Service{}, w.serviceStore(toServices)) })
	w.running.Go(func() {
		reflect(ctx, w, w.sliceSource(), &discoveryv1.EndpointSlice{}, w.sliceStore(w.converter.WantsSlice, sliceWriter{w.state}))
	})
	w.running.Go(func() { reflect(ctx, w, w.nodeSource(), &corev1.Node{}, w.nodeStore(nodeWriter{w.state})) })
	w.running.Wait()

	if failed := new(Error); errors.As(context.Cause(ctx), &failed) {
		return failed
	}
	return nil
}

// startOwn watches the handmade slices of one service.
func (w *watch) startOwn(ctx context.Context, h *handmade, own *ownService) context.CancelFunc {
	ctx, cancel := context.WithCancel(ctx)
	store := w.sliceStore(w.unlabelled, ownSlices{h, own})
	store.listed = func() {}
	w.running.Go(func() { reflect(ctx, w, w.ownSource(own.key), &discoveryv1.EndpointSlice{}, store) })
	return cancel
}

// startSingle watches the handmade slices of all services.
func (w *watch) startSingle(ctx context.Context, h *handmade) {
	store := w.sliceStore(w.handmade, handmadeSlices{h})
	store.listed = func() {}
	w.running.Go(func() { reflect(ctx, w, w.handmadeSource(), &discoveryv1.EndpointSlice{}, store) })
}
