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

// Options configures a [Wine]. The zero value is ready to use.
type Options struct {
	// Namespace is the network namespace of the programs. The default is the test's
	// namespace.
	Namespace *netnstest.Namespace
}

// Wine is a Windows installation that exists until the test ends. It is safe for
// concurrent use.
type Wine struct {
	dir  string // the path of the prefix
	opts Options
}

// New creates a Windows installation in which no program runs.
func New(t testing.TB, opts Options) *Wine {
	t.Helper()
	dir, release, err := newPrefix(t.Context())
	if err != nil {
		t.Fatalf("prepare Wine: %v", err)
	}
	w := &Wine{dir: dir, opts: opts}
	t.Cleanup(func() {
		// Kill all programs and wait until Wine has saved the registry.
		if err := w.server(context.WithoutCancel(t.Context()), "-k", "-w"); err != nil {
			t.Errorf("stop Wine: %v", err)
		}
		if err := release(); err != nil {
			t.Errorf("remove Wine prefix: %v", err)
		}
	})
	return w
}

// Drive returns the Linux path of drive C:.
func (w *Wine) Drive() string { return filepath.Join(w.dir, "drive_c") }

// Path returns the Windows path of a Linux file.
func Path(path string) string { return `Z:` + strings.ReplaceAll(path, "/", `\`) }

// Install copies a file to system32, for example a replacement of a library of Windows. A
// program uses the replacement instead of Wine's library if its environment contains
// WINEDLLOVERRIDES=name=n.
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

// Run runs a program to its end, and returns the program's output. The test fails if the
// exit status is not 0.
func (w *Wine) Run(t testing.TB, exe string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := w.command(ctx, nil, exe, args)
	// Write the output to files. With pipes, cmd.Run would wait until all pipes are closed.
	// The program's children, such as Wine's services, may keep pipes open for long.
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

// patience is the maximum time that a short program may take. On a busy machine, Wine
// needs a minute to start the first program.
const patience = 5 * time.Minute

func create(t testing.TB) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (w *Wine) command(ctx context.Context, env []string, exe string, args []string) *exec.Cmd {
	all := append([]string{"wine", exe}, args...)
	if w.opts.Namespace != nil {
		all = w.opts.Namespace.Command(all...)
	}
	cmd := exec.CommandContext(ctx, all[0], all[1:]...)
	cmd.Env = append(environ(w.dir), env...)
	return cmd
}

// server runs wineserver once for each argument in args.
func (w *Wine) server(ctx context.Context, args ...string) error {
	for _, arg := range args {
		cmd := exec.CommandContext(ctx, "wineserver", arg)
		cmd.Env = environ(w.dir)
		out, err := cmd.CombinedOutput()
		// wineserver -k fails if no wineserver runs.
		if err != nil && arg != "-k" {
			return fmt.Errorf("wineserver %s: %w\n%s", arg, err, out)
		}
	}
	return nil
}

// environ returns the environment for Wine.
func environ(prefix string) []string {
	return append(os.Environ(),
		"WINEPREFIX="+prefix,
		"WINEARCH=win64",
		"WINEDEBUG=-all",
		// Without this setting, Wine opens windows that offer to install Mono and Gecko.
		"WINEDLLOVERRIDES=mscoree=;mshtml=",
		"DISPLAY=",
	)
}

// replaceFile replaces path by a new file. It does not overwrite the old file, because
// most files of a prefix are hard links that all prefixes share.
func replaceFile(path string, data []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
