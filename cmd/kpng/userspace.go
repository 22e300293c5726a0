// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/backends/userspace/proxy"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// newUserspace describes the backend that proxies by sockets, as newProxy makes
// it for this platform.
func newUserspace(newProxy func() *proxy.Proxy) func(*cobra.Command) func() (sink.Sink, error) {
	return func(cmd *cobra.Command) func() (sink.Sink, error) {
		cmd.Long = "Listen at the addresses of services, and copy what arrives to endpoints and back. It needs no privilege for node ports and for addresses that this host has."
		p := newProxy()
		p.Register(cmd.Flags())
		return func() (sink.Sink, error) { return p, nil }
	}
}
