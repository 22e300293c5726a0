// SPDX-License-Identifier: Apache-2.0

//go:build windows

// Command winkernelspace is a service proxy for Windows nodes. It programs load balancers
// of the Host Networking Service.
//
//	winkernelspace --network l2bridge --api tcp://127.0.0.1:12090
//	winkernelspace --network l2bridge --kubeconfig C:\k\config
//
// README.md describes how to run it.
package main

import (
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/app/program"
	"github.com/kpng-project/kpng/watcher"
)

func main() {
	cmd := app.Command(app.Options{
		Name: "winkernelspace", Sink: program.Kernelspace(),
		// By default, kpng drops all annotations. Keep the annotation that the backend reads.
		Services: watcher.Options{KeepAnnotations: []string{"preserve-destination"}},
	})
	cmd.Long = "winkernelspace proxies services on a Windows node, by the load balancers of the Host Networking Service (HNS)."
	app.Execute(cmd)
}
