// SPDX-License-Identifier: Apache-2.0

package program

import (
	"testing"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

func TestTrafficHasMetricsWithTheFlag(t *testing.T) {
	for _, on := range []bool{false, true} {
		b := Userspace().(*command.Backend)
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		b.Register(fs)
		args := []string{"--add-addresses=false"}
		if on {
			args = append(args, "--stats")
		}
		if err := fs.Parse(args); err != nil {
			t.Fatal(err)
		}
		if err := b.Configure(); err != nil {
			t.Fatal(err)
		}
		registry := prometheus.NewPedanticRegistry()
		registry.MustRegister(b.Parts().Collectors...)
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, f := range families {
			switch f.GetName() {
			case "kpng_service_stats_errors_total":
				found = true
				if n := f.GetMetric()[0].GetCounter().GetValue(); n != 0 {
					t.Errorf("the counters could not be read %v times", n)
				}
			}
		}
		if found != on {
			t.Errorf("flag --stats %t: metrics of traffic %t", on, found)
		}
	}
}
