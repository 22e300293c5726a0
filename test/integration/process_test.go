// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// lines is a writer that keeps what is written line by line, for readers that
// wait for more.
type lines struct {
	mu   sync.Mutex
	all  []string
	rest []byte
	more chan struct{} // closed by the next line
}

func newLines() *lines { return &lines{more: make(chan struct{})} }

// Write implements io.Writer.
func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rest = append(l.rest, p...)
	for {
		line, rest, complete := bytes.Cut(l.rest, []byte("\n"))
		if !complete {
			return len(p), nil
		}
		l.all, l.rest = append(l.all, string(line)), rest
		close(l.more)
		l.more = make(chan struct{})
	}
}

// since returns the lines after the first n, and what is closed when there are
// more of them.
func (l *lines) since(n int) ([]string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all[n:], l.more
}

// wait returns the first line with all of the words in it, and fails the test
// if it does not come.
func (l *lines) wait(t testing.TB, words ...string) string {
	t.Helper()
	ctx := within(t)
	for n := 0; ; {
		list, more := l.since(n)
		n += len(list)
		for _, line := range list {
			if hasAll(line, words) {
				return line
			}
		}
		select {
		case <-more:
		case <-ctx.Done():
			t.Fatalf("waiting for a line with %q: %v, among:\n%s", words, context.Cause(ctx), l)
		}
	}
}

func hasAll(line string, words []string) bool {
	for _, w := range words {
		if !strings.Contains(line, w) {
			return false
		}
	}
	return true
}

// String returns all lines.
func (l *lines) String() string {
	list, _ := l.since(0)
	return strings.Join(list, "\n")
}

// process is a kpng-json that was started.
type process struct {
	stdout, stderr *lines

	cmd   *exec.Cmd
	ended chan struct{}
	err   error // of the end
}

// start starts kpng-json. It is ended with the test, the orderly way, unless it
// has ended before.
func start(t testing.TB, args ...string) *process {
	t.Helper()
	p := &process{stdout: newLines(), stderr: newLines(), ended: make(chan struct{})}
	p.cmd = exec.Command(kpngJSON(t), args...)
	p.cmd.Env = append(os.Environ(), "GORACE=halt_on_error=1")
	p.cmd.Stdout, p.cmd.Stderr = p.stdout, p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		p.err = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		select {
		case <-p.ended:
		default:
			p.stop(t)
		}
		if t.Failed() {
			t.Logf("kpng-json %s logged:\n%s", strings.Join(args, " "), p.stderr)
		}
	})
	return p
}

// stop ends the process and expects it to take that well.
func (p *process) stop(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	// Not the test's context: it has ended when cleanup runs.
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	select {
	case <-p.ended:
		if p.err != nil {
			t.Errorf("kpng-json ended with %v after an interrupt:\n%s", p.err, p.stderr)
		}
	case <-ctx.Done():
		p.cmd.Process.Kill()
		t.Errorf("kpng-json did not end after an interrupt:\n%s", p.stderr)
	}
}

// exit waits for the end that the process comes to by itself, and returns its
// exit code.
func (p *process) exit(t testing.TB) int {
	t.Helper()
	ctx := within(t)
	select {
	case <-p.ended:
		return exitCode(p.err)
	case <-ctx.Done():
		t.Fatalf("waiting for kpng-json to end: %v; it logged:\n%s", context.Cause(ctx), p.stderr)
		panic("unreachable")
	}
}
