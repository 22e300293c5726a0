// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
)

// claimant returns a service that claims some ports of an address, or the whole address.
func claimant(name string, created int64, ip string, ports ...int32) *api.Service {
	s := &api.Service{Namespace: "ns", Name: name, Type: api.ClusterIP, Created: time.Unix(created, 0), AllPorts: len(ports) == 0}
	s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr(ip))
	for _, p := range ports {
		s.Ports = append(s.Ports, api.PortMapping{Protocol: api.TCP, Port: p})
	}
	return s
}

// TestReplaceReturnsWhatChanges checks that replace returns only the claims whose
// outcome changes, and not all claims of the services and addresses. If the owner of an
// address changes, the result includes the best claim at the address.
func TestReplaceReturnsWhatChanges(t *testing.T) {
	c := newClaims()
	const ip, next = "10.0.0.1", "10.0.0.2"
	replace := func(old, new *api.Service) (others []string, changed bool) {
		t.Helper()
		_, list, changed := c.replace(old, new)
		for _, o := range list {
			text := o.claimant.Name + " wins"
			if o.lost {
				text = o.claimant.Name + " loses"
			}
			others = append(others, text)
		}
		slices.Sort(others)
		return others, changed
	}
	for _, step := range []struct {
		name     string
		old, new *api.Service
		others   []string
		same     bool
	}{
		{"the first claims", nil, claimant("ports", 9, ip, 1, 2, 3), nil, false},
		{"claims of another address", nil, claimant("next", 9, next, 1), nil, false},
		{"the same claims again", claimant("ports", 9, ip, 1, 2, 3), claimant("ports", 9, ip, 3, 2, 1), nil, true},
		{"another age", claimant("ports", 9, ip, 1, 2, 3), claimant("ports", 8, ip, 1, 2, 3), nil, false},
		{"a service without claims", nil, &api.Service{Namespace: "ns", Name: "none", Type: api.ExternalName}, nil, true},
		{"an older service of one port", nil, claimant("old", 5, ip, 2), []string{"ports loses"}, false},
		{"it gets another port, too", claimant("old", 5, ip, 2), claimant("old", 5, ip, 2, 3), []string{"ports loses"}, false},
		{"the whole address loses against both", nil, claimant("whole", 10, ip), []string{"old wins"}, false},
		{"an older service of the whole address", nil, claimant("older", 4, ip), []string{"old loses", "old loses", "old loses", "ports loses"}, false},
		{"a still older service of two ports", nil, claimant("top", 2, ip, 8, 9), []string{"old wins", "old wins", "older loses", "older loses", "ports wins"}, false},
		{"it ends", claimant("top", 2, ip, 8, 9), nil, []string{"old loses", "old loses", "older wins", "older wins", "ports loses"}, false},
		{"a still older one", nil, claimant("oldest", 3, ip), []string{"older loses"}, false},
		{"the oldest one ends", claimant("oldest", 3, ip), nil, []string{"older wins"}, false},
		{"the other one ends, too", claimant("older", 4, ip), nil, []string{"old wins", "old wins", "old wins", "ports wins", "whole loses"}, false},
	} {
		others, changed := replace(step.old, step.new)
		if changed == step.same || !slices.Equal(others, step.others) {
			t.Errorf("%s: changed %t, others %q, want %q", step.name, changed, others, step.others)
		}
	}
}

// TestStatesWithoutLostClaimsAreNotCopied checks that WithWinners returns the same
// pointer for a state without lost claims, and for nil.
func TestStatesWithoutLostClaimsAreNotCopied(t *testing.T) {
	s := New(Options{}).Snapshot()
	state := &api.ServiceState{Service: claimant("a", 1, "10.0.0.1", 1)}
	if s.WithWinners(state) != state || s.WithWinners(nil) != nil {
		t.Error("the state is copied")
	}
}
