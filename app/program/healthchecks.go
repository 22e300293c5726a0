// SPDX-License-Identifier: Apache-2.0

package program

import (
	"net/netip"

	"github.com/kpng-project/kpng/node/healthcheck"
	"github.com/kpng-project/kpng/node/nodeaddr"
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

// companions returns a function for Parts.Companions. That function creates a
// health-check server at addrs.
func (h *healthChecks) companions(addrs nodeaddr.Source) func(healthy func() bool) map[string]sink.Sink {
	return func(healthy func() bool) map[string]sink.Sink {
		if h.off {
			return nil
		}
		return map[string]sink.Sink{"healthchecks": healthcheck.New(healthcheck.Options{
			NodeAddresses: addrs,
			Healthy:       healthy,
			Failed: func(service types.NamespacedName, at netip.AddrPort, err error) {
				h.faults.Inc()
				h.failed(service, at, err)
			},
			Observe: func(open, failing int) {
				h.open.Set(float64(open))
				h.failing.Set(float64(failing))
			},
		})}
	}
}
