// SPDX-License-Identifier: Apache-2.0

//go:build windows

// Command winuserspace is a service proxy for Windows nodes that does not program the
// kernel. It adds the addresses of services to a network interface, listens there, and
// copies bytes to pods and back. It reads the services from a kpng server, by default at
// 127.0.0.1:12090 (--api).
//
//	winuserspace.exe -v=4
//
// README.md describes how to install winuserspace and the kpng server, as Windows
// services or as a DaemonSet.
package main

import (
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/app/program"
	"github.com/kpng-project/kpng/remote"
)

func main() {
	cmd := app.Command(app.Options{Name: "winuserspace", Sink: program.Userspace(), Server: remote.DefaultAddress})
	cmd.Long = "winuserspace proxies services on a Windows node by sockets, at addresses that it puts on a network interface."
	app.Execute(cmd)
}
