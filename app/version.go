// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"runtime/debug"
)

// Version returns what the program was built from, in one line: version, revision, Go and
// platform.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown, built without build information"
	}
	return versionOf(info)
}

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
	return fmt.Sprintf("%s (revision %s) %s %s/%s", info.Main.Version, revision, info.GoVersion, settings["GOOS"], settings["GOARCH"])
}
