// SPDX-License-Identifier: Apache-2.0

package gotool

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestErrorNamesMissingGoCommand(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := Build(t.Context(), Etcd)
	if err == nil || !strings.Contains(err.Error(), "needs the go command") {
		t.Errorf("error %v, want one that names the missing command", err)
	}
}

func TestErrorNamesUnknownProgram(t *testing.T) {
	_, err := Build(t.Context(), "example.com/no/such/program")
	if err == nil || !strings.Contains(err.Error(), "build example.com/no/such/program") {
		t.Errorf("error %v, want one that names the program", err)
	}
}

func TestProgramsInFolder(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("KPNG_TEST_PROGRAMS", dir)
	want := filepath.Join(dir, "server")
	if err := os.WriteFile(want, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := Build(t.Context(), Etcd); err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	if _, err := Build(t.Context(), KubeProxy); err == nil || !strings.Contains(err.Error(), KubeProxy) {
		t.Errorf("error %v, want one that names the missing program", err)
	}
}
