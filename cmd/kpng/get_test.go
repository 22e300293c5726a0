// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestGetTables(t *testing.T) {
	t.Setenv("NODE_NAME", "here")
	for _, args := range []string{"services", "services -o wide", "services web", "services -o name", "frontends", "frontends -o wide", "frontends -o name", "nodes", "nodes -o wide"} {
		t.Run(args, func(t *testing.T) {
			got := mustExecute(t, append([]string{"get", "-i", explained}, strings.Fields(args)...)...)
			compareWithFile(t, "get "+args, got)
		})
	}
}

func TestGetObjects(t *testing.T) {
	t.Setenv("NODE_NAME", "here")
	line := func(args ...string) []byte {
		t.Helper()
		out := mustExecute(t, append([]string{"get", "-i", explained, "-o", "json"}, args...)...)
		first, _, _ := strings.Cut(out, "\n")
		return []byte(first)
	}
	var service struct {
		Service   struct{ Name string }
		Endpoints []any
	}
	if text := line("services", "web"); json.Unmarshal(text, &service) != nil || service.Service.Name != "web" || len(service.Endpoints) == 0 {
		t.Errorf("service %s", text)
	}
	var frontend struct {
		Namespace, Name, Kind string
		Elsewhere             struct{ Verdict string }
	}
	if text := line("frontends", "web"); json.Unmarshal(text, &frontend) != nil || frontend.Name != "web" || frontend.Kind != "ClusterIP" || frontend.Elsewhere.Verdict != "Forward" {
		t.Errorf("frontend %s", text)
	}
	var node struct{ Name string }
	if text := line("nodes", "here"); json.Unmarshal(text, &node) != nil || node.Name != "here" {
		t.Errorf("node %s", text)
	}
	if out := mustExecute(t, "get", "frontends", "-i", explained, "--node-name=here", "-o", "yaml"); !strings.HasPrefix(out, "---\n") || !strings.Contains(out, "Kind: ClusterIP") {
		t.Errorf("YAML:\n%s", out)
	}
}

// The names of frontends are arguments of kpng explain.
func TestFrontendNamesCanBeExplained(t *testing.T) {
	names := strings.Fields(mustExecute(t, "get", "frontends", "-i", explained, "--node-name=here", "-o", "name"))
	for _, name := range names {
		if !strings.HasPrefix(name, "0.0.0.0:") {
			mustExecute(t, "explain", "-i", explained, "--node-name=here", name)
		}
	}
	if len(names) == 0 {
		t.Error("no frontends")
	}
}

func TestGetErrors(t *testing.T) {
	t.Setenv("NODE_NAME", "here")
	for _, test := range []struct{ args, want string }{
		{"services missing", "missing not found; kpng get services without a name lists all"},
		{"frontends default/missing", "default/missing not found"},
		{"nodes missing", "missing not found"},
		{"services 10.0.0.1:80", "kpng explain"},
		{"services -o xml", `--output "xml"`},
		{"pods", "use one of frontends, nodes, services"},
	} {
		args := append([]string{"get"}, strings.Fields(test.args)...)
		if !strings.HasPrefix(test.args, "pods") {
			args = append(args, "-i", explained)
		}
		if _, err := execute(t.Context(), args...); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("kpng get %s: error %v, want %q", test.args, err, test.want)
		}
	}
}
