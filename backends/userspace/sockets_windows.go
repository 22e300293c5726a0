// SPDX-License-Identifier: Apache-2.0

package userspace

import "syscall"

const keepAliveInherited = false

func listenerControl(syscall.RawConn) error { return nil }

// soReuseUnicastPort is SO_REUSE_UNICASTPORT of mswsock.h. With it, connections to
// different endpoints can share an ephemeral port. By default, connections share a port
// only if their sockets were not bound explicitly. But package net binds each socket,
// because ConnectEx requires that.
const soReuseUnicastPort = 0x3007

func dialControl(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		// Errors are ignored, because the option only increases the number of concurrent
		// connections.
		syscall.SetsockoptInt(syscall.Handle(fd), syscall.SOL_SOCKET, soReuseUnicastPort, 1)
	})
}

func bindAnywhere(syscall.RawConn) error { return nil }
