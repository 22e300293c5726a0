// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/kpng-project/kpng/backends/userspace/proxy"
)

// platformBackends returns the backends that only exist here.
func platformBackends() []backend {
	return []backend{
		{"nftables", "Program services into the kernel with nftables, in place of kube-proxy or beside it", newNFTables},
		{"userspace", "Proxy by sockets of this process", newUserspace(onRoutes)},
	}
}

func onRoutes() *proxy.Proxy { return proxy.New(userspace.LocalRoutes(userspace.RouteOptions{})) }
