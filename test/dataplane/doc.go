// SPDX-License-Identifier: Apache-2.0

// Package dataplane runs kpng's nftables backend as an operator would: as a
// process that reads a real API server, on a node that is a network namespace of
// this package's own, judged from outside by connections, by what the kernel tells
// of its tables, and by the kernel's accounts of time and memory.
//
// The benchmark does the same with kube-proxy in nftables mode, side by side:
//
//	go test -run xxx -bench . -benchtime 1x -timeout 3h ./dataplane
//	go test -run xxx -bench . -benchtime 1x -timeout 15m ./dataplane -args -shapes 1000x10,10000x10 -changes 50
//
// The soak changes services and endpoints at random while connections are made:
//
//	go test -run Soak -timeout 1h ./dataplane -args -soak 30m
package dataplane
