// SPDX-License-Identifier: Apache-2.0

package userspace

import "syscall"

const keepAliveInherited = false

func listenerControl(syscall.RawConn) error { return nil }

// soReuseUnicastPort is SO_REUSE_UNICASTPORT of mswsock.h. It lets connections to
// different endpoints share an ephemeral port. That is the default for sockets that are
// not explicitly bound, but package net binds each socket, as ConnectEx requires.
const soReuseUnicastPort = 0x3007

func dialControl(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		// Ignore errors: without the option, only fewer concurrent connections are possible.
		syscall.SetsockoptInt(syscall.Handle(fd), syscall.SOL_SOCKET, soReuseUnicastPort, 1)
	})
}

func bindAnywhere(syscall.RawConn) error { return nil }
