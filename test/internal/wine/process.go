// SPDX-License-Identifier: Apache-2.0

//go:build linux

package wine

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// endTimeout is the maximum time until a killed program has ended.
const endTimeout = 2 * time.Minute

// Process is a running program.
type Process struct {
	name  string
	log   string
	cmd   *exec.Cmd
	ended chan struct{}
}

// Start starts a program and kills it when the test ends. If the test fails, the test's
// log shows the end of the program's output.
func (w *Wine) Start(t testing.TB, exe string, args ...string) *Process {
	t.Helper()
	return w.StartEnv(t, nil, exe, args...)
}

// StartEnv is like [Wine.Start], but adds environment variables, each as "NAME=value".
func (w *Wine) StartEnv(t testing.TB, env []string, exe string, args ...string) *Process {
	t.Helper()
	name := filepath.Base(exe)
	log, err := os.CreateTemp(t.ArtifactDir(), name+".*.log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	p := &Process{
		name:  name,
		log:   log.Name(),
		cmd:   w.command(context.WithoutCancel(t.Context()), env, exe, args),
		ended: make(chan struct{}),
	}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		defer close(p.ended)
		// The kernel kills the program when the thread that started the program ends. So this
		// goroutine keeps its thread.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.cmd.Wait() // ignore the error, because ProcessState has the result
		}
	}()
	if err := <-started; err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	t.Cleanup(func() {
		p.Kill(t)
		if t.Failed() {
			t.Logf("end of the output of %s:\n%s", name, tail(p.Log(t)))
		}
	})
	return p
}

// Kill kills the program and waits for its end.
func (p *Process) Kill(t testing.TB) {
	t.Helper()
	if !p.Running() {
		return
	}
	p.cmd.Process.Kill() // ignore the error, which means that the program has already ended
	select {
	case <-p.ended:
	case <-time.After(endTimeout):
		t.Errorf("%s still runs %s after it was killed", p.name, endTimeout)
	}
}

// Running reports whether the program runs.
func (p *Process) Running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Wait waits until the program ends, and returns its exit status. If this takes
// longer than timeout, the test fails.
func (p *Process) Wait(t testing.TB, timeout time.Duration) int {
	t.Helper()
	select {
	case <-p.ended:
	case <-time.After(timeout):
		t.Fatalf("%s still runs after %s", p.name, timeout)
	}
	return p.cmd.ProcessState.ExitCode()
}

// Log returns what the program has written to standard output and standard error so far.
func (p *Process) Log(t testing.TB) string {
	t.Helper()
	log, err := os.ReadFile(p.log)
	if err != nil {
		t.Errorf("read output of %s: %v", p.name, err)
	}
	return string(log)
}

func tail(log string) string {
	const most = 8 << 10
	if len(log) > most {
		return "…" + log[len(log)-most:]
	}
	return log
}
