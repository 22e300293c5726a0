// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package userspacebench compares the userspace backend with similar proxies in one run:
// no proxy (a router), HAProxy, nginx, and the last kube-proxy with a userspace mode.
// Client, proxy and server are processes in separate network namespaces on the same
// cores.
//
//	go test -run xxx -bench Proxies -benchtime 1x -timeout 20m ./userspacebench
//
// It needs root and Debian's haproxy, nginx-light and libnginx-mod-stream.
package userspacebench
