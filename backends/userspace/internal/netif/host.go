// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// system contains the calls to Windows.
type system interface {
	// add adds an address with prefix length 32 or 128 to the named interface. It does not
	// wait until sockets can bind to the address.
	add(ctx context.Context, on string, addr netip.Addr) error
	remove(ctx context.Context, on string, addr netip.Addr) error
	// usable reports whether sockets can bind to addr.
	usable(addr netip.Addr) bool
	// addresses returns the addresses with prefix length 32 or 128 of the named interface.
	// If the interface does not exist, the error is errNoInterface.
	addresses(on string) (map[netip.Addr]bool, error)
}

var errNoInterface = errors.New("no such network interface")

// host implements the Go interface system with the IP Helper API. If the API
// fails, host uses netsh.
type host struct {
	// running limits the number of concurrent netsh processes.
	running chan struct{}
}

func newHost() host { return host{make(chan struct{}, 4)} }

func (h host) add(ctx context.Context, on string, addr netip.Addr) error {
	return h.change(ctx, on, addr, addByAPI, addArguments)
}

func (h host) remove(ctx context.Context, on string, addr netip.Addr) error {
	return h.change(ctx, on, addr, removeByAPI, deleteArguments)
}

func (h host) change(ctx context.Context, on string, addr netip.Addr,
	byAPI func(*net.Interface, netip.Addr) error, arguments func(string, netip.Addr) []string) error {
	i, err := interfaceOf(on)
	if err != nil {
		return err
	}
	if byAPI(i, addr) == nil {
		return nil
	}
	select {
	case h.running <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-h.running }()
	return netsh(ctx, arguments(on, addr)...)
}

// interfaceOf returns the named interface. Its error shows whether the interface is
// missing. The error of net.InterfaceByName does not show that.
func interfaceOf(name string) (*net.Interface, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	var names []string
	for i := range interfaces {
		if interfaces[i].Name == name {
			return &interfaces[i], nil
		}
		names = append(names, interfaces[i].Name)
	}
	return nil, fmt.Errorf("%w: %q; there are %q", errNoInterface, name, names)
}

func (host) addresses(on string) (map[netip.Addr]bool, error) {
	i, err := interfaceOf(on)
	if err != nil {
		return nil, err
	}
	addrs, err := i.Addrs()
	if err != nil {
		return nil, fmt.Errorf("list addresses of interface %q: %w", on, err)
	}
	hosts := map[netip.Addr]bool{}
	for _, a := range addrs {
		if prefix, ok := a.(*net.IPNet); ok {
			ones, bits := prefix.Mask.Size()
			if addr, ok := netip.AddrFromSlice(prefix.IP); ok && ones == bits {
				hosts[addr.Unmap()] = true
			}
		}
	}
	return hosts, nil
}

func (host) usable(addr netip.Addr) bool {
	// Try to bind a socket. The list of addresses also includes addresses that Windows still
	// checks for duplicates, and sockets cannot bind to these.
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if err != nil {
		return false
	}
	l.Close()
	return true
}

// netshTimeout limits one call of netsh, which normally takes less than a second.
const netshTimeout = 30 * time.Second

// netsh runs netsh.exe. It returns an error if the exit status is not 0.
func netsh(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, netshTimeout)
	defer cancel()
	// Do not search PATH for netsh, because other users may be able to modify PATH.
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
	return fmt.Errorf("run netsh %q: %w: %q", args, err, bytes.TrimSpace(out))
}

func addArguments(on string, addr netip.Addr) []string {
	// Without a mask, an address such as 10.0.0.1 would make all of 10.0.0.0/8 on-link.
	args := []string{"interface", "ipv4", "add", "address", "name=" + on, "address=" + addr.String(), "mask=255.255.255.255"}
	if addr.Is6() {
		args = []string{"interface", "ipv6", "add", "address", "interface=" + on, "address=" + addr.String() + "/128"}
	}
	return append(args, "store=active", "skipassource=true")
}

func deleteArguments(on string, addr netip.Addr) []string {
	family, name := "ipv4", "name="
	if addr.Is6() {
		family, name = "ipv6", "interface="
	}
	return []string{"interface", family, "delete", "address", name + on, "address=" + addr.String(), "store=active"}
}
