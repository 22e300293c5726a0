// SPDX-License-Identifier: Apache-2.0

//go:build linux

package wine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// recipe is part of the cache key. Increase it whenever makePrefix changes.
const recipe = "1"

// newPrefix copies the template prefix. The caller may use the copy until it calls
// release.
func newPrefix(ctx context.Context) (dir string, release func() error, err error) {
	cache, err := cacheDir()
	if err != nil {
		return "", nil, err
	}
	template, err := templatePrefix(ctx, cache)
	if err != nil {
		return "", nil, err
	}
	removeLeftovers(cache)
	home, err := os.MkdirTemp(cache, "run-")
	if err != nil {
		return "", nil, err
	}
	// Hold a lock while the copy is in use, so that other processes do not remove the copy.
	unlock, err := lock(filepath.Join(home, "lock"), unix.LOCK_EX)
	if err != nil {
		return "", nil, err
	}
	dir = filepath.Join(home, "prefix")
	if err := clone(template, dir); err != nil {
		return "", nil, errors.Join(fmt.Errorf("copy %s: %w", template, err), os.RemoveAll(home))
	}
	return dir, func() error {
		defer unlock()
		return os.RemoveAll(home)
	}, nil
}

// cacheDir returns the folder for the templates and the copies. Both are in one folder,
// so that files of a copy can be hard links to the template's files.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cache = filepath.Join(cache, "kpng", "wine")
	return cache, os.MkdirAll(cache, 0o755)
}

// templatePrefix returns the prefix that tests copy. If the installed version of Wine has
// no such prefix yet, templatePrefix creates it.
func templatePrefix(ctx context.Context, cache string) (string, error) {
	version, err := exec.CommandContext(ctx, "wine", "--version").Output()
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("this test needs Wine: %w (Debian: apt-get install --no-install-recommends wine64 wine)", err)
	}
	if err != nil {
		return "", fmt.Errorf("wine --version: %w", err)
	}
	name := strings.Map(func(r rune) rune {
		if r == '.' || r == '-' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' {
			return r
		}
		return '_'
	}, strings.TrimSpace(string(version))) + "-" + recipe
	unlock, err := lock(filepath.Join(cache, name+".lock"), unix.LOCK_EX)
	if err != nil {
		return "", err
	}
	defer unlock()
	template := filepath.Join(cache, name)
	if _, err := os.Stat(template); err == nil {
		return template, nil
	}
	tmp, err := os.MkdirTemp(cache, "make-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	prefix := filepath.Join(tmp, "prefix")
	if err := makePrefix(ctx, prefix); err != nil {
		return "", fmt.Errorf("create Wine prefix: %w", err)
	}
	return template, os.Rename(prefix, template)
}

// makePrefix makes a prefix that can run Go programs.
func makePrefix(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	run := func(args ...string) error {
		cmd := exec.CommandContext(ctx, args[0], args[1:]...)
		cmd.Env = environ(dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	if err := run("wineboot", "-i"); err != nil {
		return err
	}
	if err := run("wineserver", "-w"); err != nil {
		return err
	}
	// Wine 8 lacks the function ProcessPrng, which Go needs.
	prng := forwarder("bcryptprimitives.dll", "ProcessPrng", "advapi32.SystemFunction036")
	if err := os.WriteFile(filepath.Join(dir, "drive_c", "windows", "system32", "bcryptprimitives.dll"), prng, 0o644); err != nil {
		return err
	}
	if err := run("wine", "winecfg", "-v", "win10"); err != nil {
		return err
	}
	return run("wineserver", "-w")
}

// clone copies a prefix. It creates hard links to the large, read-only files in
// drive_c/windows, and copies the other files.
func clone(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case d.IsDir():
			return os.MkdirAll(target, 0o755)
		case d.Type() == fs.ModeSymlink:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(link, target)
		case strings.HasPrefix(rel, "drive_c/windows/"):
			return os.Link(path, target)
		default:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(target, data, 0o644)
		}
	})
}

// removeLeftovers removes the copies of killed test processes.
func removeLeftovers(cache string) {
	copies, _ := filepath.Glob(filepath.Join(cache, "run-*"))
	for _, home := range copies {
		info, err := os.Stat(home)
		if err != nil || time.Since(info.ModTime()) < time.Minute {
			continue // a copy younger than a minute is perhaps not locked yet
		}
		if unlock, err := lock(filepath.Join(home, "lock"), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			os.RemoveAll(home)
			unlock()
		}
	}
}

// lock locks a file, which it creates if needed.
func lock(path string, how int) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}
