// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/app/program"
	"github.com/kpng-project/kpng/backends/userspace"
)

func platformBackends() []*program.Backend {
	return []*program.Backend{
		program.NFTables(),
		program.IPTables(),
		program.IPVS(),
		program.EBPF(),
		program.OVS(),
		program.Userspace(userspace.LocalRoutes(userspace.RouteOptions{})),
	}
}
