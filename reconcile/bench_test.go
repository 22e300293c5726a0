// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
)

type benchKey struct{ key [39]byte }

// memory is a dataplane that lists the objects of all services. Each service has 100
// objects.
type memory struct {
	views   []*api.View // listed
	number  map[string]int
	version map[*api.View]uint64
}

func (m *memory) Plan(view *api.View, emit func(benchKey, uint64)) error {
	var k benchKey
	i := m.number[view.Service.Name]
	k.key[0], k.key[1], k.key[2] = byte(i), byte(i>>8), byte(i>>16)
	for n := range 100 {
		k.key[5] = byte(n)
		value := uint64(n)
		if n == 7 {
			value += m.version[view]
		}
		emit(k, value)
	}
	return nil
}

func (m *memory) List(_ context.Context, emit func(benchKey, uint64)) error {
	for _, v := range m.views {
		_ = m.Plan(v, emit)
	}
	return nil
}

func (m *memory) Apply(context.Context, []Op[benchKey, uint64]) error { return nil }

// BenchmarkObjects measures changes of one object. It also measures the first pass, a pass
// that changes nothing, and the Reconciler's memory for each object.
func BenchmarkObjects(b *testing.B) {
	for _, services := range []int{100, 10_000} {
		b.Run(fmt.Sprint(services*100), func(b *testing.B) {
			m := &memory{number: map[string]int{}, version: map[*api.View]uint64{}}
			changes := make([]sink.Change, services)
			for i := range changes {
				v := &api.View{Service: &api.Service{Namespace: "default", Name: fmt.Sprint("s", i)}}
				m.number[v.Service.Name] = i
				changes[i] = sink.Change{Key: v.Key(), New: v}
			}
			r := New(m, Options[benchKey, uint64]{Equal: func(a, b uint64) bool { return a == b }})
			deliver := func(c sink.Changes, changes []sink.Change) {
				c.Services = slices.Values(changes)
				if err := r.Sync(b.Context(), &c); err != nil {
					b.Fatal(err)
				}
			}
			objects := float64(services * 100)
			pass := func() float64 {
				start := time.Now()
				for i := 0; i < services; i += 100 {
					deliver(sink.Changes{First: i == 0, Last: i+100 >= services}, changes[i:i+100])
				}
				return float64(time.Since(start).Nanoseconds()) / objects
			}
			heap := func() uint64 {
				var stats runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&stats)
				return stats.HeapAlloc
			}
			before := heap()
			first := pass()
			size := float64(heap()-before) / objects
			for _, ch := range changes {
				m.views = append(m.views, ch.New)
			}
			second := pass()
			i := 0
			for b.Loop() {
				v := *changes[i%services].New
				changes[i%services].New = &v
				m.version[&v] = uint64(i)
				deliver(sink.Changes{}, changes[i%services:i%services+1])
				delete(m.version, &v)
				i++
			}
			b.ReportMetric(first, "first-ns/object")
			b.ReportMetric(second, "second-ns/object")
			b.ReportMetric(size, "B/object")
		})
	}
}

// sharing plans one object for each service, and one object that all services share.
type sharing struct{}

func (sharing) Plan(view *api.View, emit func(string, int)) error {
	emit(view.Service.Name, 0)
	emit("shared", 0)
	return nil
}

func (sharing) List(context.Context, func(string, int)) error { return nil }

func (sharing) Apply(context.Context, []Op[string, int]) error { return nil }

// BenchmarkSharedObject delivers services that share an object, and then deletes them. The
// cost of one service must not grow with the number of services.
func BenchmarkSharedObject(b *testing.B) {
	for _, services := range []int{1_000, 30_000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			changes := make([]sink.Change, services)
			for i := range changes {
				v := &api.View{Service: &api.Service{Namespace: "default", Name: fmt.Sprint("s", i)}}
				changes[i] = sink.Change{Key: v.Key(), New: v}
			}
			r := New(sharing{}, Options[string, int]{})
			deliver := func(c sink.Changes) {
				if err := r.Sync(b.Context(), &c); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				deliver(sink.Changes{First: true, Last: true, Services: slices.Values(changes[:0])})
				for batch := range slices.Chunk(changes, 100) {
					deliver(sink.Changes{Services: slices.Values(batch)})
				}
				for batch := range slices.Chunk(changes, 100) {
					deliver(sink.Changes{Services: func(yield func(sink.Change) bool) {
						for _, ch := range batch {
							yield(sink.Change{Key: ch.Key, Old: ch.New})
						}
					}})
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*services), "ns/service")
		})
	}
}
