// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// largeState returns a state with the given number of services. Each service has ten
// endpoints, on nodes in three zones.
func largeState(services, nodes int) *cluster.State {
	state := cluster.New(cluster.Options{Resumable: true})
	update(state, func(to apitest.Writer) {
		for n := range nodes {
			to.SetNode(&api.Node{Name: apitest.NodeName(n), Labels: map[string]string{"topology.kubernetes.io/zone": fmt.Sprint("zone-", n%3)}})
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
			Addr: netip.AddrFrom4([4]byte{172, 16 + byte(e), byte(i >> 8), byte(i)}), Details: &api.EndpointDetails{NodeName: apitest.NodeName((7*i + e) % nodes)},
			Conditions: api.Conditions{Ready: e < 9 || ready, Serving: e < 9 || ready},
		})
	}
	return s
}

type fanoutSize struct{ nodes, perNode int }

func (s fanoutSize) String() string {
	return fmt.Sprintf("nodes=%d/streams=%d", s.nodes, s.nodes*s.perNode)
}

var fanoutSizes = []fanoutSize{{100, 50}, {1000, 1}, {5000, 1}}

// fanout is a server with the streams of a crowd.
type fanout struct {
	prefix   string // of the metrics
	lastData func() time.Time
	next     func() *crowdRound
	change   func(ready bool)

	half, reached, sent []time.Duration
	cpu                 time.Duration
}

// round makes a change and waits until all streams have received it.
func (f *fanout) round(b *testing.B, ready bool) {
	time.Sleep(100 * time.Millisecond)
	committed, cpu := time.Now(), cpuTime(b)
	f.change(ready)
	round := f.next()
	f.half = append(f.half, round.syncTime(0.5).Sub(committed))
	f.reached = append(f.reached, round.syncTime(1).Sub(committed))
	f.sent = append(f.sent, f.lastData().Sub(committed))
	f.cpu += cpuTime(b) - cpu
}

func (f *fanout) report(b *testing.B) {
	for unit, list := range map[string][]time.Duration{"half-reached": f.half, "all-reached": f.reached, "all-sent": f.sent} {
		slices.Sort(list)
		b.ReportMetric(milliseconds(list[len(list)/2]), f.prefix+unit+"-p50-ms")
		b.ReportMetric(milliseconds(list[(len(list)*99+99)/100-1]), f.prefix+unit+"-p99-ms")
	}
	b.ReportMetric(milliseconds(f.cpu)/float64(b.N), f.prefix+"server-cpu-ms/change")
}

// measureFanout repeats a change at each server in turn.
func measureFanout(b *testing.B, servers ...*fanout) {
	runtime.GC()
	for ready := false; b.Loop(); ready = !ready {
		for _, f := range servers {
			f.round(b, ready)
		}
	}
	for _, f := range servers {
		f.report(b)
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkFanout changes one endpoint of a large cluster and waits until all streams
// have received the change. The streams resume with tokens, so that the server does not
// send the whole state first. The next change follows at least 100 ms later.
//
// A second server in the same process has as many streams and the same gRPC options, but
// sends the same message to all streams. The message is encoded only once. So this server
// shows the cost of gRPC alone. The two servers send in turn.
func BenchmarkFanout(b *testing.B) {
	for _, size := range fanoutSizes {
		b.Run(size.String(), func(b *testing.B) {
			state := largeState(10_000, size.nodes)
			l, bareListener := &benchListener{Listener: listen(b, socket(b))}, &benchListener{Listener: listen(b, socket(b))}
			server := serveBench(b, state, l)
			idle := memory()
			next := newCrowd(server, state, l, size.perNode).start(b)
			next()
			perStream := float64(memory()-idle) / float64(size.nodes*size.perNode)
			bare := serveBare(b, newBenchServer(b, state).BareGRPC(), bareListener)
			bareNext := newCrowd(nil, state, bareListener, size.perNode).start(b)
			bareNext()
			before := server.Stats()
			measureFanout(b, &fanout{lastData: l.lastData, next: next, change: func(ready bool) {
				update(state, func(to apitest.Writer) { to.SetSlice(benchSlice(0, size.nodes, ready)) })
			}}, &fanout{prefix: "bare-", lastData: bareListener.lastData, next: bareNext, change: func(bool) { bare.sendAll() }})
			after := server.Stats()
			b.ReportMetric(float64(after.Views-before.Views)/float64(b.N), "views/change")
			b.ReportMetric(float64(after.Values-before.Values)/float64(b.N), "values/change")
			b.ReportMetric(float64(after.Bytes-before.Bytes)/float64(b.N*size.nodes*size.perNode), "B/answer")
			b.ReportMetric(perStream, "B/stream")
		})
	}
}

// BenchmarkRelayedFanout is like BenchmarkFanout, but a tier of relays is between the
// server and the streams. Server and relays share one process.
func BenchmarkRelayedFanout(b *testing.B) {
	const nodes = 5000
	for _, relays := range []int{1, 5} {
		b.Run(fmt.Sprintf("nodes=%d/relays=%d", nodes, relays), func(b *testing.B) {
			state := largeState(10_000, nodes)
			top := listen(b, socket(b))
			server, err := remote.NewServer(state, remote.ServerOptions{ServeCluster: true})
			if err != nil {
				b.Fatal(err)
			}
			ctx := klog.NewContext(b.Context(), logr.Discard())
			go server.Serve(ctx, top)
			var listeners []*benchListener
			var rounds []func() *crowdRound
			for r := range relays {
				copied := cluster.New(cluster.Options{Resumable: true})
				go remote.Watch(ctx, copied, remote.DialOptions{Addresses: []string{"unix://" + top.Addr().String()}})
				<-copied.Changed(0)
				l := &benchListener{Listener: listen(b, socket(b))}
				c := newCrowd(serveBench(b, copied, l), state, l, 1)
				slices.SortFunc(c.Nodes, func(a, b crowdNode) int { return strings.Compare(a.Name, b.Name) })
				c.Nodes = c.Nodes[nodes*r/relays : nodes*(r+1)/relays]
				listeners, rounds = append(listeners, l), append(rounds, c.start(b))
			}
			next := func() *crowdRound {
				all := &crowdRound{}
				for _, next := range rounds {
					all.Synced = append(all.Synced, next().Synced...)
				}
				slices.Sort(all.Synced)
				return all
			}
			next()
			last := func() time.Time {
				return slices.MaxFunc(listeners, func(a, b *benchListener) int { return a.lastData().Compare(b.lastData()) }).lastData()
			}
			measureFanout(b, &fanout{lastData: last, next: next, change: func(ready bool) {
				update(state, func(to apitest.Writer) { to.SetSlice(benchSlice(0, nodes, ready)) })
			}})
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
		if want := streams * (services*11 + 2); round.Operations != want { // 11 for a service with ten endpoints, and 2 for the Reset and the node
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

// makeReal gives the objects of largeState random names, addresses and labels.
func makeReal(to apitest.Writer, services, nodes int) {
	r := rand.New(rand.NewPCG(1, 0))
	for i := range services {
		service, slice := benchService(i), benchSlice(i, nodes, true)
		app := fmt.Sprintf("app-%x", r.Uint32())
		service.UID = types.UID(fmt.Sprintf("%08x-%04x-%04x-%012x", r.Uint32(), r.Uint32()>>16, r.Uint32()>>16, r.Uint64()>>16))
		service.IPs.ClusterIPs = api.NewIPSet(netip.AddrFrom4([4]byte{10, byte(96 + i>>16), byte(i >> 8), byte(r.Uint32())}))
		service.Labels = map[string]string{"app": app, "team": fmt.Sprint(r.IntN(100))}
		for e := range slice.Endpoints {
			ep := &slice.Endpoints[e]
			ep.Addr = netip.AddrFrom4([4]byte{172, byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32())})
			ep.Details.Zone = fmt.Sprint("zone-", r.IntN(3))
			ep.Details.Target = &types.NamespacedName{Namespace: "bench", Name: fmt.Sprintf("%s-%08x-%05x", app, r.Uint32(), r.Uint32()>>12)}
		}
		to.SetService(service)
		to.SetSlice(slice)
	}
}

// BenchmarkIdleStreams reports the memory of an idle stream. It compares three servers: a
// Server, a bareServer with the same gRPC options, and a bareServer with the default
// options of gRPC.
func BenchmarkIdleStreams(b *testing.B) {
	for _, size := range fanoutSizes {
		if size.nodes == 1000 {
			continue
		}
		for _, kind := range []string{"kpng", "grpc", "grpc-defaults"} {
			b.Run(size.String()+"/"+kind, func(b *testing.B) {
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

func serveBare(b *testing.B, server *grpc.Server, l net.Listener) *bareServer {
	bare := &bareServer{change: make(chan struct{})}
	localv1.RegisterSetsServer(server, bare)
	go server.Serve(l)
	b.Cleanup(func() {
		server.Stop()
		bare.sendAll() // ends the streams
	})
	return bare
}

// bareServer answers the first request of each stream. It answers each later request when
// sendAll is called.
type bareServer struct {
	localv1.UnimplementedSetsServer

	mu       sync.Mutex
	change   chan struct{} // closed by sendAll
	prepared *grpc.PreparedMsg
}

func (s *bareServer) sendAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.change)
	s.change = make(chan struct{})
}

// next returns a channel. The next call of sendAll closes this channel.
func (s *bareServer) next() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.change
}

// message returns a message of about the size of a Server's answer.
func (s *bareServer) message(stream grpc.ServerStream) (*grpc.PreparedMsg, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.prepared != nil {
		return s.prepared, nil
	}
	set := &localv1.OpItem_Set{Set: &localv1.Value{Ref: &localv1.Ref{Set: localv1.Set_EndpointsSet, Path: "bench/svc-00000/172.25.0.0"}, Bytes: make([]byte, 60)}}
	sync := &localv1.OpItem{Op: &localv1.OpItem_Sync{Sync: &localv1.EmptyOp{}}, Resume: make([]byte, 40)}
	s.prepared = &grpc.PreparedMsg{}
	return s.prepared, s.prepared.Encode(stream, &localv1.OpItem{Batch: []*localv1.OpItem{{Op: set}, sync}})
}

// Watch implements localv1.SetsServer.
func (s *bareServer) Watch(stream grpc.BidiStreamingServer[localv1.WatchReq, localv1.OpItem]) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	for {
		next := s.next()
		message, err := s.message(stream)
		if err != nil {
			return err
		}
		if err := stream.SendMsg(message); err != nil {
			return err
		}
		if _, err := stream.Recv(); err != nil {
			return err
		}
		<-next
	}
}

// benchOptions are the default options with higher limits for a peer, because all clients
// count as one peer.
var benchOptions = remote.ServerOptions{MaxStreamsPerPeer: 100_000, MaxConnectionsPerPeer: 100_000, StreamRate: 1e6}

func newBenchServer(b *testing.B, state *cluster.State) *remote.Server {
	server, err := remote.NewServer(state, benchOptions)
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
	c := &crowd{Addresses: []string{"unix://" + l.Addr().String()}, PerNode: perNode}
	for name, node := range state.Snapshot().Nodes.All() {
		n := crowdNode{Name: name, Token: []byte{}}
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
func peakMemory(b *testing.B) float64 { return residentMemory(b, "self", "VmHWM:") }

// residentMemory returns the value of a line of /proc/PID/status, in bytes.
func residentMemory(b *testing.B, pid, line string) float64 {
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		b.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), line)
	kilobytes, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		b.Fatal(err)
	}
	return float64(kilobytes) * 1024
}
