// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

const repository = "git+https://github.com/kpng-project/kpng"

// printProvenance writes a statement of the format in-toto with the predicate SLSA
// provenance v1. It has the hashes of the files of a release. It also has the commit, the
// version of Go and the packages of Debian from which the files were made. The files *.deb
// are these packages. The current directory is the checkout of the commit.
func printProvenance(to io.Writer, files []string) error {
	commit, err := exec.Command("git", "rev-parse", "HEAD").Output()
	if err != nil {
		return fmt.Errorf("find commit: %w", err)
	}
	type sums map[string]string
	type resource struct {
		Name   string `json:"name,omitempty"`
		URI    string `json:"uri,omitempty"`
		Digest sums   `json:"digest,omitempty"`
	}
	from := []resource{{URI: repository, Digest: sums{"gitCommit": strings.TrimSpace(string(commit))}}}
	var subjects []resource
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(content)
		r := resource{Name: filepath.Base(file), Digest: sums{"sha256": hex.EncodeToString(sum[:])}}
		if filepath.Ext(file) == ".deb" {
			from = append(from, r)
		} else {
			subjects = append(subjects, r)
		}
	}
	statement := map[string]any{
		"_type":         "https://in-toto.io/Statement/v1",
		"subject":       subjects,
		"predicateType": "https://slsa.dev/provenance/v1",
		"predicate": map[string]any{
			"buildDefinition": map[string]any{
				"buildType":            "https://github.com/kpng-project/kpng/blob/main/hack/release",
				"externalParameters":   map[string]any{"source": repository, "go": runtime.Version()},
				"resolvedDependencies": from,
			},
			"runDetails": map[string]any{"builder": map[string]string{"id": "https://github.com/kpng-project/kpng/blob/main/CONTRIBUTING.md"}},
		},
	}
	return json.NewEncoder(to).Encode(statement)
}
