// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nft"
	"github.com/kpng-project/kpng/internal/parameters"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// restrictedView returns the view of a service with one load-balancer IP and many ports.
func restrictedView(name string, ip byte, ports int, ranges []netip.Prefix, endpoints ...string) *api.View {
	return view(name, []string{fmt.Sprintf("10.96.0.%d", ip)}, endpoints, func(s *api.Service) {
		s.Type = api.LoadBalancer
		s.IPs.LoadBalancerIPs = api.NewIPSet(netip.AddrFrom4([4]byte{203, 0, 113, ip}))
		if ranges != nil {
			s.SourceRanges = []api.SourceRanges{{TargetIPs: s.IPs.LoadBalancerIPs, Prefixes: ranges}}
		}
		s.Ports = nil
		for i := range ports {
			s.Ports = append(s.Ports, api.PortMapping{Name: fmt.Sprint(i), Protocol: api.TCP, Port: int32(80 + i), TargetPort: 8080})
		}
	})
}

// manyRanges returns n ranges that do not overlap.
func manyRanges(n int) (list []netip.Prefix) {
	for i := range n {
		list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{10 + byte(i>>16), byte(i >> 8), byte(i), 0}), 24))
	}
	return list
}

// TestSourceRangesAreWrittenOnce checks the number of elements for source ranges, and the
// size of the transactions after changes.
func TestSourceRangesAreWrittenOnce(t *testing.T) {
	var written int
	b, _ := start(t, Options{Options: backends.Options{Observer: &backendtest.Observer{OnWrote: func(n int, _ error) { written += n }}}})
	ranges := manyRanges(1000)
	plain := restrictedView("p", 1, 30, nil, "10.0.0.1", "10.0.0.2")
	a, equal := restrictedView("a", 2, 30, ranges, "10.0.0.1", "10.0.0.2"), restrictedView("b", 3, 30, slices.Concat(ranges[1:], ranges[:1]), "10.0.0.1")
	mustSync(t, b, batchOf(true, set(plain), set(a), set(equal)))
	for m, want := range map[mapID]int{{kindSources, 0, api.IPv4}: 1000, {kindRestricted, matchService, api.IPv4}: 60} {
		if got := b.table.state.digests[m].n; got != want {
			t.Errorf("%s has %d elements, want %d", m.name(), got, want)
		}
	}
	change := func(old, changed *api.View) int {
		t.Helper()
		before := written
		mustSync(t, b, batchOf(false, sink.Change{Old: old, New: changed}))
		return written - before
	}
	flipPlain := change(plain, restrictedView("p", 1, 30, nil, "10.0.0.1"))
	flip := change(a, restrictedView("a", 2, 30, ranges, "10.0.0.1"))
	if flip != flipPlain {
		t.Errorf("a removed endpoint of a service with source ranges needs %d octets, want %d as without ranges", flip, flipPlain)
	}
	a = restrictedView("a", 2, 30, ranges, "10.0.0.1")
	fewer := restrictedView("a", 2, 30, ranges[1:], "10.0.0.1")
	change(a, fewer) // the service a shared its list with another service
	if n := change(fewer, restrictedView("a", 2, 30, ranges[2:], "10.0.0.1")); n > 300 {
		t.Errorf("the removal of a range needs %d octets", n)
	}
	if err := verifyAll(t, b); err != nil {
		t.Error(err)
	}
	if got := b.table.state.digests[mapID{kindSources, 0, api.IPv4}].n; got != 1998 {
		t.Errorf("the two lists have %d elements, want 1998", got)
	}
}

// TestAListOfManyRangesIsWrittenInParts programs a service with more source ranges than
// fit into one transaction. The kernel refuses one of the parts. Only this service fails,
// and nothing of its list is left.
func TestAListOfManyRangesIsWrittenInParts(t *testing.T) {
	largest := 0
	var f faults
	b, _ := start(t, Options{Options: backends.Options{Observer: &backendtest.Observer{OnWrote: func(n int, _ error) { largest = max(largest, n) }}}}, f.use)
	f.refuse("10.200.0.0") // the first address of a range
	many, small := restrictedView("many", 1, 2, manyRanges(65_000), "10.0.0.1"), restrictedView("small", 2, 2, manyRanges(3), "10.0.0.1")
	failed, ok := sink.Acknowledged(b.Sync(t.Context(), batchOf(true, set(many), set(small))))
	if !ok || len(failed) != 1 || failed[many.Key()] == nil {
		t.Fatalf("failed: %v, acknowledged: %t; want one service", failed, ok)
	}
	checkFresh(t, b, set(small))
	f.exchange = nil
	mustSync(t, b, batchOf(false, sink.Change{New: many, Unsure: true}))
	checkFresh(t, b, set(many), set(small))
	if largest > maxOps*40 {
		t.Errorf("a transaction has %d octets", largest)
	}
	mustSync(t, b, batchOf(false, sink.Change{Key: many.Key(), Old: many}))
	checkFresh(t, b, set(small))
}

// TestSourceRangesChangeUnderTraffic changes source ranges again and again while clients
// connect. A client whose address is always in the ranges always gets an answer. A client
// whose address is never in the ranges gets no answer.
func TestSourceRangesChangeUnderTraffic(t *testing.T) {
	w := newPacketWorld(t)
	b := startIn(t, w.node, Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"))}})
	parse := func(text string) (list []netip.Prefix) {
		for _, s := range strings.Fields(text) {
			list = append(list, netip.MustParsePrefix(s))
		}
		return list
	}
	from := func(name string, ip byte, ranges []netip.Prefix) *api.View {
		return restrictedView(name, ip, 1, ranges, "!10.0.1.2")
	}
	lists := [][]netip.Prefix{
		parse("192.0.2.0/24"), parse("192.0.2.0/25 192.0.2.128/25"), parse("192.0.2.2/32 172.16.0.0/12"), parse("128.0.0.0/1"),
		parse("192.0.2.2/32 11.0.0.0/8"), parse("192.0.2.2/32"), parse("192.0.0.0/16 192.0.2.2/32"),
	}
	view := from("web", 5, lists[0])
	mustSync(t, b, batchOf(true, set(view)))
	asker := keepAsking(w.client, "203.0.113.5:80")
	ctx, cancel := context.WithCancel(t.Context())
	refused := make(chan struct{})
	go func() {
		defer close(refused)
		for asked := false; !asked || ctx.Err() == nil; asked = true {
			if answer, err := ask(w.pod2, "203.0.113.5:80", 20*time.Millisecond); err == nil {
				t.Errorf("a client outside of the ranges gets the answer %q", answer)
				break
			}
		}
	}()
	other := from("other", 6, lists[0])
	for i := range 300 {
		next := from("web", 5, lists[i%len(lists)])
		changes := []sink.Change{{Old: view, New: next}}
		if i%5 == 0 { // another service starts or stops using the list
			changed := from("other", 6, lists[(i/5)%len(lists)])
			changes = append(changes, sink.Change{Old: other, New: changed})
			if i == 0 {
				changes[1].Old = nil
			}
			other = changed
		}
		mustSync(t, b, batchOf(false, changes...))
		if view = next; i%7 == 0 {
			if err := b.Verify(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if i%50 == 49 {
			mustSync(t, b, batchOf(true, set(view), set(other)))
		}
	}
	cancel()
	<-refused
	if err := asker.stop(); err != nil {
		t.Errorf("the client in the ranges gets the error %v after %d answers", err, asker.answers.Load())
	}
}

// TestSourceRangesApplyToNodePorts checks node ports of both families, with ranges that
// admit or deny a client. It makes changes, a restart and drift. An established
// connection continues when the ranges stop admitting its client.
func TestSourceRangesApplyToNodePorts(t *testing.T) {
	w := newPacketWorld(t)
	w.client.Add(t, "eth0", "192.0.2.3/24")
	w.client.Add(t, "eth0", "2001:db8::3/64")
	netnstest.Listen(t, w.pod1.Do, ":8081", func(c net.Conn) { io.Copy(c, c) })
	opts := Options{Options: backends.Options{NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"))}}
	b := startIn(t, w.node, opts)
	guarded := func(ranges ...string) *api.View {
		return view("guarded", []string{"10.96.0.1", "fd00::1"}, []string{"!10.0.1.2", "!fd01:1::2"}, func(s *api.Service) {
			s.Type = api.NodePort
			s.Ports[0].NodePort = 30001
			s.Ports = append(s.Ports, api.PortMapping{Name: "echo", Protocol: api.TCP, Port: 81, NodePort: 30002, TargetPort: 8081})
			if ranges != nil {
				s.SourceRanges = []api.SourceRanges{{NodePorts: true}}
			}
			for _, r := range ranges {
				s.SourceRanges[0].Prefixes = append(s.SourceRanges[0].Prefixes, netip.MustParsePrefix(r))
			}
		})
	}
	// The service "other" has an external IP that is an address of the node. Its port is
	// the second node port.
	other := view("other", []string{"10.96.0.2"}, []string{"!10.0.2.2"}, func(s *api.Service) {
		s.IPs.ExternalIPs = api.NewIPSet(netip.MustParseAddr("192.0.2.1"))
		s.Ports[0].Port = 30002
	})
	check := func(about string, from map[string]bool) {
		t.Helper()
		for from, admitted := range from {
			to, timeout := "192.0.2.1:30001", patience
			if strings.Contains(from, ":") {
				to = "[2001:db8::1]:30001"
			}
			if !admitted {
				timeout = 300 * time.Millisecond
			}
			if pod, err := askFrom(w.client, from, to, timeout); (err == nil) != admitted {
				t.Errorf("%s: %s gets the answer %q (%v), want admitted: %t", about, from, pod, err, admitted)
			}
		}
		if err := verifyAll(t, b); err != nil {
			t.Error(err)
		}
	}
	all, even := map[string]bool{"192.0.2.2": true, "192.0.2.3": true, "2001:db8::2": true, "2001:db8::3": true},
		map[string]bool{"192.0.2.2": true, "192.0.2.3": false, "2001:db8::2": true, "2001:db8::3": false}
	odd := map[string]bool{"192.0.2.2": false, "192.0.2.3": true, "2001:db8::2": false, "2001:db8::3": true}

	views := map[string]*api.View{
		"none": guarded(), "even": guarded("192.0.2.2/32", "2001:db8::2/128"), "odd": guarded("192.0.2.3/32", "2001:db8::3/128"), "IPv6": guarded("2001:db8::/64"),
	}
	var others []string
	admitted, _ := parameters.AllExcept([]netip.Prefix{netip.MustParsePrefix("192.0.2.3/32"), netip.MustParsePrefix("2001:db8::3/128")})
	for _, r := range admitted {
		others = append(others, r.String())
	}
	mustSync(t, b, batchOf(true, set(views["none"])))
	check("without ranges", all)
	for _, family := range nft.Families {
		if n := b.table.state.digests[mapID{kindRestricted, matchNodePort, family}].n; n != 0 {
			t.Errorf("%d node ports are restricted without ranges", n)
		}
	}
	view := views["none"]
	change := func(next *api.View) {
		t.Helper()
		mustSync(t, b, batchOf(false, sink.Change{Old: view, New: next}))
		view = next
	}
	change(views["even"])
	check("with ranges", even)

	var open net.Conn
	if err := w.client.Do(func() (err error) { open, err = net.DialTimeout("tcp", "192.0.2.1:30002", patience); return err }); err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	change(views["odd"])
	check("with other ranges", odd)
	open.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(open, "x"); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(open, make([]byte, 1)); err != nil {
		t.Errorf("the established connection ends with its ranges: %v", err)
	}
	change(views["IPv6"])
	check("with ranges of IPv6 only", map[string]bool{"192.0.2.2": false, "192.0.2.3": false, "2001:db8::2": true, "2001:db8::3": true})
	change(guarded(others...))
	check("with denied ranges", even)

	mustSync(t, b, batchOf(false, set(other)))
	if pod, err := askFrom(w.client, "192.0.2.3", "192.0.2.1:30002", patience); pod != "pod2" {
		t.Errorf("the service with the address and port of a node port answers %q (%v), want pod2", pod, err)
	}
	runNFT(t, w.node, "flush map inet kpng restricted-nodeports4\n", "-f", "-")
	if err := verifyAll(t, b); err == nil {
		t.Error("the loss of restricted node ports is not found")
	}
	mustSync(t, b, batchOf(true, set(view), set(other)))
	check("after drift", even)
	if err := b.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	b = startIn(t, w.node, opts)
	mustSync(t, b, batchOf(true, set(view)))
	check("after a restart", even)
	if err := b.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	b = startIn(t, w.node, opts)
	mustSync(t, b, batchOf(true, set(views["none"])))
	check("without ranges after a restart", all)
}
