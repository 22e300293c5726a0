// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command userspace is a service proxy that programs no kernel: it listens at
// the addresses of services, and copies what arrives to their pods and back.
// README.md shows it without a cluster.
package main

import (
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/kpng-project/kpng/backends/userspace/proxy"
)

func main() {
	p := proxy.New(userspace.LocalRoutes(userspace.RouteOptions{}))
	cmd := app.Command("userspace", p)
	p.Register(cmd.Flags())
	app.Execute(cmd)
}
