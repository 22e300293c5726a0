// SPDX-License-Identifier: Apache-2.0

package gotool

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// BuildOwn builds a program of kpng, such as ./cmd/kpng, and returns its path. The caller
// must be a test in a subfolder of the folder test.
func BuildOwn(t testing.TB, pkg string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), filepath.Base(pkg))
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", path, pkg)
	cmd.Dir = "../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, out)
	}
	return path
}
