// SPDX-License-Identifier: Apache-2.0

// Package netnstest makes network namespaces for tests of backends' parts. It
// needs root.
package netnstest

import (
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace without a name. It goes with its test.
type Namespace struct {
	// FD is its file descriptor.
	FD int
	// Links configures it.
	Links *netlink.Handle
}

// New makes a namespace whose loopback interface is up.
func New(t testing.TB) *Namespace {
	t.Helper()
	n := &Namespace{}
	if err := aside(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace, which needs root: %w", err)
		}
		fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		n.FD = fd
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(n.FD) })
	links, err := netlink.NewHandleAt(netns.NsHandle(n.FD))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(links.Close)
	n.Links = links
	// Nobody else is there to have the same address, and looking takes a second.
	n.Set(t, "ipv6/conf/default/accept_dad", "0")
	n.Up(t, "lo")
	return n
}

// Do calls f in the namespace. Sockets and processes that f makes stay in it.
func (n *Namespace) Do(f func() error) error {
	return aside(func() error {
		if err := unix.Setns(n.FD, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering a network namespace: %w", err)
		}
		return f()
	})
}

// aside calls f on a thread that ends with it.
func aside(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}

// Set sets one of the kernel's settings below /proc/sys/net.
func (n *Namespace) Set(t testing.TB, name, value string) {
	t.Helper()
	if err := n.Do(func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) }); err != nil {
		t.Fatal(err)
	}
}

// Up brings an interface up.
func (n *Namespace) Up(t testing.TB, name string) {
	t.Helper()
	if err := n.Links.LinkSetUp(n.link(t, name)); err != nil {
		t.Fatalf("interface %s: %v", name, err)
	}
}

// Join makes a link between interface name of n and interface peer of o, and
// brings it up.
func (n *Namespace) Join(t testing.TB, name string, o *Namespace, peer string) {
	t.Helper()
	if err := n.Links.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: peer, PeerNamespace: netlink.NsFd(o.FD),
	}); err != nil {
		t.Fatalf("link from %s to %s: %v", name, peer, err)
	}
	n.Up(t, name)
	o.Up(t, peer)
}

// Stub makes an interface that leads nowhere.
func (n *Namespace) Stub(t testing.TB, name string) {
	t.Helper()
	n.Join(t, name, n, name+"-end")
}

// Add gives an interface an address, as in 10.0.0.1/24.
func (n *Namespace) Add(t testing.TB, name, addr string) {
	t.Helper()
	if err := n.Links.AddrAdd(n.link(t, name), parseAddr(t, addr)); err != nil {
		t.Fatalf("address %s of %s: %v", addr, name, err)
	}
}

// Remove takes an address from an interface.
func (n *Namespace) Remove(t testing.TB, name, addr string) {
	t.Helper()
	if err := n.Links.AddrDel(n.link(t, name), parseAddr(t, addr)); err != nil {
		t.Fatalf("address %s of %s: %v", addr, name, err)
	}
}

// Route sends a destination, or "default", over an interface, by way of a gateway
// unless that is empty.
func (n *Namespace) Route(t testing.TB, destination, gateway, name string) {
	t.Helper()
	route := &netlink.Route{LinkIndex: n.link(t, name).Attrs().Index}
	if gateway != "" {
		route.Gw = parseAddr(t, gateway+"/32").IP
	}
	if destination != "default" {
		route.Dst = parseAddr(t, destination).IPNet
	}
	if err := n.Links.RouteReplace(route); err != nil {
		t.Fatalf("route to %s by %s: %v", destination, name, err)
	}
}

func (n *Namespace) link(t testing.TB, name string) netlink.Link {
	t.Helper()
	link, err := n.Links.LinkByName(name)
	if err != nil {
		t.Fatalf("interface %s: %v", name, err)
	}
	return link
}

func parseAddr(t testing.TB, s string) *netlink.Addr {
	t.Helper()
	addr, err := netlink.ParseAddr(s)
	if err != nil {
		t.Fatal(err)
	}
	return addr
}
