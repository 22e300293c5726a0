// SPDX-License-Identifier: Apache-2.0

package nodeaddrs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/internal/rtnetlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

func handleOf(fd int) netns.NsHandle {
	if fd == 0 {
		return netns.None()
	}
	return netns.NsHandle(fd)
}

// subscribe returns a channel that receives a value soon after an address in the
// namespace changed. The channel is closed when ctx ends, or when notifications were
// lost.
func subscribe(ctx context.Context, netNS int) (<-chan struct{}, error) {
	socket, err := nl.SubscribeAt(handleOf(netNS), netns.None(), unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, fmt.Errorf("subscribe to address changes: %w", err)
	}
	notify := make(chan struct{}, 1)
	stop := context.AfterFunc(ctx, socket.Close)
	go func() {
		defer close(notify)
		defer func() {
			if stop() {
				socket.Close()
			}
		}()
		for {
			if _, _, err := socket.Receive(); err != nil {
				return
			}
			select {
			case notify <- struct{}{}:
			default: // a notification is already waiting
			}
		}
	}()
	return notify, nil
}

func readAddresses(netNS int, exclude []string) (machineAddresses, error) {
	handle, err := netlink.NewHandleAt(handleOf(netNS), unix.NETLINK_ROUTE)
	if err != nil {
		return machineAddresses{}, err
	}
	defer handle.Close()
	excluded, err := indexes(handle, exclude)
	if err != nil {
		return machineAddresses{}, err
	}
	list, err := rtnetlink.Dump(func() ([]netlink.Addr, error) { return handle.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return machineAddresses{}, err
	}
	var s machineAddresses
	for _, a := range list {
		// If duplicate address detection failed or has not ended, another machine may have the
		// address. Such an address is omitted.
		unsure := a.Flags&unix.IFA_F_DADFAILED != 0 || a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0
		ip, ok := netip.AddrFromSlice(a.IP)
		if ok && !unsure && !slices.Contains(excluded, a.LinkIndex) {
			s.all = append(s.all, ip)
		}
	}
	for _, target := range unrouted {
		if ip, ok := source(handle, target); ok {
			s.outgoing = append(s.outgoing, ip)
		}
	}
	return s, nil
}

// indexes returns the indexes of the named interfaces. It ignores missing interfaces.
func indexes(handle *netlink.Handle, names []string) ([]int, error) {
	var out []int
	for _, name := range names {
		link, err := handle.LinkByName(name)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("interface %s: %w", name, err)
		}
		out = append(out, link.Attrs().Index)
	}
	return out, nil
}

// source returns the source address of packets from this machine to target.
func source(handle *netlink.Handle, target netip.Addr) (netip.Addr, bool) {
	routes, err := handle.RouteGet(net.IP(target.AsSlice()))
	if err != nil || len(routes) == 0 {
		return netip.Addr{}, false // no route
	}
	ip, ok := netip.AddrFromSlice(routes[0].Src)
	return ip, ok
}
