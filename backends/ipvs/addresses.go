// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/kpng-project/kpng/internal/rtnetlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// localAddresses makes addresses of services local to this node. For each address, it
// adds a route of type local on the instance's interface to the kernel's table of local
// addresses.
//
// Such routes have advantages over addresses on the interface. Other programs do not
// mistake the addresses of services for addresses of the node. The kernel searches routes
// in a tree, but the addresses of an interface in a list. Another program may add the
// same address without a conflict.
type localAddresses struct {
	// name is the name of the interface, and owner is its alias.
	name, owner string
	netNS       int
	// The fields below are set while the connection is open.
	handle *netlink.Handle
	link   int // the index of the interface
}

// routeProtocol marks the backend's routes, because the kernel also adds routes to the
// interface.
const routeProtocol = 108

func (l *localAddresses) connect() (err error) {
	if l.handle == nil {
		l.handle, err = newHandle(l.netNS, unix.NETLINK_ROUTE)
	}
	return err
}

// newHandle opens a netlink socket for a netlink family in a network namespace.
func newHandle(netNS, family int) (*netlink.Handle, error) {
	ns := netns.None()
	if netNS != 0 {
		ns = netns.NsHandle(netNS)
	}
	h, err := netlink.NewHandleAt(ns, family)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	return h, nil
}

func (l *localAddresses) close() {
	if l.handle != nil {
		l.handle.Close()
		l.handle = nil
	}
}

// open creates the interface unless it exists.
func (l *localAddresses) open() error {
	link, err := l.connectAndFind()
	if err != nil {
		return err
	}
	if link == nil {
		add := &netlink.Dummy{LinkAttrs: netlink.NewLinkAttrs()}
		add.Name = l.name
		switch err := l.handle.LinkAdd(add); {
		case errors.Is(err, unix.EOPNOTSUPP):
			return fmt.Errorf("add interface %s: the kernel lacks interfaces of type dummy: load the module dummy", l.name)
		case errors.Is(err, unix.EPERM):
			return fmt.Errorf("add interface %s: %w (CAP_NET_ADMIN is missing)", l.name, err)
		case err != nil:
			return fmt.Errorf("add interface %s: %w", l.name, err)
		}
		if link, err = l.find(); err != nil || link == nil {
			return fmt.Errorf("interface %s is not there after it was added (%w)", l.name, err)
		}
	}
	// The kernel ignores an alias in the request that creates an interface.
	if err := l.handle.LinkSetAlias(link, l.owner); err != nil {
		return fmt.Errorf("set alias of interface %s: %w", link.Attrs().Name, err)
	}
	l.link = link.Attrs().Index
	if err := l.handle.LinkSetUp(link); err != nil {
		return fmt.Errorf("set up interface %s: %w", link.Attrs().Name, err)
	}
	return nil
}

// lost reports whether another program has deleted the interface or set it down.
func (l *localAddresses) lost() bool {
	link, err := l.handle.LinkByIndex(l.link)
	return errors.As(err, new(netlink.LinkNotFoundError)) || err == nil && link.Attrs().Flags&net.FlagUp == 0
}

// lostRoute reports whether an address is no longer local.
func (l *localAddresses) lostRoute(addr netip.Addr) (bool, error) {
	routes, err := l.handle.RouteGet(addr.AsSlice())
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("find route to %s: %w", addr, err)
	}
	return len(routes) == 0 || routes[0].Type != unix.RTN_LOCAL, nil
}

// errForeignInterface is the error of find if the interface belongs to another program.
var errForeignInterface = errors.New("choose another name, or delete it if no other program uses it")

// find returns the instance's interface, or nil if it does not exist. It identifies the
// interface by the alias, because the option Interface may have had another value when
// the interface was created. If a crash interrupted the creation, the interface has no
// alias and is down. Then find identifies it by the name.
func (l *localAddresses) find() (netlink.Link, error) {
	links, err := rtnetlink.Dump(l.handle.LinkList)
	if err != nil {
		return nil, fmt.Errorf("look for interface %s: %w", l.name, err)
	}
	var named netlink.Link
	for _, link := range links {
		if link.Type() == "dummy" && link.Attrs().Alias == l.owner {
			return link, nil
		}
		if link.Attrs().Name == l.name {
			named = link
		}
	}
	if named != nil && (named.Type() != "dummy" || named.Attrs().Alias != "" || named.Attrs().Flags&net.FlagUp != 0) {
		return nil, fmt.Errorf("interface %s exists and does not have the alias %q: %w", l.name, l.owner, errForeignInterface)
	}
	return named, nil
}

// connectAndFind is like find, but connects to the kernel first.
func (l *localAddresses) connectAndFind() (netlink.Link, error) {
	if err := l.connect(); err != nil {
		return nil, err
	}
	return l.find()
}

// delete deletes the interface and thereby all routes.
func (l *localAddresses) delete() error {
	link, err := l.connectAndFind()
	if err != nil || link == nil {
		return err
	}
	if err := l.handle.LinkDel(link); err != nil {
		return fmt.Errorf("delete interface %s: %w", link.Attrs().Name, err)
	}
	return nil
}

// route returns the route of an address. Each interface has a metric of its own, so that
// several instances can have independent routes to the same address.
func (l *localAddresses) route(addr netip.Addr) *netlink.Route {
	return &netlink.Route{
		Dst:       &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		LinkIndex: l.link,
		Type:      unix.RTN_LOCAL,
		Table:     unix.RT_TABLE_LOCAL,
		Scope:     netlink.SCOPE_HOST,
		Protocol:  routeProtocol,
		Priority:  1<<16 + l.link,
	}
}

// add makes an address local. If the address has a route with a source, add replaces the
// route.
func (l *localAddresses) add(addr netip.Addr) error {
	if err := l.handle.RouteReplace(l.route(addr)); err != nil {
		return fmt.Errorf("make %s local: %w", addr, err)
	}
	return nil
}

func (l *localAddresses) remove(addr netip.Addr) error {
	if err := l.handle.RouteDel(l.route(addr)); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("delete local route to %s: %w", addr, err)
	}
	return nil
}

// useNodeSource makes an address of this node the source of the routes to IPv4 addresses.
// Without this source, the kernel uses the destination as the source of the node's own
// connections. These connections would end when the interface is deleted.
func (l *localAddresses) useNodeSource() error {
	link, err := l.connectAndFind()
	if err != nil || link == nil {
		return err
	}
	l.link = link.Attrs().Index
	elsewhere, err := l.handle.RouteGet(net.IPv4(192, 0, 2, 1)) // an address for documentation, which no machine has
	if err != nil || elsewhere[0].Src == nil {
		return nil // without a default route, the node cannot reach services through other backends
	}
	addrs, err := l.list()
	if err != nil {
		return err
	}
	for addr := range addrs {
		if addr.Is4() {
			route := l.route(addr)
			route.Src = elsewhere[0].Src
			if err := l.handle.RouteReplace(route); err != nil {
				return fmt.Errorf("set source of local route to %s: %w", addr, err)
			}
		}
	}
	return nil
}

// connectedSockets returns the number of connected TCP and UDP sockets whose local
// address has one of the instance's routes.
func (l *localAddresses) connectedSockets() (n int, err error) {
	if l.link == 0 {
		return 0, nil // no interface
	}
	addrs, err := l.list()
	if err != nil {
		return 0, err
	}
	h, err := newHandle(l.netNS, unix.NETLINK_INET_DIAG)
	if err != nil {
		return 0, err
	}
	defer h.Close()
	for _, list := range []func(uint8) ([]*netlink.Socket, error){h.SocketDiagTCP, h.SocketDiagUDP} {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			sockets, err := rtnetlink.Dump(func() ([]*netlink.Socket, error) { return list(family) })
			if err != nil {
				return 0, fmt.Errorf("list sockets: %w", err)
			}
			for _, s := range sockets {
				addr, _ := netip.AddrFromSlice(s.ID.Source)
				if _, own := addrs[addr.Unmap()]; own && s.State == netlink.TCP_ESTABLISHED {
					n++
				}
			}
		}
	}
	return n, nil
}

// list returns the addresses for which the instance's interface has routes. The value is
// false if the route has a source, see useNodeSource.
func (l *localAddresses) list() (map[netip.Addr]bool, error) {
	all := map[netip.Addr]bool{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		filter := &netlink.Route{LinkIndex: l.link, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Protocol: routeProtocol}
		routes, err := rtnetlink.Dump(func() ([]netlink.Route, error) {
			return l.handle.RouteListFiltered(family, filter,
				netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE|netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return nil, fmt.Errorf("list local routes: %w", err)
		}
		for i := range routes {
			if addr, ok := netip.AddrFromSlice(routes[i].Dst.IP); ok {
				all[addr.Unmap()] = routes[i].Src == nil
			}
		}
	}
	return all, nil
}
