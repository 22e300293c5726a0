// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// bpffsVariable is the environment variable with the mount point of a BPF file system for
// tests. The processes of the conformance kit inherit it.
const bpffsVariable = "KPNG_TEST_BPFFS"

// mountBPFFS mounts a BPF file system until the test ends, and returns its mount point.
// In a process of the conformance kit, it returns the mount point of the test that
// started the process.
func mountBPFFS(t testing.TB) string {
	t.Helper()
	netnstest.NeedRoot(t)
	if dir := os.Getenv(bpffsVariable); dir != "" {
		return dir
	}
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		t.Fatalf("mount a BPF file system, which needs root: %v", err)
	}
	os.Setenv(bpffsVariable, dir)
	t.Cleanup(func() {
		os.Unsetenv(bpffsVariable)
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount the BPF file system: %v", err)
		}
	})
	return dir
}

// node is a backend with a network namespace and a cgroup of its own.
type node struct {
	*backend
	t     testing.TB
	ns    *netnstest.Namespace
	opts  options
	below sink.Sink
	clock *skippingClock
}

// newNode starts a backend without another sink, so only the programs translate
// connections.
func newNode(t testing.TB, opts Options) *node {
	t.Helper()
	return newNodeAbove(t, noProxy, options{public: opts})
}

// newNodeAbove starts a backend above another sink.
func newNodeAbove(t testing.TB, below sink.Sink, opts options) *node {
	t.Helper()
	n := &node{t: t, ns: netnstest.New(t), opts: opts, below: below, clock: &skippingClock{}}
	n.opts.verifyInterval, n.opts.now = -1, n.clock.now
	n.ns.Cgroup = netnstest.NewCgroup(t)
	n.opts.BPFFS, n.opts.Cgroup = mountBPFFS(t), n.ns.Cgroup.Dir
	n.restart()
	t.Cleanup(n.remove)
	return n
}

// skippingClock is the real clock plus the time that a test has skipped.
type skippingClock struct{ skipped atomic.Int64 }

func (c *skippingClock) skip(d time.Duration) { c.skipped.Add(int64(d)) }

func (c *skippingClock) now() time.Time { return time.Now().Add(time.Duration(c.skipped.Load())) }

// remove stops the backend and cleans up.
func (n *node) remove() {
	n.Stop(context.Background())
	if err := n.Cleanup(context.Background()); err != nil {
		n.t.Errorf("clean up: %v", err)
	}
}

// restart makes a new backend, as a new process does.
func (n *node) restart() {
	n.t.Helper()
	if n.backend != nil {
		if err := n.Stop(n.t.Context()); err != nil {
			n.t.Error(err)
		}
	}
	if err := n.tryStart(); err != nil {
		n.t.Fatal(err)
	}
}

// tryStart starts a new backend, and returns the error of Start.
func (n *node) tryStart() error {
	n.t.Helper()
	b, err := newBackend(n.below, n.opts)
	if err != nil {
		n.t.Fatal(err)
	}
	n.backend = b
	return n.ns.Do(func() error { return b.Start(n.t.Context()) })
}

// useNFTables restarts the backend above the nftables backend. The namespace gets a route
// to cluster IPs. So packets reach the rules if the programs do not translate them.
func (n *node) useNFTables() {
	n.t.Helper()
	n.ns.Route(n.t, "10.96.0.0/16", "", "lo")
	b, err := nftables.New(nftables.Options{Options: backends.Options{NetNS: n.ns.FD, Sysctls: backends.IgnoreSysctls, Conntrack: noProxy}})
	if err != nil {
		n.t.Fatal(err)
	}
	n.below = b
	n.restart()
}

// noProxy is a sink that does nothing.
var noProxy = sink.Func(func(context.Context, *sink.Changes) error { return nil })

// pass calls Sync with one batch, a complete pass that delivers views. Sync must succeed.
func (n *node) pass(views ...*api.View) {
	n.t.Helper()
	n.deliver(&sink.Changes{First: true, Last: true, NodeChanged: true}, views...)
}

// set calls Sync with these views as changes. Sync must succeed.
func (n *node) set(views ...*api.View) {
	n.t.Helper()
	n.deliver(&sink.Changes{}, views...)
}

// delete delivers the deletion of a service.
func (n *node) delete(name string) {
	n.t.Helper()
	key := types.NamespacedName{Namespace: "default", Name: name}
	n.sync(&sink.Changes{Services: slices.Values([]sink.Change{{Key: key}})})
}

func (n *node) deliver(c *sink.Changes, views ...*api.View) {
	n.t.Helper()
	c.Services = func(yield func(sink.Change) bool) {
		for _, v := range views {
			if !yield(sink.Change{Key: v.Key(), New: v, Unsure: true}) {
				return
			}
		}
	}
	n.sync(c)
}

func (n *node) sync(c *sink.Changes) {
	n.t.Helper()
	if err := n.Sync(n.t.Context(), c); err != nil {
		n.t.Fatal(err)
	}
}

// view calls [backendtest.View] for a service with port 80 of TCP and UDP.
func view(name string, ips, endpoints []string, edit func(*api.Service)) *api.View {
	withUDP := func(s *api.Service) {
		s.Ports = []api.PortMapping{
			{Name: "tcp", Protocol: api.TCP, Port: 80, TargetPort: 8080},
			{Name: "udp", Protocol: api.UDP, Port: 80, TargetPort: 8080},
		}
	}
	return backendtest.View(nil, name, ips, endpoints, withUDP, edit)
}

func withAffinity(seconds int32) func(*api.Service) {
	return func(s *api.Service) {
		s.AffinitySeconds = seconds
	}
}
