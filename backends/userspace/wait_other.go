// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package userspace

import (
	"errors"
	"syscall"
)

// waitReadable waits until c has bytes, its end or an error. Meanwhile the caller needs
// no buffer.
func waitReadable(c syscall.RawConn) error {
	asked := false
	return c.Read(func(uintptr) bool {
		// The second call follows the end of a read of no bytes.
		ready := asked
		asked = true
		return ready
	})
}

// waitError returns nil: Windows does not report a reset after the end.
func waitError(syscall.RawConn) error { return nil }

// openFilesLimit returns the maximum number of file descriptors of this process.
func openFilesLimit() int { return maxDescriptors }

// outOfDescriptors returns false, because there is no limit.
func outOfDescriptors(error) bool { return false }

// outOfPorts reports whether err, from connecting a UDP socket, means that the host has
// no free port for it.
func outOfPorts(err error) bool {
	const addressInUse, noBuffers = syscall.Errno(10048), syscall.Errno(10055) // of Winsock
	return errors.Is(err, addressInUse) || errors.Is(err, noBuffers)
}
