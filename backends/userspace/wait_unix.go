// SPDX-License-Identifier: Apache-2.0

//go:build unix

package userspace

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// waitReadable waits until a read of c would return bytes, the end of the stream, or an
// error. It returns the error of that read, if any. During the wait, the caller needs no
// buffer.
func waitReadable(c syscall.RawConn) error {
	var err error
	waitErr := c.Read(func(fd uintptr) bool {
		_, _, err = unix.Recvfrom(int(fd), nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		for errors.Is(err, unix.EINTR) {
			_, _, err = unix.Recvfrom(int(fd), nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		}
		return !errors.Is(err, unix.EAGAIN)
	})
	if waitErr != nil {
		return waitErr
	}
	return err
}

// waitError waits until c has an error, such as a reset. The end of the received data is
// not an error.
func waitError(c syscall.RawConn) error {
	var err error
	waitErr := c.Read(func(fd uintptr) bool {
		var code int
		if code, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err == nil && code != 0 {
			err = syscall.Errno(code)
		}
		return err != nil
	})
	return errors.Join(waitErr, err)
}

// openFilesLimit returns the maximum number of file descriptors of this process.
func openFilesLimit() int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return maxDescriptors
	}
	return int(min(uint64(limit.Cur), maxDescriptors))
}

// outOfDescriptors reports whether err means that this process or the host has no free
// file descriptor.
func outOfDescriptors(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)
}

// outOfPorts reports whether err means that the host has no free port for a UDP socket.
func outOfPorts(err error) bool {
	return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EADDRINUSE) || errors.Is(err, unix.EADDRNOTAVAIL)
}
