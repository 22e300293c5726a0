// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"k8s.io/apimachinery/pkg/types"
)

// defaultMaxPorts is the default number of service ports with series of their own.
const defaultMaxPorts = 10_000

// Traffic returns a collector of the traffic that a dataplane counts, by service port. At
// most maxPorts service ports have series of their own; 0 means 10,000. The numbers of all
// other service ports are in one series. This series has the service "other" and no
// namespace. The series of a deleted service port ends. Counters do not decrease when the
// dataplane begins to count again. Each collection reads the dataplane once, so register
// the collector only if [backends.Options.Stats] is set.
func Traffic(counter backends.Counter, maxPorts int) prometheus.Collector {
	return &traffic{counter: counter, maxPorts: cmp.Or(maxPorts, defaultMaxPorts), ports: map[trafficPort]*portTraffic{}}
}

// numbers has the values of trafficMetrics, in the same order.
type numbers [4]int64

var trafficMetrics = [len(numbers{})]struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}{
	{trafficDesc("connections_total", "New connections, by service port."), prometheus.CounterValue},
	{trafficDesc("connections_active", "Present connections, by service port."), prometheus.GaugeValue},
	{trafficDesc("from_clients_bytes_total", "Bytes from clients, by service port."), prometheus.CounterValue},
	{trafficDesc("to_clients_bytes_total", "Bytes to clients, by service port."), prometheus.CounterValue},
}

var trafficErrors = prometheus.NewDesc("kpng_service_stats_errors_total", "Times that the counters of the dataplane could not be read; the other metrics then keep their values.", nil, nil)

func trafficDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("kpng_service_"+name, help, []string{"namespace", "service", "port", "protocol"}, nil)
}

type traffic struct {
	counter  backends.Counter
	maxPorts int

	mu    sync.Mutex
	reads uint64
	ports map[trafficPort]*portTraffic
	own   int // number of ports with series of their own
	// sorted has the ports of the map ports, sorted by their labels. It is nil after the map
	// has changed.
	sorted []*portTraffic
	// counted reports which numbers the dataplane counts.
	counted [len(numbers{})]bool
	other   numbers
	errors  int
}

type trafficPort struct {
	service  types.NamespacedName
	port     string
	protocol api.Protocol
}

type portTraffic struct {
	read      uint64 // the last read that returned the port
	own       bool
	labels    []*dto.LabelPair // set if own is true
	total     numbers
	endpoints map[netip.AddrPort]*endpointTraffic
}

type endpointTraffic struct {
	read      uint64
	last, now numbers
}

// Describe implements prometheus.Collector.
func (t *traffic) Describe(to chan<- *prometheus.Desc) {
	for _, m := range trafficMetrics {
		to <- m.desc
	}
	to <- trafficErrors
}

// Collect implements prometheus.Collector. If the dataplane cannot be read, the metrics keep
// their last values.
func (t *traffic) Collect(to chan<- prometheus.Metric) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.read(); err != nil {
		t.errors++
	}
	to <- prometheus.MustNewConstMetric(trafficErrors, prometheus.CounterValue, float64(t.errors))
	send := func(n *numbers, labels []*dto.LabelPair) {
		for i, m := range trafficMetrics {
			if t.counted[i] {
				to <- &trafficMetric{m.desc, m.kind, float64(n[i]), labels}
			}
		}
	}
	if len(t.ports) > t.own || t.other != (numbers{}) {
		send(&t.other, labelsOf(&trafficPort{service: types.NamespacedName{Name: "other"}}, ""))
	}
	// The registry sorts metrics. This takes little time if the metrics are already
	// sorted.
	if t.sorted == nil {
		for _, p := range t.ports {
			if p.own {
				t.sorted = append(t.sorted, p)
			}
		}
		slices.SortFunc(t.sorted, func(a, b *portTraffic) int {
			return slices.CompareFunc(a.labels, b.labels, func(a, b *dto.LabelPair) int { return cmp.Compare(a.GetValue(), b.GetValue()) })
		})
	}
	for _, p := range t.sorted {
		send(&p.total, p.labels)
	}
}

// trafficMetric is a metric whose labels are computed in advance. The constant metrics of
// package prometheus would allocate and sort the labels of thousands of series in each
// collection.
type trafficMetric struct {
	desc   *prometheus.Desc
	kind   prometheus.ValueType
	value  float64
	labels []*dto.LabelPair
}

// Desc implements prometheus.Metric.
func (m *trafficMetric) Desc() *prometheus.Desc { return m.desc }

// Write implements prometheus.Metric.
func (m *trafficMetric) Write(to *dto.Metric) error {
	to.Label = m.labels
	if m.kind == prometheus.CounterValue {
		to.Counter = &dto.Counter{Value: &m.value}
	} else {
		to.Gauge = &dto.Gauge{Value: &m.value}
	}
	return nil
}

// labelsOf returns the labels of a service port, sorted by name.
func labelsOf(p *trafficPort, protocol string) []*dto.LabelPair {
	pair := func(name, value string) *dto.LabelPair { return &dto.LabelPair{Name: &name, Value: &value} }
	return []*dto.LabelPair{pair("namespace", p.service.Namespace), pair("port", p.port), pair("protocol", protocol), pair("service", p.service.Name)}
}

const activeNumber = 1

// read reads the dataplane. The caller holds the lock.
func (t *traffic) read() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	t.reads++
	if err := t.counter.Stats(ctx, t.note); err != nil {
		return err
	}
	for id, p := range t.ports {
		if p.read != t.reads {
			delete(t.ports, id)
			if p.own {
				t.own--
				t.sorted = nil
			}
		}
	}
	t.other[activeNumber] = 0
	for id, p := range t.ports {
		if !p.own && t.own < t.maxPorts {
			p.own = true
			t.own++
			t.sorted, p.labels = nil, labelsOf(&id, id.protocol.String())
		}
		to := &t.other
		if p.own {
			to = &p.total
			to[activeNumber] = 0
		}
		for addr, e := range p.endpoints {
			if e.read != t.reads {
				delete(p.endpoints, addr)
				continue
			}
			for i, n := range e.now {
				if i != activeNumber && n >= e.last[i] {
					n -= e.last[i]
				}
				to[i] += n
			}
			e.last = e.now
		}
	}
	return nil
}

// note adds the numbers of an endpoint to the sums of the present read.
func (t *traffic) note(s backends.Stats) bool {
	id := trafficPort{s.Service, s.Port, s.Protocol}
	p := t.ports[id]
	if p == nil {
		p = &portTraffic{endpoints: map[netip.AddrPort]*endpointTraffic{}}
		t.ports[id] = p
	}
	e := p.endpoints[s.Endpoint]
	if e == nil {
		e = &endpointTraffic{}
		p.endpoints[s.Endpoint] = e
	}
	if e.read != t.reads {
		e.now = numbers{}
	}
	p.read, e.read = t.reads, t.reads
	for i, n := range (numbers{s.Connections, s.Active, s.FromClients, s.ToClients}) {
		if n >= 0 {
			t.counted[i] = true
			e.now[i] += n
		}
	}
	return true
}
