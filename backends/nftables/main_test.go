// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"bytes"
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
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

// makeBackend makes a backend for a network namespace. It stops the backend when the test ends.
func makeBackend(t testing.TB, ns *netnstest.Namespace, public Options, edit ...func(*options)) *backend {
	t.Helper()
	opts := options{public: public}
	opts.NetNS = ns.FD
	opts.Sysctls = backends.IgnoreSysctls
	for _, f := range edit {
		f(&opts)
	}
	b, err := newBackend(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Stop(context.Background()) })
	return b
}

func start(t testing.TB, opts Options, edit ...func(*options)) (*backend, *netnstest.Namespace) {
	t.Helper()
	ns := netnstest.New(t)
	return startIn(t, ns, opts, edit...), ns
}

func startIn(t testing.TB, ns *netnstest.Namespace, opts Options, edit ...func(*options)) *backend {
	t.Helper()
	b := makeBackend(t, ns, opts, edit...)
	backendtest.TakeOver(&b.owner, ns.FD, " ", opts.Instance)
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return b
}

// faults are between a backend and the kernel. Tests change the fields between calls of the
// backend.
type faults struct {
	// exchange, if not nil, is the option of this name.
	exchange func(batch []byte, send func([]byte) error) error
	// ahead is how far the clock of the backend is ahead.
	ahead time.Duration
}

func (f *faults) use(o *options) {
	o.exchange = func(batch []byte, send func([]byte) error) error {
		if f.exchange == nil {
			return send(batch)
		}
		return f.exchange(batch, send)
	}
	o.now = func() time.Time { return time.Now().Add(f.ahead) }
}

// refuse makes the kernel refuse transactions with an address.
func (f *faults) refuse(addr string) {
	encoded := netip.MustParseAddr(addr).AsSlice()
	f.exchange = func(batch []byte, send func([]byte) error) error {
		if bytes.Contains(batch, encoded) {
			return &netfilter.Failure{Errno: unix.EINVAL}
		}
		return send(batch)
	}
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
