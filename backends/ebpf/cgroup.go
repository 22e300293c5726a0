// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// rootCgroup is the ID of the root cgroup, version 2.
const rootCgroup = 1

// cgroupID returns the ID of a cgroup, which is the inode number of the cgroup's
// directory.
func cgroupID(dir string) (uint64, error) {
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return 0, fmt.Errorf("read cgroup %s: %w", dir, err)
	}
	return s.Ino, nil
}

// findCgroup returns the directory of the root cgroup, version 2.
func findCgroup() (string, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		// See proc_pid_mountinfo(5). A separator "-" comes before the file system's type.
		mount, fileSystem, _ := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(mount)
		if !strings.HasPrefix(fileSystem, "cgroup2 ") || len(fields) < 5 {
			continue
		}
		if id, err := cgroupID(fields[4]); err == nil && id == rootCgroup {
			return fields[4], nil
		}
	}
	return "", errors.New("the root cgroup of version 2 is not mounted here; mount the node's file system of cgroups into the container")
}

// checkFileSystems checks that the directories cgroup and bpffs are on file systems of
// the right types.
func checkFileSystems(cgroup, bpffs string) error {
	for _, check := range []struct {
		dir, what, advice string
		magic             int64
	}{
		{cgroup, "in a file system of type cgroup2", "", unix.CGROUP2_SUPER_MAGIC},
		{bpffs, "a BPF file system", "; mount one: mount -t bpf -o mode=700 bpf " + bpffs, unix.BPF_FS_MAGIC},
	} {
		var s unix.Statfs_t
		if err := unix.Statfs(check.dir, &s); err != nil {
			return fmt.Errorf("check %s: %w", check.dir, err)
		}
		if int64(s.Type) != check.magic {
			return fmt.Errorf("%s is not %s%s", check.dir, check.what, check.advice)
		}
	}
	return nil
}
