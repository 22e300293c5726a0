// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
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

// manyRanges returns n ranges, of which no two overlap.
func manyRanges(n int) (list []netip.Prefix) {
	for i := range n {
		list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{10 + byte(i>>16), byte(i >> 8), byte(i), 0}), 24))
	}
	return list
}

// countWritten counts the octets of the backend's transactions.
func countWritten(b *backend) (written, largest *int) {
	written, largest = new(int), new(int)
	exchange := b.table.conn.Exchange
	b.table.conn.Exchange = func(batch []byte) error {
		*written += len(batch)
		*largest = max(*largest, len(batch))
		return exchange(batch)
	}
	return written, largest
}

// TestSourceRangesAreWrittenOnce checks how many elements source ranges need, and how much
// is written when something changes.
func TestSourceRangesAreWrittenOnce(t *testing.T) {
	b, _ := start(t, Options{})
	written, _ := countWritten(b)
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
		before := *written
		mustSync(t, b, batchOf(false, sink.Change{Old: old, New: changed}))
		return *written - before
	}
	flipPlain := change(plain, restrictedView("p", 1, 30, nil, "10.0.0.1"))
	flip := change(a, restrictedView("a", 2, 30, ranges, "10.0.0.1"))
	if flip != flipPlain {
		t.Errorf("a removed endpoint of a service with source ranges needs %d octets, want %d as without ranges", flip, flipPlain)
	}
	a = restrictedView("a", 2, 30, ranges, "10.0.0.1")
	fewer := restrictedView("a", 2, 30, ranges[1:], "10.0.0.1")
	change(a, fewer) // it had the list in common with another service
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
	b, _ := start(t, Options{})
	_, largest := countWritten(b)
	exchange := b.table.conn.Exchange
	refused := string([]byte{10, 200, 0, 0}) // the first address of a range
	b.table.conn.Exchange = func(batch []byte) error {
		if strings.Contains(string(batch), refused) {
			return &netfilter.Failure{Errno: unix.EINVAL}
		}
		return exchange(batch)
	}
	many, small := restrictedView("many", 1, 2, manyRanges(65_000), "10.0.0.1"), restrictedView("small", 2, 2, manyRanges(3), "10.0.0.1")
	failed, ok := sink.Acknowledged(b.Sync(t.Context(), batchOf(true, set(many), set(small))))
	if !ok || len(failed) != 1 || failed[many.Key()] == nil {
		t.Fatalf("failed: %v, acknowledged: %t; want one service", failed, ok)
	}
	checkFresh(t, b, set(small))
	b.table.conn.Exchange = exchange
	mustSync(t, b, batchOf(false, sink.Change{New: many, Unsure: true}))
	checkFresh(t, b, set(many), set(small))
	if *largest > maxOps*40 {
		t.Errorf("a transaction has %d octets", *largest)
	}
	mustSync(t, b, batchOf(false, sink.Change{Key: many.Key(), Old: many}))
	checkFresh(t, b, set(small))
}

// TestSourceRangesChangeUnderTraffic changes source ranges again and again while clients
// connect. A client whose address is always in the ranges always gets an answer, and one
// whose address never is gets none.
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
	stop := keepAsking(w.client, "203.0.113.5:80")
	ctx, cancel := context.WithCancel(t.Context())
	refused := make(chan int)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			if answer, err := ask(w.pod2, "203.0.113.5:80", 20*time.Millisecond); err == nil {
				t.Errorf("a client outside of the ranges gets the answer %q", answer)
				break
			}
		}
		refused <- n
	}()
	other := from("other", 6, lists[0])
	for i := range 300 {
		next := from("web", 5, lists[i%len(lists)])
		changes := []sink.Change{{Old: view, New: next}}
		if i%5 == 0 { // another service begins to use the list, or ends it
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
	if n := <-refused; n == 0 {
		t.Error("the client outside of the ranges did not try")
	}
	if answers, err := stop(); answers == 0 || err != nil {
		t.Errorf("the client in the ranges gets the error %v after %d answers", err, answers)
	}
}
