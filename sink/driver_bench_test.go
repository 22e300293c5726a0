// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// BenchmarkDriverOneChange measures the time from a change of one service until the
// driver calls Observer.Synced. This time must depend neither on the number of services
// nor on the number of failing services.
func BenchmarkDriverOneChange(b *testing.B) {
	for _, bc := range []struct{ services, failing int }{{1000, 0}, {50_000, 0}, {50_000, 10_000}} {
		b.Run(fmt.Sprintf("services=%d/failing=%d", bc.services, bc.failing), func(b *testing.B) {
			views := manyViews(bc.services)
			src := sinktest.NewSource()
			src.Set(views...)
			src.MarkSynced()
			s := sink.Func(func(_ context.Context, c *sink.Changes) error {
				var failed sink.Failed
				if c.First {
					for _, v := range views[:bc.failing] {
						failed.Add(v.Key(), errBusy)
					}
				}
				return failed.Err()
			})
			synced := make(chan sink.SyncResult, 1)
			opts := sink.Options{
				Observer: sink.Observer{Synced: func(r sink.SyncResult) { synced <- r }},
			}
			ctx, cancel := context.WithCancel(b.Context())
			ended := make(chan error)
			d := sink.NewDriver(src, s, opts)
			d.SetBackoff(sink.Backoff{Initial: 1 << 60, Max: 1 << 60})
			go func() { ended <- d.Run(ctx) }()
			for r := range synced {
				if r.Passed {
					break
				}
			}
			last := views[len(views)-1].Key()
			versions := []*api.View{view(last, 2), view(last, 3)}
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				src.Set(versions[n%2])
				<-synced
			}
			cancel()
			<-ended
		})
	}
}
