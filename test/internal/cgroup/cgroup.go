// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package cgroup runs processes in a new memory cgroup and measures their resources. It
// supports cgroups v1 and v2.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Group is a memory cgroup.
type Group struct {
	testing.TB
	dir string
}

const root = "/sys/fs/cgroup"

var groups atomic.Int64

// New creates a group and removes it when the test ends. It needs root.
func New(t testing.TB) *Group {
	t.Helper()
	name := fmt.Sprintf("kpng-%d-%d", os.Getpid(), groups.Add(1))
	dir := filepath.Join(root, name)
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(own)) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 && parts[1] == "memory" {
			dir = filepath.Join(root, "memory", parts[2], name)
		}
	}
	if filepath.Dir(dir) == root { // cgroups v2
		if err := os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+memory"), 0); err != nil {
			t.Fatalf("enabling the memory controller: %v", err)
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatalf("making a memory cgroup, which needs root: %v", err)
	}
	g := &Group{t, dir}
	t.Cleanup(g.remove)
	return g
}

// remove removes the group. It retries while processes of the group are still ending.
func (g *Group) remove() {
	var err error
	for range 100 {
		if err = os.Remove(g.dir); err == nil || errors.Is(err, fs.ErrNotExist) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	g.Errorf("remove memory cgroup: %v", err)
}

// Command returns a command line that runs args in the group.
func (g *Group) Command(args ...string) []string {
	return append([]string{"sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, g.dir}, args...)
}

// Memory returns the memory charged to the group in bytes, including kernel memory.
func (g *Group) Memory() int64 {
	g.Helper()
	return g.read("memory.usage_in_bytes", "memory.current")
}

// KernelMemory returns the kernel memory charged to the group in bytes, for example for
// sockets, page tables and nftables elements.
func (g *Group) KernelMemory() int64 {
	g.Helper()
	if stat, err := os.ReadFile(filepath.Join(g.dir, "memory.stat")); err == nil {
		for line := range strings.Lines(string(stat)) {
			if value, ok := strings.CutPrefix(line, "kernel "); ok {
				return g.number(value)
			}
		}
	}
	return g.read("memory.kmem.usage_in_bytes")
}

// read returns the number in a file of the group. If several names are given,
// it uses the first file that exists.
func (g *Group) read(names ...string) int64 {
	g.Helper()
	for _, name := range names {
		if b, err := os.ReadFile(filepath.Join(g.dir, name)); err == nil {
			return g.number(string(b))
		}
	}
	g.Fatalf("%s has none of %s", g.dir, strings.Join(names, ", "))
	return 0
}

func (g *Group) number(text string) int64 {
	g.Helper()
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil {
		g.Fatal(err)
	}
	return n
}

func (g *Group) members() []string {
	g.Helper()
	b, err := os.ReadFile(filepath.Join(g.dir, "cgroup.procs"))
	if err != nil {
		g.Fatal(err)
	}
	return strings.Fields(string(b))
}

// CPU returns the CPU time of the group's processes and of their children that have
// ended.
func (g *Group) CPU() time.Duration {
	g.Helper()
	used := time.Duration(0)
	for _, pid := range g.members() {
		times, _ := Times(g, int(g.number(pid))) // zero if the process has just ended
		for _, d := range times {
			used += d
		}
	}
	return used
}

// Descriptors returns the number of open files of the group's processes.
func (g *Group) Descriptors() int {
	g.Helper()
	n := 0
	for _, pid := range g.members() {
		if entries, err := os.ReadDir("/proc/" + pid + "/fd"); err == nil {
			n += len(entries)
		}
	}
	return n
}
