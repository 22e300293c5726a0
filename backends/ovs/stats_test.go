// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
)

func counting(o *options) { o.Stats = true }

// statsOf returns the connections by service port, as SERVICE/PORT/PROTOCOL, and endpoint.
// It leaves out endpoints without connections.
func statsOf(t testing.TB, b *backend) map[string]int64 {
	t.Helper()
	all := map[string]int64{}
	if err := b.Stats(t.Context(), func(s backends.Stats) bool {
		if s.Active != -1 || s.FromClients != -1 || s.ToClients != -1 {
			t.Errorf("numbers that are not counted: %+v", s)
		}
		if s.Connections > 0 {
			all[fmt.Sprintf("%s/%s/%s %s", s.Service.Name, s.Port, s.Protocol, s.Endpoint)] += s.Connections
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// awaitStats waits until the numbers are equal to want. The switch adds some packets later.
func (n *testNetwork) awaitStats(t *testing.T, want map[string]int64) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		got := statsOf(t, n.backend)
		if maps.Equal(got, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("counted %v, want %v", got, want)
		}
	}
}

// TestConnectionsAreCounted connects to all kinds of services. The counters must have
// exactly these connections, also after a restart.
func TestConnectionsAreCounted(t *testing.T) {
	n := newNetwork(t, counting)
	web := view("web", clusterIP, []string{"!" + podB}, withPorts, func(s *api.Service) {
		s.Ports = append(s.Ports, api.PortMapping{Name: "more", Protocol: api.TCP, Port: 81, TargetPort: endpointPort})
		s.ExternalTrafficToLocal = true
	})
	affine := view("affine", "10.96.0.2", []string{podB}, withAffinity, func(s *api.Service) {
		s.Ports = append(s.Ports, api.PortMapping{Name: "more", Protocol: api.TCP, Port: 81, TargetPort: endpointPort})
	})
	hashed := view("hashed", "10.96.0.3", []string{podB}, func(s *api.Service) { s.Algorithm = api.HashClient })
	idle := view("idle", "10.96.0.4", []string{podB})
	n.mustPass(web, affine, hashed, idle)
	want := map[string]int64{}
	for i, to := range []struct{ from, addr, counter string }{
		{podA, clusterIP + ":80", "web/tcp/TCP"},
		{podA, clusterIP + ":81", "web/more/TCP"},
		{outside, gateway + ":30080", "web/tcp/TCP"},
		{podA, "10.96.0.2:80", "affine//TCP"},
		{podA, "10.96.0.2:81", "affine/more/TCP"},
		{outside, "10.96.0.3:80", "hashed//TCP"},
	} {
		for range 3 + i {
			n.greet(t, to.from, 0, to.addr)
			want[to.counter+" "+podB+":8080"]++
		}
	}
	n.awaitStats(t, want)
	n.restart(t)
	n.mustPass(web, affine, hashed, idle)
	n.mustMatch()
	n.awaitStats(t, want)
	n.greet(t, podA, 0, clusterIP+":81")
	want["web/more/TCP "+podB+":8080"]++
	n.awaitStats(t, want)
}

// TestCountersSurviveChanges changes the list of a service in all ways that replace its
// groups. The counters of remaining endpoints must not change, whenever they are read.
func TestCountersSurviveChanges(t *testing.T) {
	n := newNetwork(t, counting)
	all := addresses(300, nil)
	web := func(last int, algorithm api.Algorithm, weights ...int32) *api.View {
		return weighted(view("web", clusterIP, all[:last], withUDP(algorithm)), weights...)
	}
	want := map[string]int64{}
	connect := func() {
		t.Helper()
		for _, e := range n.choices(t, clients(500, 50)) {
			want["web//UDP "+e.String()]++
		}
		n.awaitStats(t, want)
	}
	n.mustPass(web(3, api.Random, 100))
	connect()
	ends, stopped := make(chan bool), sync.WaitGroup{}
	stopped.Go(func() {
		for reads := 0; ; reads++ {
			select {
			case <-ends:
				t.Logf("%d reads", reads)
				return
			default:
			}
			sum := int64(0)
			for _, c := range statsOf(t, n.backend) {
				sum += c
			}
			if sum != 500 {
				t.Errorf("%d connections are counted during changes, want 500", sum)
				return
			}
		}
	})
	for i := range 10 {
		n.mustSync(web(4+i, api.Random, 100)) // one more bucket
		n.mustSync(web(300, api.Random, 100)) // several groups
		n.mustSync(web(299, api.Random, 100)) // endpoints move between groups
		n.mustSync(web(6, api.HashClient, 100))
		n.mustSync(web(4, api.HashClient, 1, 2, 7)) // all buckets change
		n.mustSync(web(3, api.Random, 100, 300))
	}
	close(ends)
	stopped.Wait()
	n.awaitStats(t, want)
	n.mustSync(web(10, api.HashConnection, 100, 300))
	connect()
	n.mustSync(web(300, api.HashConnection, 100, 300))
	n.awaitStats(t, want)
	connect()
	n.mustSync(web(3, api.Random, 100))
	maps.DeleteFunc(want, func(counter string, _ int64) bool {
		return !slices.ContainsFunc(all[:3], func(e string) bool { return strings.HasSuffix(counter, " "+e+":8080") })
	})
	n.awaitStats(t, want)
	// An endpoint that comes back begins with 0.
	n.mustSync(web(10, api.Random, 100))
	n.awaitStats(t, want)
}

// TestCountersOfForeignGroups changes a group like another program does. The numbers of the
// group do not count for the wrong endpoints, and Stats and Sync continue.
func TestCountersOfForeignGroups(t *testing.T) {
	n := newNetwork(t, counting)
	web := view("web", clusterIP, addresses(3, nil), withUDP(api.Random))
	other := view("other", "10.96.0.2", []string{"!" + podB})
	n.mustPass(web, other)
	n.choices(t, clients(100, 10))
	n.greet(t, podA, 0, "10.96.0.2:80")
	for id, g := range n.backend.dataplane.groups {
		if len(g.buckets) == 3 {
			n.Ofctl(t, "mod-group", fmt.Sprintf("group_id=%d,type=select,bucket=bucket_id:1,actions=drop", id))
		}
	}
	want := map[string]int64{"other//TCP " + podB + ":8080": 1}
	n.awaitStats(t, want)
	if err := n.backend.dataplane.reconciler.Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.mustMatch()
	n.awaitStats(t, want)
	n.mustSync(view("web", clusterIP, addresses(4, nil), withUDP(api.Random)))
	n.awaitStats(t, want)
	n.Ofctl(t, "del-groups")
	if got := statsOf(t, n.backend); len(got) > 0 {
		t.Errorf("counted %v without groups", got)
	}
}

// TestCountersCostNothing checks services whose ports have different lists. Counters do not
// change the flows and groups of these services.
func TestCountersCostNothing(t *testing.T) {
	n := newNode(t)
	n.mustPass(examples()...)
	want := n.Listing(t)
	n.restart(t, counting)
	n.mustPass(examples()...)
	n.mustBe(want)
	if got := statsOf(t, n.backend); len(got) > 0 {
		t.Errorf("counted %v without connections", got)
	}
}
