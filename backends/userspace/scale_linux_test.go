// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// BenchmarkServices starts services with three frontends each, and changes an endpoint of
// a service. It runs three times, with one third, two thirds and all of n services. The
// limit of open files determines n, which is at most 10,000.
func BenchmarkServices(b *testing.B) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		b.Fatal(err)
	}
	most := min(10_000, (int(limit.Cur)-100)/3)
	for thirds := range 3 {
		services := most * (thirds + 1) / 3
		b.Run(fmt.Sprint(services), func(b *testing.B) { benchmarkServices(b, services) })
	}
}

func benchmarkServices(b *testing.B, services int) {
	var start, change time.Duration
	var memory uint64
	for range b.N {
		n := netnstest.New(b)
		backend, err := newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("127.0.0.1"))}}, addresses: localRoutes{protocol: 107}})
		if err != nil {
			b.Fatal(err)
		}
		views := make([]*api.View, services)
		for i := range views {
			views[i] = manyServices(i, 1)
		}
		before := goMemory()
		if err := n.Do(func() error {
			if err := backend.Start(context.Background()); err != nil {
				return err
			}
			begin := time.Now()
			if err := backend.Sync(b.Context(), fullOf(views...)); err != nil {
				return err
			}
			start += time.Since(begin)
			memory = goMemory() - before
			const changes = 1000
			begin = time.Now()
			for i := range changes {
				next := manyServices(i, 2)
				c := sink.Change{Key: next.Key(), Old: views[i], New: next}
				if err := backend.Sync(b.Context(), &sink.Changes{Services: func(yield func(sink.Change) bool) { yield(c) }}); err != nil {
					return err
				}
			}
			change += time.Since(begin) / changes
			return backend.Stop(b.Context())
		}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(start.Seconds()/float64(b.N), "s/start")
	b.ReportMetric(float64(change.Microseconds())/float64(b.N), "µs/change")
	b.ReportMetric(float64(memory)/float64(services)/1000, "KB/service")
	b.ReportMetric(0, "ns/op")
}

// goMemory returns the memory that Go uses for the heap and for stacks.
func goMemory() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}

// manyServices returns service number i, which has a cluster IP, an external IP, a node
// port, and endpoints.
func manyServices(i, endpoints int) *api.View {
	s := serviceAt(fmt.Sprint("web-", i), fmt.Sprintf("10.96.%d.%d", i/250, i%250+1), 80, api.TCP)
	s.Service.Type = api.NodePort
	s.Service.IPs.ExternalIPs = api.NewIPSet(netip.AddrFrom4([4]byte{10, 97, byte(i / 250), byte(i%250 + 1)}))
	s.Service.Ports[0].NodePort = int32(30000 + i)
	for e := range endpoints {
		s.addEndpoints(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), byte(e + 1)}), 8080))
	}
	return s.view()
}
