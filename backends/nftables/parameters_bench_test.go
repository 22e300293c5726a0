// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// BenchmarkParameters compares services with traffic parameters to services without them,
// in one run. It measures a connection, and a Sync that removes or adds one endpoint.
func BenchmarkParameters(b *testing.B) {
	const endpoints = 100
	nodeAddr := netip.MustParseAddr("10.0.0.1")
	services := []struct {
		name   string
		edit   func(*api.Service)
		weight func(i int) int32
	}{
		{name: "random"},
		{name: "weighted", weight: func(i int) int32 { return []int32{100, 200, 700}[i%3] }},
		{name: "hash-client", edit: hashed(api.HashClient)},
		{name: "hash-connection", edit: hashed(api.HashConnection)},
	}
	viewOf := func(i int) *api.View {
		v := numberedService(i, endpoints)
		if s := services[i]; s.edit != nil {
			s.edit(v.Service)
		}
		for e := range v.Endpoints {
			if w := services[i].weight; w != nil {
				v.Endpoints[e].Weight = w(e)
			}
		}
		return v
	}
	b.Run("connect", func(b *testing.B) {
		be, ns := start(b, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(nodeAddr)}})
		addPods(b, ns)
		var changes []sink.Change
		var cases []backendtest.Case
		for i, s := range services {
			v := viewOf(i)
			changes = append(changes, set(v))
			to := netip.AddrPortFrom(v.Service.IPs.ClusterIPs.Family(api.IPv4)[0], 80)
			cases = append(cases, backendtest.Case{Name: s.name, Batch: connects(ns, 500, func() netip.AddrPort { return to })})
		}
		mustSync(b, be, batchOf(true, changes...))
		backendtest.Compare(b, cases...)
	})
	// For a restricted node port, the rules do one more lookup, and a lookup for each
	// prefix length of its ranges.
	b.Run("node-port", func(b *testing.B) {
		be, ns := start(b, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(nodeAddr)}})
		addPods(b, ns)
		var changes []sink.Change
		var cases []backendtest.Case
		for i, name := range []string{"open", "restricted"} {
			v := numberedService(i, endpoints)
			v.Service.Type = api.NodePort
			v.Service.Ports[0].NodePort = int32(30000 + i)
			if name == "restricted" {
				v.Service.SourceRanges = []api.SourceRanges{{NodePorts: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
			}
			changes = append(changes, set(v))
			to := netip.AddrPortFrom(nodeAddr, uint16(30000+i))
			cases = append(cases, backendtest.Case{Name: name, Batch: connects(ns, 500, func() netip.AddrPort { return to })})
		}
		mustSync(b, be, batchOf(true, changes...))
		backendtest.Compare(b, cases...)
	})
	b.Run("change", func(b *testing.B) {
		be, _ := start(b, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(nodeAddr)}})
		mustSync(b, be, batchOf(true, manyServices(10_000, 3)...))
		var cases []backendtest.Case
		for i, s := range services {
			all := viewOf(i)
			fewer := *all
			fewer.Endpoints = slices.Delete(slices.Clone(all.Endpoints), 7, 8)
			mustSync(b, be, batchOf(false, sink.Change{Old: numberedService(i, 3), New: all, Key: all.Key()}))
			cases = append(cases, backendtest.Case{Name: s.name, Batch: func(took func(time.Duration)) error {
				for _, change := range [...]sink.Change{{Old: all, New: &fewer, Key: all.Key()}, {Old: &fewer, New: all, Key: all.Key()}} {
					begin := time.Now()
					if err := be.Sync(b.Context(), batchOf(false, change)); err != nil {
						return err
					}
					took(time.Since(begin))
				}
				return nil
			}})
		}
		backendtest.Compare(b, cases...)
	})
}

// BenchmarkHashing uses a service with stable hashing and 100 endpoints on two nodes. Each of
// 100,000 clients connects to it on both nodes, and again after one endpoint was removed.
// The benchmark reports the share of each endpoint, the number of clients that move, and
// the number of clients that reach different endpoints on the two nodes.
func BenchmarkHashing(b *testing.B) {
	const n, clients = 100, 100_000
	for b.Loop() {
		var nodes [2]map[netip.Addr]netip.Addr
		var after map[netip.Addr]netip.Addr
		all := product(1, 0, n, hashed(api.HashClient))
		all.Service.Ports[0].Port = 80
		fewer := *all
		fewer.Endpoints = slices.Delete(slices.Clone(all.Endpoints), 7, 8)
		removed := all.Endpoints[7].Addr
		for i := range nodes {
			w := newPacketWorld(b)
			be := startIn(b, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
			mustSync(b, be, batchOf(true, set(all)))
			nodes[i] = endpointsOfClients(b, w, clients)
			if i > 0 {
				w = newPacketWorld(b)
				be = startIn(b, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}})
				mustSync(b, be, batchOf(true, set(all)))
				mustSync(b, be, batchOf(false, sink.Change{Old: all, New: &fewer, Key: all.Key()}))
				after = endpointsOfClients(b, w, clients)
			}
		}
		counts, others, moved, differ := map[netip.Addr]int{}, 0, 0, 0
		for client, endpoint := range nodes[0] {
			counts[endpoint]++
			if other, ok := nodes[1][client]; ok && other != endpoint {
				differ++
			}
			if now, ok := after[client]; ok && endpoint != removed {
				others++
				if now != endpoint {
					moved++
				}
			}
		}
		squares, most, mean := 0.0, 0.0, float64(len(nodes[0]))/n
		for i := range all.Endpoints {
			deviation := float64(counts[all.Endpoints[i].Addr])/mean - 1
			squares += deviation * deviation
			most = max(most, math.Abs(deviation))
		}
		b.ReportMetric(100*math.Sqrt(squares/n), "%/deviation")
		b.ReportMetric(100*most, "%/maximum")
		b.ReportMetric(100*float64(moved)/float64(others), "%/moved")
		b.ReportMetric(float64(differ), "clients/differ")
		if differ > 0 || float64(moved) > (1.0/n+0.01)*float64(others) {
			b.Error(fmt.Sprint("nodes treat ", differ, " clients differently, and ", moved, " of ", others, " clients moved"))
		}
	}
}
