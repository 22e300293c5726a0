// SPDX-License-Identifier: Apache-2.0

package userspace

import "syscall"

const keepAliveInherited = false

func listenerControl(syscall.RawConn) error { return nil }

// soReuseUnicastPort is SO_REUSE_UNICASTPORT of mswsock.h. It allows connections to
// different endpoints to share an ephemeral port. Without the option, only sockets that
// are not explicitly bound can do so. Package net binds each socket, because ConnectEx
// requires that.
const soReuseUnicastPort = 0x3007

func dialControl(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		// Ignore errors, because the option only increases the number of concurrent
		// connections.
		syscall.SetsockoptInt(syscall.Handle(fd), syscall.SOL_SOCKET, soReuseUnicastPort, 1)
	})
}

func bindAnywhere(syscall.RawConn) error { return nil }
