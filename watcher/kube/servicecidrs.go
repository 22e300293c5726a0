// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/kpng-project/kpng/cluster"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// FollowServiceCIDRs calls the function set when it has listed all ServiceCIDR objects, and
// again after each change of an object. The argument has the CIDRs of all objects, in any
// order. When ctx ends, it returns nil. Calls of the function do not overlap, and the
// function may keep and modify its argument. As in kube-proxy, an object counts from its
// creation until its deletion, whether or not it is ready.
//
// If a request fails, FollowServiceCIDRs logs the error and retries with a backoff of up to a
// minute. So while the API server cannot be reached, or has no such objects (before v1.33),
// it does not call the function. It logs and ignores invalid CIDRs. It returns an error only
// if config is invalid.
func FollowServiceCIDRs(ctx context.Context, config *rest.Config, set func([]netip.Prefix)) error {
	// This state records only the failures of requests, and has no reader.
	w := newWatch(ctx, cluster.New(cluster.Options{}), Options{})
	s := &store[*networkingv1.ServiceCIDR, []netip.Prefix]{
		watch: w, kind: "ServiceCIDR", resource: serviceCIDRs, mu: new(sync.Mutex), reduce: reduceServiceCIDR,
		decoders: sync.Pool{New: func() any {
			return newDecoder[networkingv1.ServiceCIDR](fieldSet{1: metadata[1], 2: all})
		}},
		to:     &serviceCIDRWriter{set: set},
		listed: func() {},
	}
	ctx, end := context.WithCancel(ctx)
	defer w.close()
	defer end()
	var err error
	if w.client, err = newClient(ctx, config, map[string]objectStore{s.kind: s}); err != nil {
		return fmt.Errorf("client for API server %s: %w", config.Host, err)
	}
	defer w.client.connections.CloseAll()
	w.reflect(ctx, &source{client: w.client.networking, resource: schema.GroupResource{Group: networkingv1.GroupName, Resource: serviceCIDRs}}, s)
	return nil
}

func reduceServiceCIDR(c *networkingv1.ServiceCIDR, i *item[[]netip.Prefix]) {
	i.value = new([]netip.Prefix)
	for _, text := range c.Spec.CIDRs {
		cidr, err := netip.ParsePrefix(text)
		if err != nil {
			i.problems = append(i.problems, fmt.Errorf("spec.cidrs: %w", err))
			continue
		}
		*i.value = append(*i.value, cidr.Masked())
	}
}

// serviceCIDRWriter passes the CIDRs of all objects to a function.
type serviceCIDRWriter struct {
	set     func([]netip.Prefix)
	objects map[types.NamespacedName][]netip.Prefix
}

func (w *serviceCIDRWriter) write(i *item[[]netip.Prefix]) {
	if i.value == nil {
		delete(w.objects, i.key)
	} else {
		w.objects[i.key] = *i.value
	}
	w.flush()
}

func (w *serviceCIDRWriter) replace(all []*item[[]netip.Prefix]) {
	w.objects = map[types.NamespacedName][]netip.Prefix{}
	for _, i := range all {
		w.objects[i.key] = *i.value
	}
	w.flush()
}

func (w *serviceCIDRWriter) flush() { w.set(slices.Concat(slices.Collect(maps.Values(w.objects))...)) }
