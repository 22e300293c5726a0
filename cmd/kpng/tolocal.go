// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// backend is a sink that this program can run.
type backend struct {
	name, short string
	// new adds the backend's flags to a command and returns what makes the sink
	// that they describe, to run it or to clean up after it (sink.Cleaner). It may
	// set the command's Long text, too.
	new func(cmd *cobra.Command) func() (sink.Sink, error)
}

// backends returns those that there are on this platform.
func backends() []backend {
	return append([]backend{
		{"json", "Print what the node has to proxy, one JSON object a service", newJSON},
	}, platformBackends()...)
}

func newJSON(cmd *cobra.Command) func() (sink.Sink, error) {
	return func() (sink.Sink, error) { return sink.JSON(cmd.OutOrStdout()), nil }
}

// toLocal runs a backend in this process, for this node.
func toLocal(source *app.Source) *cobra.Command {
	cmd := group("to-local", "Run a backend for this node in this process")
	for _, b := range backends() {
		cmd.AddCommand(b.run(source))
	}
	return cmd
}

func (b backend) run(source *app.Source) *cobra.Command {
	var (
		flags   app.SinkFlags
		serving app.Serving
	)
	cmd := &cobra.Command{Use: b.name, Short: b.short, Args: cobra.NoArgs}
	cmd.Flags().SortFlags = false
	newSink := b.new(cmd)
	flags.Register(cmd.Flags())
	serving.Register(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := newSink()
		if err != nil {
			return err
		}
		return flags.Run(cmd.Context(), b.name, source, &serving, s)
	}
	return cmd
}

// cleanupCommand removes what backends have left behind on purpose.
func cleanupCommand() *cobra.Command {
	cmd := group("cleanup", "Remove all that a backend has ever programmed on this machine")
	for _, b := range backends() {
		cmd.AddCommand(b.cleanup())
	}
	return cmd
}

func (b backend) cleanup() *cobra.Command {
	cmd := &cobra.Command{Use: b.name, Short: "Remove all that the backend " + b.name + " has ever programmed", Args: cobra.NoArgs}
	cmd.Flags().SortFlags = false
	newSink := b.new(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := newSink()
		if err != nil {
			return err
		}
		cleaner, leavesSomething := s.(sink.Cleaner)
		if !leavesSomething {
			cmd.PrintErrf("the backend %s leaves nothing behind\n", b.name)
			return nil
		}
		return cleaner.Cleanup(cmd.Context())
	}
	return cmd
}
