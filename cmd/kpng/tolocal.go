// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/backends/program"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// toLocal runs a backend in this process, for this node.
func toLocal(source *app.Source, selects bool) *cobra.Command {
	cmd := group("to-local", "Run a backend for this node in this process")
	json := &program.Backend{Name: "json", Short: "Print what the node has to proxy, one JSON object a service"}
	json.Make = func() (program.Parts, error) {
		return program.Parts{Sink: sink.FullState(func(_ context.Context, services []*api.ServiceEndpoints) error {
			return nodeview.WriteViews(cmd.OutOrStdout(), services)
		})}, nil
	}
	for _, b := range append([]*program.Backend{json}, platformBackends()...) {
		run := source.Command(b.Name, b)
		run.Short, run.Long = b.Short, b.Long
		if selects && !b.OnlyPorts {
			source.RegisterAllPorts(run.Flags())
		}
		cmd.AddCommand(run)
	}
	return cmd
}

// cleanupCommand removes what backends have left behind on purpose.
func cleanupCommand() *cobra.Command {
	cmd := group("cleanup", "Remove all that a backend has ever programmed on this machine")
	for _, b := range platformBackends() {
		cmd.AddCommand(cleanup(b))
	}
	return cmd
}

func cleanup(b *program.Backend) *cobra.Command {
	cmd := &cobra.Command{Use: b.Name, Short: "Remove all that the backend " + b.Name + " has ever programmed", Args: cobra.NoArgs}
	cmd.Flags().SortFlags = false
	b.Register(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := b.Configure(); err != nil {
			return err
		}
		return b.Cleanup(cmd.Context())
	}
	return cmd
}
