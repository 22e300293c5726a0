// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// lines is a writer that splits its input into lines and keeps them. Other goroutines can
// wait for a line.
type lines struct {
	mu   sync.Mutex
	all  []string
	rest []byte
	more chan struct{} // closed by the next line
}

func newLines() *lines { return &lines{more: make(chan struct{})} }

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

// since returns all lines after the first n lines, and a channel that the next
// line closes.
func (l *lines) since(n int) ([]string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all[n:], l.more
}

// wait waits for a line that contains all words, and returns the first such line.
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
			t.Fatalf("wait for a line with %q: %v; lines:\n%s", words, context.Cause(ctx), l)
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

func (l *lines) String() string {
	list, _ := l.since(0)
	return strings.Join(list, "\n")
}

type process struct {
	// stdout is nil if the caller of launch has chosen another writer.
	stdout, stderr *lines

	name  string
	cmd   *exec.Cmd
	ended chan struct{}
	err   error // the result of cmd.Wait
}

// start starts kpng-json, and stops the process with SIGINT when the test ends.
func start(t testing.TB, args ...string) *process {
	t.Helper()
	out := newLines()
	p := launch(t, out, kpngJSON(t), args...)
	p.stdout = out
	return p
}

// launch is like start, but runs the given program and writes the program's output to
// out.
func launch(t testing.TB, out io.Writer, program string, args ...string) *process {
	t.Helper()
	p := &process{stderr: newLines(), name: filepath.Base(program), ended: make(chan struct{})}
	p.cmd = exec.Command(program, args...)
	p.cmd.Env = append(os.Environ(), "GORACE=halt_on_error=1")
	p.cmd.Stdout, p.cmd.Stderr = out, p.stderr
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
			t.Logf("%s %s logged:\n%s", p.name, strings.Join(args, " "), p.stderr)
		}
	})
	return p
}

// stop ends the process with SIGINT. The process must exit with code 0.
func (p *process) stop(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	// Do not use the test's context, because it ends before the cleanups that call stop.
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	select {
	case <-p.ended:
		if p.err != nil {
			t.Errorf("%s returned %v after an interrupt:\n%s", p.name, p.err, p.stderr)
		}
	case <-ctx.Done():
		p.cmd.Process.Kill()
		t.Errorf("%s did not end after an interrupt:\n%s", p.name, p.stderr)
	}
}

// kill ends the process with SIGKILL and waits for its end.
func (p *process) kill(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatalf("kill %s: %v", p.name, err)
	}
	<-p.ended
}

// exit waits until the process ends, and returns its exit code.
func (p *process) exit(t testing.TB) int {
	t.Helper()
	ctx := within(t)
	select {
	case <-p.ended:
		return exitCode(p.err)
	case <-ctx.Done():
		t.Fatalf("wait for the end of %s: %v; its log:\n%s", p.name, context.Cause(ctx), p.stderr)
		panic("unreachable")
	}
}

// socket returns an unused address for a unix socket.
func socket(t testing.TB) string {
	t.Helper()
	// The path of t.TempDir would be too long for a unix socket.
	dir, err := os.MkdirTemp("", "kpng-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return "unix://" + filepath.Join(dir, "api.sock")
}

// serve starts a kpng server for the services whose proxy name is the tenant's name.
func serve(n *tenant, kubeconfig, address string) *process {
	n.t.Helper()
	return launch(n.t, io.Discard, kpngProgram(n.t), "kube", "--kubeconfig", kubeconfig, "--service-proxy-name", n.name,
		"to-api", "--listen", address)
}

// relay starts a kpng process that serves the state of another kpng server. The argument
// from is the other server's address.
func relay(n *tenant, from, address string) *process {
	n.t.Helper()
	return launch(n.t, io.Discard, kpngProgram(n.t), "api", "--api", from, "to-api", "--listen", address)
}
