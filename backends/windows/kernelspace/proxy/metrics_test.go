// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestWhatABackendDoesWithHNSIsShown(t *testing.T) {
	c := newHNSMetrics()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(c)
	o := c.observer()
	o.Called("CreateLoadBalancer", time.Millisecond, nil)
	o.Called("CreateLoadBalancer", time.Millisecond, errors.New("no"))
	o.Holds(3, 2)
	if err := testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP kpng_hns_call_failures_total Calls of HNS that failed, by call.
# TYPE kpng_hns_call_failures_total counter
kpng_hns_call_failures_total{call="CreateLoadBalancer"} 1
# HELP kpng_hns_endpoints Endpoints that HNS has for kpng.
# TYPE kpng_hns_endpoints gauge
kpng_hns_endpoints 3
# HELP kpng_hns_load_balancers Load balancers that HNS has for kpng.
# TYPE kpng_hns_load_balancers gauge
kpng_hns_load_balancers 2
`), "kpng_hns_call_failures_total", "kpng_hns_endpoints", "kpng_hns_load_balancers"); err != nil {
		t.Error(err)
	}
	if got := testutil.CollectAndCount(c, "kpng_hns_call_duration_seconds"); got != 1 {
		t.Errorf("there are %d series of call durations, want 1", got)
	}
}
