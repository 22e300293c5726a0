// SPDX-License-Identifier: Apache-2.0

// Command kpng-json prints its node's view, one JSON object per service. It prints the
// whole view when every service is known, and prints it again after each change. With
// --frontends it prints the node and then one JSON object per frontend. The object of a
// frontend contains its endpoints and the result of every policy. Without flags that select
// a source or services, it reads from the kpng server on this machine.
package main

import (
	"context"
	"os"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink"
)

func main() {
	var p printer
	cmd := app.Command(app.Options{Name: "kpng-json", Sink: sink.FullStateOf(&p), Server: remote.DefaultAddress})
	cmd.Flags().BoolVar(&p.frontends, "frontends", false, "print the node and each frontend, with every decision made, instead of services")
	app.Execute(cmd)
}

type printer struct{ frontends bool }

// SyncState implements sink.StateSink.
func (p *printer) SyncState(_ context.Context, node *api.Node, services []*api.View) error {
	if p.frontends {
		return nodeview.WriteFrontends(os.Stdout, node, services)
	}
	return nodeview.WriteViews(os.Stdout, services)
}
