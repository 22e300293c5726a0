// SPDX-License-Identifier: Apache-2.0

// Package gotool builds programs of Kubernetes from Go modules, for tests. This module's
// go.mod lists the programs as tools. The first build takes minutes. Later builds use the
// go command's cache.
package gotool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// The package paths of the programs that Build can build.
const (
	Etcd          = "go.etcd.io/etcd/server/v3"
	KubeAPIServer = "k8s.io/kubernetes/cmd/kube-apiserver"
	KubeProxy     = "k8s.io/kubernetes/cmd/kube-proxy"
)

// OldKubeAPIServer is kube-apiserver of Kubernetes v1.30, the last version without field
// selectors for Services.
const OldKubeAPIServer = "kube-apiserver-1.30"

// older matches the names of programs of older versions of Kubernetes, such as
// kube-proxy-1.34. Their modules are the files gotool/kubernetes-1.34.mod and so on.
var older = regexp.MustCompile(`^(kube-[a-z]+)-(1\.[0-9]+)$`)

// Build returns the path of a program in the go command's cache. If needed, it builds the
// program. Only one test process builds at a time, so that no program is built twice.
//
// If $KPNG_TEST_PROGRAMS names a folder, Build returns the program in that folder, and
// never runs the go command. In QEMU, the go command needs minutes even if its cache has
// the program.
func Build(ctx context.Context, program string) (string, error) {
	if dir := os.Getenv("KPNG_TEST_PROGRAMS"); dir != "" {
		return inFolder(dir, program)
	}
	unlock, err := lockBuild()
	if err != nil {
		return "", err
	}
	defer unlock()

	args := []string{"tool", "-n", program}
	if old := older.FindStringSubmatch(program); old != nil {
		module, err := goCommand(ctx, "env", "GOMOD")
		if err != nil {
			return "", fmt.Errorf("build %s: %w", program, err)
		}
		args = []string{"tool", "-modfile=" + filepath.Join(filepath.Dir(module), "internal", "gotool", "kubernetes-"+old[2]+".mod"), "-n", "k8s.io/kubernetes/cmd/" + old[1]}
	}
	path, err := goCommand(ctx, args...)
	if err != nil {
		return "", fmt.Errorf("build %s: %w", program, err)
	}
	return path, nil
}

// goCommand runs the go command and returns its output.
func goCommand(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("this test needs the go command in $PATH: %w", err)
	}
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, stderr.Bytes())
	}
	return strings.TrimSpace(stdout.String()), nil
}

var majorVersion = regexp.MustCompile(`/v[0-9]+$`)

// inFolder returns the path of a program in a folder. The program's file has the name that
// "go build -o folder/" selects.
func inFolder(dir, program string) (string, error) {
	file := filepath.Join(dir, path.Base(majorVersion.ReplaceAllString(program, "")))
	if _, err := os.Stat(file); err != nil {
		return "", fmt.Errorf("find %s, because $KPNG_TEST_PROGRAMS is set: %w", program, err)
	}
	return file, nil
}

// lockBuild waits until no other test process is building a program.
func lockBuild() (unlock func(), err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("lock build: %w", err)
	}
	dir := filepath.Join(cache, "kpng")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("lock build: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "test-build.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock build: %w", err)
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}
