// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/usage"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const demo = "../../examples/demo.yaml"

// execute runs kpng and returns its output.
func execute(ctx context.Context, args ...string) (stdout string, err error) {
	var out bytes.Buffer
	root := newRoot()
	usage.Prepare(root)
	root.SetArgs(args)
	root.SetOut(&out)
	root.SetErr(io.Discard)
	err = root.ExecuteContext(ctx)
	return out.String(), err
}

// mustExecute calls execute and expects no error.
func mustExecute(t *testing.T, args ...string) string {
	t.Helper()
	out, err := execute(t.Context(), args...)
	if err != nil {
		t.Fatalf("kpng %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// start runs kpng until the test ends or stop is called. It expects no error.
func start(t *testing.T, args ...string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		_, err := execute(ctx, args...)
		ended <- err
	}()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("kpng %s: %v", strings.Join(args, " "), err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// eventually calls try until it succeeds. It tries long enough for a busy machine.
func eventually(t *testing.T, what string, try func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !try(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// joinArgs returns the arguments for a source and a target with their flags. All flags
// follow the target, because the target's command defines some flags for the source.
func joinArgs(source []string, target ...string) []string {
	return slices.Concat(source[:1], target, source[1:])
}

// serve starts kpng with to-api on a unix socket, waits until the server listens, and
// returns its address.
func serve(t *testing.T, source ...string) (address string) {
	t.Helper()
	address = newSocket(t)
	start(t, joinArgs(source, "to-api", "--listen", address)...)
	eventually(t, "a server listens on "+address, func() bool {
		_, err := os.Stat(strings.TrimPrefix(address, "unix://"))
		return err == nil
	})
	return address
}

// newSocket returns the address of a unix socket that does not exist. The socket is not
// in the test's own folder, because the path of that folder may be too long for a socket.
func newSocket(t *testing.T) (address string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "kpng-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return "unix://" + filepath.Join(dir, "s")
}

func TestServedStateEqualsSource(t *testing.T) {
	toJSON := []string{"to-local", "json", "--node-name=vm-002", "--once"}
	for _, name := range []string{"", "kpng-example"} {
		fromFile := []string{"file", "-i", demo, "--service-proxy-name", name}
		want := mustExecute(t, append(fromFile, toJSON...)...)
		if want == "" {
			t.Fatal("no output")
		}
		served := serve(t, fromFile...)
		if got := mustExecute(t, append([]string{"api", "--api", served}, toJSON...)...); got != want {
			t.Errorf("proxy name %q: from a server:\n%s\nwant\n%s", name, got, want)
		}
		relayed := serve(t, "api", "--api", served)
		if got := mustExecute(t, append([]string{"api", "--api", relayed}, toJSON...)...); got != want {
			t.Errorf("proxy name %q: from a relay:\n%s\nwant\n%s", name, got, want)
		}
	}
}

func TestAllPortsServicesAreServed(t *testing.T) {
	served := serve(t, "file", "-i", demo, "--all-ports")
	if got := mustExecute(t, "api", "--api", served, "to-local", "json", "--node-name=vm-002", "--once"); !strings.Contains(got, `"MapIP":true`) {
		t.Errorf("no all-ports service in\n%s", got)
	}
}
