// SPDX-License-Identifier: Apache-2.0

// Package growth measures how the costs of proxies grow with the size of objects. A shape
// is a kind of cluster that grows in one dimension, for example the ports of a service.
// The harness measures each shape with n, 2n and 4n objects, in these phases: all objects
// are written, some of them change, the proxy is killed and started again, and all
// objects are deleted. Meanwhile an innocent service changes again and again.
//
// Each proxy runs in a process, a network namespace and a cgroup of its own. It reads from
// an API server of the harness. This server stores only the objects that the harness
// writes. kpng runs as a library in a copy of the test process, with the flags that its
// commands have. The proxy "core" is kpng with a sink that does nothing. kube-proxy is the
// real program.
//
// A change of the innocent service ends when kpng's backend acknowledges it. For
// kube-proxy, it ends when a connection reaches the new endpoint.
//
// The test measures small sizes. It fails if a cost grows with an exponent above 1.25, or
// if a restart or a deletion costs three times as much as the load. It also fails if a
// change of the innocent service takes ten times as long as without other changes. A larger
// scale takes longer:
//
//	go test ./growth
//	go test -timeout 3h ./growth -args -scale 8 -proxies nftables
//
// The benchmarks print tables and include kube-proxy. BenchmarkGrowth measures the shapes
// in larger sizes, and BenchmarkFigures a few large objects:
//
//	go test -run xxx -bench . -benchtime 1x -timeout 12h ./growth
//	go test -run xxx -bench Growth -benchtime 1x ./growth -args -proxies nftables,kube-proxy -shapes affinity -scale 4
//
// TestObjective uses the same harness in a large cluster. It measures the time from a
// change until packets reach an endpoint, during passes and transactions of other programs:
//
//	go test -v -run Objective ./growth -objective-for 10m -objective-services 100000
package growth
