// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/api/apitest"
	"github.com/kpng-project/kpng/api/localv1"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// largeState has so many services of ten endpoints each, on nodes of three zones.
func largeState(services, nodes int) *cluster.State {
	state := cluster.New(cluster.Options{})
	update(state, func(to apitest.Writer) {
		for n := range nodes {
			to.SetNode(&api.Node{Name: apitest.NodeName(n), Labels: map[string]string{api.ZoneLabel: fmt.Sprint("zone-", n%3)}})
		}
		for i := range services {
			to.SetService(benchService(i))
			to.SetSlice(benchSlice(i, nodes, true))
		}
	})
	state.SetSynced()
	return state
}

func benchService(i int) *api.Service {
	return &api.Service{
		Namespace: "bench", Name: fmt.Sprintf("svc-%05d", i), Type: api.ClusterIP,
		IPs:   api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))},
		Ports: []api.PortMapping{{Name: "http", Protocol: api.TCP, Port: 80, TargetPort: 8080}},
	}
}

// benchSlice returns the slice of a service. Its last endpoint is ready, or not.
func benchSlice(i, nodes int, ready bool) *api.EndpointSlice {
	s := &api.EndpointSlice{
		Namespace: "bench", Name: fmt.Sprintf("svc-%05d-1", i), ServiceName: fmt.Sprintf("svc-%05d", i), Family: api.IPv4,
		Ports: []api.EndpointPort{{Name: "http", Protocol: api.TCP, Port: 8080}},
	}
	for e := range 10 {
		s.Endpoints = append(s.Endpoints, api.SliceEndpoint{
			Addr: netip.AddrFrom4([4]byte{172, 16 + byte(e), byte(i >> 8), byte(i)}), NodeName: apitest.NodeName((7*i + e) % nodes),
			Conditions: api.Conditions{Ready: e < 9 || ready, Serving: e < 9 || ready},
		})
	}
	return s
}

// BenchmarkFanout changes one endpoint and waits until all streams have been told.
func BenchmarkFanout(b *testing.B) {
	for _, size := range []struct{ services, nodes, perNode int }{{1000, 50, 1}, {1000, 50, 10}, {1000, 500, 1}} {
		b.Run(fmt.Sprintf("services=%d/nodes=%d/streams=%d", size.services, size.nodes, size.nodes*size.perNode), func(b *testing.B) {
			state := largeState(size.services, size.nodes)
			server, address := serveBench(b, state)
			told := newStreams(b, address, size.nodes, size.perNode)
			before := server.Stats()
			b.ReportAllocs()
			ready := true
			for b.Loop() {
				ready = !ready
				update(state, func(to apitest.Writer) { to.SetSlice(benchSlice(0, size.nodes, ready)) })
				told()
			}
			after := server.Stats()
			n := float64(b.N)
			b.ReportMetric(float64(after.Views-before.Views)/n, "views/change")
			b.ReportMetric(float64(after.Values-before.Values)/n, "values/change")
		})
	}
}

// BenchmarkInitialSync tells everything to some streams at once.
func BenchmarkInitialSync(b *testing.B) {
	const services, nodes, streams = 2000, 20, 20
	state := largeState(services, nodes)
	_, address := serveBench(b, state)
	runtime.GC()
	b.ReportAllocs()
	for b.Loop() {
		newStreams(b, address, streams, 1)
	}
	b.ReportMetric(float64(streams*services*11*b.N)/b.Elapsed().Seconds(), "entries/s")
}

func serveBench(b *testing.B, state *cluster.State) (*remote.Server, string) {
	opts := quick
	opts.Limits.StreamsPerPeer = 100_000
	opts.Limits.ConnectionsPerPeer = 100_000
	address := socket(b)
	server, _ := serve(b, state, address, opts)
	return server, address
}

// newStreams opens streams for so many nodes, one connection a node, and returns
// what waits until all have been told once more. They ask again at once.
func newStreams(b *testing.B, address string, nodes, perNode int) (told func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running, answers sync.WaitGroup
	b.Cleanup(func() {
		cancel()
		running.Wait()
	})
	answers.Add(nodes * perNode)
	for n := range nodes {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { conn.Close() })
		for range perNode {
			running.Go(func() {
				stream, err := localv1.NewSetsClient(conn).Watch(ctx)
				if err != nil {
					return
				}
				for {
					if stream.Send(&localv1.WatchReq{NodeName: apitest.NodeName(n), AllEndpoints: true, Batches: true, Resume: []byte{}}) != nil {
						return
					}
					for synced := false; !synced; {
						item, err := stream.Recv()
						if err != nil {
							return
						}
						for _, op := range item.GetBatch() {
							_, synced = op.GetOp().(*localv1.OpItem_Sync)
						}
					}
					answers.Done()
				}
			})
		}
	}
	answers.Wait()
	answers.Add(nodes * perNode)
	return func() {
		answers.Wait()
		answers.Add(nodes * perNode)
	}
}

// BenchmarkIdleStreams opens streams that are told nothing any more, and reports
// what each takes: of a server, of the same without anything of ours behind the
// stream, and the client in this process with both.
func BenchmarkIdleStreams(b *testing.B) {
	const nodes, perNode = 50, 40
	for _, bare := range []bool{true, false} {
		b.Run(fmt.Sprintf("bare=%t", bare), func(b *testing.B) {
			for b.Loop() {
				address := socket(b)
				if bare {
					server := grpc.NewServer()
					localv1.RegisterSetsServer(server, bareServer{})
					l := listen(b, address)
					go server.Serve(l)
					b.Cleanup(server.Stop)
				} else {
					_, address = serveBench(b, largeState(100, nodes))
				}
				before := memory()
				newStreams(b, address, nodes, perNode)
				b.ReportMetric(float64(memory()-before)/(nodes*perNode), "B/stream")
			}
		})
	}
}

// bareServer answers the first request of a stream, and no other.
type bareServer struct {
	localv1.UnimplementedSetsServer
}

func (bareServer) Watch(stream grpc.BidiStreamingServer[localv1.WatchReq, localv1.OpItem]) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	sync := &localv1.OpItem{Op: &localv1.OpItem_Sync{Sync: &localv1.EmptyOp{}}}
	if err := stream.Send(&localv1.OpItem{Batch: []*localv1.OpItem{sync}}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func memory() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
