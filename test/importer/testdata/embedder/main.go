// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/sink"
)

func main() {
	log.Fatal(kpng.Run(context.Background(), kpng.Options{}, sink.Func(func(_ context.Context, c *sink.Changes) error {
		for s := range c.Services {
			fmt.Println(s.Key, s.New)
		}
		return nil
	})))
}
