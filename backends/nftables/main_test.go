// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var node = &api.Node{
	Name:      "here",
	Addresses: []api.NodeAddress{{Type: "InternalIP", IP: netip.MustParseAddr("192.0.2.1")}, {Type: "InternalIP", IP: netip.MustParseAddr("2001:db8::1")}},
}

// view returns the result of [backendtest.View] for the node of these tests.
func view(name string, ips, endpoints []string, edit func(*api.Service)) *api.View {
	return backendtest.View(node, name, ips, endpoints, edit)
}

// batchOf returns a batch with the changes in list. If whole is true, the batch is an
// entire pass.
func batchOf(whole bool, list ...sink.Change) *sink.Changes {
	for i := range list {
		c := &list[i]
		if c.Key.Name == "" {
			if c.New != nil {
				c.Key = c.New.Key()
			} else {
				c.Key = c.Old.Key()
			}
		}
	}
	c := inPass(list...)
	if !whole {
		c.Services = slices.Values(list)
	}
	c.First, c.Last, c.NodeChanged = whole, whole, whole
	return c
}

func inPass(list ...sink.Change) *sink.Changes {
	list = slices.Clone(list)
	for i := range list {
		list[i].Unsure = true
	}
	return &sink.Changes{Services: slices.Values(list), Node: node}
}

// set returns a change that adds or replaces a service.
func set(v *api.View) sink.Change { return sink.Change{New: v} }

func start(t testing.TB, opts Options) (*backend, *netnstest.Namespace) {
	t.Helper()
	ns := netnstest.New(t)
	return startIn(t, ns, opts), ns
}

func startIn(t testing.TB, ns *netnstest.Namespace, opts Options) *backend {
	t.Helper()
	opts.NetNS = ns.FD
	opts.Sysctls = backends.IgnoreSysctls
	b, err := newBackend(opts)
	if err != nil {
		t.Fatal(err)
	}
	backendtest.TakeOver(&b.owner, ns.FD, " ", opts.Instance)
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

// verifyAll calls b.Verify and makes it compare the whole table, even if no other program
// has changed a table.
func verifyAll(t testing.TB, b *backend) error {
	b.table.drift = drift{checkedCommits: -1, comparedCommits: -1}
	return b.Verify(t.Context())
}

func runNFT(t testing.TB, ns *netnstest.Namespace, input string, args ...string) string {
	t.Helper()
	return ns.RunWith(t, input, append([]string{"nft"}, args...)...)
}
