// SPDX-License-Identifier: Apache-2.0

// Package nodeproxy has what programs put around a backend so that the whole does
// what kube-proxy does on a node. It is apart from backends, so that who embeds
// one links neither Prometheus nor a parser of flags.
package nodeproxy

import (
	"github.com/kpng-project/kpng/backends/healthcheck"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

// HealthChecks are health-check node ports beside a backend, with a flag and
// metrics: it is a collector for the caller to register.
type HealthChecks struct {
	*metrics.HealthChecks
	off bool
}

// NewHealthChecks returns health checks that are served unless the flag says
// otherwise.
func NewHealthChecks() *HealthChecks { return &HealthChecks{HealthChecks: metrics.NewHealthChecks()} }

// Register adds the flag.
func (h *HealthChecks) Register(fs *pflag.FlagSet) {
	fs.BoolVar(&h.off, "no-health-checks", false, "do not serve health-check node ports")
}

// Beside returns the sinks that serve health checks at addrs: none if that is
// not wanted. Healthy is as in [healthcheck.Options]. It is what a sink that is
// an app.Companion returns.
func (h *HealthChecks) Beside(addrs nodeaddr.Source, healthy func() bool) []sink.Sink {
	if h.off {
		return nil
	}
	return []sink.Sink{healthcheck.New(healthcheck.Options{
		Addrs:   addrs,
		Healthy: healthy,
		Fault:   func(healthcheck.Fault) { h.Fault() },
		Observe: h.Ports,
	})}
}
