// SPDX-License-Identifier: Apache-2.0

package importer

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// module is a Go module outside the repository, in a temporary directory.
type module struct {
	dir string
	env []string
}

// newModule writes a module with the given files. Its go.mod contains the text goMod, and
// requires client-go in kpng's version.
func newModule(t *testing.T, goMod string, files map[string]string) *module {
	t.Helper()
	root := checkout(t)
	kpng := &module{dir: root}
	m := &module{dir: t.TempDir(), env: []string{"GOFLAGS=-mod=mod", "GOWORK=off"}}
	goVersion := kpng.goCommand(t, "list", "-m", "-f", "{{.GoVersion}}")[0]
	clientGo := kpng.goCommand(t, "list", "-m", "k8s.io/client-go")[0]
	m.write(t, "go.mod", fmt.Sprintf("module example.com/importer\n\ngo %s\n\nrequire %s\n%s", goVersion, clientGo, goMod))
	// With kpng's checksums, the go command need not download the modules again.
	sums, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	m.write(t, "go.sum", string(sums))
	for name, content := range files {
		m.write(t, name, content)
	}
	// This command adds the modules of all imported packages to go.mod, like go get.
	m.goCommand(t, "list", "-deps", "./...")
	return m
}

// newImporter calls newModule for a module that requires this checkout of kpng.
func newImporter(t *testing.T, files map[string]string) *module {
	t.Helper()
	return newModule(t, fmt.Sprintf("require %s v0.0.0\nreplace %[1]s => %s\n", kpngModule, checkout(t)), files)
}

// linked returns the packages that the program links on an operating system,
// and the module of each package. It omits the standard library.
func (m *module) linked(t *testing.T, goos string) map[string]string {
	t.Helper()
	on := &module{dir: m.dir, env: append(m.env, "GOOS="+goos, "CGO_ENABLED=0")}
	packages := map[string]string{}
	for _, line := range on.goCommand(t, "list", "-deps", "-f", "{{with .Module}}{{$.ImportPath}} {{.Path}}{{end}}", ".") {
		if path, module, ok := strings.Cut(line, " "); ok {
			packages[path] = module
		}
	}
	return packages
}

// versions returns the version of every module in the build list.
func (m *module) versions(t *testing.T) map[string]string {
	t.Helper()
	versions := map[string]string{}
	for _, line := range m.goCommand(t, "list", "-m", "-f", "{{if not .Main}}{{.Path}} {{.Version}}{{end}}", "all") {
		if path, version, ok := strings.Cut(line, " "); ok {
			versions[path] = version
		}
	}
	return versions
}

// build compiles the program without symbols and returns the path of the executable.
func (m *module) build(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	m.goCommand(t, "build", "-ldflags=-s", "-o", path, ".")
	return path
}

// goCommand runs the go command in the module and returns its output lines.
func (m *module) goCommand(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = m.dir
	cmd.Env = append(cmd.Environ(), m.env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("go %s: %v (this test needs the go command, and its modules in the cache or from a proxy)\n%s",
			strings.Join(args, " "), err, stderr.Bytes())
	}
	return strings.Split(strings.TrimSpace(stdout.String()), "\n")
}

func (m *module) write(t *testing.T, name, content string) {
	t.Helper()
	path := filepath.Join(m.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// checkout returns the directory of kpng's root module.
func checkout(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	return root
}
