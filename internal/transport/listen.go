// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// Listen listens on the address a. See remote.Listen.
func (a Address) Listen(mode fs.FileMode) (net.Listener, error) {
	if a.network == "unix" {
		if mode == 0 {
			mode = 0o600
		}
		return listenUnix(a.name, mode)
	}
	network := a.network
	if at, err := netip.ParseAddrPort(a.name); err == nil && at.Addr().Is4() {
		network = "tcp4" // with "tcp", 0.0.0.0 would include the IPv6 addresses
	}
	l, err := net.Listen(network, a.name)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", a, err)
	}
	return l, nil
}

func listenUnix(path string, mode fs.FileMode) (net.Listener, error) {
	if err := checkStale(path); err != nil {
		return nil, fmt.Errorf("listen on unix://%s: %w", path, err)
	}
	if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("listen on unix://%s: create its directory: %w", path, err)
	}
	// Create the socket in a private directory. Set its mode before moving it to path.
	private, err := os.MkdirTemp(filepath.Dir(path), privateDir)
	if err != nil {
		return nil, fmt.Errorf("listen on unix://%s: %w", path, err)
	}
	defer os.RemoveAll(private)
	made := filepath.Join(private, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: made, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on unix://%s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	info, err := publish(made, path, mode)
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("listen on unix://%s: %w", path, err)
	}
	return &unixListener{UnixListener: l, path: path, info: info}, nil
}

// The name of the private directory begins with privateDir.
const privateDir = ".kpng-"

// longestPath returns the length of the longest path that Listen uses for the socket.
func longestPath(path string) int {
	made := filepath.Join(filepath.Dir(path), privateDir+"4294967295", "s") // os.MkdirTemp appends at most this number to the name
	return max(len(path), len(made))
}

// publish moves the socket to its final path.
func publish(made, path string, mode fs.FileMode) (fs.FileInfo, error) {
	if err := os.Chmod(made, mode); err != nil {
		return nil, err
	}
	info, err := os.Lstat(made)
	if err != nil {
		return nil, err
	}
	return info, os.Rename(made, path)
}

// checkStale returns nil if path does not exist, or is a socket without a listening
// process.
func checkStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return errors.New("path exists and is not a socket")
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		conn.Close()
		return errors.New("another process is already listening")
	}
	if !isRefused(err) {
		return fmt.Errorf("check for a listener on the existing socket: %w", err)
	}
	return nil
}

// isRefused reports whether err means that no process listens. The number 10061 is
// WSAECONNREFUSED of Windows. Package syscall does not map this number to ECONNREFUSED.
// Other systems do not use 10061.
func isRefused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.Errno(10061))
}

// unixListener removes its socket when it is closed.
type unixListener struct {
	*net.UnixListener
	path string
	info fs.FileInfo
	once sync.Once
}

// Close implements net.Listener.
func (l *unixListener) Close() error {
	l.once.Do(func() {
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.info) {
			os.Remove(l.path)
		}
	})
	return l.UnixListener.Close()
}

// Addr implements net.Listener.
func (l *unixListener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }
