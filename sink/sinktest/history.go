// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Subject is a sink with a dataplane of its own, for [TestHistories].
type Subject struct {
	// Open returns a sink for the dataplane. TestHistories calls Start of this sink. To
	// imitate a restart of the program, it calls Stop of the sink and then Open again.
	Open func() sink.Sink
	// Objects returns the objects that the sink has programmed in the dataplane, in any
	// order. The result must depend only on the present services, and not on the history
	// of the sink. So it must not contain numbers that the sink chooses.
	Objects func() []string
	// Disturb makes operations of the dataplane fail, until the caller calls the returned
	// function. If Disturb is nil, all operations succeed.
	Disturb func(random *rand.Rand) (calm func())
	// Drift changes or deletes objects of the sink, as another program might do. If Drift is
	// nil, the objects do not drift.
	Drift func(random *rand.Rand)
	// Verify calls Verify of the sink, so that the sink compares the whole dataplane. If
	// Verify is nil, TestHistories calls the sink's method Verify, if it has one.
	Verify func(context.Context, sink.Sink) error
	// Usable reports whether the sink supports a service. If Usable is nil, the sink
	// supports all services.
	Usable func(*api.Service) bool
}

// TestHistories takes the place of a driver, and tests sinks with n random histories,
// which have the seeds 0 to n-1. A history changes services that share and swap
// addresses, makes operations of the dataplane fail, restarts the sink, and changes the
// dataplane without the sink. Whenever the sink has acknowledged all services, it must
// have programmed the same objects as a sink that got these services in one pass. The
// function newSubject returns a subject with an empty dataplane, and releases the
// resources of the subject when t ends.
//
// The test reports the seed and the steps of a history that fails. It ends at the first
// history that fails.
func TestHistories(t *testing.T, n int, newSubject func(testing.TB) *Subject) {
	for seed := range uint64(n) {
		if !t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			newHistory(t, seed, newSubject).run()
		}) {
			return
		}
	}
}

// history is a random history of a subject. The ledger says which Changes the driver
// may deliver.
type history struct {
	t          testing.TB
	random     *rand.Rand
	newSubject func(testing.TB) *Subject
	subject    *Subject
	sink       sink.Sink
	state      *cluster.State
	node       *api.Node
	ledger     ledger
	// views are the present views. The sink has not acknowledged the views of the services
	// in dirty.
	views map[types.NamespacedName]*api.View
	dirty map[types.NamespacedName]bool
	// again: the sink must get another pass before its dataplane is compared.
	again bool
	calm  func()
	log   []string
}

func newHistory(t testing.TB, seed uint64, newSubject func(testing.TB) *Subject) *history {
	h := &history{
		t: t, random: rand.New(rand.NewPCG(seed, 35)), newSubject: newSubject, subject: newSubject(t),
		state: cluster.New(cluster.Options{}), node: historyNode("192.0.2.1"), ledger: newLedger(),
		views: map[types.NamespacedName]*api.View{}, dirty: map[types.NamespacedName]bool{}, calm: func() {},
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the history was:\n%s", strings.Join(h.log, "\n"))
		}
	})
	h.open()
	return h
}

func (h *history) run() {
	defer func() { stop(h.t, h.sink) }()
	for range 40 {
		h.step()
	}
	h.settle()
}

func historyNode(addr string) *api.Node {
	return &api.Node{Name: "here", Labels: map[string]string{"topology.kubernetes.io/zone": "a"}, Addresses: []api.NodeAddress{{Type: "InternalIP", IP: netip.MustParseAddr(addr)}}}
}

func (h *history) logf(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
}

func (h *history) open() { h.sink, h.ledger = start(h.t, h.subject), newLedger() }

// start opens and starts the sink of a subject.
func start(t testing.TB, s *Subject) sink.Sink {
	t.Helper()
	opened := s.Open()
	if s, ok := sink.As[sink.Starter](opened); ok {
		if err := s.Start(t.Context()); err != nil {
			t.Fatalf("start the sink: %v", err)
		}
	}
	return opened
}

func stop(t testing.TB, s sink.Sink) {
	if s, ok := sink.As[sink.Stopper](s); ok {
		if err := s.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("stop the sink: %v", err)
		}
	}
}

// step changes something and lets the driver act.
func (h *history) step() {
	for range h.random.IntN(4) {
		h.change()
	}
	switch n := h.random.IntN(16); {
	case n < 6 && h.subject.Disturb != nil:
		h.logf("the dataplane fails")
		h.calm = h.subject.Disturb(h.random)
	case n == 6:
		h.logf("restart")
		stop(h.t, h.sink)
		h.open()
	case n == 7 && h.subject.Drift != nil && h.ledger.begun:
		h.logf("another program changes the dataplane")
		h.subject.Drift(h.random)
		h.verify()
		h.settle()
	}
	switch {
	case !h.ledger.begun || h.random.IntN(10) == 0:
		h.pass()
	case h.waiting():
		h.sync(sink.Changes{}, h.dirtyKeys())
	}
	h.calm()
	h.calm = func() {}
	if h.random.IntN(3) == 0 {
		h.settle()
	}
}

// settle delivers without failures until the sink has acknowledged everything. Then it
// compares the sink's dataplane with the dataplane of a sink that got the present services
// in one pass.
func (h *history) settle() {
	const most = 10 // passes; some end early because the node changes
	for verified := false; !verified; verified = h.ledger.begun {
		for i := 0; h.waiting() || !h.ledger.begun || h.again; i++ {
			if i == most {
				h.t.Fatalf("the sink still fails, although its dataplane works: %v", h.dirtyKeys())
			}
			if !h.ledger.begun || h.again && i > 0 {
				h.pass()
			} else {
				h.sync(sink.Changes{}, h.dirtyKeys())
			}
		}
		h.verify()
	}
	twin := h.newSubject(h.t)
	opened := start(h.t, twin)
	c := sink.Changes{First: true, Last: true, Revision: 1, Node: h.node, NodeChanged: true, Services: func(yield func(sink.Change) bool) {
		for _, key := range sortedKeys(h.views) {
			if !yield(sink.Change{Key: key, New: h.views[key], Unsure: true}) {
				return
			}
		}
	}}
	if err := opened.Sync(h.t.Context(), &c); err != nil {
		h.t.Fatalf("a pass of a new sink with an empty dataplane failed: %v", err)
	}
	want, got := twin.Objects(), h.subject.Objects()
	stop(h.t, opened)
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		h.t.Fatalf("the sink acknowledged all services, but its dataplane differs from that of a new sink (-new +this):\n%s", diff)
	}
}

// waiting reports whether a service or the node is not acknowledged.
func (h *history) waiting() bool {
	return len(h.dirty) > 0 || h.ledger.nodeWaits(h.node)
}

// verify lets the sink compare its dataplane with its records.
func (h *history) verify() {
	verify := h.subject.Verify
	if verify == nil {
		verify = func(ctx context.Context, s sink.Sink) error {
			if v, ok := sink.As[sink.Verifier](s); ok {
				return v.Verify(ctx)
			}
			return nil
		}
	}
	h.logf("verify")
	if err := verify(h.t.Context(), h.sink); errors.Is(err, sink.ErrStartOver) {
		h.logf("… %v", err)
		h.ledger.begun = false
	} else if err != nil {
		h.t.Fatalf("verify: %v", err)
	}
}

// pass delivers all services in one or more batches. Services may change meanwhile.
func (h *history) pass() {
	keys := sortedKeys(h.views)
	h.ledger = newLedger()
	for first := true; ; first = false {
		n := h.random.IntN(len(keys) + 1)
		batch := keys[:n:n]
		keys = keys[n:]
		c := sink.Changes{First: first, Last: len(keys) == 0}
		if !first { // this batch also has changes of services that the pass has delivered
			for _, key := range h.dirtyKeys() {
				if h.ledger.delivered(key) && !slices.Contains(keys, key) && !slices.Contains(batch, key) {
					if h.random.IntN(2) == 0 || !h.ledger.unacked[key] && c.Last {
						batch = append(batch, key)
					}
				}
			}
		}
		if c.Last {
			for key := range h.views {
				if !h.ledger.delivered(key) && !slices.Contains(batch, key) {
					batch = append(batch, key)
				}
			}
			for key := range h.ledger.unacked {
				if !slices.Contains(batch, key) {
					c.Failing = append(c.Failing, key)
				}
			}
			slices.SortFunc(c.Failing, ordering.Keys)
		}
		slices.SortFunc(batch, ordering.Keys)
		if !h.sync(c, batch) && (first || c.Last) {
			h.ledger.begun = false // the driver would begin the pass again
			return
		}
		if !h.ledger.begun {
			return
		}
		if c.Last {
			h.again = len(h.ledger.unacked) > 0
			return
		}
		for range h.random.IntN(2) {
			h.change()
		}
	}
}

// sync delivers the services with these keys. It reports whether the sink acknowledged
// the Changes.
func (h *history) sync(c sink.Changes, keys []types.NamespacedName) bool {
	c.Revision, c.Node = h.state.Snapshot().Revision, h.node
	c.NodeChanged = c.First || h.ledger.nodeWaits(h.node)
	var services []sink.Change
	for _, key := range keys {
		ch := sink.Change{Key: key, Old: h.ledger.views[key], New: h.views[key], Unsure: h.ledger.unsure(key, c.First)}
		if ch.Old != nil && !h.ledger.owns(key, ch.Old) {
			ch.Old, ch.Unsure = nil, true
		}
		services = append(services, ch)
	}
	c.Services = slices.Values(services)
	err := h.sink.Sync(h.t.Context(), &c)
	h.logf("sync first=%t last=%t failing=%v services=%v: %v", c.First, c.Last, c.Failing, describe(services), err)
	h.ledger.record(&c, err)
	failed, ok := sink.Acknowledged(err)
	if !ok {
		return false
	}
	for _, key := range keys {
		if _, fails := failed[key]; !fails {
			delete(h.dirty, key)
		}
	}
	for key := range failed {
		h.dirty[key] = true
	}
	if c.Last { // the sink has pruned deleted services
		for key := range h.dirty {
			if h.views[key] == nil && !h.ledger.delivered(key) {
				delete(h.dirty, key)
			}
		}
	}
	return true
}

func describe(changes []sink.Change) []string {
	var list []string
	for _, ch := range changes {
		text := ch.Key.Name
		if ch.New == nil {
			text += " deleted"
		}
		if ch.Unsure {
			text += "?"
		}
		list = append(list, text)
	}
	return list
}

func (h *history) dirtyKeys() []types.NamespacedName { return sortedKeys(h.dirty) }

func sortedKeys[V any](m map[types.NamespacedName]V) []types.NamespacedName {
	keys := make([]types.NamespacedName, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, ordering.Keys)
	return keys
}

// change changes the cluster at random, and updates the views.
func (h *history) change() {
	name := fmt.Sprint("s", h.random.IntN(5))
	h.state.Update(func(tx *cluster.Tx) {
		switch n := h.random.IntN(12); {
		case n == 0:
			h.logf("change: delete %s", name)
			tx.DeleteService(types.NamespacedName{Namespace: "default", Name: name})
			for i := range 2 {
				tx.DeleteSlice(types.NamespacedName{Namespace: "default", Name: fmt.Sprint(name, "-", i)})
			}
		case n == 1:
			h.node = historyNode([]string{"192.0.2.1", "192.0.2.2"}[h.random.IntN(2)])
			h.logf("change: node %v", h.node.Addresses)
		case n < 6:
			h.slice(tx, name)
		default:
			svc := h.service(name)
			if h.subject.Usable != nil && !h.subject.Usable(svc) {
				return
			}
			tx.SetService(svc)
			h.logf("change: %s %v ports %v local %t affinity %v ranges %v", name, svc.IPs, svc.Ports, svc.ExternalTrafficToLocal, svc.AffinitySeconds > 0, svc.SourceRanges)
			if h.random.IntN(2) == 0 {
				h.slice(tx, name)
			}
		}
	})
	h.state.SetSynced()
	seen := map[types.NamespacedName]bool{}
	for key, state := range h.state.Snapshot().States.All() {
		view := nodeview.View(state, h.node)
		if view == nil {
			continue
		}
		seen[key] = true
		if !view.Equal(h.views[key]) {
			h.views[key], h.dirty[key] = view, true
		}
	}
	for key := range h.views {
		if !seen[key] {
			delete(h.views, key)
			h.dirty[key] = true
		}
	}
}

// service returns a random service. As in a cluster, all services have different cluster
// IPs. When services are created again, cluster IPs move between them. Several services may
// have the same external IPs and node ports.
func (h *history) service(name string) *api.Service {
	one := func(n int) bool { return h.random.IntN(n) == 0 }
	svc := &api.Service{
		Namespace: "default", Name: name, Type: api.LoadBalancer, UID: types.UID(name),
		Created:    time.Unix(int64(h.random.IntN(3)), 0),
		IPFamilies: []api.Family{api.IPv4, api.IPv6},
	}
	for _, prefix := range []string{"10.96.0.", "fd96::"} {
		if !one(4) {
			svc.IPs.ClusterIPs.Add(netip.MustParseAddr(prefix + fmt.Sprint(1+h.random.IntN(6))))
		}
	}
	for range h.random.IntN(3) {
		svc.IPs.ExternalIPs.Add(netip.MustParseAddr(fmt.Sprint("198.51.100.", 1+h.random.IntN(4))))
	}
	if one(3) {
		svc.IPs.LoadBalancerIPs.Add(netip.MustParseAddr(fmt.Sprint("203.0.113.", 1+h.random.IntN(3))))
	}
	for i := range 1 + h.random.IntN(2) {
		p := api.PortMapping{Name: fmt.Sprint("p", i), Protocol: api.TCP, Port: int32(80 + i), TargetPort: 8080}
		if one(4) {
			p.Protocol = api.UDP
		}
		if one(3) {
			p.NodePort = int32(30000 + h.random.IntN(4))
		}
		svc.Ports = append(svc.Ports, p)
	}
	svc.ExternalTrafficToLocal = one(4)
	if one(4) {
		svc.SourceRanges = []api.SourceRanges{{TargetIPs: svc.IPs.LoadBalancerIPs, NodePorts: one(2), Prefixes: []netip.Prefix{netip.MustParsePrefix([]string{"192.0.2.0/24", "192.0.2.128/25"}[h.random.IntN(2)])}}}
	}
	if one(4) {
		svc.AffinitySeconds = int32(60 * (1 + h.random.IntN(2)))
	}
	return svc
}

// slice sets a random slice of a service.
func (h *history) slice(tx *cluster.Tx, name string) {
	slice := &api.EndpointSlice{
		Namespace: "default", Name: fmt.Sprint(name, "-", h.random.IntN(2)), ServiceName: name, Family: api.IPv4,
		Ports: []api.EndpointPort{{Name: "p0", Protocol: api.TCP, Port: 8080}, {Name: "p1", Protocol: api.TCP, Port: 8081}, {Name: "p0", Protocol: api.UDP, Port: 8080}},
	}
	prefix := "10.244.0."
	if strings.HasSuffix(slice.Name, "1") {
		slice.Family, prefix = api.IPv6, "fd44::"
	}
	for i := range 6 {
		if h.random.IntN(2) == 0 {
			continue
		}
		ready := h.random.IntN(4) > 0
		e := api.SliceEndpoint{
			Addr:       netip.MustParseAddr(prefix + fmt.Sprint(1+i)),
			Details:    &api.EndpointDetails{NodeName: []string{"here", "there"}[i%2], Zone: []string{"a", "b"}[i%2]},
			Conditions: api.Conditions{Ready: ready, Serving: ready || h.random.IntN(2) == 0, Terminating: !ready},
		}
		slice.Endpoints = append(slice.Endpoints, e)
	}
	h.logf("change: slice %s with %d endpoints", slice.Name, len(slice.Endpoints))
	tx.SetSlice(slice)
}
