// SPDX-License-Identifier: Apache-2.0

// Command kpng-json prints what its node has to proxy, one JSON object a
// service, at the start and again, as a whole, whenever something changes.
package main

import (
	"context"
	"encoding/json"
	"os"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/sink"
)

func main() {
	out := json.NewEncoder(os.Stdout)
	app.Main(sink.FullState(func(_ context.Context, services []*api.ServiceEndpoints) error {
		for _, service := range services {
			if err := out.Encode(service); err != nil {
				return err
			}
		}
		return nil
	}))
}
