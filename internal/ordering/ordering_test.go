// SPDX-License-Identifier: Apache-2.0

package ordering

import (
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
)

func TestEndpointsAreOrderedByAddressAndPorts(t *testing.T) {
	one, two, six := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::1")
	sorted := []api.Endpoint{
		{Addr: one},
		{Addr: one, PortOverrides: []api.PortName{{Port: 8080}}},
		{Addr: one, PortOverrides: []api.PortName{{Name: "http", Port: 8080}}},
		{Addr: one, PortOverrides: []api.PortName{{Name: "http", Port: 8080}, {Name: "https", Port: 1}}},
		{Addr: one, PortOverrides: []api.PortName{{Name: "http", Port: 9090}}},
		{Addr: two},
		{Addr: six},
		{Addr: six, PortOverrides: []api.PortName{{Name: "http", Port: 8080}}},
	}
	for i := range sorted {
		for j := range sorted {
			want := 0
			switch {
			case i < j:
				want = -1
			case i > j:
				want = 1
			}
			if got := Endpoints(&sorted[i], &sorted[j]); got != want {
				t.Errorf("%s compared to %s is %d, want %d", sorted[i].Key(), sorted[j].Key(), got, want)
			}
		}
	}
}
