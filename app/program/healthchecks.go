// SPDX-License-Identifier: Apache-2.0

package program

import (
	"net/netip"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
)

type healthChecks struct {
	off           bool
	open, failing prometheus.Gauge
	faults        prometheus.Counter
	// failed is called for each port that cannot be opened.
	failed func(service types.NamespacedName, at netip.AddrPort, err error)
}

func newHealthChecks() *healthChecks {
	const subsystem = "healthcheck"
	return &healthChecks{
		open:    gauge(subsystem, "ports_open", "Health-check node ports that are listened on, once for each node address."),
		failing: gauge(subsystem, "ports_failing", "Health-check node ports that cannot be listened on, once for each node address."),
		faults:  counter(subsystem, "faults_total", "Times that a health-check node port could not be listened on, for a new reason."),
		failed:  func(types.NamespacedName, netip.AddrPort, error) {},
	}
}

func (h *healthChecks) register(fs *pflag.FlagSet) {
	fs.BoolVar(&h.off, "no-health-checks", false, "do not serve health-check node ports")
}

func (h *healthChecks) collectors() []prometheus.Collector {
	return []prometheus.Collector{h.open, h.failing, h.faults}
}

// parts returns the parts of a backend on a node: the dataplane that create makes, and
// beside it the server of health-check node ports.
func (h *healthChecks) parts(opts nodesinks.Options, create func(backends.Options) (sink.Sink, error)) (command.Parts, error) {
	opts.Dataplanes = []func(backends.Options) (sink.Sink, error){create}
	opts.NoHealthChecks = h.off
	opts.PortFailed = func(service types.NamespacedName, at netip.AddrPort, err error) {
		h.faults.Inc()
		h.failed(service, at, err)
	}
	opts.Ports = func(open, failing int) {
		h.open.Set(float64(open))
		h.failing.Set(float64(failing))
	}
	sinks, err := nodesinks.New(opts)
	if err != nil {
		return command.Parts{}, err
	}
	parts := command.Parts{
		Sink: sinks.Dataplanes[0], Beside: map[string]sink.Sink{},
		Collectors: h.collectors(),
	}
	if sinks.HealthChecks != nil {
		parts.Beside["healthchecks"] = sinks.HealthChecks
	}
	return parts, nil
}
