// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// node is a node whose all-ip can be restarted.
type node struct {
	*netnstest.Namespace
	reconcile.Reconciler
	dataplane *dataplane
	// The function calls returns the arguments with which nft has run since the previous
	// call of the function.
	calls func() []string
}

var program = netnstest.Program("nft")

func newNode(t *testing.T) *node {
	n := &node{Namespace: netnstest.New(t)}
	n.calls, _ = n.Shadow(t, "nft")
	n.restart(t)
	return n
}

func (n *node) restart(t *testing.T) {
	d := newDataplane()
	d.name, n.dataplane = "test", d
	n.Reconciler = reconcile.New(d, reconcile.Options[object, string]{VerifyInterval: -1})
	if err := n.Do(func() error { return d.Start(t.Context()) }); err != nil {
		t.Fatal(err)
	}
}

// pass delivers views in one pass. It returns the services that fail.
func (n *node) pass(t *testing.T, views ...*api.View) sink.Failed {
	t.Helper()
	err := n.Do(func() error {
		return n.Sync(t.Context(), &sink.Changes{First: true, Last: true, Services: func(yield func(sink.Change) bool) {
			for _, v := range views {
				if !yield(sink.Change{Key: v.Key(), New: v}) {
					return
				}
			}
		}})
	})
	failed, ok := sink.Acknowledged(err)
	if !ok {
		t.Fatal(err)
	}
	return failed
}

// ruleset returns all rules and elements. The handle of a rule that was written again differs.
func (n *node) ruleset(t *testing.T) string { return n.Run(t, program, "-a", "list", "ruleset") }

func service(name, ip string, endpoints ...api.Endpoint) *api.View {
	v := view(endpoints...)
	v.Service.Name, v.Service.IPs.ExternalIPs = name, api.NewIPSet(netip.MustParseAddr(ip))
	return v
}

func TestOnlyDifferencesAreWritten(t *testing.T) {
	n := newNode(t)
	all := []*api.View{
		service("a", "10.0.0.1", endpoint("11.0.2.2", true)),
		service("b", "10.0.0.2", endpoint("11.0.2.2", true), endpoint("11.0.2.3", true)),
		service("c", "10.0.0.3"),
		service("d", "1000::1", endpoint("1100::2", true)),
		service("e", "10.0.0.5", endpoint("11.0.2.5", true)),
		service("f", "1000::6", endpoint("1100::6", true)),
	}
	for _, v := range all[4:] {
		v.Service.Annotations = map[string]string{allow: "80-90/tcp, 1-7/udp, 99, icmp, sctp", egress: "true"}
		v.Service.SourceRanges = []api.SourceRanges{{TargetIPs: v.Service.IPs.ExternalIPs, Prefixes: []netip.Prefix{
			netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("2001:db8::/33"), netip.MustParsePrefix("2001:db9::1/128")}}}
	}
	if failed := n.pass(t, all...); failed != nil {
		t.Fatal(failed)
	}
	before := n.ruleset(t)

	n.calls()
	n.restart(t)
	if failed := n.pass(t, all...); failed != nil {
		t.Fatal(failed)
	}
	if calls := n.calls(); len(calls) != 3 {
		t.Errorf("a restart runs nft %d times, want the check at the start and two lists", len(calls))
	}
	if diff := cmp.Diff(before, n.ruleset(t)); diff != "" {
		t.Errorf("a restart changes rules (-before +after):\n%s", diff)
	}

	n.Run(t, program, "delete element ip test pods { 10.0.0.2 . 7 }")
	if err := n.Do(func() error { return n.Verify(t.Context()) }); err != nil {
		t.Fatal(err)
	}
	if calls := n.calls(); len(calls) != 3 {
		t.Errorf("Verify runs nft %d times, want two lists and one change", len(calls))
	}
	if diff := cmp.Diff(before, n.ruleset(t)); diff != "" {
		t.Errorf("a lost element is not repaired (-before +after):\n%s", diff)
	}

	if err := n.Do(func() error { return n.Cleanup(t.Context()) }); err != nil {
		t.Fatal(err)
	}
	if now := n.ruleset(t); now != "" {
		t.Errorf("clean-up leaves:\n%s", now)
	}
}

// The kernel refuses ranges that overlap, also those of a filter and its predecessor.
func TestRangesMayChange(t *testing.T) {
	n := newNode(t)
	n.pass(t)
	for _, test := range []struct{ allow, sources string }{
		{"30000-30010/tcp", "10.0.0.0/8"},
		{"30000-30020/tcp", "10.0.0.0/9"},
		{"30003-30005/tcp", "10.1.0.0/16"},
		{"30004/tcp", "10.1.2.3/32"},
		{"30004-30020/tcp, 1-7/udp", "10.0.0.0/8"},
		{"1-65535/tcp, 7-9/udp", "0.0.0.0/0"},
	} {
		v := service("a", "10.0.0.1", endpoint("11.0.2.2", true))
		v.Service.Annotations = map[string]string{allow: test.allow}
		v.Service.SourceRanges = []api.SourceRanges{{TargetIPs: v.Service.IPs.ExternalIPs, Prefixes: []netip.Prefix{netip.MustParsePrefix(test.sources)}}}
		if failed := n.pass(t, v); failed != nil {
			t.Fatalf("%v: %v", test, failed)
		}
		n.restart(t)
		n.calls()
		if failed := n.pass(t, v); failed != nil {
			t.Fatalf("%v after a restart: %v", test, failed)
		}
		if calls := n.calls(); len(calls) != 2 {
			t.Errorf("%v: a restart runs nft %d times, want two lists", test, len(calls))
		}
	}
}

// The kernel refuses a second element of a set that has room for one.
func TestARefusedElementFailsOneService(t *testing.T) {
	n := newNode(t)
	full, _ := n.dataplane.create("ip")
	n.RunWith(t, strings.Replace(full, "set dropped {", "set dropped { size 1;", 1), program, "-f", "-")
	failed := n.pass(t,
		service("a", "10.0.0.1", endpoint("11.0.2.2", true)),
		service("b", "10.0.0.2"),
		service("c", "10.0.0.3"),
		service("d", "10.0.0.4", endpoint("11.0.2.2", true)))
	if c := (types.NamespacedName{Name: "c"}); len(failed) != 1 || failed[c] == nil {
		t.Errorf("failed: %v, want only service c", failed)
	}
	for _, want := range []string{"10.0.0.1 : 11.0.2.2", "{ 10.0.0.2 }", "10.0.0.4 : 11.0.2.2"} {
		if out := n.ruleset(t); !strings.Contains(out, want) {
			t.Errorf("there is no element %q:\n%s", want, out)
		}
	}
	if failed := n.pass(t, service("c", "10.0.0.3", endpoint("11.0.2.3", true))); failed != nil {
		t.Error(failed)
	}
}

// all-ip recreates tables that are incomplete.
func TestIncompleteTablesAreRecreated(t *testing.T) {
	n := newNode(t)
	a := service("a", "10.0.0.1", endpoint("11.0.2.2", true))
	n.pass(t, a)
	list := func() string {
		return n.Run(t, program, "list", "table", "ip", "test") + n.Run(t, program, "list", "table", "ip6", "test")
	}
	before := list()
	for _, change := range []string{"flush chain ip test postrouting", "flush table ip test", "add element ip test ports { 10.0.0.0/24 . 6 . 80 }", "delete table ip6 test", "flush ruleset"} {
		n.Run(t, program, change)
		if err := n.Do(func() error { return n.Verify(t.Context()) }); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(before, list()); diff != "" {
			t.Errorf("after %q (-want +got):\n%s", change, diff)
		}
	}
}

// The new owner of an external IP may be delivered before the old owner is deleted.
func TestFlowsFollowTheOwnerOfAnAddress(t *testing.T) {
	n := newNode(t)
	a, b := service("a", "10.0.0.1", endpoint("11.0.2.2", true)), service("b", "10.0.0.1", endpoint("11.0.2.3", true))
	n.pass(t, a)
	for _, change := range []sink.Change{{Key: b.Key(), New: b}, {Key: a.Key(), Old: a}} {
		if err := n.Do(func() error {
			return n.Sync(t.Context(), &sink.Changes{Services: func(yield func(sink.Change) bool) { yield(change) }})
		}); err != nil {
			t.Fatal(err)
		}
		if got := n.dataplane.pods[netip.MustParseAddr("10.0.0.1")]; got != "11.0.2.3" {
			t.Errorf("flows may continue to %q, want the pod of service b", got)
		}
	}
}
