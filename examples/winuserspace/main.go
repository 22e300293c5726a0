// SPDX-License-Identifier: Apache-2.0

//go:build windows

// Command winuserspace is a service proxy for Windows nodes that programs no
// kernel: it puts the addresses of services on a network interface, listens
// there, and copies what arrives to pods and back. Which services there are it is
// told by kpng, at 127.0.0.1:12090 unless --api says otherwise.
//
//	winuserspace.exe -v=4
//
// README.md says how to install both as services or as a DaemonSet.
package main

import (
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/backends/userspace/proxy"
	"github.com/spf13/cobra"
)

func main() { app.Execute(command()) }

func command() *cobra.Command {
	var (
		proxied = proxy.NewWindows()
		source  app.Source
		flags   app.SinkFlags
		serving app.Serving
		cleanup bool
	)
	cmd := &cobra.Command{
		Use:           "winuserspace",
		Long:          "winuserspace proxies services on a Windows node by sockets, at addresses that it puts on a network interface.",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	source.RegisterAPI(fs)
	proxied.Register(fs)
	fs.BoolVar(&cleanup, "cleanup", false, "remove the addresses that a program that was killed left behind, and end")
	flags.Register(fs)
	serving.Register(fs)
	app.RegisterLogging(fs)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if cleanup {
			return proxied.Cleanup(cmd.Context())
		}
		return flags.Run(cmd.Context(), cmd.Name(), &source, &serving, proxied)
	}
	return cmd
}
