// SPDX-License-Identifier: Apache-2.0

//go:build unix

package file

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kpng-project/kpng/watcher"
)

func TestNamedPipeDoesNotBlock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.yaml")
	must(t, syscall.Mkfifo(path, 0o600))
	for name, path := range map[string]string{"by name": path, "in a folder": filepath.Dir(path)} {
		t.Run(name, func(t *testing.T) {
			_, err := load(t.Context(), path, watcher.Options{})
			if err == nil || !strings.Contains(err.Error(), "m.yaml: not a regular file (prw") {
				t.Errorf("error %v", err)
			}
		})
	}
}
