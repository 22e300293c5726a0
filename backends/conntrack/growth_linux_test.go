// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
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
	before := verdictsOf(service(t, "wide", wideService(ports, externalIPs, endpoints)))
	now := verdictsOf(service(t, "wide", wideService(ports, externalIPs, endpoints-1)))
	var c comparison
	for d, v := range now {
		if !c.makesStale(before[d], v, d) {
			t.Errorf("flows to %v are kept although an endpoint was removed", d)
		}
	}
	if len(now) != ports*externalIPs || c.checks > ports*endpoints {
		t.Errorf("%d destinations took %d checks of endpoints, want %d and at most %d", len(now), c.checks, ports*externalIPs, ports*endpoints)
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
		if len(*passes) != i+1 || (*passes)[i].Ended != 2 {
			t.Fatalf("passes %+v, want one that deletes two entries", *passes)
		}
	}
}
