// SPDX-License-Identifier: Apache-2.0

//go:build linux

package wine

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// Build builds a package of the root module, such as "./examples/kpng-json", as a Windows
// program and returns its path. For this program, it replaces two lines of Go's standard
// library. Then UDP sockets work without SIO_UDP_NETRESET, and files can be deleted
// without FileDispositionInformationEx.
func (w *Wine) Build(t testing.TB, pkg string) string {
	t.Helper()
	return w.BuildFrom(t, rootModule(t), pkg)
}

// BuildFrom is like [Wine.Build], but pkg is relative to the folder dir, which may be
// part of another module.
func (*Wine) BuildFrom(t testing.TB, dir, pkg string) string {
	t.Helper()
	tmp := t.TempDir()
	overlay, err := writeOverlay(tmp, goEnv(t, "GOROOT"))
	if err != nil {
		t.Fatalf("change standard library for Wine: %v", err)
	}
	exe := filepath.Join(tmp, path.Base(pkg)+".exe")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlay, "-o", exe, pkg)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOOS=windows", "GOARCH=amd64", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s for Windows: %v\n%s", pkg, err, out)
	}
	return exe
}

// CompileDLL compiles a C file to a library for 64-bit Windows, and returns the library's
// path. The compiler gets args, such as -lws2_32, as additional arguments.
func CompileDLL(t testing.TB, name, source string, args ...string) string {
	t.Helper()
	dll := filepath.Join(t.TempDir(), name)
	cmd := exec.CommandContext(t.Context(), "x86_64-w64-mingw32-gcc",
		append([]string{"-shared", "-O1", "-Wall", "-Werror", "-o", dll, source}, args...)...)
	out, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		t.Fatalf("this test needs a compiler for Windows: %v (Debian: apt-get install --no-install-recommends gcc-mingw-w64-x86-64)", err)
	}
	if err != nil {
		t.Fatalf("compile %s: %v\n%s", source, err, out)
	}
	return dll
}

// change is a replacement of text in a source file of the standard library.
type change struct {
	file, from, to string
}

var changes = [...]change{
	{
		file: "net/fd_windows.go",
		from: "windows.SIO_UDP_NETRESET, (*byte)(unsafe.Pointer(&flag)), size, nil, 0, &ret, nil, 0)\n\t\tif err != nil {",
		to:   "windows.SIO_UDP_NETRESET, (*byte)(unsafe.Pointer(&flag)), size, nil, 0, &ret, nil, 0)\n\t\tif err != nil && err != syscall.Errno(10045) {",
	},
	{
		file: "internal/syscall/windows/at_windows.go",
		from: "case STATUS_INVALID_INFO_CLASS,",
		to:   "case STATUS_INVALID_INFO_CLASS, NTStatus(0xC0000002),",
	},
}

// writeOverlay writes the changed sources to dir. It also writes the file for the flag
// -overlay of go build, and returns the file's name.
func writeOverlay(dir, goroot string) (string, error) {
	replace := map[string]string{}
	for _, c := range changes {
		original := filepath.Join(goroot, "src", c.file)
		source, err := os.ReadFile(original)
		if err != nil {
			return "", err
		}
		if n := bytes.Count(source, []byte(c.from)); n != 1 {
			return "", fmt.Errorf("%s contains this text %d times, want once: %q; compare it with this version of Go", original, n, c.from)
		}
		changed := filepath.Join(dir, filepath.Base(c.file))
		if err := os.WriteFile(changed, bytes.Replace(source, []byte(c.from), []byte(c.to), 1), 0o644); err != nil {
			return "", err
		}
		replace[original] = changed
	}
	data, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, data, 0o644)
}

func goEnv(t testing.TB, name string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "env", name).Output()
	if err != nil {
		t.Fatalf("go env %s: %v", name, err)
	}
	return strings.TrimSpace(string(out))
}

func rootModule(t testing.TB) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/kpng-project/kpng").Output()
	if err != nil {
		t.Fatalf("find root module: %v", err)
	}
	return strings.TrimSpace(string(out))
}
