// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// checkServer returns an error unless the process that listens on a unix socket runs as
// root or as the user of this process. Another user could send false services.
func checkServer(conn net.Conn) error {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return fmt.Errorf("find the user of the server: %w", err)
	}
	var server *unix.Ucred
	var optErr error
	err = raw.Control(func(fd uintptr) {
		server, optErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, optErr); err != nil {
		return fmt.Errorf("find the user of the server: %w", err)
	}
	if uid := int(server.Uid); uid != 0 && uid != os.Geteuid() {
		return fmt.Errorf("the server runs as user %d, neither as root nor as the user of this process; --api-insecure allows this", uid)
	}
	return nil
}
