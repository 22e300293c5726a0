// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	// startPatience limits the time without log lines before a process is ready. On busy or
	// emulated machines, a start can take minutes.
	startPatience = 2 * time.Minute
	// stopTimeout limits the time until a process has ended after a signal. An API server
	// waits a minute for its clients to end their watches.
	stopTimeout = 90 * time.Second
	// probeTimeout limits the time of a readiness check.
	probeTimeout = 30 * time.Second
	// pollInterval is the time between readiness checks.
	pollInterval = 20 * time.Millisecond
	// tailBytes is the maximum length of the log excerpt that a failed test prints.
	tailBytes = 8 << 10
)

// Process is one of the two programs of a [Server]. A test can restart it with the same
// data, address and keys. The methods are not safe for concurrent use.
type Process struct {
	name    string
	path    string
	args    []string
	logPath string
	// ready returns an error until the program is ready.
	ready func(context.Context) error

	cmd *exec.Cmd
	// ended is closed when the process has ended. It is nil before the first start.
	ended chan struct{}
}

// Start starts the process if it does not run, and waits until it is ready.
func (p *Process) Start(t testing.TB) {
	t.Helper()
	if err := p.start(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Stop ends the process with SIGTERM and waits for its end. Stopping an API server that
// has open watches takes a minute.
func (p *Process) Stop(t testing.TB) {
	t.Helper()
	if err := p.stop(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

// Kill ends the process with SIGKILL and waits for its end.
func (p *Process) Kill(t testing.TB) {
	t.Helper()
	if err := p.stop(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// Running reports whether the process runs.
func (p *Process) Running() bool {
	if p.ended == nil {
		return false
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

func (p *Process) start(ctx context.Context) error {
	if p.Running() {
		return nil
	}
	log, err := os.OpenFile(p.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	defer log.Close()

	p.cmd = exec.Command(p.path, p.args...)
	p.cmd.Dir = filepath.Dir(p.logPath)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = dieWithParent()
	started, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		// The kernel kills the process when the thread that started it ends. So this goroutine
		// keeps its thread until the process has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.cmd.Wait() // ignore the error, because ProcessState has the result
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	p.ended = ended

	if err := p.waitReady(ctx); err != nil {
		p.stop(syscall.SIGKILL) // ignore the error of stop and return err, the cause
		return fmt.Errorf("start %s: %w\n%s", p.name, err, p.logTail(0))
	}
	return nil
}

// waitReady waits until the process is ready or has ended. It fails if the process logs
// nothing for startPatience.
func (p *Process) waitReady(ctx context.Context) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	logged, since := p.logSize(), time.Now()
	for {
		err := p.ready(ctx)
		if err == nil {
			return nil
		}
		if size := p.logSize(); size != logged {
			logged, since = size, time.Now()
		}
		if time.Since(since) > startPatience {
			return fmt.Errorf("not ready, and logged nothing for %s: %w", startPatience, err)
		}
		select {
		case <-p.ended:
			return fmt.Errorf("the process ended: %s", p.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w", errors.Join(ctx.Err(), err))
		case <-tick.C:
		}
	}
}

// stop sends a signal to the process and waits for its end. It returns nil if the process
// had already ended.
func (p *Process) stop(signal os.Signal) error {
	if !p.Running() {
		return nil
	}
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %s to %s: %w", signal, p.name, err)
	}
	timeout := time.NewTimer(stopTimeout)
	defer timeout.Stop()
	select {
	case <-p.ended:
		return nil
	case <-timeout.C:
		return fmt.Errorf("%s still runs %s after %s", p.name, stopTimeout, signal)
	}
}

func (p *Process) logSize() int64 {
	info, err := os.Stat(p.logPath)
	if err != nil {
		return 0
	}
	return info.Size()
}

// logTail returns the end of the log. It omits all bytes before the given offset.
func (p *Process) logTail(from int64) string {
	f, err := os.Open(p.logPath)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	cut := max(from, p.logSize()-tailBytes)
	text, err := io.ReadAll(io.NewSectionReader(f, cut, tailBytes))
	if err != nil {
		return err.Error()
	}
	tail := string(text)
	if cut > from {
		_, tail, _ = strings.Cut(tail, "\n")
		tail = "…\n" + tail
	}
	return fmt.Sprintf("%s logged:\n%s", p.name, tail)
}

// showLogOnFailure registers a cleanup of t. If t has failed, the cleanup prints the last
// lines logged since this call, and copies the log to the test's artifacts.
func (p *Process) showLogOnFailure(t testing.TB) {
	from := p.logSize()
	// Call ArtifactDir before Cleanup. If the directory is temporary, ArtifactDir registers
	// a cleanup that removes it, and cleanups run in reverse order.
	dir := t.ArtifactDir()
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		t.Log(p.logTail(from))
		log, err := os.ReadFile(p.logPath)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(p.logPath)), log, 0o644)
		}
		if err != nil {
			t.Logf("keep log of %s: %v", p.name, err)
		}
	})
}

// probe requests url and returns an error unless the status is 200.
func probe(ctx context.Context, client *http.Client, url string) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s: %s", url, resp.Status, body)
	}
	return nil
}
