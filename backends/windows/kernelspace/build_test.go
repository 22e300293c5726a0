// SPDX-License-Identifier: Apache-2.0

package kernelspace_test

import (
	"errors"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"k8s.io/apimachinery/pkg/types"
)

// node returns this node, which is named "here", with its zone.
func node() *api.Node {
	n := sinktest.Node("here", "192.168.0.1", "fd00:192::1")
	n.Labels = map[string]string{"topology.kubernetes.io/zone": "zone-a"}
	return n
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func addrs(s ...string) api.IPSet {
	var all []netip.Addr
	for _, a := range s {
		all = append(all, addr(a))
	}
	return api.NewIPSet(all...)
}

// service returns a service with a cluster IP and the port 80/TCP, whose target port is
// 8080. Each function in edits modifies the service.
func service(name string, edits ...func(*api.Service)) *api.Service {
	return sinktest.Service(name, "10.96.0.1 80>8080", edits...)
}

// view returns this node's view of a service with these endpoints, as in
// [sinktest.Slices]. An endpoint without "@" is on another node.
func view(s *api.Service, endpoints ...string) *api.View {
	var words []string
	for _, e := range endpoints {
		if !strings.Contains(e, "@") {
			e += "@other-node"
		}
		words = append(words, e)
	}
	return sinktest.View(node(), s, strings.Join(words, " "))
}

// world is a backend and its HNS. The test calls the backend without a driver.
type world struct {
	*testing.T
	hns     *fakehns.HNS
	network string
	opts    kernelspace.Options
	backend backends.Dataplane
	views   map[types.NamespacedName]*api.View
	// needsPass is true if the next Sync has to begin a pass.
	needsPass bool
}

// newWorld returns a started backend on a network where this node has pods at the given
// addresses.
func newWorld(t *testing.T, features hns.Features, network hns.Network, opts kernelspace.Options, pods ...string) *world {
	t.Helper()
	w := &world{T: t, hns: fakehns.New(features), views: map[types.NamespacedName]*api.View{}}
	network.Name = "pods"
	w.network = w.hns.AddNetwork(network)
	w.hns.SetHost(addr("192.168.0.1"), addr("fd00:192::1"))
	for _, pod := range pods {
		w.pod(pod)
	}
	fakehns.Use(t, w.hns)
	opts.Network = "pods"
	opts.StateFile = filepath.Join(t.TempDir(), "state", "kpng.json")
	w.opts = opts
	w.restart()
	return w
}

// l2bridge returns a world with the latest Windows and a network without overlay.
func l2bridge(t *testing.T, pods ...string) *world {
	t.Helper()
	return newWorld(t, fakehns.AllFeatures(), hns.Network{}, kernelspace.Options{}, pods...)
}

// pod creates the HNS endpoint for a pod of this node.
func (w *world) pod(ips ...string) string {
	w.Helper()
	e := hns.Endpoint{MAC: "00-15-5d-00-00-01"}
	for _, ip := range ips {
		e.Addrs = append(e.Addrs, addr(ip))
	}
	return w.endpoint(e)
}

// endpoint creates an HNS endpoint of another owner.
func (w *world) endpoint(e hns.Endpoint) string {
	w.Helper()
	e.Network = w.network
	id, err := w.hns.CreateEndpoint(e)
	if err != nil {
		w.Fatal(err)
	}
	return id
}

// restart replaces the backend by a new one.
func (w *world) restart() {
	w.Helper()
	if w.backend != nil {
		w.must(w.backend.Stop(w.Context()))
	}
	b, err := kernelspace.New(w.opts)
	if err != nil {
		w.Fatal(err)
	}
	if err := b.Start(w.Context()); err != nil {
		w.Fatal(err)
	}
	w.backend, w.needsPass = b, true
	w.hns.Calls()
}

// syncAll delivers all services to the backend in one pass.
func (w *world) syncAll() error {
	var changes []sink.Change
	for _, key := range slices.SortedFunc(maps.Keys(w.views), ordering.Keys) {
		changes = append(changes, sink.Change{Key: key, New: w.views[key], Unsure: true})
	}
	return w.sync(&sink.Changes{First: true, Last: true, Services: slices.Values(changes), NodeChanged: true})
}

// set delivers new or changed services to the backend.
func (w *world) set(views ...*api.View) error {
	var changes []sink.Change
	for _, v := range views {
		changes = append(changes, sink.Change{Key: v.Key(), Old: w.views[v.Key()], New: v})
		w.views[v.Key()] = v
	}
	return w.change(changes...)
}

// remove delivers the deletion of a service to the backend.
func (w *world) remove(name string) error {
	key := types.NamespacedName{Namespace: "default", Name: name}
	change := sink.Change{Key: key, Old: w.views[key]}
	delete(w.views, key)
	return w.change(change)
}

// change delivers changes or, if the backend needs a pass, all services.
func (w *world) change(changes ...sink.Change) error {
	if w.needsPass {
		return w.syncAll()
	}
	return w.sync(&sink.Changes{Services: slices.Values(changes), NodeChanged: true})
}

// verify calls Verify and, if it requests a pass, delivers all services.
func (w *world) verify() {
	w.Helper()
	err := w.backend.Verify(w.Context())
	if errors.Is(err, sink.ErrStartOver) {
		err = w.syncAll()
	}
	w.must(err)
}

func (w *world) sync(c *sink.Changes) error {
	c.Node = node()
	err := w.backend.Sync(w.Context(), c)
	w.needsPass = errors.Is(err, sink.ErrStartOver)
	return err
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatalf("Sync returned %v", err)
	}
}

// mustHave fails the test unless HNS has exactly these load balancers, one per line. On a
// network without overlay, mustHave ignores a source VIP that is an address of this node.
// TestSourceVIPOfBridgeIsNodeAddress checks such source VIPs.
func (w *world) mustHave(want string) {
	w.Helper()
	network, _ := w.hns.NetworkByID(w.network)
	var got, wanted []string
	for line := range strings.Lines(w.hns.Dump()) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "load balancer "); ok {
			if !network.Overlay {
				rest = strings.NewReplacer(" source 192.168.0.1 ", " ", " source fd00:192::1 ", " ").Replace(rest)
			}
			got = append(got, rest)
		}
	}
	for line := range strings.Lines(want) {
		if line = strings.TrimSpace(line); line != "" {
			wanted = append(wanted, line)
		}
	}
	slices.Sort(wanted)
	slices.Sort(got)
	if diff := cmp.Diff(wanted, got); diff != "" {
		w.Errorf("load balancers of HNS (-want +got):\n%s", diff)
	}
}

// mustHaveRemotes fails the test unless the remote endpoints have exactly these
// addresses.
func (w *world) mustHaveRemotes(want ...string) {
	w.Helper()
	var got []string
	for line := range strings.Lines(w.hns.Dump()) {
		if rest, ok := strings.CutPrefix(line, "endpoint ["); ok && strings.Contains(line, "] remote ") {
			address, _, _ := strings.Cut(rest, "]")
			got = append(got, address)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		w.Errorf("remote endpoints (-want +got):\n%s", diff)
	}
}

// failures returns the messages in the error of a sync, by service name.
func failures(t *testing.T, err error) map[string]string {
	t.Helper()
	failed, ok := sink.Acknowledged(err)
	if !ok {
		t.Fatalf("Sync failed completely: %v", err)
	}
	all := map[string]string{}
	for key, err := range failed {
		all[key.Name] = err.Error()
	}
	return all
}

var errRefused = errors.New("HNS says no")

// failCalls returns a hook that makes HNS calls with this name return err.
func failCalls(name string, err error) func(string) error {
	return func(call string) error {
		if call == name {
			return err
		}
		return nil
	}
}
