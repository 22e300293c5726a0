// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/api/localv1"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
)

// largeState returns a state with the given number of services. Each service has ten
// endpoints, on nodes in three zones.
func largeState(services, nodes int) *cluster.State {
	state := cluster.New(cluster.Options{Resumable: true})
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

// benchSlice returns the EndpointSlice of a service. If ready is false, the last endpoint
// is not ready.
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

// BenchmarkFanout changes one endpoint of a large cluster and waits until all streams
// have received the change. The streams resume with tokens, so that the server does not
// send the whole state first. The next change follows 100 ms after the last delivery.
func BenchmarkFanout(b *testing.B) {
	for _, size := range []struct{ nodes, perNode int }{{100, 50}, {5000, 1}} {
		b.Run(fmt.Sprintf("nodes=%d/streams=%d", size.nodes, size.nodes*size.perNode), func(b *testing.B) {
			state := largeState(10_000, size.nodes)
			l := &benchListener{Listener: listen(b, socket(b))}
			server := serveBench(b, state, l)
			idle := memory()
			next := newCrowd(server, state, l, size.perNode).start(b)
			next()
			perStream := float64(memory()-idle) / float64(size.nodes*size.perNode)
			var middle, reached, sent []time.Duration
			before, cpu := server.Stats(), cpuTime(b)
			for ready := false; b.Loop(); ready = !ready {
				time.Sleep(100 * time.Millisecond)
				committed := time.Now()
				update(state, func(to apitest.Writer) { to.SetSlice(benchSlice(0, size.nodes, ready)) })
				round := next()
				middle = append(middle, round.syncTime(0.5).Sub(committed))
				reached = append(reached, round.syncTime(1).Sub(committed))
				sent = append(sent, l.lastData().Sub(committed))
			}
			after := server.Stats()
			n := float64(b.N)
			for unit, list := range map[string][]time.Duration{"half-reached": middle, "all-reached": reached, "all-sent": sent} {
				slices.Sort(list)
				b.ReportMetric(milliseconds(list[len(list)/2]), unit+"-p50-ms")
				b.ReportMetric(milliseconds(list[(len(list)*99+99)/100-1]), unit+"-p99-ms")
			}
			b.ReportMetric(milliseconds(cpuTime(b)-cpu)/n, "server-cpu-ms/change")
			b.ReportMetric(float64(after.Views-before.Views)/n, "views/change")
			b.ReportMetric(float64(after.Values-before.Values)/n, "values/change")
			b.ReportMetric(perStream, "B/stream")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkInitialSync sends the whole state to 100 streams at the same time.
func BenchmarkInitialSync(b *testing.B) {
	const services, streams = 10_000, 100
	state := largeState(services, streams)
	for b.Loop() {
		l := &benchListener{Listener: listen(b, socket(b))}
		server := serveBench(b, state, l)
		idle := memory()
		resetPeak(b)
		c := newCrowd(nil, state, l, 1)
		began, cpu := time.Now(), cpuTime(b)
		round := c.start(b)()
		took := round.syncTime(1).Sub(began)
		if want := streams * (services*11 + 2); round.Operations != want { // 11: a service and ten endpoints; 2: the Reset and the node
			b.Fatalf("%d operations, want %d", round.Operations, want)
		}
		b.ReportMetric(float64(round.Operations)/took.Seconds(), "entries/s")
		b.ReportMetric(float64(round.Bytes)/took.Seconds()/1e6, "MB/s")
		b.ReportMetric(float64(server.Stats().Values), "values")
		b.ReportMetric((cpuTime(b) - cpu).Seconds(), "server-cpu-s")
		b.ReportMetric(float64(idle)/(1<<20), "idle-heap-MiB")
		b.ReportMetric(peakMemory(b)/(1<<20), "peak-rss-MiB")
	}
}

// BenchmarkIdleStreams reports the memory of an idle stream. It compares a Server, a
// bareServer with the gRPC options of the Server, and a bareServer with the default
// options of gRPC.
func BenchmarkIdleStreams(b *testing.B) {
	for _, size := range []struct{ nodes, perNode int }{{100, 50}, {5000, 1}} {
		for _, kind := range []string{"kpng", "grpc", "grpc-defaults"} {
			b.Run(fmt.Sprintf("nodes=%d/streams=%d/%s", size.nodes, size.nodes*size.perNode, kind), func(b *testing.B) {
				for b.Loop() {
					state := largeState(100, size.nodes)
					server, l := (*remote.Server)(nil), &benchListener{Listener: listen(b, socket(b))}
					switch kind {
					case "kpng":
						server = serveBench(b, state, l)
					case "grpc":
						serveBare(b, newBenchServer(b, state).BareGRPC(), l)
					case "grpc-defaults":
						serveBare(b, grpc.NewServer(), l)
					}
					before := memory()
					newCrowd(server, state, l, size.perNode).start(b)()
					b.ReportMetric(float64(memory()-before)/float64(size.nodes*size.perNode), "B/stream")
				}
			})
		}
	}
}

func serveBare(b *testing.B, server *grpc.Server, l net.Listener) {
	localv1.RegisterSetsServer(server, bareServer{})
	go server.Serve(l)
	b.Cleanup(server.Stop)
}

// bareServer answers the first request of each stream and ignores later requests.
type bareServer struct {
	localv1.UnimplementedSetsServer
}

// Watch implements localv1.SetsServer.
func (bareServer) Watch(stream grpc.BidiStreamingServer[localv1.WatchReq, localv1.OpItem]) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	sync := &localv1.OpItem{Op: &localv1.OpItem_Sync{Sync: &localv1.EmptyOp{}}}
	if err := stream.Send(&localv1.OpItem{Batch: []*localv1.OpItem{sync}}); err != nil {
		return err
	}
	for {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
}

// newBenchServer returns a server with default options, except that its limits for a peer
// are raised, because all clients count as one peer.
func newBenchServer(b *testing.B, state *cluster.State) *remote.Server {
	server, err := remote.NewServer(state, remote.ServerOptions{
		Limits: remote.Limits{StreamsPerPeer: 100_000, ConnectionsPerPeer: 100_000, StreamRate: 1e6},
	})
	if err != nil {
		b.Fatal(err)
	}
	return server
}

func serveBench(b *testing.B, state *cluster.State, l net.Listener) *remote.Server {
	server := newBenchServer(b, state)
	start(b, func(ctx context.Context) error { return server.Serve(klog.NewContext(ctx, logr.Discard()), l) })
	return server
}

// newCrowd returns a crowd for the nodes of state. If server is not nil, the clients
// resume with tokens of this server.
func newCrowd(server *remote.Server, state *cluster.State, l net.Listener, perNode int) *crowd {
	c := &crowd{Address: "unix://" + l.Addr().String(), PerNode: perNode}
	for name, node := range state.Snapshot().Nodes.All() {
		n := crowdNode{name, []byte{}}
		if server != nil {
			n.Token = server.TokenFor(node)
		}
		c.Nodes = append(c.Nodes, n)
	}
	return c
}

// benchListener records when data was last sent on any of its connections.
type benchListener struct {
	net.Listener
	sent atomic.Int64 // Unix nanoseconds
}

func (l *benchListener) lastData() time.Time { return time.Unix(0, l.sent.Load()) }

// Accept implements net.Listener.
func (l *benchListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	return &benchConn{conn, l}, err
}

type benchConn struct {
	net.Conn
	listener *benchListener
}

// Write implements net.Conn.
func (c *benchConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if hasData(p) {
		c.listener.sent.Store(time.Now().UnixNano())
	}
	return n, err
}

// hasData reports whether p contains an HTTP/2 DATA frame (RFC 9113, 6.1).
func hasData(p []byte) bool {
	for len(p) >= 9 {
		if p[3] == 0 {
			return true
		}
		length := int(p[0])<<16 | int(p[1])<<8 | int(p[2])
		p = p[min(len(p), 9+length):]
	}
	return false
}

func milliseconds(d time.Duration) float64 { return d.Seconds() * 1000 }

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// The function memory returns the bytes of heap and stacks in use.
func memory() uint64 {
	runtime.GC()
	runtime.GC() // only the second GC frees a sync.Pool
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// resetPeak begins a new measurement: peakMemory then returns the maximum since the last
// call of resetPeak.
func resetPeak(b *testing.B) {
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		b.Fatal(err)
	}
}

// peakMemory returns the maximum resident memory of the process in bytes.
func peakMemory(b *testing.B) float64 {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kilobytes, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		b.Fatal(err)
	}
	return float64(kilobytes) * 1024
}
