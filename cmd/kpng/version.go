// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// versionCommand prints what this program was built from.
func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print what this program was built from",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			info, ok := debug.ReadBuildInfo()
			if !ok {
				return fmt.Errorf("this program was built without saying from what")
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), versionOf(info))
			return err
		},
	}
}

// versionOf returns version, revision, Go and platform in one line.
func versionOf(info *debug.BuildInfo) string {
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	revision := settings["vcs.revision"]
	if revision == "" {
		revision = "unknown"
	}
	if settings["vcs.modified"] == "true" {
		revision += ", modified"
	}
	return fmt.Sprintf("kpng %s (revision %s) %s %s/%s", info.Main.Version, revision, info.GoVersion, settings["GOOS"], settings["GOARCH"])
}
