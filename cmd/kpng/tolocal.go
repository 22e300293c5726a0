// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/backends/program"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// backends returns the backends that this program can run. The JSON backend prints to
// the output of cmd.
func backends(cmd *cobra.Command) []*program.Backend {
	return append([]*program.Backend{{
		Name: "json", Short: "Print what the node has to proxy, one JSON object a service",
		Make: func() (program.Parts, error) { return program.Parts{Sink: sink.JSON(cmd.OutOrStdout())}, nil },
	}}, platformBackends()...)
}

// toLocal runs a backend in this process, for this node.
func toLocal(source *app.Source) *cobra.Command {
	cmd := group("to-local", "Run a backend for this node in this process")
	for _, b := range backends(cmd) {
		run := source.Command(b.Name, b)
		run.Short, run.Long = b.Short, b.Long
		cmd.AddCommand(run)
	}
	return cmd
}

// cleanupCommand removes what backends have left behind on purpose.
func cleanupCommand() *cobra.Command {
	cmd := group("cleanup", "Remove all that a backend has ever programmed on this machine")
	for _, b := range backends(cmd) {
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
		if _, leavesSomething := b.Sink().(sink.Cleaner); !leavesSomething {
			cmd.PrintErrf("the backend %s leaves nothing behind\n", b.Name)
			return nil
		}
		return b.Cleanup(cmd.Context())
	}
	return cmd
}
