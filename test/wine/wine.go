// SPDX-License-Identifier: Apache-2.0

//go:build linux

package wine

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
)

// Options say how a Wine differs from one that runs like any program of the
// test. The zero value is fine.
type Options struct {
	// Namespace is the network namespace that programs run in. Default: that of the
	// test.
	Namespace *netnstest.Namespace
}

// Wine is a Windows installation that ends with the test. Its methods may be
// called by several goroutines at once.
type Wine struct {
	dir  string // of the prefix
	opts Options
}

// New makes a Windows installation, in which nothing runs yet.
func New(t testing.TB, opts Options) *Wine {
	t.Helper()
	dir, release, err := newPrefix(t.Context())
	if err != nil {
		t.Fatalf("prepare Wine: %v", err)
	}
	w := &Wine{dir: dir, opts: opts}
	t.Cleanup(func() {
		// Kills what runs, and waits until the registry is written.
		if err := w.server(context.WithoutCancel(t.Context()), "-k", "-w"); err != nil {
			t.Errorf("stop Wine: %v", err)
		}
		if err := release(); err != nil {
			t.Errorf("remove Wine's prefix: %v", err)
		}
	})
	return w
}

// Drive returns the folder that is drive C: in Linux's terms.
func (w *Wine) Drive() string { return filepath.Join(w.dir, "drive_c") }

// Path returns what Windows programs call a file of Linux.
func Path(path string) string { return `Z:` + strings.ReplaceAll(path, "/", `\`) }

// Install copies a file, such as a program or a library that stands in for one
// of Windows', into system32. Programs use it instead of Wine's own of that
// name if their environment says so: WINEDLLOVERRIDES=name=n.
func (w *Wine) Install(t testing.TB, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err == nil {
		err = replaceFile(filepath.Join(w.Drive(), "windows", "system32", filepath.Base(path)), data)
	}
	if err != nil {
		t.Fatalf("install %s: %v", path, err)
	}
}

// Run runs a program until it ends, and returns what it printed. The test fails
// if its exit status is not 0.
func (w *Wine) Run(t testing.TB, exe string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := w.command(ctx, nil, exe, args)
	// Files and no pipes: what the program starts, such as Wine's services, may keep
	// them open for long.
	stdout, stderr := create(t), create(t)
	defer stdout.Close()
	defer stderr.Close()
	cmd.Stdout, cmd.Stderr = stdout, stderr
	ended := cmd.Run()
	text, err := os.ReadFile(stdout.Name())
	if err != nil {
		t.Fatal(err)
	}
	if ended != nil {
		log, _ := os.ReadFile(stderr.Name())
		t.Fatalf("run %s: %v\n%s%s", filepath.Base(exe), ended, text, log)
	}
	return string(text)
}

// patience is how long a program may take that has little to do: on a machine that is
// busy, Wine takes a minute to start the first one.
const patience = 5 * time.Minute

func create(t testing.TB) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// command returns the command that runs a program of Windows.
func (w *Wine) command(ctx context.Context, env []string, exe string, args []string) *exec.Cmd {
	all := append([]string{"wine", exe}, args...)
	if w.opts.Namespace != nil {
		all = w.opts.Namespace.Command(all...)
	}
	cmd := exec.CommandContext(ctx, all[0], all[1:]...)
	cmd.Env = append(environ(w.dir), env...)
	return cmd
}

// server tells the wineserver something, and waits until it has done that.
func (w *Wine) server(ctx context.Context, args ...string) error {
	for _, arg := range args {
		cmd := exec.CommandContext(ctx, "wineserver", arg)
		cmd.Env = environ(w.dir)
		out, err := cmd.CombinedOutput()
		// -k has status 1 if none runs.
		if err != nil && arg != "-k" {
			return fmt.Errorf("wineserver %s: %w\n%s", arg, err, out)
		}
	}
	return nil
}

// environ returns the environment to run Wine with.
func environ(prefix string) []string {
	return append(os.Environ(),
		"WINEPREFIX="+prefix,
		"WINEARCH=win64",
		"WINEDEBUG=-all",
		// Wine offers to install these, with windows to click at.
		"WINEDLLOVERRIDES=mscoree=;mshtml=",
		"DISPLAY=",
	)
}

// replaceFile makes path a new file, whatever it was: most files of a prefix are
// hard links that all prefixes share.
func replaceFile(path string, data []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
