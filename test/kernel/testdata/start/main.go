// SPDX-License-Identifier: Apache-2.0

// Command start starts the nftables backend. If that fails, it prints the error.
package main

import (
	"context"
	"fmt"

	"github.com/kpng-project/kpng/backends/nftables"
)

func main() {
	ctx := context.Background()
	b, err := nftables.New(nftables.Options{Sysctls: nftables.IgnoreSysctls})
	if err != nil {
		panic(err)
	}
	fmt.Println("start:", b.Start(ctx))
	fmt.Println("stop:", b.Stop(ctx))
}
