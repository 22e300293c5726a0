// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"go.uber.org/goleak"
)

// TestMain selects a lock of iptables that tests of other packages do not use.
func TestMain(m *testing.M) {
	os.Setenv("XTABLES_LOCKFILE", filepath.Join(os.TempDir(), "kpng-iptables-test.lock"))
	goleak.VerifyTestMain(m)
}

// node is the Node object of the tests.
var node = &api.Node{
	Name:      "here",
	Addresses: []api.NodeAddress{{Type: "InternalIP", IP: netip.MustParseAddr("192.0.2.1")}, {Type: "InternalIP", IP: netip.MustParseAddr("2001:db8::1")}},
}

// view returns the result of [backendtest.View] for the node of the tests. The arguments
// ips and endpoints are lists separated by spaces. The service's port has the name
// "http".
func view(name string, ips, endpoints string, edits ...func(*api.Service)) *api.View {
	named := func(s *api.Service) { s.Ports[0].Name = "http" }
	return backendtest.View(node, name, strings.Fields(ips), strings.Fields(endpoints), append([]func(*api.Service){named}, edits...)...)
}

// The functions below can be passed to the function view as edits.

func nodePort(s *api.Service) {
	s.Type, s.Ports[0].NodePort = api.NodePort, 30080
}

func loadBalancer(s *api.Service) {
	nodePort(s)
	s.Type = api.LoadBalancer
	s.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("203.0.113.1"))
	s.IPs.LoadBalancerIPs.Add(netip.MustParseAddr("2001:db8:1::1"))
}

func sourceRanges(s *api.Service) {
	s.SourceRanges = []api.SourceRanges{{
		TargetIPs: s.IPs.LoadBalancerIPs,
		Prefixes:  []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:2::/48")},
	}}
}

func noNodePort(s *api.Service)    { s.Ports[0].NodePort = 0 }
func externalLocal(s *api.Service) { s.ExternalTrafficToLocal = true }
func allPorts(s *api.Service)      { s.AllPorts, s.Ports = true, nil }

func affinity(s *api.Service) {
	s.AffinitySeconds = 100
}

// pass returns a batch that is an entire pass.
func pass(views ...*api.View) *sink.Changes {
	c := batch(views...)
	c.First, c.Last, c.NodeChanged = true, true, true
	return c
}

// batch returns a batch that sets services.
func batch(views ...*api.View) *sink.Changes {
	var list []sink.Change
	for _, v := range views {
		list = append(list, sink.Change{Key: v.Key(), New: v, Unsure: true})
	}
	return &sink.Changes{Services: slices.Values(list), Node: node}
}

// variant is a combination of options that the tests use.
type variant struct {
	flavour      flavour
	withoutIPSet bool
}

func (v variant) String() string {
	if v.withoutIPSet {
		return v.flavour.String() + " without sets"
	}
	return v.flavour.String()
}

var variants = []variant{{flavourNFT, false}, {flavourNFT, true}, {flavourLegacy, false}, {flavourLegacy, true}}

// eachVariant runs a subtest for each variant, in a network namespace of its own.
func eachVariant(t *testing.T, f func(t *testing.T, ns *netnstest.Namespace, v variant)) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) { f(t, netnstest.New(t), v) })
	}
}

// makeBackend makes a backend for a network namespace.
func makeBackend(t testing.TB, ns *netnstest.Namespace, v variant, edit ...func(*options)) *backend {
	t.Helper()
	opts := options{public: Options{
		Flavour: v.flavour.String(), WithoutIPSet: v.withoutIPSet,
		Options: backends.Options{NetNS: ns.FD, NodeAddresses: nodeaddr.Of(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")),
			Conntrack: sink.Func(func(context.Context, *sink.Changes) error { return nil }), Sysctls: backends.IgnoreSysctls},
	}}
	for _, f := range edit {
		f(&opts)
	}
	b, err := newBackend(opts)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// start starts a backend in a network namespace.
func start(t testing.TB, ns *netnstest.Namespace, v variant, edit ...func(*options)) *backend {
	t.Helper()
	b := makeBackend(t, ns, v, edit...)
	backendtest.TakeOver(&b.owner, ns.FD, " ", b.opts.Instance)
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Stop(context.Background()) })
	return b
}

func mustSync(t testing.TB, b *backend, all ...*sink.Changes) {
	t.Helper()
	for _, c := range all {
		if err := b.Sync(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
}

// verify ends the pause after the last comparison, and calls Verify.
func verify(t testing.TB, b *backend) error {
	b.verifyAt = time.Time{}
	return b.Verify(t.Context())
}

// forget makes the next Verify read the rules, even if no other program has changed any
// rules.
func forget(b *backend) {
	for _, t := range b.rulesets {
		t.verified = 0
	}
}

// saveAll returns the rules of a flavour in both families and all sets, without counters
// and comments.
func saveAll(t testing.TB, ns *netnstest.Namespace, flavour flavour) string {
	t.Helper()
	var b strings.Builder
	for _, family := range families {
		for line := range strings.Lines(ns.Run(t, programName(flavour, family, "save"))) {
			if strings.HasPrefix(line, ":") {
				line, _, _ = strings.Cut(line, " [")
				line += "\n"
			}
			if !strings.HasPrefix(line, "#") {
				b.WriteString(line)
			}
		}
	}
	// Each set has a random initial value, which would make the outputs differ.
	sets := strings.Split(regexp.MustCompile(` initval \S+`).ReplaceAllString(ns.Run(t, "ipset", "save"), ""), "\n")
	slices.Sort(sets)
	return b.String() + strings.Join(sets, "\n")
}
