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
	var node *api.Node
	views := sink.JSON(os.Stdout)
	decided := sink.FullState(func(_ context.Context, services []*api.ServiceEndpoints) error {
		return nodeview.WriteFrontends(os.Stdout, node, services)
	})
	var frontends bool
	cmd := app.Command("kpng-json", sink.Func(func(ctx context.Context, c *sink.Changes) error {
		if !frontends {
			return views.Sync(ctx, c)
		}
		node = c.Node
		return decided.Sync(ctx, c)
	}))
	cmd.Flags().BoolVar(&frontends, "frontends", false, "print the node, then each frontend with everything decided, instead of services")
	app.Execute(cmd)
}
