// SPDX-License-Identifier: Apache-2.0

// Command embedder prints the names of the services in a folder of manifests. Without a
// folder it prints the names of the services in the cluster in which it runs.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
)

func main() {
	ctx, stop := context.WithCancel(context.Background())
	err := kpng.Run(ctx, kpng.Options{Manifests: strings.Join(os.Args[1:], "")}, sink.FullState(
		func(_ context.Context, services []*api.View) error {
			for _, s := range services {
				fmt.Println(s.Key())
			}
			stop()
			return nil
		}))
	if err != nil {
		log.Fatal(err)
	}
}
