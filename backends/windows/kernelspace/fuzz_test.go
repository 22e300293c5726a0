// SPDX-License-Identifier: Apache-2.0

package kernelspace_test

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// FuzzBackend changes a cluster at random. It makes calls to HNS fail, creates the
// network again, adds pods to this node, and kills backends during a call. It checks that
// HNS finally has the state that a new backend would create, and that objects of other
// owners never change.
func FuzzBackend(f *testing.F) {
	for seed := range uint64(12) {
		f.Add(seed, uint8(60))
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps uint8) {
		synctest.Test(t, func(t *testing.T) { newFuzzer(t, seed).run(int(steps)) })
	})
}

// writer adapts a transaction of a cluster's state to apitest.Writer.
type writer struct{ tx *cluster.Tx }

func (w writer) SetService(s *api.Service)              { w.tx.SetService(s) }
func (w writer) DeleteService(key types.NamespacedName) { w.tx.DeleteService(key) }
func (w writer) SetSlice(s *api.EndpointSlice)          { w.tx.SetSlice(s) }
func (w writer) DeleteSlice(key types.NamespacedName)   { w.tx.DeleteSlice(key) }
func (w writer) SetNode(n *api.Node)                    { w.tx.SetNode(n) }
func (w writer) DeleteNode(name string)                 { w.tx.DeleteNode(name) }

type fuzzer struct {
	*testing.T
	r       *rand.Rand
	state   *cluster.State
	world   *apitest.World
	hns     *fakehns.HNS
	network string
	opts    kernelspace.Options
	stop    func() // stops the running backend
	hook    func(string) error
	// batchSize is so small that passes have several batches.
	batchSize int
}

func newFuzzer(t *testing.T, seed uint64) *fuzzer {
	r := rand.New(rand.NewPCG(seed, 0))
	features := fakehns.AllFeatures()
	features.ModifyLoadBalancer = r.IntN(3) > 0
	features.SessionAffinity = r.IntN(3) > 0
	f := &fuzzer{
		T: t, r: r,
		state: cluster.New(cluster.Options{}),
		world: apitest.NewWorld(r, 3, 5),
		hns:   fakehns.New(features),
	}
	quirks := slices.Sorted(maps.Keys(fakehns.AllQuirks()))
	fakehns.Use(t, f.hns)
	f.hns.SetQuirks(fakehns.AllQuirks()[quirks[r.IntN(len(quirks))]])
	f.opts = kernelspace.Options{Network: "pods", StateFile: filepath.Join(t.TempDir(), "kpng.json"), EnableDSR: r.IntN(2) == 0}
	f.batchSize = 1 + r.IntN(10)
	f.write(f.world.WriteAll)
	f.state.SetSynced()
	f.makeNetwork()
	return f
}

// write changes the cluster's state.
func (f *fuzzer) write(change func(apitest.Writer)) {
	f.state.Update(func(tx *cluster.Tx) { change(writer{tx}) })
}

// makeNetwork creates the network with objects of other owners.
func (f *fuzzer) makeNetwork() {
	f.network = f.hns.AddNetwork(hns.Network{Name: "pods"})
	foreign, err := f.hns.CreateEndpoint(hns.Endpoint{Network: f.network, Addrs: []netip.Addr{addr("10.200.0.1")}, Name: "foreign"})
	if err != nil {
		f.Fatal(err)
	}
	for _, lb := range []hns.LoadBalancer{
		balancer(foreign, "10.200.1.1", 80), balancer(foreign, "", 31999), balancer(foreign, "10.200.1.2", 80, 81),
	} {
		if _, err := f.hns.CreateLoadBalancer(lb); err != nil {
			f.Fatal(err)
		}
	}
}

// foreign returns a description of the objects of other owners.
func (f *fuzzer) foreign() string {
	var all []string
	for line := range strings.Lines(f.hns.Dump()) {
		if strings.Contains(line, "10.200.") || strings.Contains(line, "31999") {
			all = append(all, line)
		}
	}
	return strings.Join(all, "")
}

func (f *fuzzer) start() {
	b, err := kernelspace.New(f.opts)
	if err != nil {
		f.Fatal(err)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(f.Context(), logr.Discard()))
	reader := feed.New(f.state, apitest.NodeName(0))
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer reader.Close()
		if err := sink.Run(ctx, reader, b, sink.Options{BatchSize: f.batchSize}); err != nil && !errors.Is(err, context.Canceled) && !strings.Contains(err.Error(), errCrash.Error()) {
			f.Errorf("the driver returned %v", err)
		}
	}()
	f.stop = func() { cancel(); <-done }
}

// errCrash is the panic value with which the test kills a backend during a call. The
// driver reports the panic as an error. Then the test stops the driver.
var errCrash = errors.New("killed")

func (f *fuzzer) run(steps int) {
	f.start()
	before := f.foreign()
	for range steps {
		switch f.r.IntN(12) {
		case 0:
			f.fail()
		case 1:
			f.setHook(nil)
		case 2:
			f.kill()
		case 3:
			f.stop()
			f.start()
		case 4:
			f.setHook(nil)
			f.hns.RemoveNetwork(f.network)
			f.makeNetwork()
		case 5, 6:
			f.pods(f.r.IntN(2) == 0)
		case 7:
			time.Sleep(time.Duration(f.r.IntN(int(3 * time.Minute))))
		default:
			f.write(f.world.Change)
		}
		if f.r.IntN(2) == 0 {
			synctest.Wait()
			if now := f.foreign(); now != before {
				f.Fatalf("objects of other owners changed:\n%s", cmp.Diff(before, now))
			}
		}
	}
	f.setHook(nil)
	f.pods(true)
	time.Sleep(time.Hour) // longer than any backoff; meanwhile the driver calls Verify several times
	f.stop()
	got := f.hns.Dump()

	// Find out which objects a new backend creates beside the objects of other owners.
	have, err := f.hns.Endpoints(f.network)
	if err != nil {
		f.Fatal(err)
	}
	f.hns.RemoveNetwork(f.network)
	f.makeNetwork()
	pods := map[netip.Addr]bool{} // HNS may list a pod twice
	for _, e := range have {
		if e.Name == "" {
			pods[e.Addrs[0]] = true
		}
	}
	for a := range pods {
		f.makePod(a)
	}
	f.opts.StateFile = filepath.Join(f.TempDir(), "fresh.json")
	f.start()
	time.Sleep(time.Hour)
	f.stop()
	if diff := cmp.Diff(f.comparable(f.hns.Dump()), f.comparable(got)); diff != "" {
		f.Errorf("HNS differs from a fresh start (-fresh +got):\n%s", diff)
	}
	b, err := kernelspace.New(f.opts)
	if err != nil {
		f.Fatal(err)
	}
	if err := b.Cleanup(f.Context()); err != nil {
		f.Error(err)
	}
	if left := f.hns.Dump(); strings.Contains(left, "remote") || strings.Count(left, "load balancer") != 3 {
		f.Errorf("after Cleanup HNS does not have exactly the objects of other owners:\n%s", left)
	}
}

// comparable prepares a dump for a comparison. If the Node object was deleted,
// comparable removes the source VIPs. Only a backend from before the deletion still knows the node's
// addresses and uses them as source VIPs.
func (f *fuzzer) comparable(dump string) string {
	if _, ok := f.state.Snapshot().Nodes.Get(apitest.NodeName(0)); ok {
		return dump
	}
	lines := strings.Split(regexp.MustCompile(` source \S+`).ReplaceAllString(dump, ""), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// fail sets a hook that makes some calls to HNS fail at random.
func (f *fuzzer) fail() {
	errs := []error{
		errRefused, hns.ErrNotRunning, hns.ErrNotFound, hns.ErrExists,
		fakehns.ErrAnswerLost, fakehns.ErrIgnored,
	}
	r := rand.New(rand.NewPCG(f.r.Uint64(), 0))
	every := 1 + r.IntN(6)
	f.setHook(func(string) error {
		if r.IntN(every) > 0 {
			return nil
		}
		return errs[r.IntN(len(errs))]
	})
}

// kill ends the backend during one of its calls to HNS, before HNS performs
// the call. Then kill starts another backend.
func (f *fuzzer) kill() {
	n := f.r.IntN(6)
	killed := false
	f.setHook(func(string) error {
		if n--; n < 0 {
			killed = true
		}
		if killed {
			panic(errCrash)
		}
		return nil
	})
	f.write(f.world.Change)
	synctest.Wait()
	f.stop()
	f.setHook(nil)
	f.start()
}

// pods creates the HNS endpoints of this node's pods. If all is false, it
// omits some pods.
func (f *fuzzer) pods(all bool) {
	f.hns.SetHook(nil)
	defer f.hns.SetHook(f.hook)
	have, err := f.hns.Endpoints(f.network)
	if err != nil {
		f.Fatal(err)
	}
	known := map[netip.Addr]bool{}
	for _, e := range have {
		known[e.Addrs[0]] = known[e.Addrs[0]] || e.Name == ""
	}
	for _, a := range f.localPods() {
		if known[a] || !all && f.r.IntN(2) == 0 {
			continue
		}
		known[a] = true
		f.makePod(a)
	}
}

// makePod creates the HNS endpoint for a pod of this node.
func (f *fuzzer) makePod(a netip.Addr) {
	if _, err := f.hns.CreateEndpoint(hns.Endpoint{Network: f.network, Addrs: []netip.Addr{a}, MAC: "00-15-5d-00-00-01"}); err != nil {
		f.Fatal(err)
	}
}

// setHook sets the hook of HNS calls, and replaces the previous hook.
func (f *fuzzer) setHook(hook func(string) error) {
	f.hook = hook
	f.hns.SetHook(hook)
}

// localPods returns the addresses of the services' endpoints on this node.
func (f *fuzzer) localPods() []netip.Addr {
	var all []netip.Addr
	snapshot := f.state.Snapshot()
	node := &api.Node{Name: apitest.NodeName(0)}
	if known, ok := snapshot.Nodes.Get(node.Name); ok {
		node = known
	}
	for _, s := range snapshot.States.All() {
		if v := nodeview.View(s, node); v != nil {
			for i := range v.Endpoints {
				if v.Endpoints[i].Local {
					all = append(all, v.Endpoints[i].Addr)
				}
			}
		}
	}
	return all
}
