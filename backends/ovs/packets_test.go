// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/ovstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// The addresses of a testNetwork.
const (
	gateway      = "10.244.1.1" // of the node
	podA, podB   = "10.244.1.11", "10.244.1.12"
	outside      = "192.0.2.9"
	clusterIP    = "10.96.0.1"
	endpointPort = 8080
)

// testNetwork is a testNode with two pods and a host outside the cluster. Each is a network
// namespace at a port of the bridge. Pod B answers TCP and UDP at endpointPort with the
// address of the client.
type testNetwork struct {
	*testNode
	pods map[string]*netnstest.Namespace
}

func newNetwork(t *testing.T, edits ...func(*options)) *testNetwork {
	t.Helper()
	node := netnstest.New(t)
	n := &testNetwork{testNode: makeNode(t, node), pods: map[string]*netnstest.Namespace{}}
	n.opts.MasqueradeAddresses, n.opts.HairpinAddresses = []netip.Addr{netip.MustParseAddr(gateway)}, nil
	n.opts.NodeAddresses = nodeaddr.Of(n.opts.MasqueradeAddresses...)
	n.start(t, edits...)
	const router = "02:00:00:00:00:01"
	var flows strings.Builder
	flow := func(format string, args ...any) { fmt.Fprintf(&flows, format+"\n", args...) }
	flow("table=0,priority=100,ip actions=resubmit(,100)")
	flow("table=100,priority=1,ip actions=resubmit(,110)")
	flow("table=110,priority=100,ip actions=load:0xffff->NXM_OF_IN_PORT[],resubmit(,111)")
	flow("table=111,priority=10,ip,nw_dst=%s actions=mod_dl_dst:%s,LOCAL", gateway, router)
	for i, addr := range []string{podA, podB, outside} {
		pod := netnstest.New(t)
		n.pods[addr] = pod
		port := fmt.Sprintf("port%d", i)
		node.Join(t, port, pod, "eth0")
		node.Up(t, port)
		mac := net.HardwareAddr{2, 0, 0, 0, 1, byte(i)}
		link, err := pod.Links.LinkByName("eth0")
		if err == nil {
			err = pod.Links.LinkSetHardwareAddr(link, mac)
		}
		if err == nil {
			err = pod.Do(func() error { return netnstest.DisableChecksumOffload("eth0") })
		}
		if err != nil {
			t.Fatal(err)
		}
		pod.Add(t, "eth0", addr+"/32")
		pod.Up(t, "eth0")
		pod.Run(t, "ip", "neigh", "add", "169.254.0.1", "lladdr", router, "dev", "eth0", "nud", "permanent")
		pod.Run(t, "ip", "route", "add", "default", "via", "169.254.0.1", "dev", "eth0", "onlink")
		n.Vsctl(t, "add-port", ovstest.Bridge, port, "--", "set", "interface", port, fmt.Sprintf("ofport_request=%d", i+1))
		network := addr
		if addr == outside {
			network = "192.0.2.0/24,"
		}
		flow("table=111,priority=10,ip,nw_dst=%s actions=mod_dl_src:%s,mod_dl_dst:%s,output:%d", network, router, mac, i+1)
	}
	n.OfctlWith(t, flows.String(), "add-flows", "-")
	n.pods[gateway] = node
	n.Vsctl(t, "set", "bridge", ovstest.Bridge, fmt.Sprintf("other_config:hwaddr=%q", router))
	if err := node.Do(func() error { return netnstest.DisableChecksumOffload(ovstest.Bridge) }); err != nil {
		t.Fatal(err)
	}
	node.Add(t, ovstest.Bridge, gateway+"/32")
	node.Up(t, ovstest.Bridge)
	node.Run(t, "ip", "neigh", "add", "169.254.0.1", "lladdr", "02:00:00:00:00:02", "dev", ovstest.Bridge, "nud", "permanent")
	node.Run(t, "ip", "route", "add", "default", "via", "169.254.0.1", "dev", ovstest.Bridge, "onlink")
	netnstest.Listen(t, n.pods[podB].Do, fmt.Sprintf(":%d", endpointPort), func(c net.Conn) {
		fmt.Fprintln(c, c.RemoteAddr())
		io.Copy(c, c)
	})
	var udp net.PacketConn
	if err := n.pods[podB].Do(func() (err error) { udp, err = net.ListenPacket("udp4", fmt.Sprintf(":%d", endpointPort)); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { udp.Close() })
	go func() {
		for buffer := make([]byte, 1); ; {
			_, from, err := udp.ReadFrom(buffer)
			if err != nil {
				return
			}
			udp.WriteTo([]byte(from.String()), from)
		}
	}()
	return n
}

// withPorts gives a service TCP and UDP at port 80, and node port 30080.
func withPorts(s *api.Service) {
	s.Type = api.NodePort
	s.Ports[0].NodePort = 30080
	s.Ports[0].Name = "tcp"
	udp := s.Ports[0]
	udp.Name, udp.Protocol = "udp", api.UDP
	s.Ports = append(s.Ports, udp)
}

// dial connects from a pod. If the argument port is not 0, it is the source port.
func (n *testNetwork) dial(from string, port int, network, to string) (net.Conn, error) {
	d := net.Dialer{
		Timeout: 30 * time.Second, // long enough for a busy machine
		Control: func(_, _ string, c syscall.RawConn) (err error) {
			controlErr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
			return errors.Join(err, controlErr)
		},
	}
	switch network {
	case "tcp4":
		d.LocalAddr = &net.TCPAddr{Port: port}
	case "udp4":
		d.LocalAddr = &net.UDPAddr{Port: port}
	}
	var c net.Conn
	err := n.pods[from].Do(func() (err error) { c, err = d.DialContext(context.Background(), network, to); return err })
	return c, err
}

// greet opens a connection and returns its first answer.
func (n *testNetwork) greet(t *testing.T, from string, port int, to string) (c net.Conn, answer string) {
	t.Helper()
	c, err := n.dial(from, port, "tcp4", to)
	if err != nil {
		t.Fatalf("connect from %s:%d to %s: %v", from, port, to, err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(30 * time.Second))
	answer, err = bufio.NewReader(io.LimitReader(c, 30)).ReadString('\n')
	if err != nil {
		t.Fatalf("connection from %s:%d to %s: %v", from, port, to, err)
	}
	return c, answer
}

// echo reports whether a connection still works.
func echo(c net.Conn) bool {
	b := make([]byte, 1)
	c.SetDeadline(time.Now().Add(30 * time.Second))
	_, err := c.Write([]byte("x"))
	if err == nil {
		_, err = io.ReadFull(c, b)
	}
	return err == nil && b[0] == 'x'
}

// TestDirectAndServiceConnectionsFromOnePort connects from one port to a service and to its
// endpoint, in both orders. Both connections must work.
func TestDirectAndServiceConnectionsFromOnePort(t *testing.T) {
	n := newNetwork(t)
	n.mustPass(view("web", clusterIP, []string{"!" + podB}, withPorts))
	service, direct := clusterIP+":80", fmt.Sprintf("%s:%d", podB, endpointPort)
	for i, order := range [][]string{{direct, service}, {service, direct}} {
		first, _ := n.greet(t, podA, 5100+i, order[0])
		second, _ := n.greet(t, podA, 5100+i, order[1])
		if !echo(first) || !echo(second) {
			t.Errorf("a connection to %s ended when there was one to %s", order[0], order[1])
		}
	}
	var u net.PacketConn
	if err := n.pods[podA].Do(func() (err error) { u, err = net.ListenPacket("udp4", ":5102"); return err }); err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	for _, to := range []string{service, direct, service, direct} {
		addr := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))
		u.SetDeadline(time.Now().Add(30 * time.Second))
		u.WriteTo([]byte("x"), addr)
		if _, from, err := u.ReadFrom(make([]byte, 100)); err != nil || from.String() != to {
			t.Errorf("the answer to a datagram to %s is from %v, error %v", to, from, err)
		}
	}
}

// TestUDPClientsMayBeginBeforeTheirService sends datagrams to the addresses of a service that
// does not exist yet. The connection is tracked then, but must not stay untranslated.
func TestUDPClientsMayBeginBeforeTheirService(t *testing.T) {
	n := newNetwork(t)
	n.mustPass()
	for i, v := range []*api.View{
		view("web", clusterIP, []string{"!" + podB}, withPorts),
		view("web", "10.96.0.2", []string{"!" + podB}, withPorts), // a changed service
	} {
		to := v.Service.IPs.ClusterIPs.Family(api.IPv4)[0].String() + ":80"
		c, err := n.dial(podA, 5200+i, "udp4", to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.Write([]byte("x"))
		ovstest.Await(t, "the connection is tracked", func() bool { return strings.Contains(n.connections(t), fmt.Sprintf("sport=%d", 5200+i)) })
		n.mustSync(v)
		c.SetDeadline(time.Now().Add(30 * time.Second))
		c.Write([]byte("x"))
		if _, err := c.Read(make([]byte, 100)); err != nil {
			t.Errorf("no answer from %s: %v", to, err)
		}
	}
}

// TestConnectionsToLostEndpointsAreReset removes the endpoint of a service that requests
// resets, and of a service that does not. Clients of the first service are reset within a
// second, also if they are idle. If the switch tracks too many connections, only clients
// that send something are reset.
func TestConnectionsToLostEndpointsAreReset(t *testing.T) {
	for _, listed := range []bool{true, false} {
		n := newNetwork(t, func(o *options) {
			if !listed {
				o.maxListed = -1
			}
		})
		services := func(endpoints ...string) []*api.View {
			return []*api.View{
				view("web", clusterIP, endpoints, func(s *api.Service) { s.ResetConnections = true }),
				view("keep", "10.96.0.2", endpoints),
			}
		}
		n.mustPass(services("!" + podB)...)
		idle, _ := n.greet(t, podA, 0, clusterIP+":80")
		active, _ := n.greet(t, outside, 0, clusterIP+":80")
		keep, _ := n.greet(t, podA, 0, "10.96.0.2:80")
		n.mustSync(services()...)
		begin := time.Now()
		if listed {
			if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("an idle client got error %v, want a reset", err)
			}
			t.Logf("an idle client was reset %s after the change", time.Since(begin).Round(time.Millisecond))
		}
		if echo(active) {
			t.Errorf("listed %t: the connection of an active client was not reset", listed)
		}
		if d := time.Since(begin); d > time.Second && !slowMachine() {
			t.Errorf("listed %t: the clients were reset after %s", listed, d)
		}
		if !echo(keep) {
			t.Errorf("listed %t: a connection to a service without resets ended", listed)
		}
	}
}

// TestRepetitionKeepsNewConnections opens UDP connections after a change. Then the backend
// makes the switch forget stale connections once more, but the new connections stay.
func TestRepetitionKeepsNewConnections(t *testing.T) {
	n := newNetwork(t)
	n.mustPass()
	web := func(endpoints ...string) *api.View { return view("web", clusterIP, endpoints, withPorts) }
	remove := func() {
		if err := n.sync(sink.Changes{}, "web"); err != nil {
			t.Fatal(err)
		}
	}
	port := 5400
	for _, test := range []struct {
		name   string
		change func()
	}{
		{"a new service", func() { n.mustSync(web("!" + podB)) }},
		{"a changed address", func() {
			n.mustSync(view("web", "10.96.0.2", []string{"!" + podB}, withPorts))
			n.mustSync(web("!" + podB))
		}},
		{"an endpoint comes back", func() { n.mustSync(web(podA)); n.mustSync(web("!" + podB)) }},
		{"a service comes back", func() { remove(); n.mustSync(web("!" + podB)) }},
		{"another service gets the address", func() { remove(); n.mustSync(view("other", clusterIP, []string{"!" + podB}, withPorts)) }},
	} {
		port++
		test.change()
		c, err := n.dial(podA, port, "udp4", clusterIP+":80")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(30 * time.Second))
		c.Write([]byte("x"))
		if _, err := c.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		d := n.backend.dataplane
		if len(d.repeat) == 0 {
			t.Errorf("%s: nothing to repeat", test.name)
		}
		if err := d.forgetAgain(t.Context(), time.Now().Add(repeatAfter)); err != nil {
			t.Fatal(err)
		}
		if len(d.repeat) > 0 || !strings.Contains(n.connections(t), fmt.Sprintf("sport=%d,", port)) {
			t.Errorf("%s: a new connection has ended, or %d repetitions stay", test.name, len(d.repeat))
		}
	}
	n.mustSync(web(podA))
	due := n.backend.dataplane.repeat[0].at
	n.mustSync(web("!" + podB))
	if now := n.backend.dataplane.repeat[0].at; now != due {
		t.Errorf("a further change delays the repetition from %v to %v", due, now)
	}
}

// TestManyStaleConnections adds a service with many UDP frontends. It removes an endpoint
// and then the service, while the switch has too many connections for a listing.
func TestManyStaleConnections(t *testing.T) {
	n := newNetwork(t, func(o *options) { o.maxListed = -1 })
	n.mustPass()
	s := shape{ports: 2 * maxSearches, endpoints: 1, protocol: api.UDP}
	web := func(endpoints ...string) *api.View {
		v := s.view("web")
		other := view("web", clusterIP, endpoints)
		v.Endpoints = other.Endpoints
		for i := range v.Endpoints {
			v.Endpoints[i].PortOverrides = nil
			for _, p := range v.Service.Ports {
				v.Endpoints[i].PortOverrides = append(v.Endpoints[i].PortOverrides, api.PortName{Name: p.Name, Port: endpointPort})
			}
			slices.SortStableFunc(v.Endpoints[i].PortOverrides, func(a, b api.PortName) int { return cmp.Compare(a.Name, b.Name) })
		}
		return v
	}
	dial := func(port int) {
		t.Helper()
		c, err := n.dial(podA, port, "udp4", fmt.Sprintf("%s:%d", clusterIP, s.ports))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(30 * time.Second))
		c.Write([]byte("x"))
		if _, err := c.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
	await := func(what string, gone string) {
		t.Helper()
		ovstest.Await(t, what, func() bool {
			if err := n.backend.Verify(t.Context()); err != nil {
				t.Fatal(err)
			}
			return !strings.Contains(n.connections(t), gone)
		})
	}
	early, err := n.dial(podA, 5299, "udp4", fmt.Sprintf("%s:%d", clusterIP, s.ports))
	if err != nil {
		t.Fatal(err)
	}
	defer early.Close()
	early.Write([]byte("x"))
	ovstest.Await(t, "a connection before the service is tracked", func() bool { return strings.Contains(n.connections(t), "sport=5299") })
	n.mustSync(web("!" + podB))
	await("the connection before the service ends", "sport=5299")
	dial(5300)
	direct, err := n.dial(podA, 5301, "udp4", fmt.Sprintf("%s:%d", podB, endpointPort+1))
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	direct.Write([]byte("x"))
	ovstest.Await(t, "the direct connection is tracked", func() bool { return strings.Contains(n.connections(t), "sport=5301") })
	n.mustSync(web(podA))
	if n := len(n.backend.dataplane.waiting); n > 0 {
		t.Errorf("%d messages wait although one suffices", n)
	}
	await("connections to the endpoint end", "sport=5300")
	n.mustSync(web("!" + podB))
	dial(5302)
	if err := n.sync(sink.Changes{}, "web"); err != nil {
		t.Fatal(err)
	}
	await("connections to the service end", "sport=5302")
	if !strings.Contains(n.connections(t), "sport=5301") {
		t.Error("a connection to another port of the endpoint has ended")
	}
}

// connections lists the tracked connections.
func (n *testNode) connections(t testing.TB) string {
	t.Helper()
	text, err := control(t.Context(), n.Dir, "dpctl/dump-conntrack")
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// slowMachine reports whether the tests run on a machine like the emulated ones of the
// nightly tests.
func slowMachine() bool { return *backendtest.Patience > time.Minute }

// TestMasqueradedConnectionsGetFreePorts opens many connections of the node, and many
// masqueraded connections, to one endpoint. All have the node's address as their source, so
// each connection needs a source port of its own.
func TestMasqueradedConnectionsGetFreePorts(t *testing.T) {
	count := 1000
	if slowMachine() {
		count = 50
	}
	n := newNetwork(t)
	n.mustPass(view("web", clusterIP, []string{"!" + podB}, withPorts))
	var all []net.Conn
	defer func() {
		for _, c := range all {
			c.Close()
		}
	}()
	for i := range 2 * count {
		from, to := gateway, fmt.Sprintf("%s:%d", podB, endpointPort)
		if i%2 == 1 {
			from, to = outside, gateway+":30080"
		}
		c, err := n.dial(from, 0, "tcp4", to)
		if err == nil {
			all = append(all, c)
			c.SetDeadline(time.Now().Add(30 * time.Second))
			_, err = bufio.NewReader(io.LimitReader(c, 30)).ReadString('\n')
		}
		if err != nil {
			t.Fatalf("connection %d from %s: %v", i, from, err)
		}
	}
	for i, c := range all {
		if !echo(c) {
			t.Errorf("connection %d has ended", i)
		}
	}
}

// TestManyShortNodePortConnections opens many connections, one after another. If
// masqueraded connections could not use ports below 61000, there would not be enough ports.
func TestManyShortNodePortConnections(t *testing.T) {
	if slowMachine() {
		t.Skip("takes too long on an emulated machine")
	}
	n := newNetwork(t)
	n.mustPass(view("web", clusterIP, []string{"!" + podB}, withPorts))
	for i := range 5000 {
		c, err := n.dial(outside, 0, "tcp4", gateway+":30080")
		if err == nil {
			c.SetDeadline(time.Now().Add(30 * time.Second))
			_, err = c.Read(make([]byte, 100))
			c.Close()
		}
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
}

// TestPodsSeeUnusedAddresses masquerades connections to a pod with addresses of a network.
// Together these addresses have more ports than one address has.
func TestPodsSeeUnusedAddresses(t *testing.T) {
	network := netip.MustParsePrefix("169.254.78.0/23")
	n := newNetwork(t, func(o *options) { o.PodMasqueradeNetworks = []netip.Prefix{network} })
	n.mustPass(view("web", clusterIP, []string{"!" + podB}, withPorts))
	n.mustMatch()
	seen := map[netip.Addr]bool{}
	for range 20 {
		c, answer := n.greet(t, outside, 0, gateway+":30080")
		peer, err := netip.ParseAddrPort(strings.TrimSpace(answer))
		if err != nil || !network.Contains(peer.Addr()) || !echo(c) {
			t.Errorf("the pod sees %q, want an address of %s", answer, network)
		}
		seen[peer.Addr()] = true
	}
	// The kernel datapath chooses an address for each client, not for each connection.
	if len(seen) < 10 && !slowMachine() {
		t.Errorf("20 connections have %d addresses", len(seen))
	}
}

// TestRegistersStay checks that registers of the bridge's program keep their values while
// packets pass the tables.
func TestRegistersStay(t *testing.T) {
	n := newNetwork(t)
	n.mustPass(
		view("web", clusterIP, []string{"!" + podB}, withPorts),
		view("affine", "10.96.0.2", []string{"!" + podB}, withAffinity),
	)
	var load, match string
	for r := range 16 {
		load += fmt.Sprintf("load:%#x->NXM_NX_REG%d[],", 0xa0000+r, r)
		match += fmt.Sprintf(",reg%d=%#x", r, 0xa0000+r)
	}
	n.Ofctl(t, "add-flow", "table=0,priority=100,ip actions="+load+"resubmit(,100)")
	n.Ofctl(t, "add-flow", "table=110,priority=100,ip actions=drop")
	n.Ofctl(t, "add-flow", "table=110,priority=101,ip"+match+" actions=load:0xffff->NXM_OF_IN_PORT[],resubmit(,111)")
	for _, to := range []struct{ from, to string }{
		{podA, fmt.Sprintf("%s:%d", podB, endpointPort)},
		{podA, clusterIP + ":80"},
		{podA, "10.96.0.2:80"},
		{podA, "10.96.0.2:80"},
		{podB, clusterIP + ":80"}, // to itself
		{outside, gateway + ":30080"},
	} {
		if c, _ := n.greet(t, to.from, 0, to.to); !echo(c) {
			t.Errorf("%s: no answer from %s", to.from, to.to)
		}
	}
	if c, err := n.dial(podA, 0, "tcp4", "10.96.0.1:81"); err == nil {
		c.Close()
		t.Error("connected to a port that the service does not have")
	}
}

// TestLearnedFlowsAreLimited lets more clients use a service with session affinity than the
// switch may remember.
func TestLearnedFlowsAreLimited(t *testing.T) {
	const limit, clients = 3, 6
	n := newNetwork(t, func(o *options) { o.MaxClients = limit })
	n.mustPass(
		view("affine", clusterIP, []string{"!" + podB}, withAffinity),
		view("other", "10.96.0.2", []string{"!" + podB}, withAffinity),
	)
	flows := func() int { return strings.Count(n.Ofctl(t, "dump-flows", "table=107"), "nw_src=") }
	for i := range clients {
		addr := fmt.Sprintf("192.0.2.%d", 20+i)
		n.pods[outside].Add(t, "eth0", addr+"/32")
		n.pods[outside].Run(t, "ip", "route", "replace", "default", "via", "169.254.0.1", "dev", "eth0", "onlink", "src", addr)
		if c, _ := n.greet(t, outside, 0, clusterIP+":80"); !echo(c) {
			t.Errorf("client %s cannot use the service", addr)
		}
	}
	if got := flows(); got != limit {
		t.Errorf("%d clients are remembered, want %d", got, limit)
	}
	if c, _ := n.greet(t, outside, 0, "10.96.0.2:80"); !echo(c) {
		t.Error("the client cannot use the other service")
	}
	if got := flows(); got != limit+1 {
		t.Errorf("%d clients of both services are remembered, want %d", got, limit+1)
	}
	if err := n.sync(sink.Changes{}, "affine"); err != nil {
		t.Fatal(err)
	}
	if got := flows(); got != 1 {
		t.Errorf("%d clients are remembered after one of the services was deleted, want 1", got)
	}
	// The other service is deleted while the backend does not run.
	n.restart(t)
	n.mustPass()
	if got := flows(); got != 0 {
		t.Errorf("%d clients are remembered after both services were deleted, want 0", got)
	}
}
