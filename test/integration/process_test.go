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

// lines is a writer that keeps its input as lines. Readers can wait for more lines.
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

// since returns the lines after the first n, and a channel that the next line closes.
func (l *lines) since(n int) ([]string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all[n:], l.more
}

// wait returns the first line that contains all words. The test fails if there is none.
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

// String returns all lines.
func (l *lines) String() string {
	list, _ := l.since(0)
	return strings.Join(list, "\n")
}

// process is a running program.
type process struct {
	// stdout is nil if the output goes elsewhere.
	stdout, stderr *lines

	name  string
	cmd   *exec.Cmd
	ended chan struct{}
	err   error // result of the process
}

// start starts kpng-json. The end of the test stops it with SIGTERM, unless it has ended.
func start(t testing.TB, args ...string) *process {
	t.Helper()
	out := newLines()
	p := launch(t, out, kpngJSON(t), args...)
	p.stdout = out
	return p
}

// launch starts any program in the same way as start. The program's output is written to
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

// stop ends the process with SIGTERM and expects success.
func (p *process) stop(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	// The test's context has ended when cleanups run.
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

// kill ends the process with SIGKILL and waits.
func (p *process) kill(t testing.TB) {
	t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatalf("kill %s: %v", p.name, err)
	}
	<-p.ended
}

// exit waits for the process to end on its own and returns its exit code.
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

// socket returns the address of a unix socket that does not exist.
func socket(t testing.TB) string {
	t.Helper()
	// A test's own folder has too long a path for a unix socket.
	dir, err := os.MkdirTemp("", "kpng-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return "unix://" + filepath.Join(dir, "api.sock")
}

// serve starts a kpng server for a tenant's services, selected by the tenant's name.
func serve(n *tenant, kubeconfig, address string) *process {
	n.t.Helper()
	return launch(n.t, io.Discard, kpngProgram(n.t), "kube", "--kubeconfig", kubeconfig, "--service-proxy-name", n.name,
		"to-api", "--listen", address)
}

// relay starts a kpng that relays another server.
func relay(n *tenant, from, address string) *process {
	n.t.Helper()
	return launch(n.t, io.Discard, kpngProgram(n.t), "api", "--api", from, "to-api", "--listen", address)
}
