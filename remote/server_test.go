// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/apitest"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// The variable hinted is a service with an endpoint in zone a and an endpoint in zone b.
// Each endpoint has a hint for its own zone.
var (
	hinted = &api.Service{
		Namespace: "plain", Name: "hinted", Type: api.ClusterIP,
		IPs:   api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.0.0.1"))},
		Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 80}},
	}
	hintedSlice = &api.EndpointSlice{
		Namespace: "plain", Name: "hinted-1", ServiceName: "hinted", Family: api.IPv4,
		Ports: []api.EndpointPort{{Protocol: api.TCP, Port: 80}},
		Endpoints: []api.SliceEndpoint{
			{Addr: netip.MustParseAddr("172.16.0.1"), Details: &api.EndpointDetails{NodeName: "in-a", Zone: "a", Hints: &api.Hints{ForZones: []string{"a"}}}, Conditions: api.Conditions{Ready: true, Serving: true}},
			{Addr: netip.MustParseAddr("172.16.0.2"), Details: &api.EndpointDetails{NodeName: "in-b", Zone: "b", Hints: &api.Hints{ForZones: []string{"b"}}}, Conditions: api.Conditions{Ready: true, Serving: true}},
		},
	}
)

// There are ten nodes in each of two zones. In each zone, one node has an endpoint.
func TestViewsAreComputedOncePerClass(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	var nodes []string
	update(state, func(to apitest.Writer) {
		for _, zone := range []string{"a", "b"} {
			for _, name := range []string{"in-", "1-", "2-", "3-", "4-", "5-", "6-", "7-", "8-", "9-"} {
				nodes = append(nodes, name+zone)
				to.SetNode(&api.Node{Name: name + zone, Labels: map[string]string{"topology.kubernetes.io/zone": zone}})
			}
		}
		to.SetService(hinted)
		to.SetSlice(hintedSlice)
	})
	state.SetSynced()
	address := socket(t)
	server, _ := serve(t, state, address, quick)
	var recs []*sinktest.Recorder
	for _, node := range nodes {
		client, _ := follow(t, node, address)
		rec := sinktest.NewRecorder(t, nil)
		drive(t, client.Source(), rec)
		recs = append(recs, rec)
	}
	wait := func(syncs int) {
		t.Helper()
		for i, rec := range recs {
			if err := rec.Wait(within(t), atLeast(syncs)); err != nil {
				t.Fatalf("node %s: %v", nodes[i], err)
			}
		}
	}
	wait(1)
	const classes = 4 // two for each zone: one for the node with the endpoint, and one for all other nodes
	const first = 6   // one for each zone, and two for each node with an endpoint, because such a node gets the difference
	if got := server.Stats().Views; got != first {
		t.Errorf("%d views were computed for %d nodes, want %d", got, len(nodes), first)
	}
	change := func(ports ...api.PortMapping) {
		changed := *hinted
		changed.Ports = ports
		update(state, func(to apitest.Writer) { to.SetService(&changed) })
	}
	change(plain("", 81).Ports...) // the server also computes the old views, because first answers do not cache them
	wait(2)
	before := server.Stats()
	change(plain("", 82).Ports...)
	wait(3)
	if got := server.Stats().Views - before.Views; got != classes {
		t.Errorf("a change computed %d views, want %d", got, classes)
	}
	if got := server.Stats().Values - before.Values; got > 3*classes {
		t.Errorf("a change computed %d values, want at most %d", got, 3*classes)
	}
}

// The test adds another node, and an endpoint that is neither ready nor serving.
func TestInvisibleChangesAreNotSent(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	update(state, func(to apitest.Writer) {
		to.SetNode(&api.Node{Name: "n", Labels: map[string]string{"topology.kubernetes.io/zone": "a"}})
		to.SetService(hinted)
		to.SetSlice(hintedSlice)
	})
	state.SetSynced()
	address := socket(t)
	serve(t, state, address, quick)
	client, _ := follow(t, "n", address)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	if err := rec.Wait(within(t), atLeast(1)); err != nil {
		t.Fatal(err)
	}
	more := *hintedSlice
	more.Endpoints = append(slices.Clone(more.Endpoints), api.SliceEndpoint{Addr: netip.MustParseAddr("172.16.0.3"), Details: &api.EndpointDetails{NodeName: "in-b", Zone: "b"}})
	update(state, func(to apitest.Writer) {
		to.SetSlice(&more)
		to.SetNode(&api.Node{Name: "another"})
	})
	update(state, func(to apitest.Writer) { to.SetService(plain("mark", 1)) })
	if err := rec.Wait(within(t), func(syncs []sinktest.Sync) bool { return len(rec.Views()) == 2 }); err != nil {
		t.Fatal(err)
	}
	for _, s := range rec.Syncs()[1:] {
		if got := keys(s); len(got) != 1 || got[0] != "mark" {
			t.Errorf("received %v", got)
		}
	}
}

// The service is too large for one operation.
func TestLargeServiceIsSentInParts(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	slice := *hintedSlice
	slice.Endpoints = nil
	addr := netip.MustParseAddr("172.16.0.0")
	for range 30_000 {
		addr = addr.Next()
		slice.Endpoints = append(slice.Endpoints, api.SliceEndpoint{Addr: addr, Details: &api.EndpointDetails{NodeName: "in-a", Zone: "a"}, Conditions: api.Conditions{Ready: true, Serving: true}})
	}
	update(state, func(to apitest.Writer) {
		to.SetService(hinted)
		to.SetSlice(&slice)
	})
	state.SetSynced()
	address := socket(t)
	serve(t, state, address, quick)
	client, _ := follow(t, "n", address)
	rec := sinktest.NewRecorder(t, nil)
	drive(t, client.Source(), rec)
	// The driver delivers a large service alone, after the first Sync.
	if err := rec.Wait(within(t), func([]sinktest.Sync) bool { return len(rec.Views()) == 1 }); err != nil {
		t.Fatal(err)
	}
	if got := len(rec.Views()[0].Endpoints); got != 30_000 {
		t.Errorf("%d endpoints", got)
	}
}

func TestInvalidOptions(t *testing.T) {
	for name, opts := range map[string]remote.ServerOptions{
		"node certificates without TLS":         {NodeCertificates: true},
		"cluster readers without TLS":           {ServeCluster: true, ClusterReaders: []string{"x"}},
		"ServeCluster with TLS without readers": {TLS: tlsFiles("x"), ServeCluster: true},
		"negative connections":                  {MaxConnections: -1},
		"negative connections of a peer":        {MaxConnectionsPerPeer: -1},
		"negative streams of a peer":            {MaxStreamsPerPeer: -1},
		"negative rate":                         {StreamRate: -1},
		"rate that is not a number":             {StreamRate: math.NaN()},
		"negative timeout":                      {SendTimeout: -1},
		"negative age":                          {ConnectionAge: -1},
		"negative cache":                        {CacheBytes: -1},
	} {
		if _, err := remote.NewServer(cluster.New(cluster.Options{Resumable: true}), opts); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestServeRunsOnce(t *testing.T) {
	state := cluster.New(cluster.Options{Resumable: true})
	server, err := remote.NewServer(state, quick)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expect(t, server.Serve(ctx, listen(t, socket(t))), "")
	l := listen(t, socket(t))
	expect(t, server.Serve(ctx, l), "already serving")
	if _, err := l.Accept(); err == nil {
		t.Error("the listener of the second call is still open")
	}
}
