// SPDX-License-Identifier: Apache-2.0

// Command kpng-json prints what its node has to proxy, one JSON object a
// service, at the start and again, as a whole, whenever something changes. It prints
// nothing before every service is known. With --frontends it prints the node, and then
// one JSON object a frontend, with everything decided.
package main

import (
	"context"
	"os"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
)

func main() {
	var p printer
	cmd := app.Command("kpng-json", sink.FullStateOf(&p))
	cmd.Flags().BoolVar(&p.frontends, "frontends", false, "print the node, then each frontend with everything decided, instead of services")
	app.Execute(cmd)
}

type printer struct{ frontends bool }

// SyncState implements sink.StateSink.
func (p *printer) SyncState(_ context.Context, node *api.Node, services []*api.ServiceEndpoints) error {
	if p.frontends {
		return nodeview.WriteFrontends(os.Stdout, node, services)
	}
	return nodeview.WriteViews(os.Stdout, services)
}
