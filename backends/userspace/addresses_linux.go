// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// platformOptions are the names of the shared options that the dataplane supports only on
// this platform.
var platformOptions = []string{"Instance"}

// hostAddresses returns the mechanism that makes addresses of services local on Linux. It
// returns nil if AddAddresses is false.
func hostAddresses(o *Options) (addresses, error) {
	if o.Interface != "" || o.StateFile != "" {
		return nil, errors.New("the options Interface and StateFile are for Windows")
	}
	protocol, err := strconv.ParseUint(cmp.Or(o.Instance, "107"), 10, 8)
	if err != nil || protocol < 5 {
		return nil, fmt.Errorf("instance %q is not a routing protocol number from 5 to 255", o.Instance)
	}
	if !o.AddAddresses {
		return nil, nil
	}
	return localRoutes{protocol: int(protocol)}, nil
}

// localRoutes makes each address local with a route of type local. The routes use the
// loopback interface and are in the kernel's table of local addresses.
//
// Such routes have advantages over addresses on an interface. They need no additional
// interface. Many routes are no problem: the kernel keeps routes in a tree, but the
// addresses of an interface in a list. The protocol number identifies the owner of a
// route. Another program can still add the same address to an interface.
type localRoutes struct {
	protocol int
	netNS    int // the network namespace of the routes, for tests; 0 for that of the process
}

// metric returns the metric of the routes. It differs from the metric of the kernel's own
// routes, which is 0, and from the metric of routes with another protocol. Routes to the
// same address are independent if their metrics differ.
func (r localRoutes) metric() int { return 1024 + r.protocol }

func (r localRoutes) route(addr netip.Addr) *netlink.Route {
	return &netlink.Route{
		Dst:       &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		LinkIndex: loopbackIndex,
		Type:      unix.RTN_LOCAL,
		Table:     unix.RT_TABLE_LOCAL,
		Scope:     netlink.SCOPE_HOST,
		Protocol:  netlink.RouteProtocol(r.protocol),
		Priority:  r.metric(),
	}
}

// loopbackIndex is the index of the loopback interface. It is the first interface of
// every network namespace.
const loopbackIndex = 1

// withHandle calls f with a netlink handle for the network namespace.
func (r localRoutes) withHandle(f func(*netlink.Handle) error) error {
	open := func() (*netlink.Handle, error) { return netlink.NewHandle(unix.NETLINK_ROUTE) }
	if r.netNS != 0 {
		open = func() (*netlink.Handle, error) {
			return netlink.NewHandleAt(netns.NsHandle(r.netNS), unix.NETLINK_ROUTE)
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
	return ownership.Objects(ctx, r.netNS, fmt.Sprintf("local routes of protocol %d", r.protocol))
}

// Add implements addresses.
func (r localRoutes) Add(_ context.Context, addr netip.Addr) error {
	return r.withHandle(func(h *netlink.Handle) error {
		if err := h.RouteAdd(r.route(addr)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add local route: %w", err)
		}
		return nil
	})
}

// Remove implements addresses.
func (r localRoutes) Remove(_ context.Context, addr netip.Addr) error {
	return r.withHandle(func(h *netlink.Handle) error {
		if err := h.RouteDel(r.route(addr)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("delete local route: %w", err)
		}
		return nil
	})
}

// Left implements addresses. It returns an error if the process may not change routes.
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
				&netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: netlink.RouteProtocol(r.protocol)},
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

// Cleanup implements addresses.
func (r localRoutes) Cleanup(ctx context.Context) error {
	left, err := r.Left(ctx)
	for _, addr := range left {
		err = errors.Join(err, r.Remove(ctx, addr))
	}
	return err
}
