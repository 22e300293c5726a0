// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

// FuzzDriver lets a source change and a sink fail at random, and checks that in
// the end the sink has what the source has. The recorder checks that on the way
// each service is told in order, once, from what was last acknowledged, and that
// nothing acknowledged is told again.
func FuzzDriver(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed, uint8(200))
	}
	f.Fuzz(func(t *testing.T, seed uint64, ops uint8) {
		r := rand.New(rand.NewPCG(seed, 0))
		plane := dataplane{}
		opts := sink.Options{
			MinInterval: time.Duration(r.IntN(3)) * 50 * time.Millisecond,
			Backoff:     sink.Backoff{Jitter: float64(r.IntN(2)) / 2},
		}
		run(t, opts, plane, func(w *world) {
			var blocks []chan struct{}
			for range ops {
				blocks = append(blocks, mutate(w, r, plane)...)
				if r.IntN(2) == 0 {
					synctest.Wait()
				}
			}
			for _, b := range blocks {
				close(b)
			}
			w.src.Fail(nil)
			w.src.MarkSynced()
			w.waitApplied()
			time.Sleep(time.Hour)

			plane.expect(t, w.src.Views())
			if !w.rec.Node().Equal(w.src.Node()) {
				w.Errorf("the sink has node %v, the source %v", w.rec.Node(), w.src.Node())
			}
			s := w.driver.Status()
			if s.Pending != 0 || len(s.Failing) != 0 || s.Err != nil || !s.WaitingSince.IsZero() || s.Revision != w.src.Revision() {
				w.Errorf("all is applied up to revision %d, and the status is %+v", w.src.Revision(), s)
			}
			if last := w.rec.Syncs()[len(w.rec.Syncs())-1]; time.Since(last.Ended) < 30*time.Minute {
				w.Errorf("a sync came without a change, %v ago", time.Since(last.Ended))
			}
		})
	})
}

// mutate does one thing at random to the source, the sink or the clock. It
// returns the channel to close if that is to block the sink.
func mutate(w *world, r *rand.Rand, plane dataplane) []chan struct{} {
	someKey := func() types.NamespacedName { return key(string(rune('a' + r.IntN(6)))) }
	switch r.IntN(17) {
	case 0, 1, 2, 3, 4:
		w.src.SetTriggered(time.Now(), view(someKey(), bytesUpTo(r)...))
	case 5, 6:
		w.src.Delete(someKey())
	case 7:
		w.src.SetNode(&api.Node{Name: fmt.Sprint("n", r.IntN(3))})
	case 8:
		w.src.MarkSynced()
		if r.IntN(4) == 0 {
			w.src.Lag()
		}
	case 9:
		var err error
		if r.IntN(2) == 0 {
			err = errBusy
		}
		w.src.Fail(err)
	case 10, 11, 12:
		time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
	case 13:
		w.rec.Script(sinktest.FailServices(errBusy, someKey(), someKey()))
	case 14:
		w.rec.Script(plane.half(r.IntN(4), []error{errBusy, sink.ErrStartOver, nil}[r.IntN(3)]))
	case 15:
		release := make(chan struct{})
		w.rec.Script(sinktest.Block(release))
		if r.IntN(2) == 0 {
			return []chan struct{}{release}
		}
		close(release)
	case 16:
		wait := func() time.Duration { return time.Duration(r.IntN(100)) * time.Millisecond }
		w.rec.Script(plane.pausing(wait(), wait()))
	}
	return nil
}

// bytesUpTo returns some of the bytes 1 to 4, in order.
func bytesUpTo(r *rand.Rand) []byte {
	var some []byte
	for n := byte(1); n <= 4; n++ {
		if r.IntN(2) == 0 {
			some = append(some, n)
		}
	}
	return some
}

// dataplane is a sink that programs differences only, as far as it may: the
// endpoints of each service.
type dataplane map[types.NamespacedName]map[string]bool

func (p dataplane) Sync(_ context.Context, c *sink.Changes) error {
	if c.Full {
		clear(p)
	}
	for s := range c.Services {
		p.apply(&s)
	}
	if c.Full {
		p.catchUp(c)
	}
	return nil
}

func (p dataplane) catchUp(c *sink.Changes) {
	for _, s := range c.Meanwhile() {
		p.apply(&s)
	}
}

// pausing returns a step that catches up after each wait, in a full Sync.
func (p dataplane) pausing(waits ...time.Duration) sinktest.Step {
	return func(ctx context.Context, c *sink.Changes, s sink.Sink) error {
		err := s.Sync(ctx, c)
		for _, wait := range waits {
			if time.Sleep(wait); c.Full {
				p.catchUp(c)
			}
		}
		return err
	}
}

func (p dataplane) apply(s *sink.Change) {
	if s.Retry {
		delete(p, s.Key)
		s.Old = nil
	}
	if s.New == nil {
		delete(p, s.Key)
		return
	}
	if p[s.Key] == nil {
		p[s.Key] = map[string]bool{}
	}
	for old, new := range s.Endpoints() {
		switch {
		case new == nil:
			delete(p[s.Key], old.Key())
		default:
			p[s.Key][new.Key()] = true
		}
	}
}

// half returns a step that programs the first n services, and then fails with
// err, or panics if that is nil.
func (p dataplane) half(n int, err error) sinktest.Step {
	return func(_ context.Context, c *sink.Changes, _ sink.Sink) error {
		for s := range c.Services {
			if n--; n < 0 {
				break
			}
			p.apply(&s)
		}
		if err == nil {
			panic("oops")
		}
		return err
	}
}

// expect reports how p differs from the endpoints of views.
func (p dataplane) expect(t *testing.T, views []*api.ServiceEndpoints) {
	t.Helper()
	list := func(p dataplane) (lines []string) {
		for _, k := range slices.SortedFunc(maps.Keys(p), api.CompareKeys) {
			lines = append(lines, fmt.Sprintf("%s: %v", k, slices.Sorted(maps.Keys(p[k]))))
		}
		return lines
	}
	want := dataplane{}
	for _, v := range views {
		want.apply(&sink.Change{Key: v.Key(), New: v})
	}
	if diff := cmp.Diff(list(want), list(p)); diff != "" {
		t.Errorf("the dataplane (-want +got):\n%s", diff)
	}
}
