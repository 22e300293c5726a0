// SPDX-License-Identifier: Apache-2.0

package frontends_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/frontends"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink/sinktest"
)

func TestKeysAreThoseOfTheFrontends(t *testing.T) {
	view := sinktest.View(nil, sinktest.Service("web", "10.96.0.1 fd00::1 http=80:30080 dns=53/UDP"), "10.1.0.1 fd01::1")
	view.Lost = []api.LostClaim{{Claim: api.Claim{IP: netip.MustParseAddr("10.96.0.1"), Protocol: api.UDP, Port: 53}}}
	var want []nodeview.FrontendKey
	for f := range nodeview.Frontends(view) {
		want = append(want, f.FrontendKey)
	}
	if got := slices.Collect(frontends.Keys(view)); len(want) != 5 || !slices.Equal(got, want) {
		t.Errorf("got the keys %v, want %v", got, want)
	}
	if got := slices.Collect(frontends.Keys(nil)); len(got) > 0 {
		t.Errorf("no view has the keys %v", got)
	}
}

func TestSourcesOf(t *testing.T) {
	restricted := api.NewIPSet(netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2"))
	view := sinktest.View(nil, sinktest.Service("web", "10.96.0.1 fd00::1 80", func(s *api.Service) {
		s.Type, s.IPs.LoadBalancerIPs = api.LoadBalancer, restricted
		s.SourceRanges = []api.SourceRanges{{TargetIPs: restricted, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12")}}}
	}), "")
	contents := map[frontends.SourcesID]string{}
	ids := map[string]frontends.SourcesID{}
	for f := range nodeview.Frontends(view) {
		id, content := frontends.SourcesOf(&f), f.Family.String()+" "+f.Sources.String()
		if other, ok := contents[id]; ok && other != content {
			t.Errorf("one ID has the sources %q and %q", other, content)
		}
		if other, ok := ids[content]; ok && other != id {
			t.Errorf("the sources %q of one list have two IDs", content)
		}
		contents[id], ids[content] = content, id
	}
	// One ID for each family without restriction, and one for each family with a
	// restriction.
	if len(contents) != 4 {
		t.Errorf("got %d IDs, want 4: %v", len(contents), contents)
	}
}
