// SPDX-License-Identifier: Apache-2.0

package userspace

import "syscall"

const keepAliveInherited = false

func listenerControl(syscall.RawConn) error { return nil }

// soReuseUnicastPort is SO_REUSE_UNICASTPORT of mswsock.h: connections to different
// endpoints may share an ephemeral port. Windows does that by itself for sockets that are
// not bound explicitly, but package net binds each one, as ConnectEx requires.
const soReuseUnicastPort = 0x3007

func dialControl(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		// Without it there are fewer connections at a time, no other difference.
		syscall.SetsockoptInt(syscall.Handle(fd), syscall.SOL_SOCKET, soReuseUnicastPort, 1)
	})
}

func bindAnywhere(syscall.RawConn) error { return nil }
