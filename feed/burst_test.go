// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// A state, its feed and its driver keep no memory of 100,000 services that were created and
// deleted.
func TestHeapReturnsAfterBurst(t *testing.T) {
	const kept, most = 10_000, 110_000
	state := cluster.New(cluster.Options{})
	set := func(tx *cluster.Tx, i int) {
		addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		name := fmt.Sprintf("svc-%06d", i)
		tx.SetService(sinktest.Service("ns/"+name, addr.String()+" 80>8080"))
		tx.SetSlice(slice(name, name, "a"))
	}
	remove := func(tx *cluster.Tx, i int) {
		tx.DeleteSlice(key(fmt.Sprintf("svc-%06d", i)))
		tx.DeleteService(key(fmt.Sprintf("svc-%06d", i)))
	}
	each := func(from, to int, f func(*cluster.Tx, int)) {
		state.Update(func(tx *cluster.Tx) {
			for i := from; i < to; i++ {
				f(tx, i)
			}
		})
	}
	each(0, kept, set)
	state.SetSynced()

	ignore := sink.Func(func(_ context.Context, c *sink.Changes) error {
		for range c.Services {
		}
		return nil
	})
	f := feed.New(state, "node-a")
	defer f.Close()
	driver := sink.NewDriver(f, ignore, sink.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- driver.Run(ctx) }()
	defer func() {
		cancel()
		<-done
	}()
	wait := func() {
		for ; driver.Status().Revision < state.Snapshot().Revision; time.Sleep(time.Millisecond) {
		}
	}
	heap := func() float64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&stats)
		return float64(stats.HeapAlloc) / (1 << 20)
	}

	wait()
	before := heap()
	each(kept, most, set)
	wait()
	full := heap()
	each(kept, most, remove)
	wait()
	each(kept, kept+1, set) // so that no reader holds the burst's last snapshot
	wait()
	after := heap()
	t.Logf("heap before, during and after the burst: %.2f, %.2f and %.2f MB", before, full, after)
	if after > 1.05*before {
		t.Error("the heap does not return to within 5 %")
	}
	runtime.KeepAlive(state)
}
