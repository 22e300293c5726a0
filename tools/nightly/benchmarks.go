// SPDX-License-Identifier: Apache-2.0

package main

import "time"

// benchmarkParts returns the benchmarks of docs/history/benchmarks.md. The machine should
// be idle. Benchmarks with a dataplane need root.
func benchmarkParts() []part {
	var parts []part
	add := func(name string, limit time.Duration, long bool, commands string) {
		parts = append(parts, part{Name: "bench-" + name, About: "benchmarks of " + name, Limit: limit, Long: long, Alone: true, Command: commands})
	}
	add("watcher", 20*time.Minute, false, `go test -run xxx -bench 'Ingest|Relist' -benchtime 5x -count 3 ./watcher/kube
go test -run xxx -bench OneEndpointChanges -benchtime 5000x -count 3 ./watcher/kube
go test -run xxx -bench . -count 5 ./watcher`)
	add("core", 20*time.Minute, false, `go test -run xxx -bench OneEndpoint -count 5 ./feed
go test -run xxx -bench Readers -benchtime 10000x ./feed
go test -run xxx -bench 'View|Frontends' -count 5 ./nodeview
go test -run xxx -bench . -benchtime 0.5s ./internal/revstore
go test -run xxx -bench Companions -benchtime 10000x ./app/program
go test -run xxx -bench Page -count 3 ./internal/statuspage`)
	add("remote", 30*time.Minute, false, `go test -run xxx -bench Fanout -benchtime 60x ./remote
go test -run xxx -bench 'InitialSync|IdleStreams' -benchtime 1x -count 3 ./remote`)
	add("windows", 10*time.Minute, false, "go test -run xxx -bench Sync -benchtime 5x -count 5 ./backends/windows/kernelspace")
	add("nftables", 30*time.Minute, false, `go test -run xxx -bench Connect -benchtime 10000x -count 3 ./backends/nftables
go test -run xxx -bench ChangeDuringPass -benchtime 5x ./backends/nftables
go test -run xxx -bench Flush -benchtime 3x ./backends/nftables
go test -run xxx -bench LargeTable -benchtime 5x ./internal/conntrack`)
	add("ebpf", 30*time.Minute, false, `go test -run xxx -bench 'Connect|Send' -benchtime 10000x -count 3 ./backends/ebpf
go test -run xxx -bench Change -benchtime 2000x -count 3 ./backends/ebpf
go test -run xxx -bench Pass -benchtime 1x -count 3 ./backends/ebpf`)
	add("iptables", 30*time.Minute, false, "go test -run xxx -bench . -benchtime 5x ./backends/iptables")
	add("ovs", 20*time.Minute, false, "go test -run xxx -bench Services -benchtime 1x ./backends/ovs")
	add("userspace", 20*time.Minute, false, "go test -run xxx -bench Services -benchtime 3x ./backends/userspace")
	add("ingest", 20*time.Minute, false, `cd test
go test -run xxx -bench RealIngest -benchtime 1x -timeout 20m ./ingest
go test -run xxx -bench Watchers -benchtime 1x ./ingest`)
	add("proxies", 30*time.Minute, false, "cd test; go test -run xxx -bench Proxies -benchtime 1x -timeout 20m ./userspacebench")
	parts[len(parts)-1].Needs = []string{"haproxy", "nginx"}
	add("growth", 12*time.Hour, true, "cd test; go test -run xxx -bench . -benchtime 1x -timeout 12h ./growth")
	add("dataplane", 6*time.Hour, true, `cd test
go test -run xxx -bench '^Benchmark$' -benchtime 1x -timeout 3h ./dataplane -shapes 1000x10,5000x10,10000x10,30000x10,5000x50,45000x1,5000x10+
go test -run xxx -bench BenchmarkConnections -benchtime 1x -timeout 1h ./dataplane -shapes 10x1,1000x1,100000x1 -proxies kpng-ebpf,kpng,kube-proxy
go test -run xxx -bench '^Benchmark$' -benchtime 1x -timeout 3h ./dataplane -shapes 1000x10,5000x10 -changes 100 -proxies kpng-iptables,kube-proxy-iptables`)
	// In QEMU, because most kernels of virtual machines lack IPVS.
	add("ipvs", time.Hour, true, `programs=$(mktemp -d)
trap 'rm -r "$programs"' EXIT
export KPNG_TEST_PROGRAMS=$programs CGO_ENABLED=0
go build -o "$programs/kpng" ./cmd/kpng
cd test
go build -o "$programs/" ./kernel go.etcd.io/etcd/server/v3 k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-proxy
go test -run xxx -exec "$programs/kernel -memory 8000 -silence 5m" -bench '^Benchmark$' -benchtime 1x -timeout 1h ./dataplane -kpng "$programs/kpng" -shapes 50x10 -changes 20 -connects 200 -proxies kpng-ipvs,kube-proxy-ipvs`)
	return parts
}
