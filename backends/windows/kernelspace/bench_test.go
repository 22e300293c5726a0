// SPDX-License-Identifier: Apache-2.0

package kernelspace_test

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	"github.com/kpng-project/kpng/sink"
)

// BenchmarkSync measures a sync with an in-memory HNS, and counts the calls to HNS.
func BenchmarkSync(b *testing.B) {
	const services, endpoints = 2000, 5
	viewOf := func(i, last int) *api.View {
		var all []string
		for e := range endpoints - 1 {
			all = append(all, fmt.Sprintf("10.%d.%d.%d", 128+i>>8, i&255, e+1))
		}
		all = append(all, fmt.Sprintf("10.%d.%d.%d", 128+i>>8, i&255, last))
		return view(service(fmt.Sprint("svc-", i), withClusterIP(i)), all...)
	}
	full := &sink.Changes{First: true, Last: true, Node: node(), NodeChanged: true}
	var changes []sink.Change
	for i := range services {
		v := viewOf(i, endpoints)
		changes = append(changes, sink.Change{Key: v.Key(), New: v, Unsure: true})
	}
	full.Services = slices.Values(changes)

	newBackend := func(b *testing.B, fake *fakehns.HNS, state string) backends.Dataplane {
		fakehns.Use(b, fake)
		backend, err := kernelspace.New(kernelspace.Options{Network: "pods", StateFile: state})
		if err == nil {
			err = backend.Start(b.Context())
		}
		if err != nil {
			b.Fatal(err)
		}
		return backend
	}
	sync := func(b *testing.B, backend backends.Dataplane, c *sink.Changes) {
		if err := backend.Sync(b.Context(), c); err != nil {
			b.Fatal(err)
		}
	}
	report := func(b *testing.B, calls map[string]int) {
		listings := calls["Endpoints"] + calls["LoadBalancers"] + calls["Network"] + calls["Features"]
		writes := -listings
		for n := range maps.Values(calls) {
			writes += n
		}
		b.ReportMetric(float64(listings)/float64(b.N), "listings/op")
		b.ReportMetric(float64(writes)/float64(b.N), "writes/op")
	}
	newHNS := func() *fakehns.HNS {
		fake := fakehns.New(fakehns.AllFeatures())
		fake.AddNetwork(hns.Network{Name: "pods"})
		return fake
	}

	b.Run("first", func(b *testing.B) {
		calls := map[string]int{}
		for range b.N {
			b.StopTimer()
			fake := newHNS()
			backend := newBackend(b, fake, b.TempDir()+"/kpng.json")
			b.StartTimer()
			sync(b, backend, full)
			for call, n := range fake.Calls() {
				calls[call] += n
			}
		}
		report(b, calls)
	})
	b.Run("restart", func(b *testing.B) {
		fake, state := newHNS(), b.TempDir()+"/kpng.json"
		restart := func() {
			backend := newBackend(b, fake, state)
			sync(b, backend, full)
			if err := backend.Stop(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		restart()
		fake.Calls()
		b.ResetTimer()
		for range b.N {
			restart()
		}
		b.StopTimer()
		report(b, fake.Calls())
	})
	b.Run("unchanged", func(b *testing.B) {
		fake := newHNS()
		backend := newBackend(b, fake, b.TempDir()+"/kpng.json")
		sync(b, backend, full)
		fake.Calls()
		var before, after runtime.MemStats
		b.ResetTimer()
		for range b.N {
			sync(b, backend, full)
		}
		b.StopTimer()
		report(b, fake.Calls())
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&before)
		runtime.KeepAlive(backend)
		backend = nil
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(before.HeapAlloc-after.HeapAlloc), "heap-B")
		runtime.KeepAlive(fake)
	})
	b.Run("one endpoint", func(b *testing.B) {
		fake := newHNS()
		backend := newBackend(b, fake, b.TempDir()+"/kpng.json")
		sync(b, backend, full)
		fake.Calls()
		views := []*api.View{viewOf(7, 200), viewOf(7, 201)}
		b.ResetTimer()
		for i := range b.N {
			v := views[i%2]
			sync(b, backend, &sink.Changes{Services: slices.Values([]sink.Change{{Key: v.Key(), New: v}}), Node: node()})
		}
		b.StopTimer()
		report(b, fake.Calls())
	})
	// Before Windows Server 2025, load balancers cannot be changed in place. So a change of
	// one endpoint deletes a load balancer and creates another. The journal records both.
	b.Run("one endpoint of 10,000 services, Windows Server 2022", func(b *testing.B) {
		features := fakehns.AllFeatures()
		features.ModifyLoadBalancer = false
		fake := fakehns.New(features)
		fake.AddNetwork(hns.Network{Name: "pods"})
		backend := newBackend(b, fake, b.TempDir()+"/kpng.journal")
		var changes []sink.Change
		for i := range 10_000 {
			v := view(service(fmt.Sprint("svc-", i), withClusterIP(i)), "10.1.2.1")
			changes = append(changes, sink.Change{Key: v.Key(), New: v})
		}
		sync(b, backend, &sink.Changes{First: true, Last: true, Node: node(), NodeChanged: true, Services: slices.Values(changes)})
		fake.Calls()
		views := []*api.View{
			view(service("svc-7", withClusterIP(7)), "10.1.2.2"), view(service("svc-7", withClusterIP(7)), "10.1.2.3"),
		}
		b.ResetTimer()
		for i := range b.N {
			v := views[i%2]
			sync(b, backend, &sink.Changes{Services: slices.Values([]sink.Change{{Key: v.Key(), New: v}}), Node: node()})
		}
		b.StopTimer()
		report(b, fake.Calls())
	})
}
