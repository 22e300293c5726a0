// SPDX-License-Identifier: Apache-2.0

//go:build linux

package wine

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
	"golang.org/x/sync/errgroup"
)

// TestWindowsProgramReadsFromLinuxServer runs kpng-json.exe with a server in this
// process. It shows that sockets, gRPC and Kill work.
func TestWindowsProgramReadsFromLinuxServer(t *testing.T) {
	address := serve(t, "../../../examples/demo.yaml", "kpng-example")
	w := New(t, Options{})
	exe := w.BuildFrom(t, "../../..", "./examples/kpng-json")
	args := []string{"--api", address, "--node-name", "vm-002"}

	out := w.Run(t, exe, append(args, "--once")...)
	var view api.View
	if err := json.Unmarshal([]byte(out), &view); err != nil {
		t.Fatalf("kpng-json printed %q: %v", out, err)
	}
	if got, want := view.Key().String(), "default/kpng-example"; got != want {
		t.Errorf("it was served %s, want %s", got, want)
	}

	p := w.Start(t, exe, args...)
	for deadline := time.Now().Add(patience); !strings.Contains(p.Log(t), "kpng-example"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) || !p.Running() {
			t.Fatalf("without --once it printed %q; running: %t", p.Log(t), p.Running())
		}
	}
	p.Kill(t)
	if p.Running() {
		t.Error("the program runs after it was killed")
	}

	elsewhere := New(t, Options{Namespace: netnstest.New(t)})
	if status := elsewhere.Start(t, exe, append(args, "--once")...).Wait(t, patience); status != 1 {
		t.Errorf("exit status without the server is %d, want 1", status)
	}

	if status := w.Start(t, exe, "--no-such-flag").Wait(t, patience); status != 2 {
		t.Errorf("exit status with an unknown flag is %d, want 2", status)
	}
}

// serve starts a kpng server for the services in manifests, and returns the server's
// address. The server runs until the test ends.
func serve(t *testing.T, manifests, proxyName string) string {
	t.Helper()
	state := cluster.New(cluster.Options{})
	server, err := remote.NewServer(state, remote.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := remote.Listen("tcp://127.0.0.1:0", 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return file.Watch(ctx, state, file.Options{Path: manifests, Options: watcher.Options{ServiceProxyName: proxyName}})
	})
	group.Go(func() error { return server.Serve(ctx, listener) })
	t.Cleanup(func() {
		cancel()
		if err := group.Wait(); err != nil && err != context.Canceled {
			t.Errorf("the server returned %v", err)
		}
	})
	return "tcp://" + listener.Addr().String()
}

func TestChangedStandardLibraryIsAnError(t *testing.T) {
	goroot := t.TempDir()
	for _, c := range changes {
		path := filepath.Join(goroot, "src", c.file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("package rewritten\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := writeOverlay(t.TempDir(), goroot); err == nil || !strings.Contains(err.Error(), "fd_windows.go contains this text 0 times") {
		t.Errorf("writeOverlay returned %v, want an error with the file and the missing text", err)
	}
}
