// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/remote"
	"k8s.io/klog/v2"
)

// BenchmarkStreams measures the server's cost of a stream: the CPU time to connect, the
// memory, and the CPU time for a change. It measures streams with the views of a node and
// streams of relays, over TCP with and without TLS. The clients connect with tokens. In the
// cases "new", they get the whole state first.
func BenchmarkStreams(b *testing.B) {
	for _, c := range []struct {
		name               string
		relays, tls, isNew bool
		streams            int
	}{
		{name: "views", streams: 1000},
		{name: "views-tls", streams: 1000, tls: true},
		{name: "relays", streams: 1000, relays: true},
		{name: "relays-tls", streams: 1000, relays: true, tls: true},
		{name: "relays-tls-new", streams: 20, relays: true, tls: true, isNew: true},
	} {
		b.Run(c.name, func(b *testing.B) {
			state := largeState(10_000, 1000)
			options := benchOptions
			options.ServeCluster = true
			clients := &crowd{PerNode: 1, Relays: c.relays, Packed: true}
			if c.tls {
				authority := newAuthority(b)
				options.TLS = authority.newFiles(b, "server")
				options.ClusterReaders = []string{"relay"}
				clients.TLS = (*transport.TLS)(authority.newFiles(b, "relay"))
			}
			server, err := remote.NewServer(state, options)
			if err != nil {
				b.Fatal(err)
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			clients.Addresses = []string{"tcp://" + l.Addr().String()}
			start(b, func(ctx context.Context) error { return server.Serve(klog.NewContext(ctx, logr.Discard()), l) })
			for name, node := range state.Snapshot().Nodes.All() {
				if len(clients.Nodes) == c.streams {
					break
				}
				n := crowdNode{Name: name, Token: server.RelayToken()}
				if !c.relays {
					n.Token = server.TokenFor(node)
				}
				if c.isNew {
					n.Token = nil
				}
				clients.Nodes = append(clients.Nodes, n)
			}
			idle, cpu := memory(), cpuTime(b)
			next := clients.start(b)
			next()
			starting, perStream := cpuTime(b)-cpu, float64(memory()-idle)/float64(c.streams)
			cpu = cpuTime(b)
			for ready := false; b.Loop(); ready = !ready {
				time.Sleep(100 * time.Millisecond)
				update(state, func(to apitest.Writer) { to.SetSlice(benchSlice(0, 1000, ready)) })
				next()
			}
			b.ReportMetric(microseconds(cpuTime(b)-cpu)/float64(c.streams*b.N), "cpu-us/change")
			b.ReportMetric(microseconds(starting)/float64(c.streams), "cpu-us/start")
			b.ReportMetric(perStream, "B/stream")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func microseconds(d time.Duration) float64 { return d.Seconds() * 1e6 }
