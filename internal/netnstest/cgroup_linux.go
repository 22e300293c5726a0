// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// Cgroup is a cgroup (version 2) for threads of the test process. The kernel allows a
// thread only in cgroups below the cgroup of its process. So MakeCgroup moves the whole
// process into the parent of the new cgroup.
type Cgroup struct {
	// Dir is the directory of the cgroup.
	Dir string
	// The field parent is the directory of the cgroup above Dir. The field home is the
	// directory of the cgroup in which the process was before MakeCgroup.
	parent, home string
}

// MakeCgroup makes a cgroup. It needs root.
func MakeCgroup() (*Cgroup, error) {
	root, err := cgroupMount()
	if err != nil {
		return nil, err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	c := &Cgroup{parent: filepath.Join(root, fmt.Sprintf("kpng-test-%d", os.Getpid()))}
	for line := range strings.Lines(string(own)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			c.home = filepath.Join(root, path)
		}
	}
	c.Dir = filepath.Join(c.parent, "threads")
	err = os.Mkdir(c.parent, 0o755)
	if err == nil {
		err = os.Mkdir(c.Dir, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(c.Dir, "cgroup.type"), []byte("threaded"), 0)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(c.parent, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make cgroup: %w", err), c.Close())
	}
	return c, nil
}

// NewCgroup makes a cgroup that exists until the test ends.
func NewCgroup(t testing.TB) *Cgroup {
	t.Helper()
	NeedRoot(t)
	c, err := MakeCgroup()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// Below makes a cgroup with this name below c. The new cgroup exists until the test ends, or
// until the caller removes its directory.
func (c *Cgroup) Below(t testing.TB, name string) *Cgroup {
	t.Helper()
	below := &Cgroup{Dir: filepath.Join(c.Dir, name), parent: c.parent}
	t.Cleanup(func() {
		if err := os.Remove(below.Dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	if err := errors.Join(os.Mkdir(below.Dir, 0o755), os.WriteFile(filepath.Join(below.Dir, "cgroup.type"), []byte("threaded"), 0)); err != nil {
		t.Fatal(err)
	}
	return below
}

func cgroupMount() (string, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		mount, fileSystem, _ := strings.Cut(lines.Text(), " - ")
		if fields := strings.Fields(mount); strings.HasPrefix(fileSystem, "cgroup2 ") && len(fields) > 4 {
			return fields[4], nil
		}
	}
	return "", errors.New("no file system of type cgroup2 is mounted")
}

// Close moves the process back and removes the cgroup.
func (c *Cgroup) Close() error {
	var errs []error
	if _, err := os.Stat(c.parent); err == nil {
		errs = append(errs, os.WriteFile(filepath.Join(c.home, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0))
	}
	for _, dir := range []string{c.Dir, c.parent} {
		if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// do moves the current thread into the cgroup, calls f, and moves the thread
// back. The caller must have locked the thread (runtime.LockOSThread).
func (c *Cgroup) do(f func() error) error {
	if err := c.moveThread(c.Dir); err != nil {
		return err
	}
	err := f()
	if back := c.moveThread(c.parent); back != nil {
		runtime.LockOSThread() // more locks than unlocks: the thread ends with its goroutine
		err = errors.Join(err, back)
	}
	return err
}

func (c *Cgroup) moveThread(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.threads"), []byte("0"), 0); err != nil {
		return fmt.Errorf("move thread to another cgroup: %w", err)
	}
	return nil
}
