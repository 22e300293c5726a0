// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
)

// groups is the state of a backend that programs groups of endpoints. It has the members
// of each group. It also has the group that each frontend uses for traffic from
// elsewhere.
type groups struct {
	members map[ListID]string
	of      map[string]ListID
}

func groupsOf(view *api.View) groups {
	g := groups{map[ListID]string{}, map[string]ListID{}}
	for f := range Frontends(view) {
		g.of[f.FrontendKey.String()] = f.Elsewhere.List
		for _, traffic := range []Traffic{f.Elsewhere, f.Node} {
			if traffic.Verdict == Forward {
				g.members[traffic.List] = trafficText(traffic)
			}
		}
	}
	return g
}

func TestListsAreSharedAndKeepTheirIdentity(t *testing.T) {
	// Port 81 has the same endpoints and target port as port 80, so both share a list.
	web := service(externalLocal, externalIPs("192.0.2.1"), nodePort(30080), func(s *api.Service) {
		s.Ports[0].Name = "http"
		s.Ports = append(s.Ports, api.PortMapping{Name: "also", Protocol: api.TCP, Port: 81, TargetPort: 8080})
	})
	view := func(slice string) groups {
		return groupsOf(View(&api.ServiceState{Service: web, Slices: endpointSlices("slice a http=8080 also=8080\n" + slice)}, thisNode))
	}
	const (
		cluster, external, node = "ClusterIP 10.96.0.1:80/TCP", "ExternalIP 192.0.2.1:80/TCP", "NodePort IPv4:30080/TCP"
		also, alsoExternal      = "ClusterIP 10.96.0.1:81/TCP", "ExternalIP 192.0.2.1:81/TCP"
	)

	before := view("10.0.0.1 ready @here\n10.0.0.2 ready @there")
	want := []string{"10.0.0.1:8080", "10.0.0.1:8080 10.0.0.2:8080"}
	if diff := cmp.Diff(want, slices.Sorted(maps.Values(before.members))); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
	if before.of[cluster] != before.of[also] || before.of[external] != before.of[alsoExternal] ||
		before.of[external] != before.of[node] || before.of[cluster] == before.of[external] {
		t.Errorf("groups of the frontends: %v", before.of)
	}

	after := view("10.0.0.1 ready @here\n10.0.0.3 ready @there")
	if diff := cmp.Diff(before.of, after.of); diff != "" {
		t.Errorf("identities changed with an endpoint (-before +after):\n%s", diff)
	}

	// The Local list and the Cluster list are equal here, so there is one group.
	if same := view("10.0.0.1 ready @here"); len(same.members) != 1 || same.of[cluster] != same.of[external] {
		t.Errorf("with equal lists: groups %v, frontends %v", same.members, same.of)
	}
	if none := view("10.0.0.1 ready @there"); none.of[external] != 0 || none.of[cluster] == 0 {
		t.Errorf("with an empty Local list: groups of frontends %v", none.of)
	}
}

// TestListIDsNeverChange checks that all versions of kpng use the same ListIDs.
func TestListIDsNeverChange(t *testing.T) {
	port := &api.PortMapping{Protocol: api.UDP, Port: 53}
	for _, c := range []struct {
		port   *api.PortMapping
		family api.Family
		local  bool
		want   ListID
	}{
		{nil, api.IPv4, false, 0x4_0000_0000}, {nil, api.IPv6, true, 0x106_0000_0000},
		{port, api.IPv6, false, 0x6_0000_0035 | ListID(api.UDP)<<16}, {port, api.IPv4, true, 0x104_0000_0035 | ListID(api.UDP)<<16},
	} {
		if got := listID(c.port, c.family, c.local); got != c.want {
			t.Errorf("port %v, %s, local %t: %#x, want %#x", c.port, c.family, c.local, got, c.want)
		}
	}
}
