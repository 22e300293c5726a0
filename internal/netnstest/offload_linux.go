// SPDX-License-Identifier: Apache-2.0

package netnstest

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// DisableChecksumOffload makes the kernel compute the checksums of packets before it gives
// them to an interface of the current network namespace.
func DisableChecksumOffload(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	value := struct{ command, data uint32 }{unix.ETHTOOL_STXCSUM, 0}
	request := struct { // struct ifreq of the kernel
		name  [unix.IFNAMSIZ]byte
		value unsafe.Pointer
		_     [16]byte
	}{value: unsafe.Pointer(&value)}
	copy(request.name[:len(request.name)-1], name)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return fmt.Errorf("disable checksum offload of %s: %w", name, errno)
	}
	return nil
}
