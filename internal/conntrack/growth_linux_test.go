// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
)

// wideService returns the description of a service with UDP ports, external IPs and
// endpoints, for the function service.
func wideService(ports, externalIPs, endpoints int) string {
	var b strings.Builder
	b.WriteString("external")
	for i := range externalIPs {
		fmt.Fprintf(&b, " %s", netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)}))
	}
	for i := range ports {
		fmt.Fprintf(&b, "\nport %d", 1000+i)
	}
	if endpoints > 0 {
		b.WriteString("\nready")
	}
	for i := range endpoints {
		fmt.Fprintf(&b, " %s", netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}))
	}
	return b.String()
}

// TestFrontendsOfAPortAreComparedOnce removes an endpoint of a service with many
// frontends, all of which have the same endpoints.
func TestFrontendsOfAPortAreComparedOnce(t *testing.T) {
	const ports, externalIPs, endpoints = 5, 40, 50
	before := verdictsOf(service(t, "wide", wideService(ports, externalIPs, endpoints)))[unix.IPPROTO_UDP]
	now := verdictsOf(service(t, "wide", wideService(ports, externalIPs, endpoints-1)))[unix.IPPROTO_UDP]
	var c comparison
	stale := c.stale(before, now, unix.IPPROTO_UDP)
	for k := range now {
		if !stale[k] && k.Family == api.IPv4 {
			t.Errorf("flows to %v are kept although an endpoint was removed", k)
		}
	}
	if c.checks > ports*endpoints {
		t.Errorf("%d checks of endpoints, want at most %d", c.checks, ports*endpoints)
	}
}

// flips returns two views of a service with UDP or TCP ports. The second view lacks an
// endpoint.
func flips(t testing.TB, protocol string, ports, externalIPs, endpoints int) (more, less []*api.View) {
	view := func(endpoints int) []*api.View {
		text := strings.Split(wideService(ports, externalIPs, endpoints), "\n")
		for i, line := range text {
			if protocol == "tcp" && strings.HasPrefix(line, "port") {
				text[i] += "/TCP"
			}
		}
		return []*api.View{service(t, "wide", strings.Join(text, "\n"))}
	}
	more, less = view(endpoints), view(endpoints-1)
	less[0].Service = more[0].Service
	return more, less
}

// TestChangedEndpointTakesNoTimeForAddresses removes and adds an endpoint of services that
// differ only in the number of their external IPs.
func TestChangedEndpointTakesNoTimeForAddresses(t *testing.T) {
	for _, protocol := range []string{"udp", "tcp"} {
		for _, unsure := range []bool{false, true} {
			if protocol == "tcp" && unsure {
				continue // an unsure TCP change queues all destinations
			}
			allocations := func(externalIPs int) float64 {
				q := newQueue()
				more, less := flips(t, protocol, 5, externalIPs, 20)
				key := more[0].Key()
				q.add(wholePass(more))
				_, count := q.pending()
				q.removeUpTo(count)
				return testing.AllocsPerRun(5, func() {
					for _, c := range []sink.Change{{Key: key, Old: more[0], New: less[0], Unsure: unsure}, {Key: key, Old: less[0], New: more[0], Unsure: unsure}} {
						q.add(&sink.Changes{Services: slices.Values([]sink.Change{c})})
						q.pending()
					}
				})
			}
			few, many := allocations(10), allocations(1000)
			if many > few+5 {
				t.Errorf("%s, unsure %t: %.0f allocations with 1,000 external IPs, %.0f with 10", protocol, unsure, many, few)
			}
		}
	}
}

// BenchmarkChangedEndpoint removes and adds an endpoint of a service with 50 ports, 1,000
// external IPs and 100 endpoints.
func BenchmarkChangedEndpoint(b *testing.B) {
	for _, protocol := range []string{"udp", "tcp"} {
		b.Run(protocol, func(b *testing.B) {
			b.ReportAllocs()
			r := newReconciler(Options{})
			more, less := flips(b, protocol, 50, 1000, 100)
			r.Sync(b.Context(), wholePass(more))
			for b.Loop() {
				r.Sync(b.Context(), changesBetween(more, less))
				r.Sync(b.Context(), changesBetween(less, more))
			}
		})
	}
}

// TestServiceWithManyFrontendsTakesOnePass replaces all endpoints of a service with many
// frontends, and then deletes the service.
func TestServiceWithManyFrontendsTakesOnePass(t *testing.T) {
	n := netnstest.New(t)
	r, passes := startReconciler(t, Options{NetNS: n.FD})
	before := services(t, map[string]string{"wide": wideService(50, 100, 10)})
	syncAndFlush(t, r, changesBetween(nil, before))
	*passes = nil
	without := services(t, map[string]string{"wide": wideService(50, 100, 0)})
	for i, change := range []*sink.Changes{changesBetween(before, without), changesBetween(without, nil)} {
		sport := uint16(2000 + 10*i)
		createEntries(t, n.FD, udp(sport, "10.97.0.7:1007", "10.1.0.3:6007"), udp(sport+1, "10.97.0.99:1049", "10.1.0.4:6049"), udp(sport+2, "192.0.2.1:53", "192.0.2.1:53"))
		syncAndFlush(t, r, change)
		if len(*passes) != i+1 || (*passes)[i].deleted != 2 {
			t.Fatalf("passes %+v, want one that deletes two entries", *passes)
		}
	}
}
