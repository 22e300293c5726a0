// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"text/tabwriter"

	"github.com/kpng-project/kpng/internal/plain"
	"github.com/spf13/cobra"
)

// newTable returns a writer that aligns columns. Tabs separate the columns. Characters
// that control a terminal are escaped.
func newTable(w io.Writer) *tabwriter.Writer {
	return tabwriter.NewWriter(plain.Writer(w), 0, 0, 3, ' ', 0)
}

// completeOutput makes shells complete the values of --output.
func completeOutput(cmd *cobra.Command, values ...string) {
	complete := cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	if err := cmd.RegisterFlagCompletionFunc("output", complete); err != nil {
		panic(err) // the flag exists
	}
}
