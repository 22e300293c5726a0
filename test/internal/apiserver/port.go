// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// port is a free TCP port of 127.0.0.1. A socket that is bound to the port reserves it,
// although the socket does not listen. A process can listen on the port only if it
// belongs to the same user and sets SO_REUSEPORT. So no other process takes the address
// of a stopped server, and connections to that address are refused.
type port struct {
	number int
	file   *os.File
}

func reservePort() (*port, error) {
	syscall.ForkLock.RLock()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err == nil {
		unix.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, fmt.Errorf("reserve port: %w", err)
	}
	p := &port{file: os.NewFile(uintptr(fd), "reserved port")}
	if p.number, err = bindShared(fd); err != nil {
		p.release()
		return nil, fmt.Errorf("reserve port: %w", err)
	}
	return p, nil
}

func bindShared(fd int) (int, error) {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, err
	}
	addr, err := unix.Getsockname(fd)
	if err != nil {
		return 0, err
	}
	return addr.(*unix.SockaddrInet4).Port, nil
}

func (p *port) release() { p.file.Close() }
