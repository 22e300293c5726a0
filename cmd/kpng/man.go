// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// manCommand returns the command that writes man pages. Packages of kpng run it when they
// are built.
func manCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "man FOLDER",
		Short: "Write a man page for each command into a folder",
		Long: `Write a man page for each command into a folder.
The date of the pages is now, or that of the environment variable SOURCE_DATE_EPOCH.`,
		Example: "  kpng man /usr/share/man/man1",
		Args:    usage.One,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("write man pages: %w", err)
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true
			header := &doc.GenManHeader{Section: "1", Source: "kpng " + command.Version(), Manual: "kpng"}
			if err := doc.GenManTree(root, header, args[0]); err != nil {
				return fmt.Errorf("write man pages: %w", err)
			}
			return nil
		},
	}
}
