// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

const (
	statsFlag         = "stats"
	statsMaxPortsFlag = "stats-max-ports"
)

// statsFlags adds the flags of counters.
func statsFlags(fs *pflag.FlagSet, on *bool) {
	fs.BoolVar(on, statsFlag, false, "count connections and bytes by service and endpoint, and serve metrics of them; this costs time for each connection")
	fs.Uint(statsMaxPortsFlag, 10_000, "with --stats: at most this `number` of service ports have metrics of their own; the others are added up")
}

// statsOn reports whether the command counts traffic.
func statsOn(fs *pflag.FlagSet) bool { return flagValue(fs, statsFlag) == "true" }

// addTraffic adds the traffic counts of the parts to the metrics and the status page.
func addTraffic(parts *command.Parts, fs *pflag.FlagSet) {
	var all counters
	for _, s := range []sink.Sink{parts.Sink, parts.Beside["localhost"]} {
		if c, ok := sink.As[backends.Counter](s); ok {
			all = append(all, c)
		}
	}
	parts.Counter = all
	maxPorts, _ := fs.GetUint(statsMaxPortsFlag) // ignore the error: the flag exists
	parts.Collectors = append(parts.Collectors, metrics.Traffic(all, int(maxPorts)))
}

// counters is a [backends.Counter] of several dataplanes.
type counters []backends.Counter

// Stats implements [backends.Counter].
func (c counters) Stats(ctx context.Context, yield func(backends.Stats) bool) error {
	var errs []error
	more := true
	for _, counter := range c {
		if more {
			errs = append(errs, counter.Stats(ctx, func(s backends.Stats) bool { more = yield(s); return more }))
		}
	}
	return errors.Join(errs...)
}
