// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCompletions(t *testing.T) {
	const noFiles = ":4" // what the shell's script expects after the completions
	for _, test := range []struct {
		name string
		args []string
		want string
	}{
		{"services of explain", []string{"explain", "-i", explained, ""}, "alias default/alias dns default/dns older default/older web default/web"},
		{"a prefix", []string{"explain", "-i", explained, "default/o"}, "default/older"},
		{"services of get", []string{"get", "services", "-i", explained, "w"}, "web"},
		{"services of get frontends", []string{"get", "frontends", "-i", explained, "w"}, "web"},
		{"nodes", []string{"get", "nodes", "-i", explained, ""}, "here"},
		{"the node of explain", []string{"explain", "-i", explained, "--node-name", ""}, "here"},
		{"the node after a service", []string{"explain", "-i", explained, "web", "--node-name", "h"}, "here"},
		{"only one service", []string{"explain", "-i", explained, "web", ""}, ""},
		{"a source that does not exist", []string{"explain", "-i", "/does/not/exist", ""}, ""},
		{"output formats", []string{"get", "services", "-o", ""}, "wide json yaml name"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := strings.Fields(mustExecute(t, append([]string{"__completeNoDesc"}, test.args...)...))
			if diff := cmp.Diff(append(strings.Fields(test.want), noFiles), got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
