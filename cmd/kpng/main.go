// SPDX-License-Identifier: Apache-2.0

// Command kpng brings what a cluster says about its services from a source (an
// API server, manifests, another kpng) to a target: clients on the network, a
// backend in this process, a file.
//
//	kpng kube --kubeconfig F to-api --listen unix:///run/kpng/kpng.sock
//	kpng api --api unix:///run/kpng/kpng.sock to-local json
//
// It also explains what becomes of a service on a node, and why. docs/running.md
// is its manual.
package main

import (
	"fmt"
	"strings"

	"github.com/kpng-project/kpng/app"
	"github.com/spf13/cobra"
)

func main() { app.Execute(newRoot()) }

func newRoot() *cobra.Command {
	var server, manifests, other app.Source
	kube := group("kube", "Watch a Kubernetes API server", targets(&server, true)...)
	server.RegisterKube(kube.PersistentFlags())
	file := group("file", "Read Kubernetes manifests and follow them", targets(&manifests, true)...)
	manifests.RegisterManifests(file.PersistentFlags())
	if err := file.MarkPersistentFlagRequired("manifests"); err != nil {
		panic(err) // there is no such flag
	}
	api := group("api", "Read from another kpng, which serves with to-api", targets(&other, false)...)
	other.RegisterAPI(api.PersistentFlags())

	root := group("kpng", "Bring the services of a cluster to nodes: serve, program or write them", kube, file, api, explainCommand(), cleanupCommand())
	root.Version = app.Version()
	root.SilenceErrors = true
	root.SilenceUsage = true
	app.RegisterLogging(root.PersistentFlags())
	return root
}

// group returns a command that has others below it and does nothing itself.
func group(name, short string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   name,
		Short: short,
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			var names []string
			for _, c := range cmd.Commands() {
				if c.IsAvailableCommand() {
					names = append(names, c.Name())
				}
			}
			known := strings.Join(names, ", ")
			if len(args) > 0 {
				return fmt.Errorf("%s has no command %q, only %s", cmd.CommandPath(), args[0], known)
			}
			return fmt.Errorf("%s needs a command: one of %s", cmd.CommandPath(), known)
		},
	}
	cmd.PersistentFlags().SortFlags = false
	cmd.AddCommand(commands...)
	return cmd
}

// targets returns what can be done with a source. Unless it is another kpng, the user
// selects which services there are, and which of them are all-ports services.
func targets(s *app.Source, selects bool) []*cobra.Command {
	return []*cobra.Command{toAPI(s, selects), toLocal(s, selects), toFile(s, selects)}
}
