// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/ovstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// testNode is a backend with a switch of its own.
type testNode struct {
	testing.TB
	*ovstest.Switch
	backend *backend
	opts    options // of the next backend
	events  struct{ drifted, repaired int }
}

func newNode(t testing.TB, edits ...func(*options)) *testNode {
	t.Helper()
	n := makeNode(t, netnstest.New(t))
	n.start(t, edits...)
	return n
}

// makeNode makes a node whose backend is not started.
func makeNode(t testing.TB, ns *netnstest.Namespace) *testNode {
	t.Helper()
	n := &testNode{TB: t, Switch: ovstest.New(t, ns.Start)}
	n.opts = options{verifyInterval: -1, public: Options{
		Bridge: ovstest.Bridge, RunDir: n.Dir, MasqueradeAddresses: nodeAddrs, HairpinAddresses: hairpinAddrs, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
		Options: backends.Options{
			NodeAddresses: nodeaddr.Of(nodeAddrs...),
			Observer:      &backendtest.Observer{OnDrifted: func() { n.events.drifted++ }, OnRepaired: func() { n.events.repaired++ }},
		},
	}}
	return n
}

// start edits the options and starts a backend, which ends with the test.
func (n *testNode) start(t testing.TB, edits ...func(*options)) {
	t.Helper()
	for _, edit := range edits {
		edit(&n.opts)
	}
	b, err := newBackend(n.opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.backend = b
	t.Cleanup(func() {
		if n.backend == b {
			n.stop(t)
		}
	})
}

func (n *testNode) stop(t testing.TB) {
	t.Helper()
	if err := n.backend.Stop(context.WithoutCancel(t.Context())); err != nil {
		t.Error(err)
	}
}

// restart edits the options and replaces the backend by a new one, as a restart of kpng does.
func (n *testNode) restart(t testing.TB, edits ...func(*options)) {
	t.Helper()
	n.stop(t)
	n.start(t, edits...)
}

var testNodeObject = &api.Node{Name: "here"}

// view returns the view of a service with endpoints at this node ("!ADDRESS") and
// elsewhere.
func view(name, ip string, endpoints []string, edits ...func(*api.Service)) *api.View {
	return backendtest.View(testNodeObject, name, []string{ip}, endpoints, edits...)
}

func withAffinity(s *api.Service) {
	s.AffinitySeconds = 100
}

func key(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

// sync delivers views. A nil view deletes the service whose name is the argument deleted.
func (n *testNode) sync(c sink.Changes, deleted string, views ...*api.View) error {
	c.Services = func(yield func(sink.Change) bool) {
		for _, v := range views {
			if !yield(sink.Change{Key: v.Key(), New: v}) {
				return
			}
		}
		if deleted != "" {
			yield(sink.Change{Key: key(deleted)})
		}
	}
	return n.backend.Sync(n.Context(), &c)
}

func (n *testNode) mustPass(views ...*api.View) {
	n.Helper()
	if err := n.sync(sink.Changes{First: true, Last: true, NodeChanged: true}, "", views...); err != nil {
		n.Fatal(err)
	}
}

func (n *testNode) mustSync(views ...*api.View) {
	n.Helper()
	if err := n.sync(sink.Changes{}, "", views...); err != nil {
		n.Fatal(err)
	}
}

// mustMatch checks that the switch has exactly what the backend has written.
func (n *testNode) mustMatch() {
	n.Helper()
	before := n.events.drifted
	if err := n.backend.dataplane.reconciler.Verify(n.Context()); err != nil || n.events.drifted != before {
		n.Fatalf("the switch has changed: %t, error %v", n.events.drifted != before, err)
	}
}

// mustBe checks the flows and groups of the switch.
func (n *testNode) mustBe(want string) {
	n.Helper()
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(n.Listing(n), "\n")); diff != "" {
		n.Fatalf("the switch differs (-want +got):\n%s", diff)
	}
}

// examples returns services with all kinds of flows.
func examples() []*api.View {
	return []*api.View{
		view("affine", "10.96.0.1", []string{"!10.244.1.1", "10.244.2.1"}, withAffinity),
		view("dual", "fd00:10:96::1", []string{"!fd00:244::1", "fd00:244::2"}, withAffinity, func(s *api.Service) {
			s.IPs.ClusterIPs.Add(netip.MustParseAddr("10.96.0.2"))
		}),
		view("external", "10.96.0.3", []string{"!10.244.1.1", "10.244.2.1"}, func(s *api.Service) {
			s.Type = api.LoadBalancer
			s.ExternalTrafficToLocal = true
			s.Ports[0].NodePort = 30080
			s.IPs.ExternalIPs.Add(netip.MustParseAddr("198.18.0.1"))
			s.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("198.18.0.2"))
			s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/25")}}}
		}),
		view("none", "10.96.0.4", nil),
	}
}

// TestListingEqualsWhatWasWritten checks that the backend encodes flows as the switch
// does. Otherwise it would find differences each time.
func TestListingEqualsWhatWasWritten(t *testing.T) {
	n := newNode(t)
	n.mustPass(examples()...)
	if d := n.backend.dataplane; d.flows < 60 || len(d.groups) < 4 {
		t.Errorf("%d flows and %d groups were written", d.flows, len(d.groups))
	}
	n.mustMatch()
}

// TestRestartWritesNothing checks that a restarted backend keeps correct flows and groups.
// The switch would report a shorter duration for flows that were written again.
func TestRestartWritesNothing(t *testing.T) {
	n := newNode(t)
	n.mustPass(examples()...)
	before := n.Listing(t)
	time.Sleep(time.Second)
	restarted := time.Now()
	n.restart(t)
	n.mustPass(examples()...)
	n.mustBe(before)
	elapsed := time.Since(restarted).Seconds()
	durations := regexp.MustCompile(`duration=([0-9.]+)s`).FindAllStringSubmatch(n.Ofctl(t, "dump-flows", "cookie=0x6b706e0000000000/-1")+n.Ofctl(t, "dump-group-stats"), -1)
	if len(durations) < 60 {
		t.Errorf("the switch lists %d times", len(durations))
	}
	for _, d := range durations {
		if seconds, err := strconv.ParseFloat(d[1], 64); err != nil || seconds <= elapsed {
			t.Errorf("a flow or group exists for %s s, and the restart was %.3f s ago", d[1], elapsed)
		}
	}
}

func TestRemovedServicesLeaveNothing(t *testing.T) {
	n := newNode(t)
	n.mustPass()
	empty := n.Listing(t)
	for _, v := range examples() {
		n.mustSync(v)
		n.mustMatch()
	}
	for _, v := range examples() {
		if err := n.sync(sink.Changes{}, v.Service.Name); err != nil {
			t.Fatal(err)
		}
	}
	n.mustBe(empty)
	n.mustMatch()
	// A pass deletes services that it does not contain.
	n.mustSync(examples()...)
	n.mustPass()
	n.mustBe(empty)
}

func TestServicesSwapAddresses(t *testing.T) {
	n := newNode(t)
	one, two := []string{"10.244.2.1"}, []string{"10.244.2.2"}
	n.mustPass(view("a", "10.96.0.2", one), view("b", "10.96.0.1", two))
	want := n.Listing(t)
	n.mustPass(view("a", "10.96.0.1", one), view("b", "10.96.0.2", two))
	n.mustSync(view("a", "10.96.0.2", one), view("b", "10.96.0.1", two))
	n.mustMatch()
	n.mustBe(want)
}

// TestManyEndpoints uses a service with more endpoints than fit into one message.
func TestManyEndpoints(t *testing.T) {
	n := newNode(t)
	endpoints := func(count int) (all []string) {
		for i := range count {
			all = append(all, netip.AddrFrom4([4]byte{10, 245, byte(i >> 8), byte(i)}).String())
		}
		return all
	}
	for _, count := range []int{2000, 2001, 1999, 3, 900} {
		v := view("web", "10.96.0.1", endpoints(count))
		if count == 2000 {
			n.mustPass(v)
		}
		n.mustSync(v)
		n.mustMatch()
		if got := strings.Count(n.Ofctl(t, "dump-groups"), "nat(dst="); got != count {
			t.Errorf("%d endpoints, want %d", got, count)
		}
	}
}

func TestChangesByOthersAreRepairedAndForeignFlowsStay(t *testing.T) {
	n := newNode(t)
	foreign := "cookie=0x5,table=0,priority=7,ip actions=resubmit(,100)\n" +
		"cookie=0x5,table=100,priority=1,ip actions=drop\n" + // in a table of the backend
		"cookie=0x5,table=110,priority=7,ip actions=group:5\n"
	n.Ofctl(t, "add-group", "group_id=5,type=select,bucket=actions=drop")
	n.OfctlWith(t, foreign, "add-flows", "-")
	n.mustPass(examples()...)
	want := n.Listing(t)
	repair := func(name string) {
		t.Helper()
		if n.Listing(t) == want {
			t.Errorf("%s: the switch has not changed", name)
		}
		if err := n.backend.Verify(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, damage := range map[string]func(){
		"all flows deleted":        func() { n.Ofctl(t, "del-flows", "cookie=0x6b706e0000000000/0xffffffff00000000") },
		"all groups deleted":       func() { n.Ofctl(t, "del-groups", fmt.Sprintf("group_id=%d", n.someGroup())) },
		"a flow changed":           func() { n.Ofctl(t, "mod-flows", "table=105,ip actions=drop") },
		"a flow added":             func() { n.Ofctl(t, "add-flow", "cookie=0x6b706e0000000000,table=105,priority=9999,ip actions=drop") },
		"a flow with other cookie": func() { n.Ofctl(t, "add-flow", "cookie=0x9,table=101,priority=10,ip actions=drop") },
		"a bucket removed": func() {
			n.Ofctl(t, "remove-buckets", fmt.Sprintf("group_id=%d,command_bucket_id=first", n.someGroup()))
		},
	} {
		damage()
		repair(name)
		n.mustBe(want)
	}
	// If a group has lost its seed, a group with another ID replaces it.
	n.Ofctl(t, "mod-group", fmt.Sprintf("group_id=%d,type=all", n.someGroup()))
	repair("a group changed")
	n.mustMatch()
}

// TestForeignGroupsOfAnySize checks that the backend never lists groups of other programs.
// Open vSwitch ends if it has to list a group of more than 64 KB.
func TestForeignGroupsOfAnySize(t *testing.T) {
	n := newNode(t)
	daemon := n.Daemon.Pid
	n.mustPass(examples()...)
	buckets := func(first, last int) (text string) {
		for i := first; i < last; i++ {
			text += fmt.Sprintf(",bucket=bucket_id:%d,weight:1,actions=set_field:10.9.%d.%d->ip_dst,resubmit(,111)", i, i/250, i%250+1)
		}
		return text
	}
	n.OfctlWith(t, "group_id=7,type=select"+buckets(0, 1200)+"\n", "add-group", "-")
	n.OfctlWith(t, "group_id=7,command_bucket_id=last"+buckets(1200, 2400)+"\n", "insert-buckets", "-")
	n.mustMatch()
	n.restart(t)
	n.mustPass(examples()...)
	n.mustMatch()
	if err := n.backend.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if flows := n.Flows(t); strings.Contains(flows, "table=105") {
		t.Errorf("clean-up left flows:\n%s", flows)
	}
	if pid, err := os.ReadFile(filepath.Join(n.Dir, "ovs-vswitchd.pid")); err != nil || strings.TrimSpace(string(pid)) != strconv.Itoa(daemon) {
		t.Errorf("ovs-vswitchd has ended: process %s, before %d, error %v", pid, daemon, err)
	}
	n.Ofctl(t, "del-groups", "group_id=7") // so that nothing lists it when the test ends
}

// TestCleanupFindsGroupsWithoutFlows deletes groups that no flow names.
func TestCleanupFindsGroupsWithoutFlows(t *testing.T) {
	n := newNode(t)
	before := n.Listing(t)
	var all []*api.View
	for i := range 300 {
		all = append(all, numbered(i, 1, 1))
	}
	n.mustPass(all...)
	n.stop(t)
	n.Ofctl(t, "del-flows", "cookie=0x6b706e0000000000/-1")
	n.start(t)
	if err := n.backend.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustBe(before)
}

// TestSwitchReportsDeletedFlows checks that Verify notices changes by other programs
// before the next periodic comparison. Verify ignores changes by the backend.
func TestSwitchReportsDeletedFlows(t *testing.T) {
	n := newNode(t, func(o *options) { o.verifyInterval = time.Hour })
	n.mustPass(examples()...)
	verify := func() {
		t.Helper()
		if err := n.backend.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	n.mustSync(view("none", "10.96.0.4", []string{"10.244.2.1"}))
	n.Ofctl(t, "add-flow", "cookie=0x5,table=100,priority=1,ip actions=drop")
	n.mustMatch()
	select {
	case <-n.backend.dataplane.conn.Changed():
		t.Fatal("changes by the backend and of foreign flows are reported")
	default:
	}
	n.mustPass(examples()...)
	want := n.Listing(t)
	for _, damage := range []struct {
		name string
		do   func()
	}{
		{"a flow of a service", func() { n.Ofctl(t, "del-flows", "table=105,ip,nw_dst=10.96.0.1") }},
		{"all flows", func() { n.Ofctl(t, "del-flows", "cookie=0x6b706e0000000000/-1") }},
		{"a flow of the first table", func() { n.Ofctl(t, "del-flows", "table=100,ip,nw_dst=192.168.1.2") }},
		// A deleted group takes flows with it.
		{"a deleted group", func() { n.Ofctl(t, "del-groups", fmt.Sprintf("group_id=%d", n.someGroup())) }},
	} {
		n.restart(t)
		n.mustPass(examples()...)
		verify() // the next comparison is after an hour
		before := n.events.repaired
		damage.do()
		ovstest.Await(t, damage.name, func() bool { verify(); return n.events.repaired > before })
		n.mustBe(want)
	}
}

// TestSwitchThatDoesNotReportChanges runs the backend with a switch that does not know the
// request for reports. Open vSwitch 2.17 is such a switch.
func TestSwitchThatDoesNotReportChanges(t *testing.T) {
	const multipart, watch, badRequest, badMultipart = 18, 16, 1, 2
	n := newNode(t, throughProxy(t, func(m []byte) []byte {
		if m[1] != multipart || m[9] != watch {
			return nil
		}
		return []byte{0, badRequest, 0, badMultipart}
	}))
	n.mustPass(examples()...)
	n.mustMatch()
}

// someGroup returns the ID of a group of the backend with several buckets.
func (n *testNode) someGroup() uint32 {
	for id, g := range n.backend.dataplane.groups {
		if len(g.buckets) > 1 {
			return id
		}
	}
	n.Fatal("no group has several buckets")
	return 0
}

func TestRefusedServiceFailsAlone(t *testing.T) {
	n := newNode(t)
	n.mustPass(view("a", "10.96.0.1", []string{"10.244.2.1"}))
	// The table of frontends gets room for the flows of only one more service.
	limit := strings.Count(n.Ofctl(t, "dump-flows", "table=105"), "priority=") + 4
	n.Vsctl(t, "--", "--id=@limit", "create", "Flow_Table", fmt.Sprintf("flow_limit=%d", limit), "overflow_policy=refuse",
		"--", "set", "bridge", ovstest.Bridge, "flow_tables:105=@limit")
	b, c := view("b", "10.96.0.2", []string{"10.244.2.2"}), view("c", "10.96.0.3", []string{"10.244.2.3"})
	changed := view("a", "10.96.0.1", []string{"10.244.2.9"})
	err := n.sync(sink.Changes{}, "", changed, b, c)
	failed, ok := sink.Acknowledged(err)
	if !ok || len(failed) == 0 || failed[key("a")] != nil {
		t.Fatalf("error %v, want that only services without room fail", err)
	}
	for _, err := range failed {
		if !strings.Contains(err.Error(), "table is full") {
			t.Errorf("error %q does not say that the table is full", err)
		}
	}
	if groups := n.Ofctl(t, "dump-groups"); !strings.Contains(groups, "10.244.2.9") {
		t.Errorf("the changed endpoint of service a is missing:\n%s", groups)
	}
	n.Vsctl(t, "clear", "bridge", ovstest.Bridge, "flow_tables")
	n.mustSync(b, c)
	n.mustMatch()
}

// TestServiceWithoutRoomForGroupsFailsAlone checks what happens if the switch has no room
// for a group. A test could not reach Open vSwitch's limit for groups, so a proxy in front
// of the switch refuses to add a group.
func TestServiceWithoutRoomForGroupsFailsAlone(t *testing.T) {
	var full atomic.Bool
	full.Store(true)
	refused := netip.MustParseAddr("10.244.2.2").AsSlice()
	const groupMod, bundleAdd, groupModFailed, outOfGroups = 15, 34, 6, 3
	n := newNode(t, throughProxy(t, func(m []byte) []byte {
		if full.Load() && m[1] == bundleAdd && m[17] == groupMod && bytes.Contains(m, refused) {
			return []byte{0, groupModFailed, 0, outOfGroups}
		}
		return nil
	}))
	a, b := view("a", "10.96.0.1", []string{"10.244.2.1"}), view("b", "10.96.0.2", []string{"10.244.2.2"})
	err := n.sync(sink.Changes{First: true, Last: true, NodeChanged: true}, "", a, b)
	failed, ok := sink.Acknowledged(err)
	if !ok || len(failed) != 1 || failed[key("b")] == nil || !strings.Contains(failed[key("b")].Error(), "no room for more groups") {
		t.Fatalf("error %v, want that only service b fails, because there is no room for groups", err)
	}
	n.mustMatch()
	if groups := n.Ofctl(t, "dump-groups"); !strings.Contains(groups, "10.244.2.1") || strings.Contains(groups, "10.244.2.2") {
		t.Errorf("want only the endpoint of service a:\n%s", groups)
	}
	if err := n.backend.Verify(t.Context()); err != nil {
		t.Errorf("Verify requests a new pass immediately, although a service still fails: %v", err)
	}
	full.Store(false)
	n.mustSync(b)
	n.mustMatch()
	if groups := n.Ofctl(t, "dump-groups"); !strings.Contains(groups, "10.244.2.2") {
		t.Errorf("the endpoint of service b is missing:\n%s", groups)
	}

	// In a pass, a service that fails keeps its flows.
	n.mustSync(view("b", "10.96.0.2", []string{"10.244.2.3"}))
	full.Store(true)
	moved := view("b", "10.96.0.9", []string{"10.244.2.2", "10.244.2.3"})
	err = n.sync(sink.Changes{First: true, Last: true, NodeChanged: true}, "", a, moved)
	if failed, ok := sink.Acknowledged(err); !ok || len(failed) != 1 || failed[key("b")] == nil {
		t.Fatalf("error %v, want that only service b fails", err)
	}
	if flows := n.Flows(t); !strings.Contains(flows, "nw_dst=10.96.0.2,") {
		t.Errorf("service b has lost its flows:\n%s", flows)
	}
	full.Store(false)
	n.mustPass(a, moved)
	if flows := n.Flows(t); strings.Contains(flows, "nw_dst=10.96.0.2,") || !strings.Contains(flows, "nw_dst=10.96.0.9,") {
		t.Errorf("service b has not moved:\n%s", flows)
	}

	// Outside of a pass, the flows from before the failure are deleted when the service
	// succeeds.
	n.mustSync(view("b", "10.96.0.9", []string{"10.244.2.3"}))
	full.Store(true)
	back := view("b", "10.96.0.2", []string{"10.244.2.2", "10.244.2.4"})
	if failed, ok := sink.Acknowledged(n.sync(sink.Changes{}, "", back)); !ok || len(failed) != 1 {
		t.Fatalf("failed services %v, want service b", failed)
	}
	full.Store(false)
	n.mustSync(back)
	if flows := n.Flows(t); strings.Contains(flows, "nw_dst=10.96.0.9,") || !strings.Contains(flows, "nw_dst=10.96.0.2,") {
		t.Errorf("service b has not moved back:\n%s", flows)
	}
}

// throughProxy makes the backend connect to a proxy in front of the switch. For each message,
// the proxy calls errorFor. If that returns an error, the proxy answers with this error
// instead of the switch.
func throughProxy(t *testing.T, errorFor func(message []byte) []byte) func(*options) {
	return func(o *options) {
		dir := o.RunDir
		o.RunDir = t.TempDir()
		proxy(t, o.socket(), dir, func(message []byte) ([]byte, bool) { return errorFor(message), false })
	}
}

// proxy listens at a socket in place of the switch with the directory dir. For each message,
// it calls handle. If handle returns a code, the proxy answers with this error instead of
// the switch. If the result "lost" is true, the proxy closes the connection afterwards.
func proxy(t testing.TB, socket, dir string, handle func(message []byte) (code []byte, lost bool)) {
	t.Helper()
	const typeError = 1
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var connections sync.WaitGroup
	t.Cleanup(func() { l.Close(); connections.Wait() })
	serve := func(c net.Conn) {
		defer c.Close()
		s, err := net.Dial("unix", filepath.Join(dir, filepath.Base(socket)))
		if err != nil {
			t.Error(err)
			return
		}
		defer s.Close()
		context.AfterFunc(t.Context(), func() { c.Close() })
		connections.Go(func() { io.Copy(c, s) })
		for {
			message := make([]byte, 8)
			if _, err := io.ReadFull(c, message); err != nil {
				return
			}
			message = append(message, make([]byte, int(binary.BigEndian.Uint16(message[2:]))-8)...)
			if _, err := io.ReadFull(c, message[8:]); err != nil {
				return
			}
			code, lost := handle(message)
			if code != nil {
				c.Write(append([]byte{message[0], typeError, 0, byte(8 + len(code)), message[4], message[5], message[6], message[7]}, code...))
			} else if _, err := s.Write(message); err != nil {
				return
			}
			if lost {
				return
			}
		}
	}
	connections.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			connections.Go(func() { serve(c) })
		}
	})
}

// TestHangingSwitch stops the switch without ending its connections.
func TestHangingSwitch(t *testing.T) {
	n := newNode(t)
	n.mustPass(examples()...)
	want := n.Listing(t)
	if err := n.Daemon.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	changed := view("affine", "10.96.0.1", []string{"10.244.2.9"})
	err := n.backend.Sync(ctx, &sink.Changes{Services: func(yield func(sink.Change) bool) { yield(sink.Change{Key: changed.Key(), New: changed}) }})
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, sink.ErrStartOver) {
		t.Errorf("error %v, want the deadline, and a new pass", err)
	}
	if err := n.Daemon.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	n.mustPass(examples()...)
	n.mustBe(want)
}

func TestBridgeWithoutOpenFlow15(t *testing.T) {
	n := newNode(t)
	n.Vsctl(t, "set", "bridge", ovstest.Bridge, "protocols=OpenFlow13")
	err := n.sync(sink.Changes{First: true, Last: true}, "")
	if err == nil || !strings.Contains(err.Error(), "OpenFlow15") {
		t.Errorf("error %v does not say that the bridge needs OpenFlow15", err)
	}
}

func TestCleanupLeavesOnlyForeignFlows(t *testing.T) {
	n := newNode(t)
	n.Ofctl(t, "add-group", "group_id=5,type=select,bucket=actions=drop")
	n.Ofctl(t, "add-flow", "cookie=0x5,table=110,priority=7,ip actions=group:5")
	before := n.Listing(t)
	n.mustPass(examples()...)
	n.Ofctl(t, "add-flow", fmt.Sprintf("cookie=%#x,table=107,ip actions=drop", n.backend.opts.cookie()|5))
	for range 2 {
		if err := n.backend.Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.mustBe(before)
	}
}

// TestRestartedSwitch kills the switch while a driver runs. The new switch must get
// everything.
func TestRestartedSwitch(t *testing.T) {
	n := newNode(t)
	n.mustPass(examples()...)
	want := n.Listing(t)
	for range 2 {
		n.Kill()
		ovstest.Await(t, "the lost connection is noticed", func() bool { return errors.Is(n.backend.Verify(t.Context()), sink.ErrStartOver) })
		done := make(chan error)
		go func() { done <- n.sync(sink.Changes{First: true, Last: true}, "", examples()...) }()
		n.StartDaemon(t)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		n.mustBe(want)
	}
}

func TestStaleConnectionsOfListing(t *testing.T) {
	o := options{public: Options{Zone: 27392}}
	existing, err := o.parseConnections(`tcp,orig=(src=203.0.113.10,dst=198.18.1.4,sport=1,dport=80),reply=(src=10.244.2.13,dst=203.0.113.10,sport=8080,dport=1),zone=27392,mark=1,protoinfo=(state=TIME_WAIT)
udp,orig=(src=203.0.113.10,dst=198.18.1.4,sport=2,dport=80),reply=(src=10.244.2.13,dst=203.0.113.10,sport=8080,dport=2),zone=27392,mark=1
udp,orig=(src=203.0.113.10,dst=198.18.1.4,sport=3,dport=80),reply=(src=10.244.2.14,dst=203.0.113.10,sport=8080,dport=3),zone=27392
udp,orig=(src=fd00::1,dst=fd00:10::4,sport=4,dport=53),reply=(src=fd00::2,dst=fd00::1,sport=5353,dport=4),zone=27392,mark=1
`, tcp, udp)
	if err != nil || len(existing) != 4 {
		t.Fatalf("%d connections of four, error %v", len(existing), err)
	}
	addr := netip.MustParseAddrPort
	of := func(source, destination, endpoint string) openflow.Connections {
		c := openflow.Connections{Zone: o.Zone, Protocol: udp, Destination: addr(destination)}
		if source != "" {
			c.Source = addr(source)
		}
		if endpoint != "" {
			c.Endpoint = addr(endpoint)
		}
		return c
	}
	got := existing.matching(staleConnections{
		of("", "198.18.1.4:80", "10.244.2.13:8080"): true, // one endpoint
		of("", "198.18.1.4:81", "10.244.2.14:8080"): true, // another port
		of("", "[fd00:10::4]:53", ""):               true, // all endpoints
	}, nil)
	want := staleConnections{of("203.0.113.10:2", "198.18.1.4:80", ""): true, of("[fd00::1]:4", "[fd00:10::4]:53", ""): true}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
