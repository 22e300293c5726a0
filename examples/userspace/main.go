// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command userspace is a service proxy that does not program the kernel. It listens at
// the addresses of services and copies bytes to their pods and back. README.md shows how
// to try it without a cluster.
package main

import (
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/app/program"
)

func main() {
	app.Main(program.Userspace())
}
