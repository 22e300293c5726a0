// SPDX-License-Identifier: Apache-2.0

//go:build !linux && !windows

package main

import "github.com/kpng-project/kpng/backends/userspace/proxy"

// platformBackends returns the backends that only exist here.
func platformBackends() []backend {
	return []backend{
		{"userspace", "Proxy by sockets of this process, at addresses that this host has", newUserspace(func() *proxy.Proxy { return proxy.New(nil) })},
	}
}
