// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// system is what there is of Windows.
type system interface {
	// netsh runs netsh, and returns an error if its exit status is not 0.
	netsh(ctx context.Context, args ...string) error
	// usable reports whether sockets can be bound to addr.
	usable(addr netip.Addr) bool
	// has reports whether addr is a host address of the interface of this name.
	// Where there is no such interface, it is not.
	has(name string, addr netip.Addr) (bool, error)
}

// host is the system that the process runs on.
type host struct{}

// netshTimeout is how long one netsh may take: it does within a second what it is
// asked for here.
const netshTimeout = 30 * time.Second

func (host) netsh(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, netshTimeout)
	defer cancel()
	// Not by PATH, which others may write to.
	cmd := exec.CommandContext(ctx, filepath.Join(os.Getenv("SystemRoot"), "System32", "netsh.exe"), args...)
	cmd.WaitDelay = time.Second
	withoutWindow(cmd)
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return fmt.Errorf("netsh %q: %w, and it says %q", args, err, bytes.TrimSpace(out))
}

func (host) usable(addr netip.Addr) bool {
	// Not a look at the addresses that are listed: an address that Windows still
	// looks for elsewhere is, and cannot be bound to.
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if err != nil {
		return false
	}
	l.Close()
	return true
}

func (host) has(name string, addr netip.Addr) (bool, error) {
	// Not net.InterfaceByName, whose error does not tell whether there is none.
	interfaces, err := net.Interfaces()
	if err != nil {
		return false, fmt.Errorf("listing interfaces: %w", err)
	}
	at := slices.IndexFunc(interfaces, func(i net.Interface) bool { return i.Name == name })
	if at < 0 {
		return false, nil
	}
	addrs, err := interfaces[at].Addrs()
	if err != nil {
		return false, fmt.Errorf("listing the addresses of interface %q: %w", name, err)
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		prefix, ok := a.(*net.IPNet)
		if !ok {
			return false
		}
		ones, bits := prefix.Mask.Size()
		has, _ := netip.AddrFromSlice(prefix.IP)
		return has.Unmap() == addr && ones == bits
	}), nil
}
