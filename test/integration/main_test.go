// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	"k8s.io/klog/v2"
)

// patience is the maximum time to wait for an expected event. On an idle machine most
// events take less than a second, and events after a backoff take seconds.
const patience = 2 * time.Minute

var (
	shared   apiserver.Shared
	programs builder
)

func TestMain(m *testing.M) {
	// Discard the errors that client-go logs in this process when a test stops an API
	// server.
	klog.SetLogger(klog.Logger{})
	code := shared.Run(m)
	if err := programs.remove(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// within returns the test's context with the time limit patience.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience, fmt.Errorf("no result within %s", patience))
	t.Cleanup(cancel)
	return ctx
}

// builder builds each program at most once.
type builder struct {
	mu    sync.Mutex
	dir   string
	built map[string]string // paths of programs; a key has the package and says whether the race detector is used
}

// kpngJSON builds kpng-json and returns its path. It uses the race detector for the build
// if the test was built with the race detector.
func kpngJSON(t testing.TB) string {
	return programs.build(t, "../..", "./examples/kpng-json", raceDetector())
}

// quickKpngJSON is like kpngJSON, but never uses the race detector. It is for tests with
// much output.
func quickKpngJSON(t testing.TB) string {
	return programs.build(t, "../..", "./examples/kpng-json", false)
}

// kpngProgram is like kpngJSON, but builds the program kpng.
func kpngProgram(t testing.TB) string {
	return programs.build(t, "../..", "./cmd/kpng", raceDetector())
}

// build builds the package pkg of the module in the directory dir, and returns the
// program's path.
func (b *builder) build(t testing.TB, dir, pkg string, race bool) string {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	key := fmt.Sprint(pkg, " race ", race)
	if path, ok := b.built[key]; ok {
		return path
	}
	if b.dir == "" {
		var err error
		if b.dir, err = os.MkdirTemp("", "kpng-test-"); err != nil {
			t.Fatal(err)
		}
		b.built = map[string]string{}
	}
	path := filepath.Join(b.dir, strconv.Itoa(len(b.built)), filepath.Base(pkg))
	args := []string{"build", "-o", path}
	if race {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(t.Context(), "go", append(args, pkg)...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, out)
	}
	b.built[key] = path
	return path
}

func (b *builder) remove() error {
	if b.dir == "" {
		return nil
	}
	return os.RemoveAll(b.dir)
}

// raceDetector reports whether the test was built with the race detector.
func raceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// exitCode returns the exit code of a process, given the result of exec.Cmd.Wait.
func exitCode(err error) int {
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		return -1
	}
	return 0
}
