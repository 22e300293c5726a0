// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/conntrack"
	"github.com/kpng-project/kpng/internal/healthcheck"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// BenchmarkCompanions measures the CPU time of changes of one endpoint in three proxies. The
// first has only the backend nftables. The others also have health checks and connection
// tracking: one with separate feeds, the other with feeds that share views.
func BenchmarkCompanions(b *testing.B) {
	separate := func(state *cluster.State, n int) (all []sink.Source) {
		for range n {
			all = append(all, feed.New(state, "node-1"))
		}
		return all
	}
	shared := func(state *cluster.State, n int) []sink.Source { return feed.NewAll(state, "node-1", n) }
	for _, test := range []struct {
		name  string
		sinks int
		feeds func(*cluster.State, int) []sink.Source
	}{{"backend", 1, separate}, {"three-separate", 3, separate}, {"three-shared", 3, shared}} {
		b.Run(test.name, func(b *testing.B) {
			const services = 10_000
			namespace := netnstest.New(b)
			backend, err := nftables.New(nftables.Options{Options: backends.Options{NetNS: namespace.FD, Sysctls: backends.IgnoreSysctls}})
			if err != nil {
				b.Fatal(err)
			}
			sinks := []sink.Sink{
				backend,
				healthcheck.New(healthcheck.Options{NodeAddresses: nodeaddr.Of()}),
				conntrack.New(conntrack.Options{NetNS: namespace.FD}),
			}[:test.sinks]

			state := cluster.New(cluster.Options{})
			state.Update(func(tx *cluster.Tx) {
				for i := range services {
					tx.SetService(&api.Service{
						Namespace: "default", Name: fmt.Sprint("service-", i), Type: api.ClusterIP,
						IPs:        api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}))},
						Ports:      []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 8080}},
						IPFamilies: []api.Family{api.IPv4},
					})
					tx.SetSlice(companionsSlice(i, true))
				}
			})
			state.SetSynced()
			ctx, cancel := context.WithCancel(klog.NewContext(b.Context(), logr.Discard()))
			var running sync.WaitGroup
			defer running.Wait()
			defer cancel()
			var drivers []*sink.Driver
			for i, f := range test.feeds(state, len(sinks)) {
				defer f.Close()
				d := sink.NewDriver(f, sinks[i], sink.Options{})
				drivers = append(drivers, d)
				running.Go(func() { _ = d.Run(ctx) })
			}
			wait := func() {
				revision := uint64(state.Snapshot().Revision)
				for _, d := range drivers {
					if err := d.WaitApplied(ctx, revision); err != nil {
						b.Fatal(err)
					}
				}
			}
			wait()

			before, n := cpuTime(b), 0
			for b.Loop() {
				changed := companionsSlice(n*7919%services, n/services%2 == 1)
				state.Update(func(tx *cluster.Tx) { tx.SetSlice(changed) })
				wait()
				n++
			}
			b.ReportMetric(float64(cpuTime(b)-before)/1e3/float64(n), "cpu-µs/change")
		})
	}
}

// companionsSlice returns the slice of service i, with ten endpoints. The argument ready
// is a condition of the fourth endpoint.
func companionsSlice(i int, ready bool) *api.EndpointSlice {
	s := &api.EndpointSlice{
		Namespace: "default", Name: fmt.Sprint("service-", i, "-x7k2p"), ServiceName: fmt.Sprint("service-", i), Family: api.IPv4,
		Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 8080}},
		Endpoints: slices.Repeat([]api.SliceEndpoint{{
			Details: &api.EndpointDetails{NodeName: "node-2"}, Conditions: api.Conditions{Ready: true, Serving: true},
		}}, 10),
	}
	for e := range s.Endpoints {
		n := i*10 + e
		s.Endpoints[e].Addr = netip.AddrFrom4([4]byte{11, byte(n >> 16), byte(n >> 8), byte(n)})
	}
	s.Endpoints[3].Ready, s.Endpoints[3].Serving = ready, ready
	return s
}

// cpuTime returns the CPU time of this process, in nanoseconds.
func cpuTime(b *testing.B) int64 {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return usage.Utime.Nano() + usage.Stime.Nano()
}
