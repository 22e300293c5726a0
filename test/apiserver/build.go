// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// The programs, as the tool directives of this module's go.mod name them.
const (
	etcdPackage          = "go.etcd.io/etcd/server/v3"
	kubeAPIServerPackage = "k8s.io/kubernetes/cmd/kube-apiserver"
)

// binaries are the paths of the two executables in the go command's cache.
type binaries struct {
	etcd, kubeAPIServer string
}

// build returns the executables, which the go command makes where they are not
// in its cache yet. Test processes that come at once wait for the first: the
// cache would keep them from harm, but not from doing the same work.
func build(ctx context.Context) (binaries, error) {
	unlock, err := lockBuild()
	if err != nil {
		return binaries{}, err
	}
	defer unlock()

	etcd, err := tool(ctx, etcdPackage)
	if err != nil {
		return binaries{}, err
	}
	kubeAPIServer, err := tool(ctx, kubeAPIServerPackage)
	if err != nil {
		return binaries{}, err
	}
	return binaries{etcd: etcd, kubeAPIServer: kubeAPIServer}, nil
}

// tool has the go command build one tool of the module that the test runs in.
func tool(ctx context.Context, pkg string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "tool", "-n", pkg)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("build %s: this test needs the go command in $PATH: %w", pkg, err)
	}
	if err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", pkg, err, stderr.Bytes())
	}
	return strings.TrimSpace(stdout.String()), nil
}

// lockBuild waits until no other test process builds.
func lockBuild() (unlock func(), err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("lock the build: %w", err)
	}
	dir := filepath.Join(cache, "kpng")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("lock the build: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "test-build.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the build: %w", err)
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
