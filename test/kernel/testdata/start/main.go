// SPDX-License-Identifier: Apache-2.0

// Command start starts the backend nftables or ipvs, and calls its method Sync without
// services. It prints the resulting errors, if any.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/sink"
)

type backend interface {
	sink.Sink
	sink.Starter
	sink.Stopper
}

func main() {
	ctx := context.Background()
	b, err := func() (backend, error) {
		if os.Args[1] == "ipvs" {
			return ipvs.New(ipvs.Options{})
		}
		return nftables.New(nftables.Options{Sysctls: nftables.IgnoreSysctls})
	}()
	if err != nil {
		panic(err)
	}
	err = b.Start(ctx)
	fmt.Println("start:", err)
	if err == nil {
		none := func(func(sink.Change) bool) {}
		fmt.Println("sync:", b.Sync(ctx, &sink.Changes{First: true, Last: true, NodeChanged: true, Services: none}))
	}
	fmt.Println("stop:", b.Stop(ctx))
}
