// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package nodeaddrs

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// subscribe returns nil, because a Watcher receives notifications only on Linux.
func subscribe(context.Context, int) (<-chan struct{}, error) { return nil, nil }

func readAddresses(_ int, exclude []string) (machineAddresses, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return machineAddresses{}, err
	}
	var s machineAddresses
	for _, i := range interfaces {
		if slices.Contains(exclude, i.Name) {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			return machineAddresses{}, fmt.Errorf("interface %s: %w", i.Name, err)
		}
		for _, a := range addrs {
			if prefix, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(prefix.IP); ok {
					s.all = append(s.all, ip)
				}
			}
		}
	}
	for _, target := range unrouted {
		if ip, ok := source(target); ok {
			s.outgoing = append(s.outgoing, ip)
		}
	}
	return s, nil
}

// source returns the source address of packets from this machine to target. To find it,
// the function connects a UDP socket to target. This sends no packet.
func source(target netip.Addr) (netip.Addr, bool) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(target, 9)))
	if err != nil {
		return netip.Addr{}, false // no route
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr(), true
}
