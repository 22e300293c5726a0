// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

var kills = flag.Int("kills", 12, "the number of kills in TestKilledProcessesRecoverWithoutLoss")

// TestKilledProcessesRecoverWithoutLoss kills a server, a client, a relay and the API
// server one after the other while services change. A viewer is a client that prints its
// state. No viewer may lose a service or an endpoint that still exists. At the end all
// viewers must show the API server's state.
func TestKilledProcessesRecoverWithoutLoss(t *testing.T) {
	t.Parallel()
	server := apiserver.Start(t, apiserver.Options{})
	c := newChurn(t, server.Replica(t))
	kubeconfig := apiserver.Kubeconfig(t, server.Config())
	served, relayed := socket(t), socket(t)
	startServer := func() *process { return serve(c.tenant, kubeconfig, served) }
	startRelay := func() *process { return relay(c.tenant, served, relayed) }
	serving, relaying := startServer(), startRelay()
	viewers := []*viewer{
		newViewer(c, c.name, served),
		newViewer(c, "unknown", served),
		newViewer(c, c.name, relayed),
	}
	settle := func() {
		t.Helper()
		c.stamp.Spec.Ports[0].Port++
		c.put(c.stamp)
		for _, v := range viewers {
			v.wait(t, c.stamp.Spec.Ports[0].Port)
		}
	}
	settle()

	for i := range *kills {
		c.wait(t, c.IntN(20))
		switch i % 4 {
		case 0:
			serving.kill(t)
			c.wait(t, c.IntN(20))
			serving = startServer()
		case 1:
			v := pick(c.Rand, viewers...)
			v.process.kill(t)
			c.wait(t, c.IntN(20))
			v.start(t)
		case 2:
			relaying.kill(t)
			c.wait(t, c.IntN(20))
			relaying = startRelay()
		case 3:
			server.APIServer.Kill(t)
			c.wait(t, c.IntN(20))
			server.APIServer.Start(t)
		}
		settle()
	}
	c.stop()
	settle()
	all := c.list()
	for _, v := range viewers {
		v.out.expect(t, c.print(v.node, all), v.String())
	}
}

// churn makes random changes to a tenant, at a fixed rate. Each service has one
// EndpointSlice. All endpoint addresses differ.
type churn struct {
	*tenant
	*rand.Rand            // random source of the test
	own        *rand.Rand // random source of the goroutine that makes the changes
	stamp      *corev1.Service
	stop       func()

	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice
	made     int // number of services and endpoint addresses that were created

	mu      sync.Mutex
	changes int
	more    chan struct{} // closed by the next change
	// removed contains the services and endpoints that were removed or are about to be
	// removed.
	removed map[string]bool
}

const changesPerSecond = 15

// newChurn creates a tenant with services and changes them until the test ends or the
// caller calls stop.
func newChurn(t *testing.T, server *apiserver.Server) *churn {
	t.Helper()
	random := newRandom(t)
	c := &churn{
		tenant: newTenant(t, server),
		Rand:   random, own: rand.New(rand.NewPCG(random.Uint64(), 0)),
		services: map[string]*corev1.Service{}, slices: map[string]*discoveryv1.EndpointSlice{},
		more: make(chan struct{}), removed: map[string]bool{},
	}
	c.stamp = newService("zzz-stamp", c.name, servicePort("", 1, 1))
	c.put(c.node("a"), c.stamp)
	for range 40 {
		if err := c.add(); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var ended sync.WaitGroup
	ended.Go(func() {
		limit := rate.NewLimiter(changesPerSecond, 1)
		for limit.Wait(ctx) == nil {
			if err := c.change(); err != nil {
				t.Errorf("change object: %v", err)
				return
			}
			c.mu.Lock()
			c.changes++
			close(c.more)
			c.more = make(chan struct{})
			c.mu.Unlock()
		}
	})
	c.stop = func() {
		cancel()
		ended.Wait()
	}
	t.Cleanup(c.stop)
	return c
}

// wait waits until churn has made the given number of further changes.
func (c *churn) wait(t *testing.T, changes int) {
	t.Helper()
	ctx := within(t)
	for first := -1; ; {
		c.mu.Lock()
		now, more := c.changes, c.more
		c.mu.Unlock()
		if first < 0 {
			first = now
		}
		if now >= first+changes {
			return
		}
		select {
		case <-more:
		case <-ctx.Done():
			t.Fatalf("wait for changes: %v", context.Cause(ctx))
		}
	}
}

// add creates a service and its EndpointSlice.
func (c *churn) add() error {
	c.made++
	s := newService(fmt.Sprintf("s%04d", c.made), c.name, servicePort("", 80, 80))
	if c.own.IntN(4) == 0 {
		s.Spec.Selector = nil
	}
	slice := newSlice(s.Name, s, slicePorts("", 80), c.endpoint(), c.endpoint())
	c.services[s.Name], c.slices[s.Name] = s, slice
	if err := c.tryPut(s); err != nil {
		return err
	}
	return c.tryPut(slice)
}

// endpoint returns an endpoint with a new address.
func (c *churn) endpoint() discoveryv1.Endpoint {
	c.made++
	e := newEndpoint(fmt.Sprintf("10.%d.%d.%d", c.made>>16&255, c.made>>8&255, c.made&255), pick(c.own, "", c.name, "unknown"))
	e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: pick(c.own, "a", "b")}}}
	return e
}

func (c *churn) change() error {
	name := pick(c.own, slices.Sorted(maps.Keys(c.services))...)
	service, slice := c.services[name], c.slices[name]
	switch what := c.own.IntN(12); {
	case what == 0:
		return c.tryPut(c.node(pick(c.own, "", "a", "b")))
	case what == 1 || len(c.services) < 20:
		return c.add()
	case what == 2:
		gone := []string{name}
		for _, e := range slice.Endpoints {
			gone = append(gone, name+" "+e.Addresses[0])
		}
		c.forget(gone...)
		delete(c.services, name)
		delete(c.slices, name)
		if err := c.tryRemove(service); err != nil {
			return err
		}
		return c.tryRemove(slice)
	case what < 5:
		service.Spec.Ports[0].Port++
		return c.tryPut(service)
	case what < 7 && len(slice.Endpoints) > 0:
		i := c.own.IntN(len(slice.Endpoints))
		c.forget(name + " " + slice.Endpoints[i].Addresses[0])
		slice.Endpoints = slices.Delete(slice.Endpoints, i, i+1)
		return c.tryPut(slice)
	case what < 9 && len(slice.Endpoints) > 0:
		// This endpoint terminates but still serves, so kpng-json still shows it.
		slice.Endpoints[0].Conditions = conditions(false, true, true)
		return c.tryPut(slice)
	default:
		slice.Endpoints = append(slice.Endpoints, c.endpoint())
		return c.tryPut(slice)
	}
}

// forget adds entries to c.removed. Call it before the services or endpoints are removed.
func (c *churn) forget(entries ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range entries {
		c.removed[e] = true
	}
}

// lost returns the entries that the map older contains and the map newer
// lacks. It omits entries in c.removed.
func (c *churn) lost(older, newer map[string]bool) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var lost []string
	for e := range older {
		if !newer[e] && !c.removed[e] {
			lost = append(lost, e)
		}
	}
	slices.Sort(lost)
	return lost
}

// viewer is a kpng-json process that reads from a kpng server, or several such processes
// one after the other.
type viewer struct {
	churn      *churn
	node, from string
	process    *process
	out        *prints

	mu    sync.Mutex
	shown map[string]bool // services and endpoints in the last print
	stamp int32
}

func newViewer(c *churn, node, from string) *viewer {
	v := &viewer{churn: c, node: node, from: from}
	v.start(c.t)
	return v
}

func (v *viewer) String() string { return fmt.Sprintf("the viewer of node %s at %s", v.node, v.from) }

func (v *viewer) start(t testing.TB) {
	t.Helper()
	v.out = newPrints(v.churn.name, v.churn.stamp.Name)
	v.out.each = func(print []byte) { v.check(t, print) }
	v.process = launch(t, v.out, quickKpngJSON(t), "--api", v.from, "--node-name", v.node)
}

// check reports entries of the previous print that the new print lacks.
func (v *viewer) check(t testing.TB, print []byte) {
	shown, stamp := map[string]bool{}, int32(0)
	for line := range bytes.Lines(print) {
		var view api.View
		if err := json.Unmarshal(line, &view); err != nil {
			t.Errorf("printed invalid JSON: %v\n%s", err, line)
			return
		}
		name := view.Service.Name
		shown[name] = true
		stamp = view.Service.Ports[0].Port
		for _, endpoints := range [...][]api.Endpoint{view.Endpoints, view.Draining} {
			for i := range endpoints {
				shown[name+" "+endpoints[i].Addr.String()] = true
			}
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if lost := v.churn.lost(v.shown, shown); len(lost) > 0 {
		t.Errorf("%s lost %d of %d entries: %s", v, len(lost), len(v.shown), lost)
	}
	v.shown, v.stamp = shown, stamp
}

// wait waits until the last print shows the service zzz-stamp with the given port.
func (v *viewer) wait(t testing.TB, stamp int32) {
	t.Helper()
	if print, ok := v.out.wait(t, func([]byte) bool {
		v.mu.Lock()
		defer v.mu.Unlock()
		return v.stamp == stamp
	}); !ok {
		t.Fatalf("%s has not reached stamp %d; its print:\n%s", v, stamp, print)
	}
}
