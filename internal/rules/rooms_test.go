// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const (
	module = "github.com/kpng-project/kpng"
	root   = "../.."
)

// Packages may only import what rooms.txt allows.
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
			t.Errorf("rooms.txt has no line for package %s", pkg.ImportPath)
			continue
		}
		seen++
		for _, imported := range pkg.Imports {
			if (imported == module || strings.HasPrefix(imported, module+"/")) && !mayImport(room, allowed, roomOf(imported)) {
				t.Errorf("%s imports %s, which rooms.txt does not allow", room, imported)
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

// readRooms returns the packages that each package in rooms.txt may import.
func readRooms(t *testing.T) map[string][]string {
	text, err := os.ReadFile("internal/rules/rooms.txt")
	if err != nil {
		t.Fatal(err)
	}
	rooms := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		names, allowed, isRooms := strings.Cut(line, ":")
		if !isRooms || strings.HasPrefix(line, "#") {
			continue
		}
		for _, name := range strings.Fields(names) {
			rooms[name] = strings.Fields(allowed)
		}
	}
	return rooms
}

// If a program contains text/template, the linker keeps all exported methods of the
// program. In an agent with typed clients, these methods have many megabytes. So no
// package that an agent imports may need text/template.
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

// A program that uses package node but not package metrics links none of these modules.
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
