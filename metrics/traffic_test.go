// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/metrics"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/types"
)

// fakeCounter is a dataplane with these counters.
type fakeCounter struct {
	all []backends.Stats
	err error
}

func (c *fakeCounter) Stats(_ context.Context, yield func(backends.Stats) bool) error {
	for _, s := range c.all {
		if !yield(s) {
			break
		}
	}
	return c.err
}

func trafficOf(service string, endpoint byte, connections, active, from, to int64) backends.Stats {
	return backends.Stats{
		Service: types.NamespacedName{Namespace: "ns", Name: service}, Port: "http", Protocol: api.TCP,
		Endpoint:    netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, endpoint}), 80),
		Connections: connections, Active: active, FromClients: from, ToClients: to,
	}
}

func TestTrafficCountersNeverDecrease(t *testing.T) {
	registry, c := prometheus.NewPedanticRegistry(), &fakeCounter{}
	registry.MustRegister(metrics.Traffic(c, 1))
	for _, step := range []struct {
		name        string
		all         []backends.Stats
		err         error
		web, active float64 // of the service web
		other       float64
		errors      float64
		ended       bool // web has no series
	}{
		{name: "endpoints and parts of an endpoint are added", all: []backends.Stats{trafficOf("web", 1, 5, 2, 10, 20), trafficOf("web", 1, 1, 1, 0, 0), trafficOf("web", 2, 4, 0, 1, 1)}, web: 10, active: 3},
		{name: "only the difference counts", all: []backends.Stats{trafficOf("web", 1, 7, 1, 10, 20), trafficOf("web", 2, 4, 0, 1, 1)}, web: 11, active: 1},
		{name: "an endpoint is removed", all: []backends.Stats{trafficOf("web", 2, 5, 0, 1, 1)}, web: 12},
		{name: "the numbers begin again", all: []backends.Stats{trafficOf("web", 2, 3, 0, 1, 1)}, web: 15},
		{name: "reading fails", all: []backends.Stats{trafficOf("web", 2, 9, 9, 9, 9)}, err: errors.New("busy"), web: 15, errors: 1},
		{name: "more ports than series", all: []backends.Stats{trafficOf("web", 2, 3, 0, 1, 1), trafficOf("a", 1, 2, 0, 1, 1), trafficOf("b", 1, 3, 0, 1, 1)}, web: 15, other: 5, errors: 1},
		{name: "services are deleted", other: 5, errors: 1, ended: true},
	} {
		c.all, c.err = step.all, step.err
		got := exported(t, registry)
		want := map[string]float64{
			"kpng_service_connections_total ns http TCP web": step.web, "kpng_service_connections_active ns http TCP web": step.active,
			"kpng_service_connections_total    other": step.other, "kpng_service_stats_errors_total": step.errors,
		}
		if step.ended {
			delete(want, "kpng_service_connections_total ns http TCP web")
			delete(want, "kpng_service_connections_active ns http TCP web")
		}
		if step.other == 0 {
			delete(want, "kpng_service_connections_total    other")
		}
		for name := range got {
			if _, ok := want[name]; !ok && name != "kpng_service_connections_active    other" && !strings.Contains(name, "_bytes_total") {
				t.Errorf("%s: unexpected metric %s", step.name, name)
			}
		}
		for name := range want {
			if got[name] != want[name] {
				t.Errorf("%s: metric %s is %v, want %v", step.name, name, got[name], want[name])
			}
		}
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("problems %v, error %v", problems, err)
	}
}

func TestTrafficOmitsNumbersThatAreNotCounted(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(metrics.Traffic(&fakeCounter{all: []backends.Stats{trafficOf("web", 1, 5, -1, -1, -1)}}, 0))
	want := map[string]float64{"kpng_service_connections_total ns http TCP web": 5, "kpng_service_stats_errors_total": 0}
	if diff := cmp.Diff(want, exported(t, registry)); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// BenchmarkTraffic scrapes 10,000 services with ten endpoints.
func BenchmarkTraffic(b *testing.B) {
	c := &fakeCounter{}
	for i := range 10_000 {
		for endpoint := range byte(10) {
			c.all = append(c.all, trafficOf(fmt.Sprint("service-", i), endpoint, int64(i), 1, 1e6, 1e6))
		}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics.Traffic(c, 0))
	handler := promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	b.ReportAllocs()
	for b.Loop() {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	}
}
