// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// noticeAfter is the time after which the log names the resources not yet listed.
const noticeAfter = 10 * time.Second

// followServer fills the state from an API server until ctx ends.
func (w *watch) followServer(ctx context.Context, config *rest.Config) error {
	var err error
	s := w.newStores(w.find, gatherFor)
	if w.client, err = newClient(ctx, config, s.byKind()); err != nil {
		return fmt.Errorf("client for API server %s: %w", config.Host, err)
	}
	defer w.client.connections.CloseAll()
	w.running.Go(func() { w.reportDelay(ctx, noticeAfter, "Still waiting for the first list of resources") })
	services, slices, nodes := newQueue(s.services), newQueue(s.slices), newQueue(s.nodes)
	for _, q := range [...]*queue{services, slices, nodes} {
		w.running.Go(func() { q.run(ctx) })
	}
	w.running.Go(func() { w.reflect(ctx, w.serviceSource(), services) })
	w.running.Go(func() { w.reflect(ctx, w.nodeSource(), nodes) })
	if s.selection != nil {
		w.running.Go(func() { s.selection.lookUps(ctx) })
	}
	w.running.Go(func() {
		if s.selection == nil {
			w.reflect(ctx, w.sliceSource(false), slices)
			return
		}
		select {
		case <-s.selection.ready:
		case <-ctx.Done():
		}
		s.selection.follow(ctx, func(ctx context.Context, filtered, again bool) {
			src := w.sliceSource(filtered)
			src.latest.Store(again)
			w.reflect(ctx, src, slices)
		})
	})
	w.running.Wait()
	return nil
}

func (w *watch) serviceSource() *source {
	src := &source{client: w.client.core, resource: schema.GroupResource{Resource: services}}
	if name := w.opts.ServiceProxyName; name != "" {
		src.labels = watcher.LabelServiceProxyName + "=" + name
	} else {
		src.labels = "!" + watcher.LabelServiceProxyName
		src.newFields = fields.OneTermNotEqualSelector("spec.clusterIP", corev1.ClusterIPNone).String()
	}
	return src
}

func (w *watch) nodeSource() *source {
	src := &source{client: w.client.core, resource: schema.GroupResource{Resource: nodes}}
	if name := w.opts.NodeName; name != "" {
		src.fields = fields.OneTermEqualSelector("metadata.name", name).String()
	}
	return src
}

// sliceSource returns the source of EndpointSlices. If filtered is true, the source has
// only slices with the proxy's label.
func (w *watch) sliceSource(filtered bool) *source {
	var labels []string
	switch {
	case w.opts.ServiceProxyName == "":
		labels = append(labels, "!"+corev1.IsHeadlessService)
	case filtered:
		labels = append(labels, watcher.LabelServiceProxyName+"="+w.opts.ServiceProxyName)
	}
	if w.opts.ServiceNameLabel != "" {
		labels = append(labels, w.opts.ServiceNameLabel)
	}
	return &source{
		client: w.client.discovery, resource: schema.GroupResource{Group: discoveryv1.GroupName, Resource: endpointSlices},
		labels: strings.Join(labels, ","),
	}
}

// serviceLabel returns the label that contains the name of an EndpointSlice's service.
func (w *watch) serviceLabel() string {
	return cmp.Or(w.opts.ServiceNameLabel, discoveryv1.LabelServiceName)
}

// find implements finder with a request to the API server.
func (w *watch) find(ctx context.Context, services []types.NamespacedName) (found []*discoveryv1.EndpointSlice, err error) {
	namespace := services[0].Namespace
	names := make([]string, len(services))
	for i, service := range services {
		names[i] = service.Name
		if service.Namespace != namespace {
			namespace = metav1.NamespaceAll
		}
	}
	src := w.sliceSource(false)
	options := metav1.ListOptions{LabelSelector: fmt.Sprintf("%s in (%s),%s!=%s",
		w.serviceLabel(), strings.Join(names, ","), watcher.LabelServiceProxyName, w.opts.ServiceProxyName)}
	var list discoveryv1.EndpointSliceList
	err = src.request(&options).Namespace(namespace).Do(ctx).Into(&list)
	for i := range list.Items {
		found = append(found, &list.Items[i])
	}
	return found, (&reporter{watch: w, resource: src.resource}).request(ctx, "list", err)
}

// noResync is a resync period so long that no resync happens. Without a period,
// reflectors before client-go v0.35 wait in a way that stops the clock of synctest.
const noResync = 100 * 365 * 24 * time.Hour

// reflect keeps the store equal to the objects of src until ctx ends.
func (w *watch) reflect(ctx context.Context, src *source, store objectStore) {
	r := &reporter{watch: w, resource: src.resource}
	reflector := cache.NewReflectorWithOptions(src.listWatch(r, store), store.example(), store, cache.ReflectorOptions{
		Name:            "kpng/" + src.resource.Resource,
		TypeDescription: src.resource.String(),
		ResyncPeriod:    noResync,
	})
	// This is the default backoff of client-go's reflectors.
	backoff := wait.Backoff{Duration: 800 * time.Millisecond, Cap: 30 * time.Second, Steps: 38, Factor: 2, Jitter: 1}
	_ = backoff.DelayWithReset(clock.RealClock{}, 2*time.Minute).Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := reflector.ListAndWatchWithContext(ctx)
		if reported := new(requestError); err != nil && ctx.Err() == nil && !errors.As(err, &reported) {
			klog.FromContext(ctx).Error(err, "Reflector failed; retrying", "resource", src.resource.String())
		}
		return false, nil
	})
}
