// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// During each Sync, the feed loses its position. Nevertheless each pass ends, all services
// are delivered, and deleted services are pruned.
func TestPassesEndUnderAnyRateOfChanges(t *testing.T) {
	bare := func(name string, port int32) *api.Service {
		return &api.Service{Namespace: "ns", Name: name, HealthCheckNodePort: port}
	}
	for _, tc := range []struct {
		name string
		// churn changes the state during Sync number n.
		churn func(tx *cluster.Tx, n int)
		takes time.Duration
	}{
		{"the Sync is short, but one service changes 10,001 times", func(tx *cluster.Tx, n int) {
			for i := range 10_001 {
				tx.SetService(bare("hot", int32(i+n%2)))
			}
		}, time.Second},
		{"the Sync takes longer than deletions are kept", func(tx *cluster.Tx, n int) {
			tx.DeleteService(key(fmt.Sprint("a-temporary-", n-1)))
			tx.SetService(bare(fmt.Sprint("a-temporary-", n), 1))
		}, 22 * time.Minute},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state := cluster.New(cluster.Options{})
				state.Update(func(tx *cluster.Tx) {
					for i := range 25 {
						tx.SetService(bare(fmt.Sprintf("s%02d", i), 0))
					}
				})
				state.SetSynced()
				f := feed.New(state, "n1")
				defer f.Close()
				var syncs, firsts atomic.Int32
				var quiet atomic.Bool
				programmed := map[types.NamespacedName]bool{}
				var pass sink.Pass
				d := sink.NewDriver(f, sink.Func(func(_ context.Context, c *sink.Changes) error {
					pass.Begin(c)
					for s := range c.Services {
						programmed[s.Key] = s.New != nil
					}
					for key := range programmed {
						if pass.Stale(key) || !programmed[key] {
							delete(programmed, key)
						}
					}
					syncs.Add(1)
					if c.First {
						firsts.Add(1)
					}
					if !quiet.Load() {
						time.Sleep(tc.takes / 2)
						state.Update(func(tx *cluster.Tx) { tc.churn(tx, int(syncs.Load())) })
						time.Sleep(tc.takes / 2)
						state.Update(func(tx *cluster.Tx) { tx.SetService(bare("clock", syncs.Load())) })
					}
					return nil
				}), sink.Options{BatchSize: 10})
				ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.Logger{}))
				ended := make(chan error)
				go func() { ended <- d.Run(ctx) }()
				revision := uint64(state.Snapshot().Revision)
				if err := d.WaitApplied(ctx, revision); err != nil {
					t.Error(err)
				}
				time.Sleep(4 * tc.takes)
				synctest.Wait()
				if s := d.Status(); s.Passes < 2 || firsts.Load() < 2 || syncs.Load() < 7 {
					t.Errorf("%d Syncs, %d of them begin a pass, and %d passes are complete", syncs.Load(), firsts.Load(), s.Passes)
				}
				quiet.Store(true)
				time.Sleep(tc.takes) // the end of the last Sync that changes the state
				if err := d.WaitApplied(ctx, uint64(state.Snapshot().Revision)); err != nil {
					t.Error(err)
				}
				if want := state.Snapshot().States.Len(); len(programmed) != want {
					t.Errorf("%d services are programmed, want %d: %v", len(programmed), want, programmed)
				}
				cancel()
				<-ended
			})
		})
	}
}
