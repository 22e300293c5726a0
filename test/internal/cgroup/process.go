// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cgroup

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Times returns the fields utime, stime, cutime and cstime of a process, in steps of 10 ms.
// They are the CPU times of the process in user and kernel mode, and the same times of its
// ended children. If the process has ended, ok is false.
func Times(t testing.TB, pid int) (times [4]time.Duration, ok bool) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return times, false
	}
	// The second field is the program's name in parentheses, which may contain spaces. So
	// fields[0] is the third field.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	for i := range times {
		ticks, err := strconv.Atoi(fields[11+i])
		if err != nil {
			t.Fatal(err)
		}
		times[i] = time.Duration(ticks) * (time.Second / 100)
	}
	return times, true
}

// Status returns the bytes in a line of a process's status, such as VmRSS for the resident
// memory or VmHWM for its peak.
func Status(t testing.TB, pid int, line string) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(l, line+":"); ok {
			kilobytes, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kilobytes << 10
		}
	}
	t.Fatalf("the status of process %d has no line %s", pid, line)
	return 0
}
