// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// counting is a sink that counts one connection.
type counting struct{ sink.Sink }

var below = backends.Stats{Port: "below", Connections: 1}

func (counting) Stats(_ context.Context, yield func(backends.Stats) bool) error {
	yield(below)
	return nil
}

// counted returns the connections by service port and endpoint.
func (n *node) counted() map[string]int64 {
	n.t.Helper()
	all := map[string]int64{}
	if err := n.Stats(n.t.Context(), func(s backends.Stats) bool {
		all[fmt.Sprint(s.Service.Name, " ", s.Port, " ", s.Protocol, " ", s.Endpoint)] += s.Connections
		return true
	}); err != nil {
		n.t.Fatal(err)
	}
	return all
}

func (n *node) mustCount(step string, want map[string]int64) {
	n.t.Helper()
	want[" below Protocol(0) invalid AddrPort"] = 1
	if got := n.counted(); !maps.Equal(got, want) {
		n.t.Errorf("%s: counted %v, want %v", step, got, want)
	}
}

func testStats(t *testing.T) {
	n := newNodeAbove(t, counting{noProxy}, options{})
	if err := n.Stats(t.Context(), nil); !errors.Is(err, errNoStats) {
		t.Errorf("error %v, want %v", err, errNoStats)
	}
	n.opts.Stats = true
	n.restart()
	n.serve()
	n.echo(2)
	web := []string{"10.96.0.9", "10.96.0.10"} // two frontends of one port
	n.pass(view("web", web, []string{"10.0.0.1"}, nil), service(1, 1), service(2, 2))
	n.mustCount("before connections", map[string]int64{})
	n.reaches("10.96.0.9:80", 5)
	n.reaches("10.96.0.10:80", 2)
	s := n.socket()
	for range 3 { // one use of each service
		s.ask(serviceAddr(1))
		s.ask(serviceAddr(2))
	}
	const tcp = "web tcp TCP 10.0.0.1:8080"
	n.mustCount("after connections", map[string]int64{tcp: 7, "s1 udp UDP 10.0.1.1:8080": 1, "s2 udp UDP 10.0.1.2:8080": 1})
	// If a service or an endpoint is removed, and added again after a Verify, its
	// counters begin at 0.
	n.delete("s1")
	n.set(service(2, 1))
	n.mustCount("without the endpoints", map[string]int64{tcp: 7})
	if err := n.verify(); err != nil {
		t.Fatal(err)
	}
	n.set(service(1, 1), service(2, 2))
	n.mustCount("with the endpoints again", map[string]int64{tcp: 7})
	calls := 0
	if err := n.Stats(t.Context(), func(backends.Stats) bool { calls++; return false }); err != nil || calls != 1 {
		t.Errorf("Stats called a function that returns false %d times, error %v", calls, err)
	}
}

// BenchmarkStats compares the time to connect to a service with and without counters, in
// turn, and measures reading the counters of 10,000 services with ten endpoints each.
func BenchmarkStats(b *testing.B) {
	b.Run("connect", func(b *testing.B) {
		n := newNode(b, Options{})
		n.ns.Add(b, "lo", "10.0.0.1")
		netnstest.Listen(b, n.ns.Do, "10.0.0.1:8080", func(net.Conn) {})
		target := &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 5}, Port: 80}
		var cases []backendtest.Case
		for _, name := range []string{"without", "with"} {
			cases = append(cases, backendtest.Case{Name: name, Batch: func(took func(time.Duration)) error {
				n.opts.Stats = name == "with"
				n.restart()
				n.pass(numberedService(5, 1))
				return n.ns.Do(func() error {
					for range 2000 {
						d, err := netnstest.TimeConnect(target)
						if err != nil {
							return err
						}
						took(d)
					}
					return nil
				})
			}})
		}
		backendtest.Compare(b, cases...)
	})
	b.Run("read", func(b *testing.B) {
		n := newNode(b, Options{Options: backends.Options{Stats: true}})
		cpus, err := ebpf.PossibleCPU()
		if err != nil {
			b.Fatal(err)
		}
		var views []*api.View
		for i := range 10_000 {
			v := numberedService(i, 10)
			views = append(views, v)
			for _, w := range plan(v, "", nodeview.Parameters{}) {
				for _, a := range w.endpoints {
					if err := n.programs.Connections.Put(pair{w.frontend, a}, make([]uint64, cpus)); err != nil {
						b.Fatal(err)
					}
				}
			}
		}
		n.pass(views...)
		before := cpuTime(b)
		for b.Loop() {
			read := 0
			if err := n.Stats(b.Context(), func(backends.Stats) bool { read++; return true }); err != nil || read != 100_000 {
				b.Fatalf("read %d pairs, error %v", read, err)
			}
		}
		b.ReportMetric(float64((cpuTime(b)-before).Milliseconds())/float64(b.N), "cpu-ms/read")
	})
}
