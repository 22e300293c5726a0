// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/sockdiag"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// TestKernel uses real sockets. The addresses of endpoints are on the loopback interface
// of a network namespace, and no interface has the addresses of services.
func TestKernel(t *testing.T) {
	t.Run("TCP sockets are translated when they connect", testTCP)
	t.Run("IPv6 sockets may use IPv4-mapped addresses", testMapped)
	t.Run("UDP sockets are translated when they send", testUDP)
	t.Run("UDP sockets keep a draining endpoint and leave a removed one", testUDPChurn)
	t.Run("UDP sockets keep a draining endpoint that no new socket may use", testDrainingOnly)
	t.Run("endpoints get connections according to their weights", testWeights)
	t.Run("connected UDP sockets of pods are left to the other sink", testConnectedUDP)
	t.Run("a connected UDP socket may name its peer when it sends", testConnectedUDPNamesPeer)
	t.Run("connected UDP sockets of removed endpoints are destroyed", testDestroyedUDP)
	t.Run("closed UDP sockets leave no record", testForgottenUDP)
	t.Run("resolvers get answers while endpoints come and go", testResolvers)
	t.Run("TCP connections are reset if their service requests it later", testResetTCP)
	t.Run("answers in flight come from the service that was asked", testAnswersInFlight)
	t.Run("a UDP socket uses at most eight services at a time", testManyServices)
	t.Run("answers to threads that share a UDP socket come from the service", testThreads)
	t.Run("a UDP socket that is idle for two minutes forgets its endpoint", testIdle)
	t.Run("an answer has the name of a service only while the service has the endpoint", testPresentNames)
	t.Run("a UDP socket that is connected and disconnected gets right names", testReconnectedUDP)
	t.Run("UDP sessions stay where they are when eBPF takes over", testTakeover)
	t.Run("a datagram is not translated if its answer could not be restored", testNoMemory)
	t.Run("programs count what they translate and what they leave", testCounts)
	t.Run("connections are counted by service port and endpoint", testStats)
	t.Run("connections from one bound port reach all services", testBoundPort)
	t.Run("getpeername returns the endpoint after a direct connection", testReconnectedTCP)
	t.Run("programs stop ten minutes after the last process", testAbandoned)
	t.Run("a start does not let programs use old maps", testNotRevived)
	t.Run("a process in a time namespace writes the time of the kernel", testTimeNamespace)
	t.Run("removed endpoints are not used while the other sink works", testSlowSink)
	t.Run("clients of a service with session affinity keep their endpoint", testAffinity)
	t.Run("a service with session affinity has a share of the clients", testClientsOfOneService)
	t.Run("sockets of other cgroups are not translated", testOtherCgroup)
	t.Run("processes of excluded cgroups are left to the other sink", testExcludedCgroups)
	t.Run("pods are excluded by their UIDs", testExcludedPods)
	t.Run("pods stay excluded while the source does not know them", testUnknownPodsStayExcluded)
	t.Run("a restart applies a change of excluded cgroups", testExclusionAfterRestart)
	t.Run("HostNetworkOnly excludes other network namespaces", testHostNetworkOnly)
	t.Run("TCPOnly leaves UDP sockets to the other sink", testTCPOnly)
	t.Run("an annotation excludes a service", testAnnotation)
	t.Run("external addresses lead to endpoints", testExternal)
	t.Run("node ports are at the addresses of the node, which may change", testNodePorts)
	t.Run("node ports on localhost are for sockets of the node", testLocalhost)
	t.Run("sockets of the node cannot use node ports of services", testBind)
	t.Run("while lists change, connections reach endpoints of their own service", testChurn)
	t.Run("a restart adopts the maps and replaces the programs", testRestart)
	t.Run("an update merges equal lists while programs use them", testMergedLists)
	t.Run("a restart deletes what the process before it left", testStale)
	t.Run("a restart detaches programs at hooks of other versions", testUnknownLink)
	t.Run("maps of a new size have the elements of the old maps", testNewSize)
	t.Run("maps in use change their size", testNewSizeUnderLoad)
	t.Run("a map of another layout is replaced by an empty map", testNewLayout)
	t.Run("a start replaces whatever is pinned", testForeignFiles)
	t.Run("a start continues an interrupted one", testInterruptedStart)
	t.Run("a failed start leaves the maps of the attached programs", testFailedStart)
	t.Run("a deleted directory is made again", testDeletedDirectory)
	t.Run("services that do not fit are left to the other sink until there is space", testFull)
	t.Run("a service left without reason is added by Verify", testVerifyRetries)
	t.Run("an error of a map leaves everything to the other sink, until a later pass succeeds", testMapError)
	t.Run("a second process cannot use the same maps", testLock)
	t.Run("changes by other programs are repaired", testRepair)
	t.Run("Dataplane shows and compares maps", testDataplane)
	t.Run("clean-up removes everything", testCleanup)
	t.Run("errors at the start name what is missing", testStartErrors)
	t.Run("a directory that other users can change is an error", testForeignDirectory)
	t.Run("the backend needs only three capabilities", testCapabilities)
}

var endpoints = []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1", "fd00::2", "fd00::3"}

// serve starts a server at each endpoint. The server answers with the address of the
// endpoint.
func (n *node) serve() {
	n.t.Helper()
	for _, addr := range endpoints {
		n.serveAt(addr)
		n.awaitRoute(net.JoinHostPort(addr, "8080"))
	}
}

func (n *node) serveAt(addr string) {
	n.t.Helper()
	n.ns.Add(n.t, "lo", addr)
	at := net.JoinHostPort(addr, "8080")
	netnstest.Listen(n.t, n.ns.Do, at, func(c net.Conn) { fmt.Fprint(c, addr) })
	netnstest.Answer(n.t, n.ns.Do, at, addr)
}

// awaitRoute waits until a TCP connection to an address of the namespace is accepted or
// refused. The kernel adds a new IPv6 address first, and the route to this address a
// moment later. Until then, connections fail, and all datagrams of a connected socket are
// lost.
func (n *node) awaitRoute(at string) {
	n.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		_, _, err := n.dial(n.ns.Do, at)
		if err == nil || errors.Is(err, unix.ECONNREFUSED) {
			return
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("connect to %s: %v", at, err)
		}
	}
}

// dial connects to a service, and returns the name of the endpoint and the address that
// getpeername returns.
func (n *node) dial(in netnstest.Place, to string) (endpoint, peer string, err error) {
	var c net.Conn
	err = in(func() (err error) { c, err = (&net.Dialer{Timeout: 5 * time.Second}).Dial("tcp", to); return err })
	if err != nil {
		return "", "", err
	}
	defer c.Close()
	name, err := io.ReadAll(c)
	return string(name), c.RemoteAddr().String(), err
}

// reaches makes connections to a service, and returns the endpoints that they
// reach.
func (n *node) reaches(to string, connections int) (names []string) {
	n.t.Helper()
	for range connections {
		name, _, err := n.dial(n.ns.Do, to)
		if err != nil {
			n.t.Fatalf("connect to %s: %v", to, err)
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (n *node) mustReach(to string, want ...string) {
	n.t.Helper()
	if got := n.reaches(to, 40); !slices.Equal(got, want) {
		n.t.Errorf("%s leads to %v, want %v", to, got, want)
	}
}

// mustNotReach checks that connections to a service are not translated. Untranslated
// connections fail, because there is no route.
func (n *node) mustNotReach(to string) {
	n.t.Helper()
	if name, _, err := n.dial(n.ns.Do, to); err == nil {
		n.t.Errorf("%s leads to %s, and must not be translated", to, name)
	}
}

func testTCP(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1", "fd00:96::1"}, endpoints, nil))
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	n.mustReach("[fd00:96::1]:80", endpoints[3:]...)
	for _, to := range []string{"10.96.0.1:80", "[fd00:96::1]:80"} {
		if _, peer, err := n.dial(n.ns.Do, to); err != nil || peer != to {
			t.Errorf("getpeername returns %s, %v, want %s", peer, err, to)
		}
	}
	n.mustNotReach("10.96.0.1:81")
	n.set(view("web", []string{"10.96.0.1", "fd00:96::1"}, endpoints[2:4], nil))
	n.mustReach("10.96.0.1:80", endpoints[2])
	n.mustReach("[fd00:96::1]:80", endpoints[3])
	n.set(view("web", []string{"10.96.0.1", "fd00:96::1"}, nil, nil))
	n.mustNotReach("10.96.0.1:80")
	n.set(view("web", []string{"10.96.0.2"}, endpoints, nil))
	n.mustReach("10.96.0.2:80", endpoints[:3]...)
	n.delete("web")
	n.mustNotReach("10.96.0.2:80")
	for name, m := range map[string]int{"frontends": count(t, n.dataplane.frontends), "slots": count(t, n.dataplane.slots), "members": count(t, n.dataplane.members)} {
		if m != 0 {
			t.Errorf("map %s has %d elements after all services were deleted", name, m)
		}
	}
}

func count[K comparable, V any](t *testing.T, in table[K, V]) (number int) {
	if err := in.each(t.Context(), func(K, V) { number++ }); err != nil {
		t.Fatal(err)
	}
	return number
}

func testMapped(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], nil))
	mapped := &unix.SockaddrInet6{Port: 80, Addr: [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: 96, 15: 1}}
	err := n.ns.Do(func() error {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
				return err
			}
			if kind == unix.SOCK_STREAM {
				err = unix.Connect(fd, mapped)
			} else {
				err = unix.Sendto(fd, []byte("?"), 0, mapped)
			}
			if err != nil {
				return err
			}
			buffer := make([]byte, 100)
			got, from, err := unix.Recvfrom(fd, buffer, 0)
			if err == nil && kind == unix.SOCK_STREAM {
				from, err = unix.Getpeername(fd)
			}
			if err != nil {
				return err
			}
			if a, ok := from.(*unix.SockaddrInet6); string(buffer[:got]) != endpoints[0] || !ok || a.Addr != mapped.Addr || a.Port != 80 {
				t.Errorf("socket of type %d: answer %q from %v", kind, buffer[:got], from)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// socket is an unconnected UDP socket.
type socket struct {
	n *node
	*net.UDPConn
}

func (n *node) socket() *socket {
	n.t.Helper()
	s := &socket{n: n}
	if err := n.ns.Do(func() (err error) { s.UDPConn, err = net.ListenUDP("udp", nil); return err }); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { s.Close() })
	return s
}

// ask sends a datagram to a service, and returns the endpoint that answers. The answer
// must come from the address of the service.
func (s *socket) ask(to string) string {
	s.n.t.Helper()
	addr, err := net.ResolveUDPAddr("udp", to)
	if err != nil {
		s.n.t.Fatal(err)
	}
	if _, err := s.WriteTo([]byte("?"), addr); err != nil {
		s.n.t.Fatalf("send to %s: %v", to, err)
	}
	s.SetReadDeadline(time.Now().Add(10 * time.Second))
	buffer := make([]byte, 100)
	length, from, err := s.ReadFromUDP(buffer)
	if err != nil {
		s.n.t.Fatalf("answer of %s: %v", to, err)
	}
	if from.String() != to {
		s.n.t.Errorf("answer from %s, want %s", from, to)
	}
	return string(buffer[:length])
}

func testUDP(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.serveAt("10.0.0.4")
	n.pass(view("web", []string{"10.96.0.1", "fd00:96::1"}, endpoints, nil), view("dns", []string{"10.96.0.2"}, []string{"10.0.0.4"}, nil))
	for to, want := range map[string][]string{"10.96.0.1:80": endpoints[:3], "[fd00:96::1]:80": endpoints[3:]} {
		var names []string
		for range 40 {
			s := n.socket()
			first := s.ask(to)
			for range 5 {
				if now := s.ask(to); now != first {
					t.Errorf("a socket moved from %s to %s", first, now)
				}
			}
			s.ask("10.96.0.2:80")
			names = append(names, first)
		}
		slices.Sort(names)
		if names = slices.Compact(names); !slices.Equal(names, want) {
			t.Errorf("%s leads to %v, want %v", to, names, want)
		}
	}
}

func testUDPChurn(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	ips := []string{"10.96.0.1"}
	n.pass(view("web", ips, endpoints[:1], nil))
	s := n.socket()
	for _, step := range []struct {
		endpoints []string
		want      string
	}{
		{[]string{"10.0.0.1"}, "10.0.0.1"},
		{[]string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, "10.0.0.1"},
		{[]string{"~10.0.0.1", "10.0.0.2"}, "10.0.0.1"},
		{[]string{"10.0.0.2"}, "10.0.0.2"},
		{[]string{"10.0.0.1", "10.0.0.2"}, "10.0.0.2"},
	} {
		n.set(view("web", ips, step.endpoints, nil))
		if got := s.ask("10.96.0.1:80"); got != step.want {
			t.Errorf("endpoints %v: the socket reaches %s, want %s", step.endpoints, got, step.want)
		}
	}
}

// local makes a service use endpoints of this node only.
func local(s *api.Service) { s.InternalTrafficToLocal = true }

// testDrainingOnly removes all endpoints that new sockets may use.
func testDrainingOnly(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	ips := []string{"10.96.0.1"}
	n.pass(view("web", ips, endpoints[:1], nil))
	s := n.socket()
	s.ask("10.96.0.1:80")
	n.set(view("web", ips, []string{"~10.0.0.1"}, local))
	s.ask("10.96.0.1:80")
	// The program does not translate datagrams of other sockets, so there is no route.
	if _, err := n.socket().WriteTo([]byte("?"), &net.UDPAddr{IP: net.IPv4(10, 96, 0, 1), Port: 80}); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("a new socket: error %v, want %v", err, unix.ENETUNREACH)
	}
	n.mustNotReach("10.96.0.1:80")
}

func testConnectedUDP(t *testing.T) {
	if !sweepsUDP(t) {
		return
	}
	n := newNode(t, Options{})
	n.serve()
	ips := []string{"10.96.0.1", "fd00:96::1"}
	n.pass(view("web", ips, []string{endpoints[0], endpoints[3]}, nil))
	pod := netnstest.New(t)
	pod.Cgroup = n.ns.Cgroup
	pod.Route(t, "10.96.0.0/16", "", "lo")
	for _, c := range []struct {
		in       netnstest.Place
		to, want string // want is the peer that /proc/net/udp shows
	}{
		{n.ns.Do, "10.96.0.1:80", "10.0.0.1:8080"},
		{n.ns.Do, "[fd00:96::1]:80", "[fd00::1]:8080"},
		{n.ns.Do, "10.0.0.1:8080", "10.0.0.1:8080"},
		{pod.Do, "10.96.0.1:80", "10.96.0.1:80"},
	} {
		conn := n.connect(c.in, c.to)
		if name := conn.RemoteAddr().String(); name != c.to {
			t.Errorf("getpeername returns %s, want %s", name, c.to)
		}
		var peers []string
		err := c.in(func() error {
			diag, err := sockdiag.Open(0)
			if err != nil {
				return err
			}
			defer diag.Close()
			return diag.Connected(unix.IPPROTO_UDP, func(s sockdiag.Socket) { peers = append(peers, s.Peer.String()) })
		})
		conn.Close()
		if err != nil || !slices.Equal(peers, []string{c.want}) {
			t.Errorf("to %s: peers %v, %v, want %s", c.to, peers, err, c.want)
		}
	}
}

func testConnectedUDPNamesPeer(t *testing.T) {
	if !sweepsUDP(t) {
		return
	}
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1", "fd00:96::1"}, []string{endpoints[0], endpoints[3]}, nil))
	for to, want := range map[string]string{"10.96.0.1:80": endpoints[0], "[fd00:96::1]:80": endpoints[3], "[::ffff:10.96.0.1]:80": endpoints[0]} {
		n.rawSocket(netip.MustParseAddrPort(to), unix.SOCK_DGRAM, func(fd int) error {
			if err := unix.Connect(fd, sockaddr(to)); err != nil {
				return err
			}
			if err := unix.Sendto(fd, []byte("?"), 0, sockaddr(to)); err != nil {
				return err
			}
			buffer := make([]byte, 100)
			length, from, err := unix.Recvfrom(fd, buffer, 0)
			if err == nil && (string(buffer[:length]) != want || name(from) != to) {
				err = fmt.Errorf("to %s: answer %q from %s", to, buffer[:length], name(from))
			}
			return err
		})
	}
}

func testNoMemory(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], nil))
	if err := n.ns.Sysctl("core/optmem_max=0"); errors.Is(err, os.ErrNotExist) {
		t.Log("not tested: before Linux 6.9, a namespace has no limit of its own")
		return
	} else if err != nil {
		t.Fatal(err)
	}
	// The program does not translate the packet, so there is no route.
	if _, err := n.socket().WriteTo([]byte("?"), &net.UDPAddr{IP: net.IPv4(10, 96, 0, 1), Port: 80}); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("error %v, want %v", err, unix.ENETUNREACH)
	}
	n.mustReach("10.96.0.1:80", endpoints[0])
}

func testCounts(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1", "fd00:96::1"}, endpoints, nil)
	n.pass(web)
	n.reaches("10.96.0.1:80", 5)
	n.restart()
	n.pass(web)
	n.reaches("[fd00:96::1]:80", 3)
	n.socket().ask("10.96.0.1:80")
	n.set(view("web", []string{"10.96.0.1"}, []string{"~10.0.0.1"}, local))
	n.socket().WriteTo([]byte("?"), &net.UDPAddr{IP: net.IPv4(10, 96, 0, 1), Port: 80})
	translated, left, err := n.Counts()
	if err != nil {
		t.Fatal(err)
	}
	// Go calls getpeername for each connection. Its UDP socket is for both families: it
	// sends an IPv4 datagram to an IPv4 address, and receives an answer with an
	// IPv4-mapped address.
	want := []map[string]uint64{
		{
			"connect4": 5, "connect6": 3, "getpeername4": 5, "getpeername6": 3,
			"sendmsg4": 1, "sendmsg6": 0, "recvmsg4": 0, "recvmsg6": 1,
		},
		{"abandoned": 0, "no_endpoint": 1, "list_changed": 0, "no_memory": 0, "bound_port": 0, "ambiguous": 0, "excluded": 0},
	}
	if diff := cmp.Diff(want, []map[string]uint64{translated, left}); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := n.Counts(); !errors.Is(err, errNotStarted) {
		t.Errorf("after Stop: error %v, want %v", err, errNotStarted)
	}
}

func testAbandoned(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], nil))
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.setAge(9 * time.Minute)
	n.mustReach("10.96.0.1:80", endpoints[0])
	n.setAge(10*time.Minute + time.Second)
	n.mustNotReach("10.96.0.1:80")
	n.setAge(-time.Hour) // as an earlier version in a time namespace wrote it
	n.mustNotReach("10.96.0.1:80")
	n.restart()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], nil))
	n.mustReach("10.96.0.1:80", endpoints[0])
	n.setAge(time.Hour)
	if err := n.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustReach("10.96.0.1:80", endpoints[0])
	n.setAge(time.Hour)
	n.set()
	n.mustReach("10.96.0.1:80", endpoints[0])
}

// setAge changes the time of the last heartbeat.
func (n *node) setAge(age time.Duration) {
	n.t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		n.t.Fatal(err)
	}
	n.withHeartbeat(func(m *ebpf.Map) error { return m.Put(uint32(0), uint64(now.Nano()-int64(age))) })
}

// withHeartbeat calls f with the pinned map heartbeat.
func (n *node) withHeartbeat(f func(*ebpf.Map) error) {
	n.t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(n.opts.directory(), "heartbeat"), nil)
	if err != nil {
		n.t.Fatal(err)
	}
	defer m.Close()
	if err := f(m); err != nil {
		n.t.Fatal(err)
	}
}

// testNotRevived imitates a process that ends again and again, for example because the API
// server is unreachable.
func testNotRevived(t *testing.T) {
	below, errs := &failingStart{Sink: noProxy}, &tableErrors{}
	n := newNodeAbove(t, below, options{tables: errs.inAll})
	n.serveAt(endpoints[0])
	web := view("web", []string{"10.96.0.1"}, endpoints[:1], nil)
	n.pass(web)
	n.setAge(11 * time.Minute)
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	below.err = errBroken
	if err := n.tryStart(); !errors.Is(err, errBroken) {
		t.Errorf("error %v, want %v", err, errBroken)
	}
	n.mustNotReach("10.96.0.1:80")
	below.err = nil
	n.restart()
	n.mustNotReach("10.96.0.1:80")
	if err := n.Verify(t.Context()); err != nil {
		t.Error(err)
	}
	n.mustNotReach("10.96.0.1:80")
	n.deliver(&sink.Changes{First: true, NodeChanged: true}, web)
	n.mustNotReach("10.96.0.1:80")
	n.deliver(&sink.Changes{Last: true})
	n.mustReachOnce("10.96.0.1:80", endpoints[0])

	// The process was frozen, and its services may be old.
	n.setAge(11 * time.Minute)
	n.clock.skip(11 * time.Minute)
	n.set(web)
	n.mustNotReach("10.96.0.1:80")
	if err := n.Verify(t.Context()); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("error %v, want a new pass", err)
	}
	n.mustNotReach("10.96.0.1:80")
	n.pass(web)
	n.mustReachOnce("10.96.0.1:80", endpoints[0])

	// After an error, the maps may miss changes. So the next process must not use them either.
	errs.delete = errBroken
	n.delete("web")
	n.mustNotReach("10.96.0.1:80")
	errs.delete = nil
	n.restart()
	n.mustNotReach("10.96.0.1:80")
	n.pass(web)
	n.mustReachOnce("10.96.0.1:80", endpoints[0])
}

// failingStart is a sink whose Start returns err.
type failingStart struct {
	sink.Sink
	err error
}

func (s *failingStart) Start(context.Context) error { return s.err }

// timeNamespaceVariable is the environment variable that gives TestInTimeNamespace its
// cgroup.
const timeNamespaceVariable = "KPNG_TEST_TIME_NAMESPACE"

func testTimeNamespace(t *testing.T) {
	n := newNode(t, Options{})
	n.serveAt(endpoints[0])
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "--time", "--fork", "--monotonic", "100000",
		os.Args[0], "-test.run=^TestInTimeNamespace$", "-test.v")
	cmd.Env = append(os.Environ(), timeNamespaceVariable+"="+n.opts.Cgroup)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	n.mustReachOnce("10.96.0.1:80", endpoints[0])
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	n.withHeartbeat(func(m *ebpf.Map) error {
		var beat int64
		err := m.Lookup(uint32(0), &beat)
		if age := time.Duration(now.Nano() - beat); age < 0 || age > 5*time.Minute {
			t.Errorf("the age of the heartbeat is %s", age)
		}
		return err
	})
}

// Some kernels refuse a packet without a payload; the kernel of this machine may accept
// it.
func TestThePacketOfTheHeartbeatHasAPayload(t *testing.T) {
	const header = 14 // bytes of Ethernet
	if len(beatPacket) <= header {
		t.Errorf("the packet has %d bytes, not more than the header", len(beatPacket))
	}
}

// TestInTimeNamespace runs only in a process that testTimeNamespace starts.
func TestInTimeNamespace(t *testing.T) {
	cgroup := os.Getenv(timeNamespaceVariable)
	if cgroup == "" {
		return
	}
	b, err := newBackend(noProxy, options{public: Options{Cgroup: cgroup, BPFFS: mountBPFFS(t)}})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{backend: b, t: t}
	if err := n.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], nil))
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// testSlowSink makes a connection while the other sink's Sync has not returned.
func testSlowSink(t *testing.T) {
	var n *node
	syncs := 0
	n = newNodeAbove(t, sink.Func(func(context.Context, *sink.Changes) error {
		if syncs++; syncs == 2 {
			n.mustReachOnce("10.96.0.1:80", endpoints[1])
		}
		return nil
	}), options{})
	n.serveAt(endpoints[0])
	n.serveAt(endpoints[1])
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], nil))
	n.mustReachOnce("10.96.0.1:80", endpoints[0])
	n.set(view("web", []string{"10.96.0.1"}, endpoints[1:2], nil))
	if syncs != 2 {
		t.Errorf("the other sink got %d batches, want 2", syncs)
	}
}

// testClientsOfOneService makes more clients of a service than it may have: a client for
// each port. Another service keeps its client. Deleting the service frees the memory.
func testClientsOfOneService(t *testing.T) {
	const ports = 200
	n := newNode(t, Options{MaxClients: 1024})
	limit := share(1024)
	n.serve()
	web := view("web", []string{"10.96.0.1"}, endpoints[:3], func(s *api.Service) {
		withAffinity(10800)(s)
		s.Ports = nil
		for i := range ports {
			s.Ports = append(s.Ports, api.PortMapping{Name: fmt.Sprint("p", i), Protocol: api.TCP, Port: int32(1000 + i), TargetPort: 8080})
		}
	})
	other := view("other", []string{"10.96.0.2"}, endpoints[:3], withAffinity(10800))
	n.pass(web, other)
	kept := n.reaches("10.96.0.2:80", 1)[0]
	connect := func() (translated int) {
		for i := range ports {
			if _, _, err := n.dial(n.ns.Do, fmt.Sprintf("10.96.0.1:%d", 1000+i)); err == nil {
				translated++
			}
		}
		return translated
	}
	for restarts := range 2 {
		if restarts > 0 { // the clients stay, and the new process counts them
			n.restart()
			n.pass(web, other)
			if err := n.verify(); err != nil {
				t.Fatal(err)
			}
		}
		if got := connect(); got != limit {
			t.Errorf("%d clients are translated, want %d", got, limit)
		}
		if got := count(t, n.dataplane.clients); got != limit+1 {
			t.Errorf("the map has %d clients, want %d", got, limit+1)
		}
	}
	n.mustReach("10.96.0.2:80", kept)
	n.delete("web")
	if err := n.verify(); err != nil {
		t.Fatal(err)
	}
	if clients, ips := count(t, n.dataplane.clients), count(t, n.dataplane.counts); clients != 1 || ips != 1 {
		t.Errorf("after the service was deleted, the maps have %d clients and %d cluster IPs, want 1 and 1", clients, ips)
	}
	n.mustReach("10.96.0.2:80", kept)
}

func testAffinity(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	ips := []string{"10.96.0.1"}
	n.pass(view("web", ips, endpoints[:3], withAffinity(10800)))
	first := n.reaches("10.96.0.1:80", 20)
	if len(first) != 1 {
		t.Fatalf("a client reaches %v", first)
	}
	// The client keeps its endpoint when another endpoint is removed.
	others := slices.DeleteFunc(slices.Clone(endpoints[:3]), func(e string) bool { return e == first[0] })
	n.set(view("web", ips, []string{first[0], others[0]}, withAffinity(10800)))
	n.mustReach("10.96.0.1:80", first[0])
	n.set(view("web", ips, others, withAffinity(10800)))
	second := n.reaches("10.96.0.1:80", 20)
	if len(second) != 1 || second[0] == first[0] {
		t.Errorf("after %v was removed, the client reaches %v", first, second)
	}
	// A client does not stay at a draining endpoint.
	rest := slices.DeleteFunc(others, func(e string) bool { return e == second[0] })
	n.set(view("web", ips, []string{"~" + second[0], rest[0]}, withAffinity(10800)))
	n.mustReach("10.96.0.1:80", rest[0])
	// Without affinity, the client reaches all endpoints.
	n.set(view("web", ips, endpoints[:3], nil))
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	// The time-out ends the affinity. The probability to reach the same endpoint in ten
	// attempts by chance is 1 in 19,000.
	n.set(view("web", ips, endpoints[:3], withAffinity(1)))
	seen := map[string]bool{}
	for range 10 {
		seen[n.reaches("10.96.0.1:80", 1)[0]] = true
		n.shiftClients(-time.Second)
	}
	if len(seen) == 1 {
		t.Errorf("after the time-out, the client still reaches %v", seen)
	}
	// If another CPU stored the time of a connection, that time may be in the future. The
	// client must still keep its endpoint.
	n.set(view("web", ips, endpoints[:3], withAffinity(10800)))
	kept := n.reaches("10.96.0.1:80", 1)
	for range 10 {
		n.shiftClients(time.Hour)
		n.mustReachOnce("10.96.0.1:80", kept[0])
	}
}

// mustReachOnce checks the endpoint that one connection reaches.
func (n *node) mustReachOnce(to, want string) {
	n.t.Helper()
	if got := n.reaches(to, 1); got[0] != want {
		n.t.Errorf("%s leads to %s, want %s", to, got[0], want)
	}
}

// shiftClients changes the times of the last connections of all clients.
func (n *node) shiftClients(by time.Duration) {
	n.t.Helper()
	clients := kernelTable[clientKey, choice]{"clients", n.programs.Clients}
	var all batch[clientKey, choice]
	if err := clients.each(n.t.Context(), func(k clientKey, c choice) { c.Time += uint64(by); all.add(k, c) }); err != nil {
		n.t.Fatal(err)
	}
	if _, err := clients.set(all.keys, all.values); err != nil {
		n.t.Fatal(err)
	}
}

func testOtherCgroup(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints, nil))
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	n.ns.Cgroup = nil
	n.mustNotReach("10.96.0.1:80")
}

// The second time, the cgroup has another ID.
func testExcludedCgroups(t *testing.T) {
	n := newNode(t, Options{ExcludedCgroups: []string{"/mesh/proxy", "missing"}})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1", "fd00:96::1"}, endpoints, nil))
	root := n.ns.Cgroup
	udp := func() error {
		s := n.socket()
		return n.ns.Do(func() error {
			_, err := s.WriteTo([]byte("?"), &net.UDPAddr{IP: net.IPv4(10, 96, 0, 1), Port: 80})
			return err
		})
	}
	for range 2 {
		mesh := root.Below(t, "mesh")
		excluded := mesh.Below(t, "proxy")
		below := excluded.Below(t, "a")
		if err := n.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, n.ns.Cgroup = range []*netnstest.Cgroup{root, mesh} {
			n.mustReach("10.96.0.1:80", endpoints[:3]...)
			n.mustReach("[fd00:96::1]:80", endpoints[3:]...)
			if err := udp(); err != nil {
				t.Error(err)
			}
		}
		for _, n.ns.Cgroup = range []*netnstest.Cgroup{excluded, below} {
			n.mustNotReach("10.96.0.1:80")
			n.mustNotReach("[fd00:96::1]:80")
			if err := udp(); !errors.Is(err, unix.ENETUNREACH) {
				t.Errorf("UDP: error %v, want %v", err, unix.ENETUNREACH)
			}
		}
		n.ns.Cgroup = root
		for _, c := range []*netnstest.Cgroup{below, excluded, mesh} {
			if err := os.Remove(c.Dir); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, left, err := n.Counts(); err != nil || left["excluded"] == 0 {
		t.Errorf("counts %v, error %v", left, err)
	}
	if err := n.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	if entries := n.programs.Excluded.Iterate(); entries.Next(new(uint64), new(uint32)) {
		t.Error("the map excluded has a cgroup that was removed")
	}
}

// After a restart with the option, the cgroup is excluded before the first program of the
// new process runs. After a restart without the option, the programs handle the cgroup
// again.
func testExclusionAfterRestart(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1"}, endpoints, nil)
	n.pass(web)
	n.ns.Cgroup = n.ns.Cgroup.Below(t, "mesh")
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	n.opts.ExcludedCgroups = []string{"mesh"}
	n.restart()
	n.mustNotReach("10.96.0.1:80")
	n.pass(web)
	n.mustNotReach("10.96.0.1:80")
	n.opts.ExcludedCgroups = nil
	n.restart()
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
}

// podSource is the source of the UIDs of excluded pods. While it is nil, the UIDs are
// unknown.
type podSource []types.UID

func (s *podSource) get() ([]types.UID, bool) { return *s, *s != nil }

func testExcludedPods(t *testing.T) {
	pods := podSource{}
	n := newNode(t, Options{ExcludedPods: pods.get})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1", "fd00:96::1"}, endpoints, nil))
	root := n.ns.Cgroup
	verify := func() {
		t.Helper()
		if err := n.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	translated := func(c *netnstest.Cgroup) {
		t.Helper()
		n.ns.Cgroup = c
		n.mustReach("10.96.0.1:80", endpoints[:3]...)
		n.mustReach("[fd00:96::1]:80", endpoints[3:]...)
	}
	left := func(c *netnstest.Cgroup) {
		t.Helper()
		n.ns.Cgroup = c
		n.mustNotReach("10.96.0.1:80")
		n.mustNotReach("[fd00:96::1]:80")
	}
	pods = podSource{"11111111-2222-3333-4444-555555555555", "5a105e8b9d40e1329780d62ea2265d8a"}
	verify() // there are no cgroups of pods yet
	class := root.Below(t, "kubelet.slice").Below(t, "kubelet-kubepods.slice").Below(t, "kubelet-kubepods-burstable.slice")
	pod := class.Below(t, "kubelet-kubepods-burstable-pod11111111_2222_3333_4444_555555555555.slice")
	static := class.Below(t, "kubelet-kubepods-burstable-pod5a105e8b9d40e1329780d62ea2265d8a.slice")
	other := class.Below(t, "kubelet-kubepods-burstable-pod99999999_2222_3333_4444_555555555555.slice")
	container := pod.Below(t, "cri-containerd-1.scope")
	verify()
	for _, c := range []*netnstest.Cgroup{container, pod, static} {
		left(c)
	}
	for _, c := range []*netnstest.Cgroup{root, class, other} {
		translated(c)
	}
	pods = podSource{"5a105e8b9d40e1329780d62ea2265d8a", "99999999-2222-3333-4444-555555555555"}
	verify() // the label was moved to another pod
	translated(container)
	left(other)
	if err := os.Remove(other.Dir); err != nil {
		t.Fatal(err)
	}
	again := class.Below(t, filepath.Base(other.Dir))
	verify() // the cgroup has another ID
	left(again)
}

func testUnknownPodsStayExcluded(t *testing.T) {
	pods := podSource{"11111111-2222-3333-4444-555555555555"}
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1"}, endpoints, nil)
	n.pass(web)
	n.ns.Cgroup = n.ns.Cgroup.Below(t, "kubepods").Below(t, "pod11111111-2222-3333-4444-555555555555").Below(t, "1")
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	n.opts.ExcludedPods = pods.get
	n.restart()
	n.mustNotReach("10.96.0.1:80")
	pods = nil
	n.restart()
	n.pass(web)
	if err := n.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustNotReach("10.96.0.1:80")
	pods = podSource{}
	if err := n.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
}

// If there are too many pods for the map, this causes no error and excludes no other
// processes.
func TestExcludedPodsAreLimited(t *testing.T) {
	n := newNode(t, Options{ExcludedCgroups: []string{"mesh"}})
	mesh, kubepods := n.ns.Cgroup.Below(t, "mesh"), n.ns.Cgroup.Below(t, "kubepods")
	var pods podSource
	for i := range maxExcluded + 1 {
		pods = append(pods, types.UID(fmt.Sprint(i)))
		kubepods.Below(t, fmt.Sprint("pod", i))
	}
	n.opts.ExcludedPods = pods.get
	n.restart()
	if n.exclusions.left != 2 {
		t.Errorf("%d pods are left, want 2", n.exclusions.left)
	}
	id, err := cgroupID(mesh.Dir)
	if err == nil {
		err = n.programs.Excluded.Lookup(id, new(uint32))
	}
	if err != nil {
		t.Errorf("the cgroup of ExcludedCgroups is not excluded: %v", err)
	}
}

func TestInvalidExcludedCgroups(t *testing.T) {
	for _, path := range []string{"", "/", ".", "a/../..", "../a", strings.Repeat("a/", maxCgroupLevels+1)} {
		if _, err := New(noProxy, Options{ExcludedCgroups: []string{path}}); err == nil {
			t.Errorf("New accepts %q", path)
		}
	}
}

func testHostNetworkOnly(t *testing.T) {
	if _, err := netNSCookie(); err != nil {
		// The start must fail with this error on Linux before 5.14.
		b, newErr := newBackend(noProxy, options{public: Options{HostNetworkOnly: true, BPFFS: mountBPFFS(t), Cgroup: netnstest.NewCgroup(t).Dir}})
		if newErr != nil {
			t.Fatal(newErr)
		}
		if startErr := b.Start(t.Context()); startErr == nil || startErr.Error() != err.Error() || !errors.Is(err, unix.ENOPROTOOPT) {
			t.Errorf("error %v, want %v", startErr, err)
		}
		return
	}
	n := newNode(t, Options{HostNetworkOnly: true})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints, nil))
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	other := netnstest.New(t)
	other.Cgroup = n.ns.Cgroup
	n.ns = other
	n.serve()
	n.mustNotReach("10.96.0.1:80")
}

func testTCPOnly(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	service := view("web", []string{"10.96.0.1"}, endpoints[:1], withAffinity(60))
	withoutAffinity := view("dns", []string{"10.96.0.2"}, endpoints[:1], nil)
	n.pass(service, withoutAffinity)
	s := n.socket()
	s.ask("10.96.0.2:80")
	n.opts.TCPOnly = true
	n.restart()
	n.pass(service, withoutAffinity)
	n.mustReach("10.96.0.1:80", endpoints[0])
	n.mustReach("10.96.0.2:80", endpoints[0])
	for _, s := range []*socket{s, n.socket()} {
		// The programs do not translate the datagram, so there is no route.
		if _, err := s.WriteTo([]byte("?"), &net.UDPAddr{IP: net.IPv4(10, 96, 0, 2), Port: 80}); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("error %v, want %v", err, unix.ENETUNREACH)
		}
	}
}

func testAnnotation(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	annotate := func(value string) func(*api.Service) {
		return func(s *api.Service) { s.Annotations = map[string]string{"kpng.io/ebpf": value} }
	}
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], annotate("false")))
	n.mustNotReach("10.96.0.1:80")
	n.set(view("web", []string{"10.96.0.1"}, endpoints[:1], annotate("true")))
	n.mustReach("10.96.0.1:80", endpoints[0])
	n.set(view("web", []string{"10.96.0.1"}, endpoints[:1], annotate("false")))
	n.mustNotReach("10.96.0.1:80")
}

func testChurn(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := func(i int) *api.View {
		return view("web", []string{"10.96.0.1"}, endpoints[:1+i%2], nil)
	}
	// The affinity time-out of service dns changes, but its only endpoint stays.
	dns := func(i int) *api.View {
		return view("dns", []string{"10.96.0.2"}, endpoints[2:3], withAffinity(int32(1+i%2)))
	}
	n.pass(web(0), dns(0))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		for i := 0; ctx.Err() == nil; i++ {
			if err := n.Sync(t.Context(), changesOf(sink.Changes{}, map[string]*api.View{"web": web(i), "dns": dns(i)})); err != nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}()
	left := 0
	const connections = 2000
	for i := range connections {
		to, want := "10.96.0.1:80", endpoints[:2]
		if i%2 == 1 {
			to, want = "10.96.0.2:80", endpoints[2:3]
		}
		name, _, err := n.dial(n.ns.Do, to)
		if errors.Is(err, unix.ENETUNREACH) {
			left++ // the other sink would handle this connection
		} else if err != nil || !slices.Contains(want, name) {
			t.Errorf("%s leads to %q, %v, want one of %v", to, name, err, want)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if t.Logf("%d of %d connections were left to the other sink", left, connections); left > connections/10 {
		t.Errorf("%d of %d connections were not translated", left, connections)
	}
}

func testRestart(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1", "fd00:96::1"}, endpoints, nil)
	dns := view("dns", []string{"10.96.0.2"}, endpoints[:3], withAffinity(10800))
	n.pass(web, dns)
	chosen := n.reaches("10.96.0.2:80", 1)
	s := n.socket()
	kept := s.ask("10.96.0.1:80")
	ids := func() map[frontendKey]uint64 {
		all := map[frontendKey]uint64{}
		for f, l := range read(t, n.dataplane.frontends) {
			all[f] = l.ID
		}
		return all
	}
	before := ids()
	program := n.linkedProgram()

	n.mustConnectDuring("10.96.0.1:80", func() {
		for range 3 {
			n.restart()
			n.pass(web, dns)
		}
	})
	if n.linkedProgram() == program {
		t.Error("the link still has the program of the process before")
	}
	if diff := cmp.Diff(before, ids()); diff != "" {
		t.Errorf("lists were replaced (-before +now):\n%s", diff)
	}
	n.mustReach("10.96.0.2:80", chosen[0])
	if got := s.ask("10.96.0.1:80"); got != kept {
		t.Errorf("a UDP socket moved from %s to %s", kept, got)
	}
}

// mustConnectDuring makes connections while f runs. All must succeed.
func (n *node) mustConnectDuring(to string, f func()) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.t.Context())
	failed := make(chan error, 1)
	go func() {
		var err error
		for ctx.Err() == nil && err == nil {
			_, _, err = n.dial(n.ns.Do, to)
		}
		failed <- err
	}()
	f()
	cancel()
	if err := <-failed; err != nil {
		n.t.Errorf("a connection failed meanwhile: %v", err)
	}
}

// testMergedLists gives each frontend a list of its own, as earlier versions did.
func testMergedLists(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1"}, endpoints[:3], nil)
	affine := view("affine", []string{"10.96.0.2"}, endpoints[:3], withAffinity(10800))
	n.pass(web, affine)
	kept := n.reaches("10.96.0.2:80", 1)[0]
	s := n.socket()
	asked := s.ask("10.96.0.1:80")
	next := uint64(1)
	for _, w := range plan(web, "", nodeview.Parameters{}) {
		next++
		var err error
		for i, a := range w.endpoints {
			_, slotErr := n.dataplane.slots.set([]slotKey{{List: next, Index: uint32(i)}}, []address{a})
			err = errors.Join(err, slotErr)
		}
		for _, a := range w.members {
			if w.frontend.Protocol == unix.IPPROTO_UDP {
				_, memberErr := n.dataplane.members.set([]memberKey{{List: next, Endpoint: a}}, []uint32{0})
				err = errors.Join(err, memberErr)
			}
		}
		_, frontendErr := n.dataplane.frontends.set([]frontendKey{w.frontend}, []list{{ID: next, Count: uint32(len(w.endpoints))}})
		if err := errors.Join(err, frontendErr); err != nil {
			t.Fatal(err)
		}
	}
	n.mustConnectDuring("10.96.0.1:80", func() {
		n.restart()
		n.pass(web, affine)
	})
	if slots := count(t, n.dataplane.slots); slots != 6 {
		t.Errorf("the map has %d slots, want 3 for each service", slots)
	}
	if err := n.verify(); err != nil {
		t.Error(err)
	}
	n.mustReach("10.96.0.2:80", kept)
	if got := s.ask("10.96.0.1:80"); got != asked {
		t.Errorf("a UDP socket moved from %s to %s", asked, got)
	}
}

// linkedProgram returns the ID of the program of a link.
func (n *node) linkedProgram() uint32 {
	info, err := n.programs.links[0].Info()
	if err != nil {
		n.t.Fatal(err)
	}
	return uint32(info.Program)
}

func testStale(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("goes", []string{"10.96.0.1"}, endpoints, nil), view("stays", []string{"10.96.0.2"}, endpoints[:3], nil))
	// Imitate a process that was killed after it wrote a list, but before it wrote the
	// frontend.
	if _, err := n.dataplane.slots.set([]slotKey{{List: 1000}}, []address{{}}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.dataplane.members.set([]memberKey{{List: 1000}}, []uint32{0}); err != nil {
		t.Fatal(err)
	}
	n.restart()
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	// In a pass of several batches, old frontends stay until the last batch.
	stays := view("stays", []string{"10.96.0.2"}, endpoints[:1], nil)
	n.deliver(&sink.Changes{First: true, NodeChanged: true}, stays)
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	n.mustReach("10.96.0.2:80", endpoints[0])
	n.deliver(&sink.Changes{Last: true})
	n.mustNotReach("10.96.0.1:80")
	n.mustReach("10.96.0.2:80", endpoints[0])
	if slots, members := count(t, n.dataplane.slots), count(t, n.dataplane.members); slots != 1 || members != 1 {
		t.Errorf("%d slots and %d members, want 1 and 1", slots, members)
	}
}

func testUnknownLink(t *testing.T) {
	n := newNode(t, Options{})
	// This link stands for a link of a hook that only another version of kpng uses.
	l, err := link.AttachCgroup(link.CgroupOptions{Path: n.opts.Cgroup, Attach: ebpf.AttachCGroupInet4Connect, Program: n.programs.Connect4})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	path := filepath.Join(n.opts.directory(), "other")
	if err := l.Pin(path); err != nil {
		t.Fatal(err)
	}
	n.restart()
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) || attachedTo(l).cgroup != 0 {
		t.Errorf("the link is attached to %v, and its file has error %v", attachedTo(l), err)
	}
}

func testNewSize(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1"}, endpoints, withAffinity(10800))
	dns := view("dns", []string{"10.96.0.2"}, endpoints[:2], nil)
	n.pass(web, dns)
	chosen := n.reaches("10.96.0.1:80", 1)
	s := n.socket()
	kept := s.ask("10.96.0.2:80")
	n.opts.MaxFrontends, n.opts.MaxEndpoints, n.opts.MaxMembers, n.opts.MaxClients = 100, 1000, 1000, 1000
	n.restart()
	// The new maps have the elements of the old maps, also before the first pass.
	for range 2 {
		n.mustReach("10.96.0.1:80", chosen[0])
		if got := s.ask("10.96.0.2:80"); got != kept {
			t.Errorf("a UDP socket moved from %s to %s", kept, got)
		}
		n.pass(web, dns)
	}
	if size := n.programs.Frontends.MaxEntries(); size != 100 {
		t.Errorf("the map has size %d", size)
	}
	n.restart()
	if size := n.programs.Frontends.MaxEntries(); size != 100 {
		t.Errorf("after another restart, the map has size %d", size)
	}
	// Maps may shrink, too.
	n.opts.MaxEndpoints = 3
	n.restart()
	n.pass(web, dns)
	if len(n.dataplane.left) == 0 {
		t.Error("all services fit into the smaller map")
	}
}

func testNewLayout(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1"}, endpoints[:1], nil)
	n.pass(web)
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Imitate another version of kpng, whose map has elements of the same size, but with
	// another meaning.
	spec, err := loadConnect()
	if err != nil {
		t.Fatal(err)
	}
	spec.Maps["slots"].Name = "slots_v0"
	spec.Maps["slots"].MaxEntries = uint32(n.backend.opts.MaxEndpoints)
	other, err := ebpf.NewMap(spec.Maps["slots"])
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.Put(slotKey{List: 1}, address{}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(n.opts.directory(), "slots")
	if err := errors.Join(os.Remove(path), other.Pin(path)); err != nil {
		t.Fatal(err)
	}
	n.restart()
	if slots := count(t, n.dataplane.slots); slots != 0 {
		t.Errorf("the new map has %d elements of the other version", slots)
	}
	n.pass(web)
	n.mustReach("10.96.0.1:80", endpoints[0])
	n.restart()
	n.mustReach("10.96.0.1:80", endpoints[0])
}

// testFailedStart makes a start fail after the new maps were made.
func testFailedStart(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], nil))
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Make the kernel refuse a link: another program has the hook for itself.
	if err := discard(filepath.Join(n.opts.directory(), "getpeername6")); err != nil {
		t.Fatal(err)
	}
	cgroup, err := os.Open(n.opts.Cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	spec, err := loadConnect()
	if err != nil {
		t.Fatal(err)
	}
	var alone connectObjects
	if err := spec.LoadAndAssign(&alone, nil); err != nil {
		t.Fatal(err)
	}
	defer alone.Close()
	attached := link.RawAttachProgramOptions{Target: int(cgroup.Fd()), Program: alone.Getpeername6, Attach: ebpf.AttachCgroupInet6GetPeername}
	if err := link.RawAttachProgram(attached); err != nil {
		t.Fatal(err)
	}
	opts := n.opts
	opts.MaxFrontends = 100
	b, err := newBackend(noProxy, opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err == nil {
		t.Fatal("the start succeeded")
	}
	// The attached programs still use these maps.
	if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: attached.Target, Program: attached.Program, Attach: attached.Attach}); err != nil {
		t.Fatal(err)
	}
	n.restart()
	if size := n.programs.Frontends.MaxEntries(); size == 100 || count(t, n.dataplane.frontends) != 2 {
		t.Errorf("the map has size %d, and not its old elements", size)
	}
	n.mustReach("10.96.0.1:80", endpoints[0])
}

func testDeletedDirectory(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1"}, endpoints[:1], nil)
	n.pass(web)
	for _, path := range []string{n.opts.directory(), filepath.Join(n.opts.directory(), "slots")} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		if err := n.verify(); err != nil {
			t.Fatal(err)
		}
		n.mustReach("10.96.0.1:80", endpoints[0])
		b, err := newBackend(noProxy, n.opts)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Start(t.Context()); err == nil {
			t.Error("a second process uses the new directory")
		}
		n.restart()
		n.mustReach("10.96.0.1:80", endpoints[0])
		n.pass(web)
	}
}

func testFull(t *testing.T) {
	tcp := func(s *api.Service) { s.Ports = s.Ports[:1] }
	for name, opts := range map[string]Options{
		"frontends": {MaxFrontends: 2},
		"slots":     {MaxEndpoints: 4},
		"members":   {MaxMembers: 4},
	} {
		t.Run(name, func(t *testing.T) {
			edit := tcp
			if name == "members" {
				edit = func(s *api.Service) { tcp(s); withAffinity(1)(s) }
			}
			n := newNode(t, opts)
			n.serve()
			var views []*api.View
			for i := range 3 {
				two := []string{endpoints[i], endpoints[(i+1)%3]}
				views = append(views, view(fmt.Sprint("web", i), []string{fmt.Sprintf("10.96.0.%d", i)}, two, edit))
			}
			n.pass(views...)
			works := func() (works []string) {
				for i := range 3 {
					if _, _, err := n.dial(n.ns.Do, fmt.Sprintf("10.96.0.%d:80", i)); err == nil {
						works = append(works, fmt.Sprint("web", i))
					}
				}
				return works
			}
			before := works()
			if len(before) != 2 {
				t.Fatalf("%v work, want 2 of 3", before)
			}
			n.delete(before[0])
			if after := works(); len(after) != 2 || slices.Contains(after, before[0]) {
				t.Errorf("after %s was deleted, %v work", before[0], after)
			}
			if len(n.dataplane.left) != 0 {
				t.Errorf("%d services do not fit", len(n.dataplane.left))
			}
			written := read(t, n.dataplane.frontends)
			if err := n.verify(); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(written, read(t, n.dataplane.frontends)); diff != "" {
				t.Errorf("Verify wrote frontends (-before +now):\n%s", diff)
			}
		})
	}
}

// verify runs Verify and makes it compare the maps with the records.
func (n *node) verify() error {
	n.clock.skip(repairPause)
	return n.Verify(n.t.Context())
}

// tableErrors are the errors of a brokenTable: its method set fails while the field set is
// not nil, and its method delete fails while the field delete is not nil.
type tableErrors struct{ set, delete error }

type brokenTable[K comparable, V any] struct {
	table[K, V]
	errs *tableErrors
}

func (t brokenTable[K, V]) set(keys []K, values []V) (int, error) {
	if t.errs.set != nil {
		return 0, t.errs.set
	}
	return t.table.set(keys, values)
}

func (t brokenTable[K, V]) delete(keys []K) error {
	if t.errs.delete != nil {
		return t.errs.delete
	}
	return t.table.delete(keys)
}

// inSlots returns tables of which the table slots has these errors.
func (e *tableErrors) inSlots(t tables) tables {
	t.slots = brokenTable[slotKey, address]{t.slots, e}
	return t
}

// inAll returns tables of frontends, slots and members that have these errors.
func (e *tableErrors) inAll(t tables) tables {
	t.frontends = brokenTable[frontendKey, list]{t.frontends, e}
	t.members = brokenTable[memberKey, uint32]{t.members, e}
	return e.inSlots(t)
}

func testVerifyRetries(t *testing.T) {
	errs := &tableErrors{set: unix.ENOMEM}
	n := newNodeAbove(t, failingVerifier{noProxy}, options{tables: errs.inSlots})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints[:1], nil))
	n.mustNotReach("10.96.0.1:80")
	errs.set = nil
	// Verify must repair the maps although the other sink's Verify fails.
	if err := n.verify(); !errors.Is(err, errBroken) {
		t.Errorf("error %v, want %v", err, errBroken)
	}
	n.mustReach("10.96.0.1:80", endpoints[0])
}

var errBroken = errors.New("broken")

type failingVerifier struct{ sink.Sink }

func (failingVerifier) Verify(context.Context) error { return errBroken }

func testMapError(t *testing.T) {
	delivered, errs := 0, &tableErrors{}
	below := sink.Func(func(context.Context, *sink.Changes) error { delivered++; return nil })
	n := newNodeAbove(t, below, options{tables: errs.inSlots})
	n.serve()
	ips := []string{"10.96.0.1"}
	n.pass(view("web", ips, endpoints[:1], nil))
	n.mustReach("10.96.0.1:80", endpoints[0])
	errs.delete = errBroken
	web := view("web", ips, endpoints[1:2], nil)
	for range 3 {
		n.set(web)
		n.mustNotReach("10.96.0.1:80")
	}
	for range 2 {
		if err := n.verify(); !errors.Is(err, sink.ErrStartOver) {
			t.Errorf("error %v, want a new pass", err)
		}
		if err := n.Verify(t.Context()); err != nil {
			t.Errorf("immediately after an attempt: %v", err)
		}
		n.pass(web)
		n.mustNotReach("10.96.0.1:80")
	}
	if delivered != 6 {
		t.Errorf("the other sink got %d batches, want 6", delivered)
	}
	errs.delete = nil
	if err := n.verify(); !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("error %v, want a new pass", err)
	}
	n.deliver(&sink.Changes{First: true, NodeChanged: true}, web)
	n.mustNotReach("10.96.0.1:80") // the programs stay detached until the pass ends
	n.deliver(&sink.Changes{Last: true})
	n.mustReach("10.96.0.1:80", endpoints[1])
	if err := n.verify(); err != nil {
		t.Error(err)
	}
}

func testLock(t *testing.T) {
	n := newNode(t, Options{})
	b, err := newBackend(noProxy, n.opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); !errors.Is(err, sink.ErrOwned) || !strings.Contains(err.Error(), n.opts.directory()) {
		t.Errorf("Start returned %v, want an error with the directory", err)
	}
	if err := b.Cleanup(t.Context()); !errors.Is(err, sink.ErrOwned) {
		t.Errorf("Cleanup returned %v", err)
	}
	if _, err := os.Stat(n.opts.directory()); err != nil {
		t.Errorf("Cleanup deleted maps that another process uses: %v", err)
	}
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func testRepair(t *testing.T) {
	n := newNode(t, Options{})
	n.serve()
	web := view("web", []string{"10.96.0.1"}, endpoints, nil)
	n.pass(web)
	verify := n.verify
	if err := verify(); err != nil {
		t.Fatal(err)
	}
	d := n.dataplane
	frontend := plan(web, "", nodeview.Parameters{})[0].frontend
	id := func() uint64 { return read(t, d.frontends)[frontend].ID }
	sizes := func() [3]int { return [3]int{count(t, d.frontends), count(t, d.slots), count(t, d.members)} }
	want := sizes()
	var wrong address
	for name, change := range map[string]func() error{
		"a deleted frontend": func() error { return d.frontends.delete([]frontendKey{frontend}) },
		"another endpoint":   func() error { _, err := d.slots.set([]slotKey{{List: id()}}, []address{wrong}); return err },
		"a deleted endpoint": func() error { return d.slots.delete([]slotKey{{List: id()}}) },
		"an added frontend": func() error {
			_, err := d.frontends.set([]frontendKey{{Protocol: 6}}, []list{{ID: id(), Count: 1}})
			return err
		},
		"an added member": func() error { _, err := d.members.set([]memberKey{{List: 7}}, []uint32{0}); return err },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if err := verify(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		n.mustReach("10.96.0.1:80", endpoints[:3]...)
		if got := sizes(); got != want {
			t.Errorf("%s: the maps have %v elements, want %v", name, got, want)
		}
	}
	if err := n.programs.links[0].Detach(); err != nil {
		t.Fatal(err)
	}
	n.mustNotReach("10.96.0.1:80")
	if err := verify(); err != nil {
		t.Fatal(err)
	}
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	if err := os.Remove(filepath.Join(n.opts.directory(), "connect4")); err != nil {
		t.Fatal(err)
	}
	if err := verify(); err != nil {
		t.Fatal(err)
	}
	n.restart()
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
}

func testDataplane(t *testing.T) {
	n := newNode(t, Options{})
	web := view("web", []string{"10.96.0.1"}, endpoints[:2], func(s *api.Service) {
		s.IPs.ExternalIPs.Add(netip.MustParseAddr("192.0.2.1"))
	})
	n.pass(web)
	other := view("web", []string{"10.96.0.1"}, endpoints[1:3], nil)
	none := view("web", []string{"10.96.0.1"}, nil, nil)
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		addr     string
		protocol api.Protocol
		view     *api.View
		want     []string
	}{
		"equal":         {"10.96.0.1", api.UDP, web, []string{"  slot 0: 10.0.0.1:8080", "  slot 1: 10.0.0.2:8080"}},
		"without view":  {"10.96.0.1", api.TCP, nil, []string{"  slot 0: 10.0.0.1:8080", "  slot 1: 10.0.0.2:8080"}},
		"different":     {"10.96.0.1", api.TCP, other, []string{"+ slot 0: 10.0.0.1:8080", "- slot 0: 10.0.0.2:8080", "+ slot 1: 10.0.0.2:8080", "- slot 1: 10.0.0.3:8080"}},
		"no endpoint":   {"10.96.0.1", api.TCP, none, []string{"  not handled by eBPF: it has no usable endpoint", "+ slot 0: 10.0.0.1:8080", "+ slot 1: 10.0.0.2:8080"}},
		"external IP":   {"192.0.2.1", api.TCP, web, []string{"  slot 0: 10.0.0.1:8080", "  slot 1: 10.0.0.2:8080"}},
		"other address": {"192.0.2.2", api.TCP, nil, []string{"  nothing leads to it"}},
	} {
		got, err := n.Inspect(t.Context(), netip.MustParseAddr(test.addr), test.protocol, 80, test.view)
		want := "maps " + n.opts.directory() + "\n" + strings.Join(test.want, "\n") + "\n"
		if err != nil || got != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", name, err, got, want)
		}
	}
}

func testCleanup(t *testing.T) {
	n := newNode(t, Options{Options: backends.Options{Instance: "one"}})
	n.serve()
	n.pass(view("web", []string{"10.96.0.1"}, endpoints, nil))
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustReach("10.96.0.1:80", endpoints[:3]...)
	for range 2 { // the second time, nothing is left to remove
		if err := n.Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.mustNotReach("10.96.0.1:80")
	}
	if _, err := os.Stat(n.opts.directory()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of the instance is left: %v", err)
	}
}

func testStartErrors(t *testing.T) {
	bpffs := mountBPFFS(t)
	for want, opts := range map[string]Options{
		"is not a BPF file system":                {BPFFS: t.TempDir(), Cgroup: netnstest.NewCgroup(t).Dir},
		"is not in a file system of type cgroup2": {BPFFS: bpffs, Cgroup: t.TempDir()},
		"no such file or directory":               {BPFFS: bpffs, Cgroup: "/nowhere"},
	} {
		b, err := newBackend(noProxy, options{public: opts})
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Start(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}

func testForeignDirectory(t *testing.T) {
	opts := Options{Options: backends.Options{Instance: "foreign"}, BPFFS: mountBPFFS(t), Cgroup: netnstest.NewCgroup(t).Dir}
	dir := opts.directory()
	for want, change := range map[string]func() error{
		"belongs to user 65534": func() error { return os.Chown(dir, 65534, 65534) },
		"has mode 770":          func() error { return os.Chmod(dir, 0o770) },
		"not a directory": func() error {
			return errors.Join(os.Remove(dir), os.Symlink(opts.BPFFS, dir))
		},
	} {
		b, err := newBackend(noProxy, options{public: opts})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.Mkdir(dir, 0o700), change()); err != nil {
			t.Fatal(err)
		}
		if err := b.Start(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
	}
}

// capabilitiesVariable is the environment variable that gives TestWithFewCapabilities its
// cgroup.
const capabilitiesVariable = "KPNG_TEST_CAPABILITIES"

func testCapabilities(t *testing.T) {
	run := func(capabilities, cgroup string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "setpriv", "--bounding-set="+capabilities, "--inh-caps="+capabilities,
			os.Args[0], "-test.run=^TestWithFewCapabilities$", "-test.v")
		cmd.Env = append(os.Environ(), capabilitiesVariable+"="+cgroup)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	n := newNode(t, Options{Options: backends.Options{Instance: "other"}})
	needed := "-all,+bpf,+net_admin,+perfmon"
	var kernel unix.Utsname
	if err := unix.Uname(&kernel); err != nil {
		t.Fatal(err)
	}
	if strings.HasPrefix(unix.ByteSliceToString(kernel.Release[:]), "5.10.") {
		needed += ",+sys_resource" // to raise the limit of locked memory
	}
	if out, err := run(needed, n.opts.Cgroup); err != nil {
		t.Errorf("with %s: %v\n%s", needed, err, out)
	}
	for _, capability := range []string{"bpf", "net_admin", "perfmon"} {
		want := "the process lacks " + strings.ToUpper(capability)
		if out, err := run(strings.ReplaceAll(needed, ",+"+capability, ""), n.opts.Cgroup); err == nil || !strings.Contains(out, want) {
			t.Errorf("without %s: %v, want an error with %q\n%s", capability, err, want, out)
		}
	}
}

// TestWithFewCapabilities runs only in a process that testCapabilities starts.
func TestWithFewCapabilities(t *testing.T) {
	cgroup := os.Getenv(capabilitiesVariable)
	if cgroup == "" {
		return
	}
	clock := &skippingClock{}
	b, err := newBackend(noProxy, options{now: clock.now, public: Options{Cgroup: cgroup, BPFFS: mountBPFFS(t)}})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{backend: b, t: t, clock: clock}
	for range 2 {
		if err := n.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.pass(view("web", []string{"10.96.0.1"}, endpoints, nil))
		if err := n.verify(); err != nil {
			t.Fatal(err)
		}
		if err := n.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
}
