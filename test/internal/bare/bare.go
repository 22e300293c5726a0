// SPDX-License-Identifier: Apache-2.0

// Package bare reads the objects that every service proxy must read, and discards them.
// Measurements of proxies use it as the baseline.
package bare

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// The label selectors of a service proxy that has no proxy name.
const (
	serviceLabels = "!service.kubernetes.io/service-proxy-name"
	sliceLabels   = serviceLabels + ",!service.kubernetes.io/headless"
)

// Reflect starts client-go's reflectors for Services and EndpointSlices, which run until
// ctx ends. It returns nil when both reflectors have listed all objects.
func Reflect(ctx context.Context, config *rest.Config) error {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	services, slices := discardStore{make(chan struct{})}, discardStore{make(chan struct{})}
	reflect := func(resource string, c cache.Getter, labels string, expected runtime.Object, store discardStore) {
		lw := cache.NewFilteredListWatchFromClient(c, resource, "", func(o *metav1.ListOptions) { o.LabelSelector = labels })
		go cache.NewReflector(lw, expected, store, 0).RunWithContext(ctx)
	}
	reflect("services", client.CoreV1().RESTClient(), serviceLabels, &corev1.Service{}, services)
	reflect("endpointslices", client.DiscoveryV1().RESTClient(), sliceLabels, &discoveryv1.EndpointSlice{}, slices)
	for _, s := range []discardStore{services, slices} {
		select {
		case <-s.listed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// discardStore is a reflector's store that discards all objects.
type discardStore struct{ listed chan struct{} }

func (discardStore) Add(any) error                 { return nil }
func (discardStore) Update(any) error              { return nil }
func (discardStore) Delete(any) error              { return nil }
func (discardStore) Resync() error                 { return nil }
func (n discardStore) Replace([]any, string) error { close(n.listed); return nil }
