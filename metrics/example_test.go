// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"fmt"

	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/prometheus/client_golang/prometheus"
)

func Example() {
	registry := prometheus.NewRegistry()
	m, err := metrics.New(registry, metrics.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	source := sinktest.NewSource() // a real program has a feed, or a remote client
	source.MarkSynced()
	nothing := sink.Func(func(context.Context, *sink.Changes) error { return nil })
	err = sink.Run(context.Background(), source, nothing, sink.Options{Once: true, Observer: m.Sink("nothing")})
	if err != nil {
		fmt.Println(err)
		return
	}
	families, err := registry.Gather()
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, f := range families {
		if f.GetName() == "kpng_sink_sync_duration_seconds" {
			fmt.Println(f.GetName(), len(f.Metric), "series")
		}
	}
	// Output:
	// kpng_sink_sync_duration_seconds 2 series
}
