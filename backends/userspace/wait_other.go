// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package userspace

import (
	"errors"
	"syscall"
)

// waitReadable waits until c can be read, which it also can at its end and when
// it has an error. Whoever waits so needs no buffer meanwhile.
func waitReadable(c syscall.RawConn) error {
	asked := false
	return c.Read(func(uintptr) bool {
		// The second call comes when a read of no bytes has ended.
		ready := asked
		asked = true
		return ready
	})
}

// waitError returns nil: Windows does not report a reset after the end.
func waitError(syscall.RawConn) error { return nil }

// openFilesLimit returns how many file descriptors this process may have.
func openFilesLimit() int { return maxDescriptors }

// outOfDescriptors is about a limit that there is not.
func outOfDescriptors(error) bool { return false }

// outOfPorts reports whether err, of connecting a UDP socket, means that the host
// has no port left for it.
func outOfPorts(err error) bool {
	const addressInUse, noBuffers = syscall.Errno(10048), syscall.Errno(10055) // of Winsock
	return errors.Is(err, addressInUse) || errors.Is(err, noBuffers)
}
