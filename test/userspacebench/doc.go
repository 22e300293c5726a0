// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package userspacebench measures the userspace backend beside other proxies of
// the same kind, in one run: no proxy at all (a router), HAProxy, nginx and the
// last kube-proxy that had a userspace mode. Client, proxy and server are
// processes in network namespaces of their own, on the same cores.
//
//	go test -run xxx -bench Proxies -benchtime 1x -timeout 20m ./userspacebench
//
// It takes root and Debian's haproxy, nginx-light and libnginx-mod-stream.
package userspacebench
