// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package userspacebench compares the userspace backend with HAProxy, nginx, the last
// kube-proxy with a userspace mode, and a router without a proxy. Client, proxy and
// server are processes in separate network namespaces, and share the machine's cores.
//
//	go test -run xxx -bench Proxies -benchtime 1x -timeout 20m ./userspacebench
//
// The benchmark needs root and the Debian packages haproxy, nginx-light and
// libnginx-mod-stream.
package userspacebench
