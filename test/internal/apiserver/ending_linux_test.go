// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestProcessesEnd(t *testing.T) {
	for name, way := range map[string]string{
		"the test process panicked":   "panic",
		"the test process was killed": "SIGKILL",
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), endingEnv+"="+way, "TMPDIR="+t.TempDir())
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(stdout).ReadString('\n')
			if err != nil {
				t.Errorf("%v\n%s", err, stderr.Bytes())
			}
			if way == "SIGKILL" {
				if err := cmd.Process.Kill(); err != nil {
					t.Error(err)
				}
			}
			if err := cmd.Wait(); err == nil {
				t.Error("the test process ended without an error")
			}
			for _, pid := range strings.Fields(line) {
				waitEnded(t, pid)
			}
		})
	}

	t.Run("the test ended", func(t *testing.T) {
		before := goleak.IgnoreCurrent()
		var pids []string
		var dir string
		t.Run("test", func(t *testing.T) {
			s := Start(t, Options{})
			pids = []string{fmt.Sprint(s.Etcd.cmd.Process.Pid), fmt.Sprint(s.APIServer.cmd.Process.Pid)}
			dir = s.dir
		})
		for _, pid := range pids {
			if running(t, pid) {
				t.Errorf("process %s still runs", pid)
			}
		}
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("stat %s: %v, want not exist", dir, err)
		}
		goleak.VerifyNone(t, before)
	})
}

func waitEnded(t *testing.T, pid string) {
	t.Helper()
	deadline := time.Now().Add(stopTimeout)
	for running(t, pid) {
		if time.Now().After(deadline) {
			t.Errorf("process %s still runs", pid)
			return
		}
		time.Sleep(pollInterval)
	}
}

// running reports whether a process exists and is not a zombie.
func running(t *testing.T, pid string) bool {
	t.Helper()
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X")
}
