// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
)

// nodeAddresses is a source of addresses that may change.
type nodeAddresses struct {
	addrs   []netip.Addr
	changed chan struct{}
}

func (n *nodeAddresses) Addresses() ([]netip.Addr, <-chan struct{}) { return n.addrs, n.changed }

func addressesOf(addrs ...string) *nodeAddresses {
	n := &nodeAddresses{changed: make(chan struct{})}
	for _, a := range addrs {
		n.addrs = append(n.addrs, netip.MustParseAddr(a))
	}
	return n
}

// withNodePort adds node port 30080, for TCP and UDP, to a service that the function view
// returned.
func withNodePort(s *api.Service) {
	s.Type = api.NodePort
	for i := range s.Ports {
		s.Ports[i].NodePort = 30080
	}
}

// newNodeAt returns a node with these addresses of node ports.
func newNodeAt(t *testing.T, addrs ...string) *node {
	return newNode(t, Options{Options: backends.Options{NodeAddresses: addressesOf(addrs...)}})
}

// mustName checks that getpeername and the source of an answer name the service.
func (n *node) mustName(to ...string) {
	n.t.Helper()
	for _, to := range to {
		if _, peer, err := n.dial(n.ns.Do, to); err != nil || peer != to {
			n.t.Errorf("connect to %s: peer %s, error %v", to, peer, err)
		}
		n.socket().ask(to)
	}
}

func testExternal(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("web", nil, endpoints, func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"))
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.2"))
		s.ExternalTrafficToLocal = true
	}), view("guarded", nil, endpoints, func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.3"))
		s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
	}))
	n.mustReach("192.0.2.1:80", endpoints[:3]...)
	n.mustReach("192.0.2.2:80", endpoints[:3]...)
	n.mustReach("[2001:db8::1]:80", endpoints[3:]...)
	n.mustName("192.0.2.1:80", "192.0.2.2:80", "[2001:db8::1]:80")
	n.mustNotReach("192.0.2.3:80")
}

func testNodePorts(t *testing.T) {
	n := newNodeAt(t, "172.16.0.1", "fd00:172::1")
	n.serve()
	n.pass(view("web", nil, endpoints, withNodePort), view("other", []string{"172.16.0.1"}, endpoints[:1], func(s *api.Service) {
		s.Ports[0].Port = 30081
	}), view("next", nil, endpoints[1:2], func(s *api.Service) {
		withNodePort(s)
		s.Ports[0].NodePort, s.Ports[1].NodePort = 30081, 30082
	}))
	n.awaitAddresses("172.16.0.1:30080")
	n.mustReach("172.16.0.1:30080", endpoints[:3]...)
	n.mustReach("[::ffff:172.16.0.1]:30080", endpoints[:3]...)
	n.mustReach("[fd00:172::1]:30080", endpoints[3:]...)
	n.mustName("172.16.0.1:30080", "[fd00:172::1]:30080")
	n.mustReach("172.16.0.1:30081", endpoints[0]) // a service address precedes a node port
	n.mustNotReach("172.16.0.1:30083")
	n.mustNotReach("172.16.0.2:30080")
	n.mustNotReach("0.0.0.0:30080")
	n.mustNotReach("[::]:30080")
	pod := netnstest.New(t)
	pod.Cgroup = n.ns.Cgroup
	pod.Add(t, "lo", endpoints[0])
	netnstest.Listen(t, pod.Do, endpoints[0]+":8080", func(c net.Conn) { c.Write([]byte("from a pod")) })
	n.set(view("web", nil, endpoints[:1], withNodePort))
	if got, _, err := n.dial(pod.Do, "172.16.0.1:30080"); got != "from a pod" {
		t.Errorf("a pod reaches %q, error %v", got, err)
	}

	source := n.opts.NodeAddresses.(*nodeAddresses)
	old := *source
	*source = *addressesOf("172.16.0.2")
	close(old.changed)
	n.awaitAddresses("172.16.0.2:30080")
	n.mustNotReach("172.16.0.1:30080")
	n.mustNotReach("[fd00:172::1]:30080")
	n.opts.NodeAddresses = nil
	n.restart()
	n.pass(view("web", nil, endpoints[:1], withNodePort))
	n.mustNotReach("172.16.0.2:30080")
}

// awaitAddresses waits until a node port is reachable.
func (n *node) awaitAddresses(to string) {
	n.t.Helper()
	for range 1000 {
		if _, _, err := n.dial(n.ns.Do, to); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	n.t.Fatalf("%s is not reachable", to)
}

func testLocalhost(t *testing.T) {
	if _, err := netNSCookie(); err != nil {
		t.Skip(err)
	}
	n := newNodeAt(t, "127.0.0.1", "::1")
	n.serve()
	n.pass(view("web", nil, endpoints, withNodePort))
	n.awaitAddresses("127.0.0.1:30080")
	n.mustReach("127.0.0.1:30080", endpoints[:3]...)
	n.mustReach("[::1]:30080", endpoints[3:]...)
	n.mustName("127.0.0.1:30080", "[::1]:30080")
	n.mustNotReach("127.0.0.2:30080")

	// A socket with a loopback address could not reach an endpoint elsewhere.
	err := n.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			return err
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 30080}); err != unix.ECONNREFUSED {
			t.Errorf("connect from 127.0.0.1: %v, want the refusal of an untranslated connection", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}

	pod := netnstest.New(t)
	pod.Cgroup = n.ns.Cgroup
	for _, to := range []string{"127.0.0.1:30080", "[::1]:30080"} {
		netnstest.Listen(t, pod.Do, to, func(c net.Conn) { c.Write([]byte("own")) })
		if got, _, err := n.dial(pod.Do, to); got != "own" {
			t.Errorf("in a pod, %s leads to %q, error %v", to, got, err)
		}
	}
	var used []string
	n.set(view("web", nil, endpoints[:1], withNodePort))
	used = n.reaches("127.0.0.1:30080", 3)
	if !slices.Equal(used, endpoints[:1]) {
		t.Errorf("after a change, localhost leads to %v", used)
	}
}

func testBind(t *testing.T) {
	n := newNodeAt(t, "127.0.0.1", "172.16.0.1", "fd00:172::1")
	if features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval) != nil {
		t.Skip("the kernel has no bpf_set_retval")
	}
	n.serve()
	for _, addr := range []string{"172.16.0.1", "172.16.0.2", "fd00:172::1"} {
		n.ns.Add(t, "lo", addr)
	}
	onlyTCP := func(s *api.Service) {
		withNodePort(s)
		s.Ports = s.Ports[:1]
	}
	n.pass(view("web", nil, endpoints[:3], onlyTCP))
	n.awaitAddresses("172.16.0.1:30080")
	pod := netnstest.New(t)
	pod.Cgroup = n.ns.Cgroup
	bind := func(in netnstest.Place, network, address string) error {
		return in(func() error {
			var c io.Closer
			var err error
			if network == "udp" {
				c, err = net.ListenPacket(network, address)
			} else {
				c, err = net.Listen(network, address)
			}
			if err == nil {
				err = c.Close()
			}
			return err
		})
	}
	for _, test := range []struct {
		in               netnstest.Place
		network, address string
		refused          bool
	}{
		{n.ns.Do, "tcp", ":30080", true},
		{n.ns.Do, "tcp4", ":30080", true},
		{n.ns.Do, "tcp", "172.16.0.1:30080", true},
		{n.ns.Do, "tcp", "[::ffff:172.16.0.1]:30080", true},
		{n.ns.Do, "tcp", "172.16.0.2:30080", false},    // not an address of node ports
		{n.ns.Do, "tcp", "[fd00:172::1]:30080", false}, // the service has no IPv6 node port
		{n.ns.Do, "tcp", "127.0.0.1:30080", false},     // kpng's own listener handles it
		{n.ns.Do, "tcp", ":30081", false},              // another port
		{n.ns.Do, "tcp", ":0", false},
		{n.ns.Do, "udp", ":30080", false}, // another protocol
		{pod.Do, "tcp", ":30080", false},  // a port of the pod itself
	} {
		err := bind(test.in, test.network, test.address)
		if (err != nil) != test.refused || err != nil && !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("listen at %s %s: %v, want refusal %t", test.network, test.address, err, test.refused)
		}
	}
	n.set(view("web", nil, endpoints, withNodePort))
	for _, address := range []string{":30080", "[fd00:172::1]:30080"} {
		if err := bind(n.ns.Do, "udp", address); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("listen at udp %s: %v", address, err)
		}
	}
	n.delete("web")
	if err := bind(n.ns.Do, "tcp", ":30080"); err != nil {
		t.Errorf("the service is deleted: %v", err)
	}
	n.set(view("web", nil, endpoints, withNodePort))
	n.setAge(patience + time.Minute)
	if err := bind(n.ns.Do, "tcp", ":30080"); err != nil {
		t.Errorf("no process of kpng has run for ten minutes: %v", err)
	}
}
