// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/mod/semver"
)

// checkUpdates fails if a module of a program has a newer patch than the program contains.
// It runs the go command, which asks the module proxy.
func checkUpdates(file string) error {
	p, err := readProgram(file)
	if err != nil {
		return err
	}
	present := map[string]string{}
	args := []string{"list", "-mod=mod", "-m", "-versions", "-f", "{{.Path}} {{range .Versions}}{{.}} {{end}}"}
	for _, m := range p.info.Deps {
		present[m.Path] = m.Version
		args = append(args, m.Path)
	}
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("list versions: %w", err)
	}
	var updates []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if newest := newestPatch(present[fields[0]], fields[1:]); newest != "" {
			updates = append(updates, fmt.Sprintf("%s@%s", fields[0], newest))
		}
	}
	if len(updates) > 0 {
		return fmt.Errorf("newer patches exist: %s", strings.Join(updates, " "))
	}
	return nil
}

// newestPatch returns the newest version with the same minor version as the version
// present, or "" if no such version is newer.
func newestPatch(present string, versions []string) string {
	newest := present
	for _, v := range versions {
		if semver.MajorMinor(v) == semver.MajorMinor(present) && semver.Prerelease(v) == "" && semver.Compare(v, newest) > 0 {
			newest = v
		}
	}
	if newest == present {
		return ""
	}
	return newest
}
