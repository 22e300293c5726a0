// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
)

// localView returns the view of a dual-stack service of type NodePort. Both traffic
// policies are Local, and each of the given nodes has an endpoint.
func localView(name string, nodes ...string) *api.View {
	svc := sinktest.Service("test/"+name, "10.96.0.1 fd96::1 80:30080>8080", func(s *api.Service) {
		s.InternalTrafficToLocal, s.ExternalTrafficToLocal = true, true
		s.IPs.ExternalIPs.Add(netip.MustParseAddr("192.0.2.1")) // one external IP, which is IPv4
	})
	endpoints := ""
	for i, node := range nodes {
		endpoints += fmt.Sprintf(" 10.1.0.%[1]d@%[2]s fd01::%[1]d@%[2]s", i+1, node)
	}
	return sinktest.View(sinktest.Node("here"), svc, endpoints)
}

func TestServicePortsWithoutLocalEndpointsAreCounted(t *testing.T) {
	var result error
	b := withReports(&command.Backend{Make: func(command.Run) (command.Parts, error) {
		return command.Parts{Sink: sink.Func(func(context.Context, *sink.Changes) error { return result })}, nil
	}}, nil)
	if err := b.Configure(); err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(slices.Concat(b.Parts().Collectors, b.Parts().KubeProxy)...)
	check := func(after string, want float64) {
		t.Helper()
		values := map[string]float64{}
		for _, name := range []string{"kpng_service_ports_without_local_endpoints", "kubeproxy_sync_proxy_rules_no_local_endpoints_total"} {
			for _, labels := range []string{" IPv4 external", " IPv4 internal", " IPv6 external", " IPv6 internal"} {
				values[name+labels] = want
			}
		}
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				name := f.GetName()
				for _, l := range m.GetLabel() {
					name += " " + l.GetValue()
				}
				got[name] = m.GetGauge().GetValue()
			}
		}
		if diff := cmp.Diff(values, got); diff != "" {
			t.Errorf("metrics after %s (-want +got):\n%s", after, diff)
		}
	}
	sync := func(c sink.Changes, views ...*api.View) {
		var changes []sink.Change
		for _, v := range views {
			changes = append(changes, sink.Change{Key: v.Key(), New: v})
		}
		c.Services = slices.Values(changes)
		if err := b.Sync(t.Context(), &c); !errors.Is(err, result) {
			t.Fatalf("Sync returned %v, want %v", err, result)
		}
	}
	remote, both := localView("a", "there"), localView("b", "here", "there")
	check("the first pass", 0)
	sync(sink.Changes{First: true}, remote)
	sync(sink.Changes{Last: true}, both, localView("c", "there"), localView("without-any"))
	check("a pass", 2)
	sync(sink.Changes{}, localView("b", "there"))
	check("a service lost its local endpoint", 3)
	sync(sink.Changes{}, localView("a", "here"))
	check("a service got a local endpoint", 2)
	result = errors.New("the dataplane is unavailable")
	sync(sink.Changes{}, both)
	check("a failed Sync", 2)
	result = nil
	sync(sink.Changes{First: true, Last: true}, localView("d", "there"))
	check("a pass without the other services", 1)
	c := localView("c", "there")
	sync(sink.Changes{}, c)
	sync(sink.Changes{First: true, Last: true, Failing: []types.NamespacedName{c.Key()}})
	check("a pass with a failure of a service without local endpoints", 1)
}
