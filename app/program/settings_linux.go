// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
)

// settingsReport is a sink that passes on services to another sink. It reports wrong kernel
// settings that the services need. It reads the settings for each report, because other
// programs may change them.
type settingsReport struct {
	sink.Sink
	settings []sysctl.Setting
	// ipv4 and ipv6 are true after a service of the family was seen. A node without IPv6
	// services does not need the settings of IPv6.
	ipv4, ipv6 atomic.Bool
}

// Unwrap returns the other sink, see sink.As.
func (r *settingsReport) Unwrap() sink.Sink { return r.Sink }

// Sync implements sink.Sink.
func (r *settingsReport) Sync(ctx context.Context, c *sink.Changes) error {
	for s := range c.Services {
		if s.New == nil {
			continue
		}
		for _, family := range s.New.Service.Families() {
			if family == api.IPv4 {
				r.ipv4.Store(true)
			} else {
				r.ipv6.Store(true)
			}
		}
	}
	return r.Sink.Sync(ctx, c)
}

// problems returns a sentence for each wrong setting.
func (r *settingsReport) problems() (all []string) {
	for i := range r.settings {
		s := &r.settings[i]
		if s.Family == api.IPv4 && !r.ipv4.Load() || s.Family == api.IPv6 && !r.ipv6.Load() {
			continue
		}
		switch value, err := sysctl.Kernel.Read(s.Name); {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			all = append(all, err.Error())
		case !s.Accepts(value):
			all = append(all, fmt.Sprintf("kernel setting %s is %d; with %d, %s", s.Name, value, s.Value, s.Reason))
		}
	}
	return all
}

// metric counts the problems.
func (r *settingsReport) metric() prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: "kpng", Name: "sysctls_wrong", Help: "Kernel settings that services need and that have another value; kpng status names them.",
	}, func() float64 { return float64(len(r.problems())) })
}
