// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

// largeService returns a service and its EndpointSlice with these numbers of ports,
// external IPs and endpoints.
func largeService(ports, addrs, endpoints int) (*api.Service, *api.EndpointSlice) {
	words, endpointWords := []string{"10.0.0.9"}, []string{}
	for i := range ports {
		words = append(words, fmt.Sprintf("port-%d=%d", i, 1000+i))
	}
	for i := range endpoints {
		endpointWords = append(endpointWords, fmt.Sprintf("172.16.%d.%d", i>>8, i&255))
	}
	svc := sinktest.Service("ns/large", strings.Join(words, " "))
	svc.IPs.ExternalIPs = apitest.IPs("203.0.0.0", addrs)
	return svc, sinktest.Slices(svc, strings.Join(endpointWords, " "))[0]
}

// flipped returns a copy of a slice with the given readiness of one endpoint.
func flipped(s *api.EndpointSlice, ready bool) *api.EndpointSlice {
	changed := *s
	changed.Endpoints = append([]api.SliceEndpoint(nil), s.Endpoints...)
	changed.Endpoints[3].Conditions = api.Conditions{Ready: ready, Serving: ready}
	return &changed
}

func TestViewsOfLargeServicesAreNotComputedAhead(t *testing.T) {
	svc, s := largeService(updates.LargeSize/10, 1, 10)
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(svc)
		tx.SetSlice(s)
		tx.SetService(service("small"))
		tx.SetSlice(slice("small-1", "small", "x"))
		tx.SetService(&api.Service{Namespace: "ns", Name: "external", Type: api.ExternalName})
	})
	state.SetSynced()
	f := feed.New(state, "n")
	defer f.Close()
	u, _ := f.Next()
	f.Advance(u)
	sizes := map[string]bool{}
	for key, view := range u.After(types.NamespacedName{}) {
		sizes[key.Name] = view.Size >= updates.LargeSize
		if got := view.Get(); got.Key() != key || updates.Size(got) > view.Size {
			t.Errorf("the view of %s is of %s, with size %d, which is more than %d", key, got.Key(), updates.Size(got), view.Size)
		}
	}
	if len(sizes) != 2 || !sizes["large"] || sizes["small"] {
		t.Errorf("large services: %v", sizes)
	}

	before := u.View(key("large"))
	state.Update(func(tx *cluster.Tx) {
		tx.SetSlice(flipped(s, false))
		tx.SetSlice(slice("small-1", "small"))
	})
	u, _ = f.Next()
	f.Advance(u)
	if len(u.Changes) != 1 || u.Changes[0].Key != key("small") {
		t.Errorf("changes: %v", describe(u))
	}
	if len(u.Large) != 1 || u.Large[0].Key != key("large") {
		t.Fatalf("large changes: %v", u.Large)
	}
	if old := u.Large[0].Old.Get(); !old.Equal(before) {
		t.Error("the old view of the large service is not the view before the change")
	}
	if now := u.View(key("large")); len(now.Endpoints) != len(before.Endpoints)-1 {
		t.Errorf("the new view has %d endpoints, the old view %d", len(now.Endpoints), len(before.Endpoints))
	}

	state.Update(func(tx *cluster.Tx) { tx.DeleteService(key("large")) })
	u, _ = f.Next()
	if len(u.Large) != 1 || u.View(key("large")) != nil {
		t.Errorf("after the deletion: %v", u.Large)
	}
}

// BenchmarkChangeBesideLargeService changes a service while one endpoint of a large service
// flips. It reports how long the other service waits, and how long the large one takes.
func BenchmarkChangeBesideLargeService(b *testing.B) {
	for _, shape := range [][3]int{{1, 1, 10}, {500, 1, 50}, {2000, 1, 50}, {50, 1000, 100}} {
		b.Run(fmt.Sprintf("ports=%d/addresses=%d/endpoints=%d", shape[0], shape[1], shape[2]), func(b *testing.B) {
			svc, s := largeService(shape[0], shape[1], shape[2])
			state := cluster.New(cluster.Options{})
			state.Update(func(tx *cluster.Tx) {
				tx.SetService(svc)
				tx.SetSlice(s)
			})
			state.SetSynced()
			f := feed.New(state, "n")
			defer f.Close()
			changed := make(chan types.NamespacedName, 2)
			programmed := sink.Events(noHandler{})
			d := sink.NewDriver(f, sink.Func(func(ctx context.Context, c *sink.Changes) error {
				err := programmed.Sync(ctx, c)
				for s := range c.Services {
					changed <- s.Key
				}
				return err
			}), sink.Options{})
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() { ended <- d.Run(ctx) }()
			<-changed
			if err := d.WaitSynced(ctx); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			var small time.Duration
			for n := 0; b.Loop(); n++ {
				begin := time.Now()
				other := service("zz")
				other.Ports[0].Port = int32(1 + n%2)
				state.Update(func(tx *cluster.Tx) {
					tx.SetSlice(flipped(s, n%2 == 1))
					tx.SetService(other)
				})
				for range 2 {
					if k := <-changed; k == other.Key() {
						small += time.Since(begin)
					}
				}
			}
			b.ReportMetric(small.Seconds()*1e3/float64(b.N), "ms/other-service")
			cancel()
			<-ended
		})
	}
}

// noHandler is a handler that does nothing.
type noHandler struct{}

func (noHandler) SetService(context.Context, *api.Service) error                        { return nil }
func (noHandler) DeleteService(context.Context, *api.Service) error                     { return nil }
func (noHandler) SetEndpoint(context.Context, *api.Service, *api.Endpoint) error        { return nil }
func (noHandler) DeleteEndpoint(context.Context, *api.Service, *api.Endpoint) error     { return nil }
func (noHandler) SetFrontend(context.Context, *api.Service, nodeview.Frontend) error    { return nil }
func (noHandler) DeleteFrontend(context.Context, *api.Service, nodeview.Frontend) error { return nil }
