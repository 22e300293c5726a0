// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/spf13/cobra"
)

// completionTime limits the time to read the source when a user presses the Tab key.
const completionTime = 3 * time.Second

type completion = func(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective)

// completeFrom returns a function that completes the first argument, or a flag, with
// names from the source. Without a source, or if it does not answer in time, there are no
// completions.
func completeFrom(source *command.Source, names func(*cluster.Snapshot) []string) completion {
	return func(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		parent := cmd.Context()
		if parent == nil {
			parent = context.Background()
		}
		ctx, cancel := context.WithTimeout(parent, completionTime)
		defer cancel()
		objects, err := source.Load(ctx)
		if err != nil {
			cobra.CompDebugln(err.Error(), false)
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		matching := slices.DeleteFunc(names(objects.Snapshot), func(name string) bool { return !strings.HasPrefix(name, toComplete) })
		return matching, cobra.ShellCompDirectiveNoFileComp
	}
}

// serviceNames returns the names of all services with their namespaces. A service in the
// namespace default also has its short name.
func serviceNames(s *cluster.Snapshot) []string {
	var names []string
	for key, state := range s.States.All() {
		if state.Service == nil {
			continue
		}
		if key.Namespace == "default" {
			names = append(names, key.Name)
		}
		names = append(names, key.String())
	}
	return names
}

func nodeNames(s *cluster.Snapshot) []string {
	var names []string
	for name := range s.Nodes.All() {
		names = append(names, name)
	}
	return names
}

// completeNode makes shells complete the value of --node-name with names from the source.
func completeNode(cmd *cobra.Command, source *command.Source) {
	complete := completeFrom(source, nodeNames)
	err := cmd.RegisterFlagCompletionFunc("node-name", func(cmd *cobra.Command, _ []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return complete(cmd, nil, toComplete)
	})
	if err != nil {
		panic(err) // the flag exists
	}
}
