// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/ownership"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

func TestServicesThatIPVSCannotServe(t *testing.T) {
	for name, test := range map[string]struct {
		edit   func(*api.Service)
		reason string
	}{
		"plain":           {func(*api.Service) {}, ""},
		"internal policy": {func(s *api.Service) { s.InternalTrafficToLocal = true }, ""},
		"all ports":       {func(s *api.Service) { s.AllPorts = true }, "one protocol and port"},
		"affinity":        {func(s *api.Service) { s.AffinitySeconds = 1 }, "affinity"},
		"hashing":         {func(s *api.Service) { s.Algorithm = api.HashConnection }, "stable hashing"},
		"external policy": {func(s *api.Service) { s.Type, s.ExternalTrafficToLocal = api.NodePort, true }, "one list of endpoints"},
	} {
		s := view(nil, test.edit).Service
		if got := unsuitable(s); (got == "") != (test.reason == "") || !strings.Contains(got, test.reason) {
			t.Errorf("%s: reason %q, want %q", name, got, test.reason)
		}
	}
}

// affine returns the view of a service with session affinity.
func affine(edit ...func(*api.Service)) *api.View {
	return view([]string{"10.1.0.1"}, func(s *api.Service) {
		s.AffinitySeconds = 90
		for _, f := range edit {
			f(s)
		}
	})
}

// mustServe checks which dataplane serves the service at 10.96.0.1.
func (n *node) mustServe(step string, byIPVS, byTable bool) {
	n.t.Helper()
	inTable := slices.ContainsFunc(restObjects(n.t, n.backend), func(line string) bool { return strings.HasPrefix(line, "other services4") })
	s, err := n.dataplane.conn.read(id("10.96.0.1:80", api.TCP))
	if err != nil {
		n.t.Fatal(err)
	}
	if (s != nil) != byIPVS || inTable != byTable {
		n.t.Errorf("%s: IPVS serves the service: %t, want %t; the table serves it: %t, want %t", step, s != nil, byIPVS, inTable, byTable)
	}
}

func TestTableExistsOnlyWhileServicesNeedIt(t *testing.T) {
	n := newMemoryNode(t, netnstest.New(t), fakeServers{})
	plain := view([]string{"10.1.0.1"}, nil)
	n.mustPass(plain)
	n.mustServe("plain", true, false)
	change := func(old, v *api.View) {
		t.Helper()
		c := &sink.Changes{Services: slices.Values([]sink.Change{{Key: plain.Key(), Old: old, New: v}})}
		if err := n.Sync(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		change(plain, affine())
		n.mustServe("with affinity", false, true)
		change(affine(), plain)
		n.mustServe("plain again", true, false)
		if objects := restObjects(t, n.backend); objects != nil {
			t.Errorf("the table stays: %v", objects)
		}
	}
	change(plain, affine())
	n.mustPass(affine())
	n.mustServe("a pass", false, true)
	n.mustPass(plain)
	if objects := restObjects(t, n.backend); objects != nil {
		t.Errorf("after a pass, the table stays: %v", objects)
	}
	n.mustPass(affine())
	if err := n.remove(affine()); err != nil {
		t.Fatal(err)
	}
	n.mustServe("deleted", false, false)
}

func TestTableOfEarlierProcessIsDeleted(t *testing.T) {
	n := newMemoryNode(t, netnstest.New(t), fakeServers{})
	n.mustPass(affine())
	if err := n.rest.stop(t.Context()); err != nil { // as in a new process
		t.Fatal(err)
	}
	n.mustServe("stopped", false, true)
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	n.mustServe("plain", true, false)
	if objects := restObjects(t, n.backend); objects != nil {
		t.Errorf("the table stays: %v", objects)
	}
}

// TestServicesMoveWithoutGap checks that both dataplanes have a service while it moves.
func TestServicesMoveWithoutGap(t *testing.T) {
	n := newMemoryNode(t, netnstest.New(t), fakeServers{})
	plain := view([]string{"10.1.0.1"}, nil)
	n.mustPass(plain)
	sync := func(old, v *api.View, ipvs func(*sink.Changes) error) error {
		c := &sink.Changes{Services: slices.Values([]sink.Change{{Key: plain.Key(), Old: old, New: v}})}
		return n.rest.sync(t.Context(), c, n.tasks.Addresses, ipvs)
	}
	failure := sink.Failed{plain.Key(): errors.New("no memory")}
	if err := sync(plain, affine(), func(c *sink.Changes) error {
		n.mustServe("before IPVS removes the service", true, true)
		return n.dataplane.sync(t.Context(), c)
	}); err != nil {
		t.Fatal(err)
	}
	n.mustServe("moved to the table", false, true)
	if failed, ok := sink.Acknowledged(sync(affine(), plain, func(*sink.Changes) error { return failure.Err() })); !ok || failed[plain.Key()] == nil {
		t.Errorf("failed services: %v (%t)", failed, ok)
	}
	n.mustServe("IPVS fails", false, true)
	if err := sync(affine(), plain, func(c *sink.Changes) error {
		if err := n.dataplane.sync(t.Context(), c); err != nil {
			return err
		}
		n.mustServe("before the table loses the service", true, true)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	n.mustServe("moved to IPVS", true, false)
}

// TestServiceStaysInIPVSIfTableFails makes another process own the table.
func TestServiceStaysInIPVSIfTableFails(t *testing.T) {
	servers := fakeServers{}
	n := newMemoryNode(t, netnstest.New(t), servers)
	release, err := ownership.Objects(t.Context(), n.ns.FD, "nftables table kpng-"+n.opts.restInstance())
	if err != nil {
		t.Fatal(err)
	}
	other := view([]string{"10.1.0.2"}, func(s *api.Service) {
		s.Name, s.IPs.ClusterIPs = "other", api.NewIPSet(netip.MustParseAddr("10.96.0.2"))
	})
	n.mustPass(view([]string{"10.1.0.1"}, nil))
	for _, deliver := range map[string]func() error{
		"change": func() error { return n.deliver(&sink.Changes{}, affine(), other) },
		"pass":   func() error { return n.pass(affine(), other) },
	} {
		failed, ok := sink.Acknowledged(deliver())
		if err := failed[affine().Key()]; !ok || len(failed) != 1 || !errors.Is(err, sink.ErrOwned) {
			t.Errorf("failed services: %v (%t)", failed, ok)
		}
		n.mustServe("the table fails", true, false)
		if servers[id("10.96.0.2:80", api.TCP)] == nil {
			t.Error("the other service is not served")
		}
	}
	release()
	n.mustPass(affine(), other)
	n.mustServe("the table works", false, true)
}

// TestTableInPassOfSeveralBatches starts the table in the middle of a pass.
func TestTableInPassOfSeveralBatches(t *testing.T) {
	n := newMemoryNode(t, netnstest.New(t), fakeServers{})
	named := func(i int, affinity int32) *api.View {
		return view([]string{"10.1.0.1"}, func(s *api.Service) {
			s.Name, s.IPs.ClusterIPs = fmt.Sprint("s", i), api.NewIPSet(netip.AddrFrom4([4]byte{10, 96, 1, byte(i)}))
			s.AffinitySeconds = affinity
		})
	}
	has := func() (services int) {
		for _, line := range restObjects(t, n.backend) {
			if strings.HasPrefix(line, "other services4") {
				services++
			}
		}
		return services
	}
	for round, second := range []int32{90, 90, 0} {
		for i, c := range []*sink.Changes{{First: true, NodeChanged: true}, {}, {}, {Last: true}} {
			affinity := []int32{0, 90, second, 0}[i]
			if err := n.deliver(c, named(i, affinity)); err != nil {
				t.Fatal(err)
			}
		}
		if want := []int{2, 2, 1}[round]; has() != want {
			t.Errorf("round %d: the table has %d services, want %d", round, has(), want)
		}
	}
}

func TestCleanupDeletesTable(t *testing.T) {
	n := newMemoryNode(t, netnstest.New(t), fakeServers{})
	n.mustPass(affine())
	if err := n.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustServe("stopped", false, true)
	if err := n.rest.cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if objects := restObjects(t, n.backend); objects != nil {
		t.Errorf("the table stays: %v", objects)
	}
}

// TestOptionsReachTable checks that the table gets all options that it needs from the
// backend.
func TestOptionsReachTable(t *testing.T) {
	b, err := newBackend(options{public: Options{Options: backends.Options{
		Instance: strings.Repeat("a", 56), MasqueradeMark: 0x8000, MasqueradeOutsiders: true, PodInterfaces: []string{"veth*"},
		Stats: true, Conntrack: sink.Func(func(context.Context, *sink.Changes) error { return nil }),
	}, Interface: "a"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.rest.new(nil); err != nil {
		t.Error(err)
	}
}

// TestServersStayUntilTheirConnectionsEnd deletes a service in one case. In the other
// case, it moves the service to the table.
func TestServersStayUntilTheirConnectionsEnd(t *testing.T) {
	plain := view([]string{"10.1.0.1"}, nil)
	for name, test := range map[string]struct {
		protocol api.Protocol
		next     *api.View
		stays    bool
	}{
		"TCP, deleted": {api.TCP, nil, true},
		"TCP, moved":   {api.TCP, affine(), true},
		"UDP, deleted": {api.UDP, nil, false},
		"UDP, moved":   {api.UDP, affine(func(s *api.Service) { s.Ports[0].Protocol = api.UDP }), true},
	} {
		t.Run(name, func(t *testing.T) {
			servers := fakeServers{}
			n := newMemoryNode(t, netnstest.New(t), servers)
			d, web, at := n.dataplane, id("10.96.0.1:80", test.protocol), netip.MustParseAddrPort("10.1.0.1:8080")
			old := view([]string{"10.1.0.1"}, func(s *api.Service) { s.Ports[0].Protocol = test.protocol })
			n.mustPass(old)
			connected := func(n uint32) {
				to := servers[web].destinations[at]
				if to.connections = n; test.protocol != api.UDP {
					to.established = n
				}
				servers[web].destinations[at] = to
			}
			check := func(step string, exists, local bool) {
				t.Helper()
				if s := servers[web]; (s != nil) != exists || s != nil && s.destinations[at].weight != 0 {
					t.Errorf("%s: the virtual server is %+v, want one without new connections: %t", step, s, exists)
				}
				elements, err := d.table.read(t.Context())
				routes, routesErr := d.local.list()
				if err := errors.Join(err, routesErr); err != nil {
					t.Fatal(err)
				}
				if _, is := routes[web.Addr()]; is != local || elements[addressElement(web.Addr())] != local {
					t.Errorf("%s: the address is local: %t, want %t", step, is, local)
				}
				if elements[web.element()] {
					t.Errorf("%s: the table accepts new connections", step)
				}
			}
			verify := func() {
				t.Helper()
				n.idleAt, n.searchAt = time.Time{}, time.Time{}
				if err := n.Verify(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			connected(1)
			change := &sink.Changes{Services: slices.Values([]sink.Change{{Key: old.Key(), Old: old, New: test.next}})}
			if err := n.Sync(t.Context(), change); err != nil {
				t.Fatal(err)
			}
			check("removed", test.stays, test.stays)
			verify()
			check("verified", test.stays, test.stays)
			if !test.stays {
				return
			}
			n.mustPass() // the first pass of a new process
			if test.protocol == api.UDP {
				return // a new process does not know that the service has moved
			}
			check("a pass", true, true)
			if err := n.deliver(&sink.Changes{}, old); err != nil {
				t.Fatal(err)
			}
			if s := servers[web]; s == nil || s.destinations[at].weight != 1 {
				t.Errorf("after the return of the service, the virtual server is %+v", s)
			}
			if err := n.remove(old); err != nil {
				t.Fatal(err)
			}
			check("removed again", true, true)
			connected(0)
			verify()
			check("without connections", false, false)
			n.mustPass(plain)
		})
	}
}

// serve answers TCP connections in the namespace and closes them.
func serve(t testing.TB, ns *netnstest.Namespace, addr string) {
	t.Helper()
	var l net.Listener
	if err := ns.Do(func() (err error) { l, err = net.Listen("tcp", addr); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			c.Close()
		}
	}()
}

// testMoves moves a service between IPVS and the table while clients connect. A packet may
// reach a chain of the table before the change, and a later chain after it. The kernel refuses
// such a packet, so a few connections may fail.
func testMoves(t *testing.T) {
	n := newNode(t)
	client := netnstest.New(t)
	n.ns.Join(t, "veth0", client, "eth0")
	n.ns.Add(t, "veth0", "192.0.2.1/24")
	client.Add(t, "eth0", "192.0.2.2/24")
	n.ns.Run(t, "ip", "route", "add", "default", "via", "192.0.2.2")
	client.Run(t, "ip", "route", "add", "default", "via", "192.0.2.1")
	n.ns.Set(t, "ipv4/ip_forward=1")
	n.ns.Add(t, "lo", "10.1.0.1/32")
	serve(t, n.ns, "10.1.0.1:8080")
	plain := view([]string{"10.1.0.1"}, nil)
	n.mustPass(plain)
	done, failed := make(chan struct{}), make(chan error, 2)
	connections, failures := [2]int{}, [2]int{}
	for i, ns := range []*netnstest.Namespace{n.ns, client} {
		go func() {
			failed <- ns.Do(func() error {
				for {
					select {
					case <-done:
						return nil
					default:
					}
					c, err := net.DialTimeout("tcp", "10.96.0.1:80", 30*time.Second)
					if err != nil {
						failures[i]++
						continue
					}
					c.Close()
					connections[i]++
				}
			})
		}()
	}
	views := []*api.View{plain, affine()}
	const moves = 20
	for i := range moves {
		c := &sink.Changes{Services: slices.Values([]sink.Change{{Key: plain.Key(), Old: views[i%2], New: views[(i+1)%2]}})}
		if err := n.Sync(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	close(done)
	for range 2 {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d moves, %v connections, %v failures", moves, connections, failures)
	if 4*(failures[0]+failures[1]) > moves {
		t.Errorf("%v connections have failed", failures)
	}
}

// testSharedAddress checks an external IP that is local because of a service in IPVS. The
// endpoint has no route to this IP, so the node's connections must be masqueraded.
func testSharedAddress(t *testing.T) {
	n := newNode(t)
	pod := netnstest.New(t)
	n.ns.Join(t, "veth0", pod, "eth0")
	n.ns.Add(t, "veth0", "192.0.2.1/24")
	pod.Add(t, "eth0", "192.0.2.2/24")
	pod.Run(t, "ip", "route", "add", "203.0.113.1", "via", "192.0.2.1")
	n.ns.Set(t, "ipv4/ip_forward=1")
	serve(t, pod, "192.0.2.2:8080")
	at := func(name, ip string, port int32, edit func(*api.Service)) *api.View {
		return view([]string{"192.0.2.2"}, func(s *api.Service) {
			s.Name, s.IPs.ClusterIPs, s.Ports[0].Port = name, api.NewIPSet(netip.MustParseAddr(ip)), port
			s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("203.0.113.1"))
			edit(s)
		})
	}
	n.mustPass(
		at("a", "10.96.0.1", 80, func(*api.Service) {}),
		at("b", "10.96.0.2", 81, func(s *api.Service) { s.AffinitySeconds = 90 }),
		at("c", "10.96.0.3", 82, func(s *api.Service) { s.Type, s.ExternalTrafficToLocal = api.NodePort, true }),
	)
	for _, addr := range []string{"203.0.113.1:80", "203.0.113.1:81", "203.0.113.1:82"} {
		if err := n.dial(addr); err != nil {
			t.Error(err)
		}
	}
	if err := n.dial("203.0.113.1:83"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("another port: error %v, want connection refused", err)
	}
	// All endpoints of the service c are elsewhere, so its table drops this connection. The table
	// of the backend ipvs, which refuses unknown ports of the address, must not come first.
	if err := pod.Do(func() error {
		c, err := net.DialTimeout("tcp", "203.0.113.1:82", 2*time.Second)
		if err == nil {
			c.Close()
		}
		return err
	}); !os.IsTimeout(err) {
		t.Errorf("policy Local without local endpoints: error %v, want a timeout", err)
	}
}

func testInspect(t *testing.T) {
	n := newNode(t)
	n.mustPass(view([]string{"10.1.0.1", "10.1.0.2"}, nil))
	describe := func(v *api.View, want ...string) {
		t.Helper()
		got, err := n.Inspect(t.Context(), netip.MustParseAddr("10.96.0.1"), api.TCP, 80, v)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range want {
			if !strings.Contains(got, line+"\n") {
				t.Errorf("the description lacks the line %q:\n%s", line, got)
			}
		}
	}
	describe(nil, "virtual server 10.96.0.1:80/TCP scheduler rr", "  endpoint 10.1.0.1:8080 weight 1 connections 0")
	describe(view([]string{"10.1.0.1", "10.1.0.3"}, nil), "  endpoint 10.1.0.1:8080 weight 1 connections 0",
		"+ endpoint 10.1.0.2:8080 weight 1 connections 0", "- endpoint 10.1.0.3:8080")
	n.mustPass(affine())
	describe(affine(), "not served by IPVS: "+unsuitable(affine().Service), "table inet kpng-of-ipvs")
	describe(view(nil, nil), "there is no virtual server 10.96.0.1:80/TCP")
}
