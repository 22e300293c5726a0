// SPDX-License-Identifier: Apache-2.0

package collector

import (
	"iter"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/types"
)

func TestEachPortHasItsMetrics(t *testing.T) {
	stats := []userspace.PortStats{{
		Service:  types.NamespacedName{Namespace: "default", Name: "web"},
		Protocol: api.TCP, Port: 80,
		Connections: 5, Active: 2, DialFailures: 1, BytesToEndpoints: 100, BytesFromEndpoints: 200,
	}}
	const want = `
# HELP kpng_userspace_connections_active TCP connections and UDP clients that have not ended.
# TYPE kpng_userspace_connections_active gauge
kpng_userspace_connections_active{namespace="default",port="80",protocol="TCP",service="web"} 2
# HELP kpng_userspace_connections_total TCP connections and UDP clients that came.
# TYPE kpng_userspace_connections_total counter
kpng_userspace_connections_total{namespace="default",port="80",protocol="TCP",service="web"} 5
# HELP kpng_userspace_dial_failures_total Times that an endpoint did not take a connection or a datagram.
# TYPE kpng_userspace_dial_failures_total counter
kpng_userspace_dial_failures_total{namespace="default",port="80",protocol="TCP",service="web"} 1
# HELP kpng_userspace_received_bytes_total Bytes received from endpoints.
# TYPE kpng_userspace_received_bytes_total counter
kpng_userspace_received_bytes_total{namespace="default",port="80",protocol="TCP",service="web"} 200
# HELP kpng_userspace_sent_bytes_total Bytes sent to endpoints.
# TYPE kpng_userspace_sent_bytes_total counter
kpng_userspace_sent_bytes_total{namespace="default",port="80",protocol="TCP",service="web"} 100
`
	c := New(func() iter.Seq[userspace.PortStats] { return slices.Values(stats) })
	if err := testutil.CollectAndCompare(c, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
