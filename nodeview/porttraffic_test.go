// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
)

// TestPortTrafficsAgreeWithFrontends checks that each frontend has the decisions of its
// port and family, for all policies.
func TestPortTrafficsAgreeWithFrontends(t *testing.T) {
	for _, edit := range []func(*api.Service){
		func(*api.Service) {},
		externalLocal,
		func(s *api.Service) { s.InternalTrafficToLocal = true },
		func(s *api.Service) { externalLocal(s); s.InternalTrafficToLocal = true },
	} {
		svc := service(edit, externalIPs("192.0.2.1"), nodePort(30080), func(s *api.Service) {
			s.Ports[0].Name = "http"
			s.Ports = append(s.Ports, api.PortMapping{Name: "other", Protocol: api.TCP, Port: 81, TargetPort: 9090})
		})
		view := View(&api.ServiceState{Service: svc, Slices: endpointSlices("slice a http=8080 other=9090\n10.0.0.1 ready @here\n10.0.0.2 ready @there")}, thisNode)
		byPort := map[int32]PortTraffic{}
		for p := range PortTraffics(view) {
			byPort[p.ServicePort.Port] = p
		}
		if len(byPort) != 2 {
			t.Errorf("%d ports, want 2", len(byPort))
		}
		for f := range Frontends(view) {
			p := byPort[f.ServicePort.Port]
			elsewhere, node := p.External, p.ShortCircuit
			local := p.ExternalLocal
			if f.Kind == ClusterIP {
				elsewhere, node, local = p.Internal, p.Internal, p.InternalLocal
			}
			if diff := cmp.Diff([]Traffic{f.Elsewhere, f.Node}, []Traffic{elsewhere, node}, cmpopts.EquateComparable(), cmp.AllowUnexported()); diff != "" {
				t.Errorf("%s (-frontend +port):\n%s", f.FrontendKey, diff)
			}
			if want := map[bool]int{true: 1, false: 2}[local]; len(elsewhere.Endpoints) != want {
				t.Errorf("%s has %d endpoints, want %d", f.FrontendKey, len(elsewhere.Endpoints), want)
			}
		}
	}
	for range PortTraffics(nil) {
		t.Error("a deleted service has ports")
	}
}
