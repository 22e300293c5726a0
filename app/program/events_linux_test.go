// SPDX-License-Identifier: Apache-2.0

package program

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestEventsNeedAnAPIServer(t *testing.T) {
	if _, err := parsedFlags(t, "", "--events").parts(command.Run{}); err == nil || !strings.Contains(err.Error(), "--events") {
		t.Errorf("error %v, want one with --events", err)
	}
}

func TestOnlyNewlyLostClaimsBecomeEvents(t *testing.T) {
	lost := func(address string, protocol api.Protocol, port int32) api.LostClaim {
		return api.LostClaim{Claim: api.Claim{IP: netip.MustParseAddr(address), Protocol: protocol, Port: port}, Winner: types.NamespacedName{Namespace: "other", Name: "winner"}}
	}
	first := lost("192.0.2.1", api.TCP, 80)
	nodePort := api.LostClaim{Claim: api.Claim{Family: api.IPv6, Protocol: api.UDP, Port: 30000}, Winner: first.Winner}
	views := func(claims ...api.LostClaim) *api.View { return &api.View{Lost: claims} }
	w := &eventsWriter{node: "node", queue: make(chan *eventsv1.Event, 5)}
	key := types.NamespacedName{Namespace: "ns", Name: "web"}
	if err := w.Sync(t.Context(), &sink.Changes{Services: slices.Values([]sink.Change{
		{Key: key, New: views(first)},
		{Key: key, Old: views(first)},
		{Key: key, Old: views(first), New: views(first, nodePort, lost("2001:db8::1", 0, 0))},
		{Key: key, New: views(first)}, // in another pass
	})}); err != nil {
		t.Fatal(err)
	}
	close(w.queue)
	var notes, names []string
	for e := range w.queue {
		claim, _, _ := strings.Cut(e.Note, " belongs to service other/winner")
		notes, names = append(notes, claim), append(names, e.Name)
		if e.Namespace != "ns" || e.Regarding.Kind != "Service" || e.Regarding.Name != "web" || e.Reason != "ClaimLost" {
			t.Errorf("event %v", e)
		}
	}
	if diff := cmp.Diff([]string{"192.0.2.1:80/TCP", "node port 30000/UDP", "2001:db8::1", "192.0.2.1:80/TCP"}, notes); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
	if names[0] != names[3] || len(slices.Compact(slices.Sorted(slices.Values(names)))) != 3 {
		t.Errorf("names %q: want the same name for the same claim, and only then", names)
	}
}

func TestEventsNameIgnoredTrafficParameters(t *testing.T) {
	w := &eventsWriter{queue: make(chan *eventsv1.Event, 100), honours: nodeview.Parameters{Resets: true}}
	plain := &api.View{Service: &api.Service{Name: "web"}}
	hashed := &api.View{Service: &api.Service{Name: "web", Algorithm: api.HashClient, ResetConnections: true}}
	if err := w.Sync(t.Context(), &sink.Changes{Services: slices.Values([]sink.Change{{New: plain}, {Old: plain, New: hashed}, {Old: hashed, New: hashed}})}); err != nil {
		t.Fatal(err)
	}
	close(w.queue)
	var notes []string
	for e := range w.queue {
		notes = append(notes, e.Reason+": "+e.Note)
	}
	if want := []string{"TrafficParametersIgnored: served without traffic parameters that this dataplane does not have: stable hashing"}; !slices.Equal(notes, want) {
		t.Errorf("events %q, want %q", notes, want)
	}
}

// A service that loses many claims leaves room for the Events of other services.
func TestEventsOfOneServiceAreLimited(t *testing.T) {
	many := &api.View{}
	for port := range int32(1000) {
		many.Lost = append(many.Lost, api.LostClaim{Claim: api.Claim{IP: netip.MustParseAddr("192.0.2.1"), Protocol: api.TCP, Port: port + 1}})
	}
	w := &eventsWriter{queue: make(chan *eventsv1.Event, 100)}
	if err := w.Sync(t.Context(), &sink.Changes{Services: slices.Values([]sink.Change{{New: many}, {Old: many, New: many}})}); err != nil {
		t.Fatal(err)
	}
	close(w.queue)
	last, n := "", 0
	for e := range w.queue {
		last = e.Note
		n++
	}
	if n != 11 || last != "990 more addresses and ports belong to other services" {
		t.Errorf("%d events, the last one: %s", n, last)
	}
}

func TestRefusedServicesBecomeEvents(t *testing.T) {
	w := &eventsWriter{queue: make(chan *eventsv1.Event, 1)}
	w.serviceRefused(types.NamespacedName{Namespace: "ns", Name: "web"}, errors.New("it needs 5 elements"))
	if e := <-w.queue; e.Namespace != "ns" || e.Regarding.Kind != "Service" || e.Regarding.Name != "web" || e.Reason != "ServiceRefused" || !strings.Contains(e.Note, "it needs 5 elements") {
		t.Errorf("event %v", e)
	}
}

// TestEventsOfObservers checks that observers of metrics also write Events.
func TestEventsOfObservers(t *testing.T) {
	counted, err := metrics.New(prometheus.NewRegistry(), metrics.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m := metricsWithEvents{counted, &eventsWriter{node: "node", queue: make(chan *eventsv1.Event, 2)}}
	o := m.Backend("nftables")
	o.Wrote(1, nil)
	o.Drifted(true)
	o.Drifted(false)
	_, failed := m.HealthChecks()
	failed(types.NamespacedName{Namespace: "ns", Name: "web"}, netip.MustParseAddrPort("192.0.2.1:30100"), errors.New("in use"))
	for _, want := range []string{"ServiceRulesChanged", "FailedToStartServiceHealthcheck"} {
		if e := <-m.events.queue; e.Reason != want {
			t.Errorf("event %v, want %s", e, want)
		}
	}
}

func TestEventsDoNotBlock(t *testing.T) {
	w := &eventsWriter{node: "node", queue: make(chan *eventsv1.Event, 1)}
	w.drifted("nftables")
	w.drifted("nftables")
	if e := <-w.queue; e.Namespace != "default" || e.Regarding.Kind != "Node" || e.Regarding.Name != "node" {
		t.Errorf("event %v", e)
	}
}
