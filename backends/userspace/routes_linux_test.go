// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// localRoutesIn returns the destinations of local routes over the loopback interface,
// except routes of the kernel itself.
func localRoutesIn(t *testing.T, n *netnstest.Namespace) []string {
	t.Helper()
	var out []string
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := n.Links.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_LOCAL}, netlink.RT_FILTER_TABLE)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			if r.Protocol != unix.RTPROT_KERNEL {
				out = append(out, r.Dst.String())
			}
		}
	}
	slices.Sort(out)
	return out
}

func TestAddressesAreLocalWhileServed(t *testing.T) {
	n := netnstest.New(t)
	cmd, stdin := backendProcess(t, n, "10.96.0.1", "10.96.0.2", "fd00::1")
	if diff := cmp.Diff([]string{"10.96.0.1/32", "10.96.0.2/32", "fd00::1/128"}, localRoutesIn(t, n)); diff != "" {
		t.Errorf("local routes (-want +got):\n%s", diff)
	}
	err := n.Do(func() error {
		c, err := net.DialTimeout("tcp", "10.96.0.1:80", patience)
		if err != nil {
			return err
		}
		defer c.Close()
		fmt.Fprintln(c, "hello")
		line, err := bufio.NewReader(c).ReadString('\n')
		if line != "a hello\n" {
			return fmt.Errorf("answer %q, error %w", line, err)
		}
		return nil
	})
	if err != nil {
		t.Errorf("connect to a cluster IP: %v", err)
	}
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		t.Errorf("the process returned %v", err)
	}
	if got := localRoutesIn(t, n); len(got) != 0 {
		t.Errorf("after the process stopped: local routes to %v", got)
	}
}

func TestRestartAfterKillLeavesNoAddressBehind(t *testing.T) {
	n := netnstest.New(t)
	foreign := netlink.Route{
		Dst: &net.IPNet{IP: net.IPv4(10, 97, 0, 1), Mask: net.CIDRMask(32, 32)}, LinkIndex: 1,
		Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST, Protocol: 108, Priority: 1024,
	}
	if err := n.Links.RouteAdd(&foreign); err != nil {
		t.Fatal(err)
	}
	cmd, _ := backendProcess(t, n, "10.96.0.1", "10.96.0.2", "fd00::1")
	cmd.Process.Signal(syscall.SIGKILL)
	cmd.Wait()
	if got := localRoutesIn(t, n); len(got) != 4 {
		t.Fatalf("the killed process left local routes to %v", got)
	}
	cmd, stdin := backendProcess(t, n, "10.96.0.2")
	if diff := cmp.Diff([]string{"10.96.0.2/32", "10.97.0.1/32"}, localRoutesIn(t, n)); diff != "" {
		t.Errorf("local routes after the restart (-want +got):\n%s", diff)
	}
	stdin.Close()
	cmd.Wait()
	if diff := cmp.Diff([]string{"10.97.0.1/32"}, localRoutesIn(t, n)); diff != "" {
		t.Errorf("local routes after the end (-want +got):\n%s", diff)
	}
}

func TestBackendsShareAnAddress(t *testing.T) {
	n := netnstest.New(t)
	a, b := localRoutes{protocol: 107, netNS: n.FD}, localRoutes{protocol: 108, netNS: n.FD}
	for _, addr := range []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")} {
		if err := errors.Join(a.Add(t.Context(), addr), b.Add(t.Context(), addr), a.Remove(t.Context(), addr)); err != nil {
			t.Error(err)
		}
		if got := localRoutesIn(t, n); len(got) != 1 {
			t.Errorf("after the first backend removed %s: local routes to %v", addr, got)
		}
		if err := b.Remove(t.Context(), addr); err != nil {
			t.Error(err)
		}
		if got := localRoutesIn(t, n); len(got) != 0 {
			t.Errorf("after both backends removed %s: local routes to %v", addr, got)
		}
	}
}

func TestStartFailsWithoutPrivilegeForRoutes(t *testing.T) {
	n := netnstest.New(t)
	for _, privileged := range []bool{true, false} {
		b, err := newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}}, addresses: localRoutes{protocol: 107}})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Do(func() error {
			if !privileged { // drop only the capabilities of this thread, which ends when Do returns
				header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
				var none [2]unix.CapUserData
				if err := unix.Capset(&header, &none[0]); err != nil {
					t.Fatal(err)
				}
			}
			err = b.Start(t.Context())
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		switch {
		case privileged && err == nil:
			b.Stop(context.Background())
		case privileged || err == nil || !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN"):
			t.Errorf("with the privilege %v: Start returned %v", privileged, err)
		}
	}
}

// runInside starts a backend and calls f on a thread in the network namespace n. The
// Backend opens its sockets and adds its routes there.
func runInside(t *testing.T, n *netnstest.Namespace, f func(b *backend)) {
	t.Helper()
	b, err := newBackend(settings{Options: Options{Options: backends.Options{NodeAddresses: nodeaddr.Of()}, DrainTimeout: patience}, addresses: localRoutes{protocol: 107, netNS: n.FD}})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Do(func() error {
		if err := b.Start(t.Context()); err != nil {
			return err
		}
		f(b)
		return b.Stop(context.Background())
	}); err != nil {
		t.Error(err)
	}
}

func TestVerifyRestoresRemovedAddress(t *testing.T) {
	n := netnstest.New(t)
	runInside(t, n, func(b *backend) {
		if err := b.Sync(t.Context(), fullOf(serviceAt("a", "10.96.0.1", 80, api.TCP).markUnusable().view(), serviceAt("b", "fd00::1", 80, api.TCP).markUnusable().view())); err != nil {
			t.Error(err)
		}
		want := localRoutesIn(t, n)
		if err := b.opts.addresses.Cleanup(t.Context()); err != nil {
			t.Error(err)
		}
		if got := localRoutesIn(t, n); len(got) != 0 || len(want) != 2 {
			t.Fatalf("local routes to %v, without them to %v", want, got)
		}
		if err := b.Verify(t.Context()); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(want, localRoutesIn(t, n)); diff != "" {
			t.Errorf("local routes (-want +got):\n%s", diff)
		}
	})
}

func TestAddressIsRemovedWithItsLastUser(t *testing.T) {
	n := netnstest.New(t)
	runInside(t, n, func(b *backend) {
		sync := func(want []string, views ...*api.View) {
			t.Helper()
			if err := b.Sync(t.Context(), fullOf(views...)); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(want, localRoutesIn(t, n)); diff != "" {
				t.Errorf("local routes (-want +got):\n%s", diff)
			}
		}
		a := serviceAt("a", "10.96.0.1", 80, api.TCP).view()
		b2 := serviceAt("b", "10.96.0.1", 81, api.TCP).view()
		sync([]string{"10.96.0.1/32"}, a, b2)
		sync([]string{"10.96.0.1/32"}, b2)
		sync([]string{"10.96.0.2/32"}, serviceAt("b", "10.96.0.2", 81, api.TCP).view())
		sync(nil)
	})
}

func TestAddressStaysForConnectionsThatDrain(t *testing.T) {
	n := netnstest.New(t)
	runInside(t, n, func(b *backend) {
		view := serviceAt("a", "10.96.0.1", 80, api.TCP).addEndpoints(netip.MustParseAddrPort("127.0.0.1:9")).view()
		if err := b.Sync(t.Context(), fullOf(view)); err != nil {
			t.Fatal(err)
		}
		// Pretend that the listener has a connection.
		l := b.sockets.owner(socketAddr{api.TCP, netip.MustParseAddrPort("10.96.0.1:80")}).listeners[socketAddr{api.TCP, netip.MustParseAddrPort("10.96.0.1:80")}].(*tcpListener)
		l.enter()
		if err := b.Sync(t.Context(), fullOf()); err != nil {
			t.Fatal(err)
		}
		if got := localRoutesIn(t, n); len(got) != 1 {
			t.Errorf("while a connection drains: local routes to %v", got)
		}
		l.recordEnd(nil)
		for deadline := time.Now().Add(patience); len(localRoutesIn(t, n)) > 0; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Error("the address is still local")
				return
			}
		}
	})
}
