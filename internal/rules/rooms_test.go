// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	module = "github.com/kpng-project/kpng"
	root   = "../.."
)

// Packages may only import what the table in docs/design.md allows.
func TestRooms(t *testing.T) {
	t.Chdir(root)
	rooms := readRooms(t)
	list := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var pkg struct {
			ImportPath string
			Imports    []string
		}
		if err := decoder.Decode(&pkg); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		room := roomOf(pkg.ImportPath)
		if strings.HasPrefix(room, "examples/") {
			continue
		}
		allowed, ok := rooms[room]
		if !ok {
			t.Errorf("docs/design.md lists no room for package %s", pkg.ImportPath)
			continue
		}
		seen++
		for _, imported := range pkg.Imports {
			if (imported == module || strings.HasPrefix(imported, module+"/")) && !mayImport(room, allowed, roomOf(imported)) {
				t.Errorf("%s imports %s, which docs/design.md does not allow", room, imported)
			}
		}
	}
	if seen < 10 {
		t.Errorf("checked only %d packages", seen)
	}
}

func roomOf(importPath string) string {
	if importPath == module {
		return "kpng"
	}
	return strings.TrimPrefix(importPath, module+"/")
}

func mayImport(room string, allowed []string, imported string) bool {
	return strings.HasPrefix(imported, room+"/") || strings.HasPrefix(room, imported+"/") ||
		slices.ContainsFunc(allowed, func(pattern string) bool {
			matched, _ := path.Match(pattern, imported)
			return matched || strings.TrimSuffix(pattern, "/*") == imported
		})
}

var quoted = regexp.MustCompile("`([^`]+)`")

// readRooms returns, for each package in docs/design.md, the packages that it may import.
func readRooms(t *testing.T) map[string][]string {
	file, err := os.Open("docs/design.md")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rooms := map[string][]string{}
	inTable := false
	for lines := bufio.NewScanner(file); lines.Scan(); {
		columns := strings.Split(lines.Text(), "|")
		switch {
		case len(columns) < 4:
			inTable = false
			continue
		case strings.Contains(columns[3], "may import"):
			inTable = true
			continue
		case !inTable:
			continue
		}
		var allowed []string
		for _, m := range quoted.FindAllStringSubmatch(columns[3], -1) {
			allowed = append(allowed, m[1])
		}
		for _, m := range quoted.FindAllStringSubmatch(columns[1], -1) {
			name := m[1]
			if name == "proxy.go" {
				name = "kpng"
			}
			rooms[name] = allowed
		}
	}
	return rooms
}

// With text/template, the linker keeps all exported methods of a program, which are many
// megabytes of an agent with typed clients. So the packages that an agent imports do not
// need it.
func TestAgentsNeedNoTemplates(t *testing.T) {
	t.Chdir(root)
	list := exec.Command("go", "list", "-deps", ".", "./status", "./health", "./metrics", "./backends/nftables")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(out))
	if !slices.Contains(packages, module+"/status") {
		t.Errorf("the list of packages has no package status: %s", out)
	}
	for _, unwanted := range []string{"text/template", "html/template"} {
		if slices.Contains(packages, unwanted) {
			t.Errorf("an agent needs package %s", unwanted)
		}
	}
}

// Programs with the proxy of a node, but without package metrics, link none of these modules.
func TestNodesNeedNoPrometheus(t *testing.T) {
	t.Chdir(root)
	list := exec.Command("go", "list", "-deps", "./node", "./backends/nftables")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(out))
	if !slices.Contains(packages, module+"/node") {
		t.Errorf("the list of packages has no package node: %s", out)
	}
	for _, p := range packages {
		for _, unwanted := range []string{"github.com/prometheus", "github.com/spf13/cobra", "google.golang.org/grpc", "text/template", module + "/internal/wire"} {
			if p == unwanted || strings.HasPrefix(p, unwanted+"/") {
				t.Errorf("package node needs package %s", p)
			}
		}
	}
}
