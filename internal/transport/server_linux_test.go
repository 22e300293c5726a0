// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/transport"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
)

// A local user may be the first to listen on a well-known path. This user must not be
// able to send services to root.
func TestSocketOfAnotherUserIsRefused(t *testing.T) {
	netnstest.NeedRoot(t)
	if os.Geteuid() != 0 {
		t.Skip("needs root, to listen as another user")
	}
	dir, err := os.MkdirTemp("", "kpng-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	for user, refused := range map[int]bool{0: false, nobody: true} {
		path := filepath.Join(dir, map[int]string{0: "root", nobody: "nobody"}[user])
		l := listenAs(t, user, path)
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				conn.Close()
			}
		}()
		for _, insecure := range []bool{false, true} {
			d, err := transport.NewDialer(transport.DialOptions{Addresses: []string{"unix://" + path}, FailFast: true, Insecure: insecure})
			if err != nil {
				t.Fatal(err)
			}
			err = d.Stay(t.Context(), func(ctx context.Context, conn *grpc.ClientConn, _ func(complete, stale bool) error) error {
				return conn.Invoke(ctx, "/x", nil, nil)
			})
			if got := strings.Contains(err.Error(), "runs as user 65534"); got != (refused && !insecure) {
				t.Errorf("server of user %d, Insecure %t: %v", user, insecure, err)
			}
		}
		l.Close()
	}
}

// listenAs listens on a unix socket with the effective user ID of one thread.
func listenAs(t *testing.T, user int, path string) net.Listener {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	setUser := func(user int) {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(user), ^uintptr(0)); errno != 0 {
			t.Fatal(errno)
		}
	}
	setUser(user)
	l, err := net.Listen("unix", path)
	setUser(0)
	if err != nil {
		t.Fatal(err)
	}
	return l
}
