// SPDX-License-Identifier: Apache-2.0

// Package dataplane runs the program kpng with its nftables backend as an operator would,
// with a real API server. A network namespace is the node. The tests observe connections,
// the kernel's notifications about tables, and the use of CPU time and memory.
//
// The benchmark also measures kube-proxy in nftables mode:
//
//	go test -run xxx -bench '^Benchmark$' -benchtime 1x -timeout 3h ./dataplane
//	go test -run xxx -bench '^Benchmark$' -benchtime 1x -timeout 15m ./dataplane -args -shapes 1000x10,10000x10 -changes 50
//
// With the flag -proxies kpng-iptables,kube-proxy-iptables, the benchmark compares kpng
// and kube-proxy in iptables mode. Use the nft variant of the command iptables, because
// the benchmark needs nftables notifications.
//
// Most kernels of virtual machines lack IPVS. Measure that mode in QEMU:
//
//	CGO_ENABLED=0 go build -C test -o /tmp/kernel ./kernel
//	CGO_ENABLED=0 go build -o /tmp/kpng ./cmd/kpng
//	go build -C test -o /tmp/programs/ go.etcd.io/etcd/server/v3 k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-proxy
//	cd test && KPNG_TEST_PROGRAMS=/tmp/programs CGO_ENABLED=0 go test -timeout 1h -exec "/tmp/kernel -memory 8000 -silence 5m" \
//		-run xxx -bench '^Benchmark$' -benchtime 1x ./dataplane \
//		-args -kpng /tmp/kpng -shapes 50x10 -changes 20 -connects 200 -proxies kpng-ipvs,kube-proxy-ipvs
//
// BenchmarkConnections compares connections through services with connections to their
// endpoints, also for kpng with its eBPF backend:
//
//	go test -run xxx -bench Connections -benchtime 1x -timeout 1h ./dataplane -args -shapes 10x1,1000x1 -proxies kpng-ebpf,kpng,kube-proxy
//
// The soak test changes services and endpoints at random while it makes connections:
//
//	go test -run Soak -timeout 1h ./dataplane -args -soak 30m
//
// With the flag -soak-ebpf, it runs kpng with the eBPF backend.
package dataplane
