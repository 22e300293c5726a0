// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/usage"
)

func TestKubeProxySyncedNeedsEachFamily(t *testing.T) {
	const queued4, queued6 = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv4\"} 1.7e+09\n", "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family=\"IPv6\"} 1.7e+09\n"
	const synced4, synced6 = "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 1.7e+09\n", "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"} 1.7e+09\n"
	const old = "# HELP kubeproxy_sync_proxy_rules_last_timestamp_seconds The last time\nkubeproxy_sync_proxy_rules_last_queued_timestamp_seconds 1.7e+09\nkubeproxy_sync_proxy_rules_last_timestamp_seconds "
	for _, test := range []struct {
		name, metrics string
		synced        bool
	}{
		{"no metrics", "", false},
		{"nothing synced", queued4 + queued6, false},
		{"IPv4 synced", queued4 + queued6 + synced4, false},
		{"both synced", queued4 + queued6 + synced4 + synced6, true},
		{"one family only", queued4 + synced4, true},
		{"older version, not synced", old + "0\n", false},
		{"older version, synced", old + "1.7e+09\n", true},
		{"kpng with --kubeproxy-metrics", "kpng_build_info{} 1\n" + synced4, false},
	} {
		if err := kubeProxySynced([]byte(test.metrics)); (err == nil) != test.synced {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

func TestWaitEndsWhenTheProxyIsReady(t *testing.T) {
	var requests atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/readyz" {
			t.Errorf("request of %s", r.URL.Path)
		}
		if requests.Add(1) == 1 {
			http.NotFound(w, r) // as kube-proxy does
			return
		}
		io.WriteString(w, "ok")
	}))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")
	if out := mustExecute(t, "wait", "kpng", "--address", address); out != "kpng has programmed all services\n" || requests.Load() != 2 {
		t.Errorf("after %d requests: %s", requests.Load(), out)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := execute(ctx, "wait", "kube-proxy", "--address", freeAddress(t)); err == nil || usage.ExitStatus(err) != 1 {
		t.Errorf("without a proxy: %v", err)
	}
	if _, err := execute(t.Context(), "wait", "kube-proxy", "--address", "10249"); usage.ExitStatus(err) != 2 {
		t.Errorf("wrong address: %v", err)
	}
}
