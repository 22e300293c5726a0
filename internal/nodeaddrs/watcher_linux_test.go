// SPDX-License-Identifier: Apache-2.0

package nodeaddrs_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/nodeaddrs"
	"go.uber.org/goleak"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// machine returns a namespace with three interfaces. The default route uses the interface
// world, and a proxy has added addresses of services to the interface kube-ipvs0.
func machine(t *testing.T) *netnstest.Namespace {
	n := netnstest.New(t)
	for name, list := range map[string][]string{
		"world":      {"10.0.0.1/24", "fd00::1/64"},
		"other":      {"10.1.0.1/24", "fd01::1/64"},
		"kube-ipvs0": {"10.96.0.1/32", "fd96::1/128"},
	} {
		n.Stub(t, name)
		for _, a := range list {
			n.Add(t, name, a)
		}
	}
	n.Route(t, "default", "10.0.0.254", "world")
	n.Route(t, "default", "fd00::ff", "world")
	return n
}

// run starts a new watcher, which runs until the test ends.
func run(t *testing.T, clock clock.WithTicker, opts nodeaddrs.Options) *nodeaddrs.Watcher {
	t.Helper()
	w, err := nodeaddrs.NewWatcher(opts, clock)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stop := w.Start(ctx)
	cancel() // the end of ctx must not stop the watcher
	t.Cleanup(stop)
	return w
}

// await waits until the method Addresses of the watcher returns the addresses want.
func await(t *testing.T, w *nodeaddrs.Watcher, want ...string) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		got, changed := w.Addresses()
		if equal(got, addrs(want...)) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			compare(t, addrs(want...), got)
			return
		}
	}
}

func equal(a, b []netip.Addr) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func TestAddressesAreFollowed(t *testing.T) {
	n := machine(t)
	w := run(t, settling{clocktesting.NewFakeClock(time.Now())}, nodeaddrs.Options{
		NetNS: n.FD, Selection: []string{"all"}, ExcludeInterfaces: []string{"kube-ipvs0", "not-there"},
	})
	await(t, w, "10.0.0.1", "10.1.0.1", "fd00::1", "fd01::1")
	n.Add(t, "other", "10.1.0.2/24")
	await(t, w, "10.0.0.1", "10.1.0.1", "10.1.0.2", "fd00::1", "fd01::1")
	n.Remove(t, "world", "fd00::1/64")
	await(t, w, "10.0.0.1", "10.1.0.1", "10.1.0.2", "fd01::1")
}

func TestTentativeAddressIsNotServed(t *testing.T) {
	n := machine(t)
	n.Stub(t, "new")
	n.Set(t, "ipv6/conf/new/accept_dad=1", "ipv6/conf/new/dad_transmits=60") // duplicate address detection takes 60 seconds
	n.Run(t, "ip", "addr", "add", "fd02::1/64", "dev", "new")
	n.Add(t, "new", "10.2.0.1/24")
	w := run(t, clock.RealClock{}, nodeaddrs.Options{NetNS: n.FD, Selection: []string{"10.2.0.0/24", "fd02::/64"}})
	await(t, w, "10.2.0.1")
}

func TestPrimaryAddressesComeFromNodeOrDefaultRoutes(t *testing.T) {
	n := machine(t)
	clock := settling{clocktesting.NewFakeClock(time.Now())}
	w := run(t, clock, nodeaddrs.Options{NetNS: n.FD})
	await(t, w, "10.0.0.1", "fd00::1")

	// If only a route changes, Linux sends no notification. So the watcher detects the
	// change only after the interval.
	n.Route(t, "default", "10.1.0.254", "other")
	clock.tick(t)
	await(t, w, "10.1.0.1", "fd00::1")

	node := &api.Node{Addresses: []api.NodeAddress{
		{Type: "ExternalIP", IP: netip.MustParseAddr("192.0.2.7")},
		{Type: "InternalIP", IP: netip.MustParseAddr("10.9.0.1")},
	}}
	nodeaddrs.SetNode(w, node)
	got, _ := w.Addresses()
	compare(t, addrs("10.9.0.1"), got)

	nodeaddrs.SetNode(w, &api.Node{Addresses: node.Addresses[:1]})
	got, _ = w.Addresses()
	compare(t, addrs("192.0.2.7"), got)

	nodeaddrs.SetNode(w, nil)
	got, _ = w.Addresses()
	compare(t, addrs("10.1.0.1", "fd00::1"), got)

	nodeaddrs.SetNode(nodeaddrs.Of(), node) // fixed addresses ignore the Node object
}

func TestNoPrimaryAddressWithoutDefaultRouteAndNode(t *testing.T) {
	n := netnstest.New(t)
	n.Stub(t, "world")
	n.Add(t, "world", "10.0.0.1/24")
	await(t, run(t, clock.RealClock{}, nodeaddrs.Options{NetNS: n.FD}))
}

func TestInvalidNamespaceIsAnError(t *testing.T) {
	if _, err := nodeaddrs.New(nodeaddrs.Options{NetNS: 1 << 20}); err == nil {
		t.Error("there is a watcher for a namespace that does not exist")
	}
}

// settling is a fake clock on which the wait after a notification ends immediately.
type settling struct{ *clocktesting.FakeClock }

func (c settling) After(time.Duration) <-chan time.Time {
	now := make(chan time.Time, 1)
	now <- c.Now()
	return now
}

func (c settling) tick(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !c.HasWaiters(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the watcher does not wait for the interval")
		}
	}
	c.Step(10 * time.Second)
}
