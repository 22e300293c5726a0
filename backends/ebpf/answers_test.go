// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// echo starts servers at port 8080 of the addresses 10.0.1.1 to 10.0.1.<servers>. They send
// each datagram back.
func (n *node) echo(servers int) {
	n.t.Helper()
	for i := range servers {
		addr := fmt.Sprint("10.0.1.", i+1)
		n.ns.Add(n.t, "lo", addr)
		c := n.bind(addr + ":8080")
		go func() {
			buffer := make([]byte, 100)
			for {
				length, from, err := c.ReadFromUDPAddrPort(buffer)
				if err != nil {
					return
				}
				c.WriteToUDPAddrPort(buffer[:length], from)
			}
		}()
	}
}

// bind opens a UDP socket.
func (n *node) bind(at string) (c *net.UDPConn) {
	n.t.Helper()
	if err := n.ns.Do(func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { c.Close() })
	return c
}

// service returns the view of service number i, with address 10.96.0.<i> and
// the endpoints 10.0.1.<number>.
func service(i int, numbers ...int) *api.View {
	var addrs []string
	for _, number := range numbers {
		addrs = append(addrs, fmt.Sprint("10.0.1.", number))
	}
	return view(fmt.Sprint("s", i), []string{fmt.Sprint("10.96.0.", i)}, addrs, nil)
}

func serviceAddr(i int) string  { return fmt.Sprintf("10.96.0.%d:80", i) }
func endpointAddr(i int) string { return fmt.Sprintf("10.0.1.%d:8080", i) }

// send sends a datagram whose content is its destination.
func (s *socket) send(to string) error {
	_, err := s.WriteToUDPAddrPort([]byte(to), netip.MustParseAddrPort(to))
	return err
}

func (s *socket) mustSend(to ...string) {
	s.n.t.Helper()
	for _, to := range to {
		if err := s.send(to); err != nil {
			s.n.t.Fatalf("send to %s: %v", to, err)
		}
	}
}

// receive reads a datagram, and returns its content and its source.
func (s *socket) receive() (content, from string) {
	s.n.t.Helper()
	s.SetReadDeadline(time.Now().Add(time.Minute))
	buffer := make([]byte, 100)
	length, addr, err := s.ReadFromUDPAddrPort(buffer)
	if err != nil {
		s.n.t.Fatalf("no datagram: %v", err)
	}
	return string(buffer[:length]), netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port()).String()
}

// mustReceive reads answers of echo servers. An answer contains the destination of the
// datagram, and mustReceive checks that the answer comes from there.
func (s *socket) mustReceive(answers int) {
	s.n.t.Helper()
	for range answers {
		if to, from := s.receive(); from != to {
			s.n.t.Errorf("the answer to a datagram to %s comes from %s", to, from)
		}
	}
}

// testAnswersInFlight sends datagrams before it reads the answers to earlier datagrams.
func testAnswersInFlight(t *testing.T) {
	n := newNode(t, Options{})
	n.useNFTables()
	n.echo(12)
	var views []*api.View
	for i := range 12 {
		views = append(views, service(i+1, i+1))
	}
	// Services 13 and 14 have one endpoint.
	n.pass(append(views, service(13, 1), service(14, 1, 2))...)
	for _, destinations := range [][]string{
		{serviceAddr(1), serviceAddr(2)},
		{serviceAddr(1), serviceAddr(13), serviceAddr(14), serviceAddr(1), serviceAddr(13)},
		{serviceAddr(14), serviceAddr(1), serviceAddr(2), serviceAddr(13)},
		{endpointAddr(1), serviceAddr(1), endpointAddr(1), serviceAddr(14)},
		{endpointAddr(3), serviceAddr(1), serviceAddr(14), endpointAddr(1)},
	} {
		s := n.socket()
		s.mustSend(destinations...)
		s.mustReceive(len(destinations))
	}
	s := n.socket()
	for range 3 {
		for i := range 12 {
			s.mustSend(serviceAddr(i + 1))
		}
		s.mustReceive(12)
	}
	// A socket that uses a service may also send to its endpoint directly.
	s = n.socket()
	s.mustSend(serviceAddr(1))
	s.mustReceive(1)
	for range 3 {
		s.mustSend(endpointAddr(1), serviceAddr(1), serviceAddr(2))
		s.mustReceive(3)
	}
	mixDatagrams(n, rand.New(rand.NewPCG(1, 1)))
}

// mixDatagrams sends datagrams of several sockets to services and endpoints at random. It
// never sends to an endpoint directly while an answer of a service may be in flight.
func mixDatagrams(n *node, random *rand.Rand) {
	n.t.Helper()
	for range 10 {
		s, services := n.socket(), 1+random.IntN(14)
		for range 10 {
			sent := 1 + random.IntN(5)
			for range sent {
				s.mustSend(serviceAddr(1 + random.IntN(services)))
			}
			s.mustReceive(sent)
			if random.IntN(4) == 0 {
				s.mustSend(endpointAddr(1 + random.IntN(12)))
				sent = random.IntN(3)
				for range sent {
					s.mustSend(serviceAddr(1 + random.IntN(services)))
				}
				s.mustReceive(1 + sent)
			}
		}
	}
}

func testManyServices(t *testing.T) {
	n := newNode(t, Options{})
	n.echo(9)
	var views []*api.View
	for i := range 9 {
		views = append(views, service(i+1, i+1))
	}
	n.pass(views...)
	s := n.socket()
	use := func(i int) {
		t.Helper()
		s.mustSend(serviceAddr(i))
		s.mustReceive(1)
	}
	// Without the other sink, an untranslated datagram has no route.
	mustLeave := func(i int) {
		t.Helper()
		if err := s.send(serviceAddr(i)); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("to service %d: error %v, want %v", i, err, unix.ENETUNREACH)
		}
	}
	for i := range 8 {
		use(i + 1)
	}
	mustLeave(9)
	for i := range 8 {
		use(i + 1)
	}
	// The other sink keeps service 9 while the socket uses it, and for two minutes after
	// that.
	s.age(time.Minute, 1)
	mustLeave(9)
	s.age(121*time.Second, 1)
	use(9)
	use(2)
	mustLeave(1)
}

// udpPeers is a value of the map udp_peers.
type udpPeers struct {
	Lock, Pad uint32
	Other     uint64
	Uses      [8]struct {
		Peer peer
		Time uint64
	}
}

// age sets back the recorded times of the socket's last datagrams to a service, and of
// its last untranslated datagrams.
func (s *socket) age(by time.Duration, i int) {
	s.n.t.Helper()
	raw, err := s.SyscallConn()
	if err != nil {
		s.n.t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		var value udpPeers
		if err = s.n.programs.UdpPeers.Lookup(int32(fd), &value); err != nil {
			return
		}
		if value.Other != 0 {
			value.Other -= uint64(by)
		}
		for at := range value.Uses {
			if value.Uses[at].Peer.Service == toAddress(netip.MustParseAddrPort(serviceAddr(i)).Addr(), 80) {
				value.Uses[at].Time -= uint64(by)
			}
		}
		err = s.n.programs.UdpPeers.Put(int32(fd), &value)
	})
	if err != nil {
		s.n.t.Fatal(err)
	}
}

// testThreads uses a service for the first time from two threads at the same time.
func testThreads(t *testing.T) {
	n := newNode(t, Options{})
	n.echo(3)
	n.pass(service(1, 1, 2, 3))
	for range 300 {
		s := n.socket()
		var senders sync.WaitGroup
		var ready atomic.Int32
		for range 2 {
			senders.Go(func() {
				for ready.Add(1); ready.Load() < 2; {
					runtime.Gosched()
				}
				if err := s.send(serviceAddr(1)); err != nil {
					t.Errorf("send: %v", err)
				}
			})
		}
		senders.Wait()
		s.mustReceive(2)
		s.Close()
	}
}

func testIdle(t *testing.T) {
	n := newNode(t, Options{})
	for _, addr := range endpoints[:3] {
		n.serveAt(addr)
	}
	ips := []string{"10.96.0.1"}
	n.pass(view("web", ips, endpoints[:1], nil))
	s := n.socket()
	first := s.ask("10.96.0.1:80")
	n.set(view("web", ips, endpoints[:3], nil))
	for range 20 {
		s.age(time.Minute, 1)
		if got := s.ask("10.96.0.1:80"); got != first {
			t.Fatalf("after a minute, the socket moved from %s to %s", first, got)
		}
	}
	seen := map[string]bool{}
	for range 50 {
		s.age(120*time.Second, 1)
		seen[s.ask("10.96.0.1:80")] = true
	}
	if len(seen) != 3 {
		t.Errorf("a socket that is often idle reaches %v, want all endpoints", seen)
	}
}

// testPresentNames sends datagrams to sockets that did not request them.
func testPresentNames(t *testing.T) {
	n := newNode(t, Options{})
	n.echo(2)
	n.ns.Add(t, "lo", "10.0.1.3")
	endpoint := n.bind(endpointAddr(3)) // does not answer
	for name, test := range map[string]struct {
		change func()
		want   string
	}{
		"no change":            {func() {}, serviceAddr(1)},
		"another endpoint":     {func() { n.set(service(1, 1, 2, 3)) }, serviceAddr(1)},
		"a draining endpoint":  {func() { n.set(view("s1", []string{"10.96.0.1"}, []string{"10.0.1.1", "~10.0.1.3"}, nil)) }, serviceAddr(1)},
		"a removed endpoint":   {func() { n.set(service(1, 1)) }, endpointAddr(3)},
		"a deleted service":    {func() { n.delete("s1") }, endpointAddr(3)},
		"paused programs":      {func() { n.fail(t.Context(), errBroken) }, serviceAddr(1)},
		"a service left alone": {func() { n.set(view("s1", []string{"10.96.0.1"}, []string{"10.0.1.3"}, withAffinity(10))) }, endpointAddr(3)},
		"a pod of another service": {func() {
			n.set(service(1, 1), service(2, 3))
		}, endpointAddr(3)},
	} {
		n.pass(service(1, 3))
		s := n.socket()
		s.mustSend(serviceAddr(1))
		test.change()
		to := netip.AddrPortFrom(netip.MustParseAddr("10.0.1.3"), uint16(s.LocalAddr().(*net.UDPAddr).Port))
		if _, err := endpoint.WriteToUDPAddrPort([]byte("!"), to); err != nil {
			t.Fatal(err)
		}
		if _, from := s.receive(); from != test.want {
			t.Errorf("%s: a datagram comes from %s, want %s", name, from, test.want)
		}
	}
	// While the list of a service changes, its answers come from the address of the
	// service.
	n.pass(service(1, 1))
	s := n.socket()
	s.mustSend(serviceAddr(1))
	s.mustReceive(1)
	ctx, cancel := context.WithCancel(t.Context())
	changed := make(chan error, 1)
	go func() {
		var err error
		for i := 0; ctx.Err() == nil && err == nil; i++ {
			v := service(1, []int{1, 2}[:1+i%2]...)
			err = n.Sync(t.Context(), &sink.Changes{Services: slices.Values([]sink.Change{{Key: v.Key(), New: v, Unsure: true}})})
		}
		changed <- err
	}()
	for range 2000 {
		if s.send(serviceAddr(1)) == nil { // an error means that the list changed at this moment
			s.mustReceive(1)
		}
	}
	cancel()
	if err := <-changed; err != nil {
		t.Fatal(err)
	}
}

// disconnect undoes a connect.
func disconnect(fd int) error {
	unspecified := unix.RawSockaddrInet4{Family: unix.AF_UNSPEC}
	if _, _, e := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unspecified)), unix.SizeofSockaddrInet4); e != 0 {
		return fmt.Errorf("disconnect: %w", e)
	}
	return nil
}

func sockaddr(addr string) unix.Sockaddr {
	a := netip.MustParseAddrPort(addr)
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func name(a unix.Sockaddr) string {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)).String()
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)).String()
	}
	return fmt.Sprintf("%T", a)
}

// rawSocket calls f with a socket of the namespace. The socket has the family of the
// address to, and its reads time out.
func (n *node) rawSocket(to netip.AddrPort, kind int, f func(fd int) error) {
	n.t.Helper()
	err := n.ns.Do(func() error {
		family := unix.AF_INET6
		if to.Addr().Is4() {
			family = unix.AF_INET
		}
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 60}); err != nil {
			return err
		}
		return f(fd)
	})
	if err != nil {
		n.t.Error(err)
	}
}

func testReconnectedUDP(t *testing.T) {
	n := newNode(t, Options{})
	n.useNFTables()
	n.echo(2)
	n.pass(service(1, 1), service(2, 2))
	for port := range 2 { // with a port of the kernel's choice, and with a fixed port
		n.rawSocket(netip.MustParseAddrPort(serviceAddr(1)), unix.SOCK_DGRAM, func(fd int) error {
			if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 4000 * port}); err != nil {
				return err
			}
			connect := func(to string) error { return unix.Connect(fd, sockaddr(to)) }
			send := func(to string) error { return unix.Sendto(fd, []byte(to), 0, sockaddr(to)) }
			receive := func(want string) error {
				buffer := make([]byte, 100)
				length, from, err := unix.Recvfrom(fd, buffer, 0)
				if err == nil && (name(from) != want || string(buffer[:length]) != want) {
					err = fmt.Errorf("%s answers to %s, want %s", name(from), buffer[:length], want)
				}
				return err
			}
			for step, f := range []func() error{
				func() error { return send(serviceAddr(1)) },
				func() error { return receive(serviceAddr(1)) },
				func() error { return connect(endpointAddr(1)) },
				func() error { _, err := unix.Write(fd, []byte(endpointAddr(1))); return err },
				func() error { return receive(endpointAddr(1)) },
				func() error { return disconnect(fd) },
				func() error { return send(serviceAddr(1)) },
				func() error { return receive(serviceAddr(1)) },
				func() error { return connect(endpointAddr(2)) },
				func() error { _, err := unix.Write(fd, []byte(endpointAddr(2))); return err },
				func() error { return disconnect(fd) },
				func() error { return send(endpointAddr(2)) },
				func() error { return send(serviceAddr(2)) },
				func() error { return receive(endpointAddr(2)) },
				func() error { return connect(serviceAddr(2)) },
				func() error { _, err := unix.Write(fd, []byte(serviceAddr(2))); return err },
			} {
				if err := f(); err != nil {
					return fmt.Errorf("step %d: %w", step, err)
				}
			}
			return nil
		})
	}
}

// testTakeover starts the programs while a UDP socket uses a service through the other
// sink.
func testTakeover(t *testing.T) {
	n := newNode(t, Options{})
	n.useNFTables()
	for _, addr := range endpoints[:3] {
		n.ns.Add(t, "lo", addr)
		c := n.bind(addr + ":8080")
		go func() {
			for {
				_, from, err := c.ReadFromUDPAddrPort(make([]byte, 100))
				if err != nil {
					return
				}
				c.WriteToUDPAddrPort([]byte(addr+" serves "+from.String()), from)
			}
		}()
	}
	web := view("web", []string{"10.96.0.1"}, endpoints[:3], nil)
	pass := &sink.Changes{First: true, Last: true, NodeChanged: true, Services: slices.Values([]sink.Change{{Key: web.Key(), New: web, Unsure: true}})}
	if err := n.below.Sync(t.Context(), pass); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		s := n.socket()
		first := s.ask("10.96.0.1:80")
		mustStay := func() {
			t.Helper()
			if got := s.ask("10.96.0.1:80"); got != first {
				t.Errorf("first: %s; then: %s", first, got)
			}
		}
		n.pass(web)
		mustStay()
		n.fail(t.Context(), errBroken)
		mustStay()
		n.pass(web)
		mustStay()
		n.restart()
		mustStay()
		n.fail(t.Context(), errBroken)
	}
	n.pass(web)
	before, _, err := n.Counts()
	if err != nil {
		t.Fatal(err)
	}
	n.socket().ask("10.96.0.1:80")
	if after, _, err := n.Counts(); err != nil || after["sendmsg4"] != before["sendmsg4"]+1 {
		t.Errorf("a new socket is not handled by eBPF: %+v, %v", after, err)
	}
}

func testBoundPort(t *testing.T) {
	n := newNode(t, Options{})
	n.useNFTables()
	n.ns.Add(t, "lo", "10.0.1.1")
	n.ns.Add(t, "lo", "10.0.2.1")
	netnstest.Listen(t, n.ns.Do, endpointAddr(1), func(c net.Conn) { c.Read(make([]byte, 1)) })
	n.pass(service(1, 1), service(2, 1))
	for _, from := range []string{"10.0.2.1:4000", "0.0.0.0:4001"} {
		err := n.ns.Do(func() error {
			for _, to := range []string{serviceAddr(1), serviceAddr(2), endpointAddr(1)} {
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				defer unix.Close(fd)
				if err := errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, sockaddr(from)), unix.Connect(fd, sockaddr(to))); err != nil {
					return fmt.Errorf("connect to %s: %w", to, err)
				}
				if peer, err := unix.Getpeername(fd); err != nil || name(peer) != to {
					t.Errorf("getpeername returns %s, %v, want %s", name(peer), err, to)
				}
			}
			return nil
		})
		if err != nil {
			t.Errorf("from %s: %v", from, err)
		}
	}
	// A socket that is bound to an address without a port gets its port when it connects.
	n.rawSocket(netip.MustParseAddrPort(serviceAddr(1)), unix.SOCK_STREAM, func(fd int) error {
		const bindAddressNoPort = 24
		return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IP, bindAddressNoPort, 1), unix.Bind(fd, sockaddr("10.0.2.1:0")), unix.Connect(fd, sockaddr(serviceAddr(1))))
	})
	translated, left, err := n.Counts()
	if err != nil || left["bound_port"] != 4 || translated["connect4"] != 1 {
		t.Errorf("translated %v, left %v, %v", translated, left, err)
	}
}

func testReconnectedTCP(t *testing.T) {
	n := newNode(t, Options{})
	for _, addr := range []string{endpoints[0], endpoints[3]} {
		n.serveAt(addr)
		n.awaitRoute(net.JoinHostPort(addr, "8080"))
	}
	n.pass(view("web", []string{"10.96.0.1", "fd00:96::1"}, []string{endpoints[0], endpoints[3]}, nil))
	for _, addrs := range [][]string{
		{"10.96.0.1:80", "10.0.0.1:8080"},
		{"[fd00:96::1]:80", "[fd00::1]:8080"},
		{"[::ffff:10.96.0.1]:80", "[::ffff:10.0.0.1]:8080"},
	} {
		n.rawSocket(netip.MustParseAddrPort(addrs[0]), unix.SOCK_STREAM, func(fd int) error {
			for _, to := range slices.Concat(addrs, addrs) {
				if err := unix.Connect(fd, sockaddr(to)); err != nil {
					return err
				}
				peer, err := unix.Getpeername(fd)
				if err != nil {
					return err
				}
				if name(peer) != to {
					t.Errorf("connected to %s, getpeername returns %s", to, name(peer))
				}
				if err := disconnect(fd); err != nil {
					return err
				}
			}
			return nil
		})
	}
}
