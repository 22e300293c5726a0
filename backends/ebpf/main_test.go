// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf_test

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// bpffsVariable has the mount point of a BPF file system for tests. The processes of the
// conformance kit inherit it.
const bpffsVariable = "KPNG_TEST_BPFFS"

// mountBPFFS mounts a BPF file system until the test ends, and returns its mount point. In
// a process of the conformance kit, it returns that of the test.
func mountBPFFS(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv(bpffsVariable); dir != "" {
		return dir
	}
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		t.Fatalf("mount a BPF file system, which needs root: %v", err)
	}
	os.Setenv(bpffsVariable, dir)
	t.Cleanup(func() {
		os.Unsetenv(bpffsVariable)
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount the BPF file system: %v", err)
		}
	})
	return dir
}
