// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
)

func TestFreshnessAgesOnlyWhileSomethingWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		m, err := metrics.New(registry, metrics.Options{KubeProxy: true})
		if err != nil {
			t.Fatal(err)
		}
		o := m.Sink("test")
		// check expects an age in seconds; -1 means that nothing was ever programmed.
		check := func(step string, want float64) {
			t.Helper()
			for _, name := range []string{"kpng_sink_sync_last_timestamp_seconds", "kubeproxy_sync_proxy_rules_last_timestamp_seconds"} {
				age := float64(time.Now().UnixNano())/1e9 - gauge(t, registry, name)
				if want < 0 && age < 1e6 || want >= 0 && age != want {
					t.Errorf("%s: %s is %v s old, want %v", step, name, age, want)
				}
			}
		}
		check("before the first sync", -1)
		o.Pending(3)
		o.Synced(sink.SyncResult{})
		time.Sleep(time.Minute)
		check("others wait", 60)
		o.Pending(0)
		o.Synced(sink.SyncResult{})
		time.Sleep(24 * time.Hour)
		check("a quiet day", 0)
		o.Pending(1)
		time.Sleep(5 * time.Second)
		check("a change waits", 5)
		o.Synced(sink.SyncResult{Err: errors.New("full")})
		o.Pending(0)
		time.Sleep(5 * time.Second)
		check("the sync failed", 10)
		o.Synced(sink.SyncResult{})
		check("a retry succeeded", 0)
	})
}
