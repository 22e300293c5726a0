// SPDX-License-Identifier: Apache-2.0

package program

import "github.com/prometheus/client_golang/prometheus"

// observer is a backends.Observer that counts the events of a dataplane. A field without a
// value ignores its event.
type observer struct {
	writes, failed, size, drifted, repaired prometheus.Counter
	// holds has a gauge for each kind of object.
	holds map[string]prometheus.Gauge
	// onDrift is also called for each drift.
	onDrift func()
}

// Wrote implements backends.Observer.
func (o *observer) Wrote(size int, err error) {
	if o.writes != nil {
		o.writes.Inc()
	}
	if o.size != nil {
		o.size.Add(float64(size))
	}
	if o.failed != nil && err != nil {
		o.failed.Inc()
	}
}

// Holds implements backends.Observer.
func (o *observer) Holds(kind string, n int) {
	if g := o.holds[kind]; g != nil {
		g.Set(float64(n))
	}
}

// Drifted implements backends.Observer.
func (o *observer) Drifted(now bool) {
	count := o.repaired
	if now {
		count = o.drifted
	}
	if count != nil {
		count.Inc()
	}
	if now && o.onDrift != nil {
		o.onDrift()
	}
}

func (o *observer) collectors() (list []prometheus.Collector) {
	for _, c := range [...]prometheus.Counter{o.writes, o.failed, o.size, o.drifted, o.repaired} {
		if c != nil {
			list = append(list, c)
		}
	}
	for _, g := range o.holds {
		list = append(list, g)
	}
	return list
}
