// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"k8s.io/apimachinery/pkg/types"
)

// When the proxy no longer wants a service, the cost does not depend on the number of
// other services that have slices without the label.
func TestUnwantedServiceReadsOnlyItsSlices(t *testing.T) {
	measure := func(services int) time.Duration {
		w := &watch{state: cluster.New(cluster.Options{})}
		w.opts.ServiceProxyName = "x"
		n := w.newStores(nil, 0).selection
		key := func(i int) types.NamespacedName {
			return types.NamespacedName{Namespace: "ns", Name: fmt.Sprint("s", i)}
		}
		for i := range services {
			k := key(i)
			serviceSelection{n}.write(&item[api.Service]{key: k, value: &api.Service{Namespace: k.Namespace, Name: k.Name}})
			sliceSelection{n}.write(&item[api.EndpointSlice]{
				key: k, unlabelled: &origin{k, true},
				value: &api.EndpointSlice{Namespace: k.Namespace, Name: k.Name, ServiceName: k.Name},
			})
		}
		begin := time.Now()
		for i := range 100 {
			serviceSelection{n}.write(&item[api.Service]{key: key(i)})
		}
		took := time.Since(begin)
		if got := len(n.unlabelled); got != services-100 || len(n.ofService) != got {
			t.Fatalf("%d slices of %d services remain, want %d", got, len(n.ofService), services-100)
		}
		return took
	}
	var few, many time.Duration
	for range 5 {
		if few, many = measure(200), measure(10_000); many < 8*few {
			return
		}
	}
	t.Errorf("100 services become unwanted in %v among 200, in %v among 10,000", few, many)
}
