// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// RouteOptions are the settings of LocalRoutes. The zero value selects the defaults.
type RouteOptions struct {
	// Protocol is the routing protocol number of the routes, 5 to 255. LocalRoutes treats
	// all local routes with this number as its own. So two proxies on one host need
	// different numbers. Default: 107.
	Protocol int
	// NetNS is a file descriptor of the network namespace for the routes. It must stay open
	// while the result of LocalRoutes is used. Default 0: the namespace of the process.
	NetNS int
}

// metric returns the metric of the routes. It differs from the metric of the kernel's own
// routes, which is 0, and from the metric of routes with another value of Protocol.
// Routes to the same address are independent if their metrics differ.
func (r localRoutes) metric() int { return 1024 + r.Protocol }

// LocalRoutes returns an implementation of [Addresses]. It makes each address local with
// a route of type local. The routes use the loopback interface and are in the kernel's
// table of local addresses. A process needs the capability CAP_NET_ADMIN to change these
// routes. Without it, Start of a Backend returns an error.
//
// Such routes have advantages over addresses on an interface. They need no additional
// interface. Many routes are no problem: the kernel keeps routes in a tree, but the
// addresses of an interface in a list. The protocol number identifies the owner of a
// route. Another program can still add the same address to an interface.
func LocalRoutes(opts RouteOptions) Addresses {
	if opts.Protocol == 0 {
		opts.Protocol = 107
	}
	return localRoutes(opts)
}

type localRoutes RouteOptions

func (r localRoutes) route(addr netip.Addr) *netlink.Route {
	return &netlink.Route{
		Dst:       &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		LinkIndex: loopbackIndex,
		Type:      unix.RTN_LOCAL,
		Table:     unix.RT_TABLE_LOCAL,
		Scope:     netlink.SCOPE_HOST,
		Protocol:  netlink.RouteProtocol(r.Protocol),
		Priority:  r.metric(),
	}
}

// loopbackIndex is the index of the loopback interface. It is the first interface of
// every network namespace.
const loopbackIndex = 1

// withHandle calls f with a netlink handle for the network namespace.
func (r localRoutes) withHandle(f func(*netlink.Handle) error) error {
	open := func() (*netlink.Handle, error) { return netlink.NewHandle(unix.NETLINK_ROUTE) }
	if r.NetNS != 0 {
		open = func() (*netlink.Handle, error) {
			return netlink.NewHandleAt(netns.NsHandle(r.NetNS), unix.NETLINK_ROUTE)
		}
	}
	h, err := open()
	if err != nil {
		return fmt.Errorf("open netlink socket: %w", err)
	}
	defer h.Close()
	return f(h)
}

// Own takes the ownership of the routes, see exclusive.
func (r localRoutes) Own(ctx context.Context) (release func(), err error) {
	return ownership.Objects(ctx, r.NetNS, fmt.Sprintf("local routes of protocol %d", r.Protocol))
}

// Add implements [Addresses].
func (r localRoutes) Add(_ context.Context, addr netip.Addr) error {
	return r.withHandle(func(h *netlink.Handle) error {
		if err := h.RouteAdd(r.route(addr)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add local route: %w", err)
		}
		return nil
	})
}

// Remove implements [Addresses].
func (r localRoutes) Remove(_ context.Context, addr netip.Addr) error {
	return r.withHandle(func(h *netlink.Handle) error {
		if err := h.RouteDel(r.route(addr)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("delete local route: %w", err)
		}
		return nil
	})
}

// Left implements [Addresses]. It returns an error if the process may not change routes.
func (r localRoutes) Left(ctx context.Context) (left []netip.Addr, err error) {
	// Check the privilege: try to remove a route that cannot exist, because no service has
	// the address 0.0.0.0.
	if err := r.Remove(ctx, netip.IPv4Unspecified()); err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("make addresses of services local (needs CAP_NET_ADMIN): %w", err)
		}
		return nil, err
	}
	err = r.withHandle(func(h *netlink.Handle) error {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			routes, err := h.RouteListFiltered(family,
				&netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: netlink.RouteProtocol(r.Protocol)},
				netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE|netlink.RT_FILTER_PROTOCOL)
			if err != nil {
				return fmt.Errorf("list local routes: %w", err)
			}
			for i := range routes {
				if addr, ok := netip.AddrFromSlice(routes[i].Dst.IP); ok {
					left = append(left, addr.Unmap())
				}
			}
		}
		return nil
	})
	return left, err
}

// Cleanup implements [Addresses].
func (r localRoutes) Cleanup(ctx context.Context) error {
	left, err := r.Left(ctx)
	for _, addr := range left {
		err = errors.Join(err, r.Remove(ctx, addr))
	}
	return err
}
