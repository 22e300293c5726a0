// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package userspace

import (
	"errors"
	"syscall"
)

// waitReadable waits until a read of c would return bytes, the end of the stream, or an
// error. During the wait, the caller needs no buffer.
func waitReadable(c syscall.RawConn) error {
	asked := false
	return c.Read(func(uintptr) bool {
		// If this callback returns false, c.Read starts a read of zero bytes, which ends when c
		// is readable. Then c.Read calls the callback again.
		ready := asked
		asked = true
		return ready
	})
}

// waitError returns nil, because Windows reports no reset after the end of the stream.
func waitError(syscall.RawConn) error { return nil }

// openFilesLimit returns the maximum number of file descriptors of this process.
func openFilesLimit() int { return maxDescriptors }

// outOfDescriptors returns false, because only Unix systems limit the number of
// descriptors.
func outOfDescriptors(error) bool { return false }

// outOfPorts reports whether err means that the host has no free port for a UDP socket.
func outOfPorts(err error) bool {
	const addressInUse, noBuffers = syscall.Errno(10048), syscall.Errno(10055) // error codes of Winsock
	return errors.Is(err, addressInUse) || errors.Is(err, noBuffers)
}
