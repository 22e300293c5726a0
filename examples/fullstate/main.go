// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command fullstate is a small service proxy that uses sink.FullState. For each change, it
// writes its whole nftables table.
package main

import (
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/sink"
)

func main() {
	b := &backend{}
	cmd := app.Command(app.Options{Name: "fullstate", Sink: sink.FullStateOf(b)})
	cmd.Flags().StringVar(&b.table, "table", "fullstate", "the `name` of the nftables table")
	cmd.Flags().Func("node-ports", "serve node ports at the node's addresses in this `network`; may be repeated", func(text string) error {
		network, err := netip.ParsePrefix(text)
		if err != nil {
			return fmt.Errorf("parse network: %w", err)
		}
		b.nodePorts = append(b.nodePorts, network.Masked())
		return nil
	})
	app.Execute(cmd)
}
