// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/backends/program"
	"github.com/kpng-project/kpng/backends/userspace"
)

// platformBackends returns the backends of this platform.
func platformBackends() []*program.Backend {
	return []*program.Backend{
		program.NFTables(),
		program.Userspace(userspace.LocalRoutes(userspace.RouteOptions{})),
	}
}
