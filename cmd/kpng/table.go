// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"io"
	"text/tabwriter"

	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// newTable returns a writer that aligns columns. Tabs separate the columns. Characters
// that control a terminal are escaped.
func newTable(w io.Writer) *tabwriter.Writer {
	return tabwriter.NewWriter(plain.Writer(w), 0, 0, 3, ' ', 0)
}

// number returns a number and a noun, in the singular or plural.
func number(n int, noun string) string { return report.Number(n, noun, noun+"s") }

// toYAML returns a value as YAML. Package yaml alone fails if JSON contains control
// characters, which annotations may have.
func toYAML(value any) ([]byte, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	return yaml.JSONToYAML(plain.YAML(text))
}

// completeOutput makes shells complete the values of --output.
func completeOutput(cmd *cobra.Command, values ...string) {
	complete := cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	if err := cmd.RegisterFlagCompletionFunc("output", complete); err != nil {
		panic(err) // the flag exists
	}
}
