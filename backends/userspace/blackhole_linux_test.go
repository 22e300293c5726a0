// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
)

// TestSilentEndpointIsSkipped connects to a service with two endpoints. One of them never
// answers, because its backlog is full.
func TestSilentEndpointIsSkipped(t *testing.T) {
	w := newWorld(t, settings{})
	port := freePort(t, "127.0.0.2")
	hole := blackHole(t)
	w.set(serviceAt("web", "127.0.0.2", port, api.TCP).addEndpoints(hole, namedServer(t, "alive")).view())
	for range 4 {
		begin := time.Now()
		if got := askOnce(t, "127.0.0.2", port); got != "alive" {
			t.Fatalf("connected to %s", got)
		}
		if took := time.Since(begin); took > 2*time.Second {
			t.Errorf("took %v, although the second endpoint is tried after 250 ms", took)
		}
	}
}

// blackHole returns an address that neither accepts nor refuses TCP connections.
func blackHole(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(name.(*syscall.SockaddrInet4).Port))
	c, err := net.Dial("tcp", at.String()) // fills the backlog, which has room for one connection
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return at
}
