// SPDX-License-Identifier: Apache-2.0

// Command first is the program of the README: a sink that prints the frontends of a node.
package main

import (
	"context"
	"fmt"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
)

func main() {
	app.Main(sink.FullState(func(_ context.Context, services []*api.View) error {
		for _, service := range services {
			for f := range nodeview.Frontends(service) {
				fmt.Println(service.Key(), f.FrontendKey, f.Elsewhere) // replace this by code that programs f
			}
		}
		return nil
	}))
}
