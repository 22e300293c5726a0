// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// freshness is the last time when a sink had programmed everything. While no service waits
// and none fails, this is the present time, so that it does not age on a quiet cluster.
type freshness struct {
	mu      sync.Mutex
	last    time.Time // zero before the first Sync that succeeded
	waiting int       // services that wait
	failed  bool      // the last Sync failed
}

func (f *freshness) synced(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.advance()
	f.failed = err != nil
	if err == nil {
		f.last = time.Now()
	}
}

func (f *freshness) pending(services int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.advance()
	f.waiting = services
}

// advance sets f.last to the present time if everything is programmed.
func (f *freshness) advance() {
	if !f.last.IsZero() && f.waiting == 0 && !f.failed {
		f.last = time.Now()
	}
}

// seconds returns the time as a Unix time, or 0 before the first Sync that succeeded.
func (f *freshness) seconds() float64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.advance()
	if f.last.IsZero() {
		return 0
	}
	return float64(f.last.UnixNano()) / 1e9
}

// freshnessVec collects the freshness of each sink.
type freshnessVec struct {
	desc *prometheus.Desc

	mu    sync.Mutex
	sinks map[string]*freshness
}

func (v *freshnessVec) of(sink string) *freshness {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.sinks[sink] == nil {
		v.sinks[sink] = &freshness{}
	}
	return v.sinks[sink]
}

// Describe implements prometheus.Collector.
func (v *freshnessVec) Describe(to chan<- *prometheus.Desc) { to <- v.desc }

// Collect implements prometheus.Collector.
func (v *freshnessVec) Collect(to chan<- prometheus.Metric) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for sink, f := range v.sinks {
		to <- prometheus.MustNewConstMetric(v.desc, prometheus.GaugeValue, f.seconds(), sink)
	}
}
