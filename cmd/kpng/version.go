// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/kpng-project/kpng/app"
	"github.com/spf13/cobra"
)

// versionCommand prints what this program was built from.
func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print what this program was built from",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "kpng", app.Version())
			return err
		},
	}
}
