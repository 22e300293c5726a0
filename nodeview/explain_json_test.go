// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"encoding/json"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// TestExplanationsAreDocumented compares the JSON of an explanation that has all fields with
// the table in docs/reference/json.md.
func TestExplanationsAreDocumented(t *testing.T) {
	key := types.NamespacedName{Namespace: "default", Name: "web"}
	port := &api.PortMapping{Protocol: api.TCP, Port: 80}
	endpoints := []endpointReport{{
		Slice: "web-1", Endpoint: &api.SliceEndpoint{}, TargetPort: 80,
		Internal: inReady, External: inHere, ShortCircuit: outNotHere, Preferred: "web-2",
	}}
	all := &api.View{
		Service: &api.Service{
			Algorithm: api.HashClient, ResetConnections: true,
			Ports: []api.PortMapping{{NodePort: 30080}}, SourceRanges: []api.SourceRanges{{NodePorts: true}},
		},
		Endpoints: []api.Endpoint{{Addr: netip.MustParseAddr("10.1.0.1")}, {Addr: netip.MustParseAddr("10.1.0.2"), Weight: 1}},
	}
	text, err := json.Marshal(&Explanation{
		Service: key, node: "here", zone: "zone-1", View: all, absent: "no service",
		lists:     []listReport{{Port: port, Family: api.IPv4, Endpoints: endpoints}},
		skipped:   endpoints,
		Frontends: []Frontend{{}},
		unserved:  []namedFrontend{{FrontendKey{ExternalIP, netip.MustParseAddr("192.0.2.1"), api.IPv4, api.TCP, 80}, port, lostClaim, key}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var explanation map[string]any
	if err := json.Unmarshal(text, &explanation); err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	addPaths(got, "", explanation)

	page, err := os.ReadFile("../docs/reference/json.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "\n| field of an explanation | type | meaning |\n|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var documented []string
	for row := range strings.Lines(table) {
		fields, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " |")
		documented = append(documented, strings.Split(fields, ", ")...)
	}
	if diff := cmp.Diff(slices.Sorted(slices.Values(documented)), slices.Sorted(maps.Keys(got))); diff != "" {
		t.Errorf("table in docs/reference/json.md (-documented +written):\n%s", diff)
	}
}

// addPaths adds the paths of the values in v. It skips the values in objects that other
// tables describe.
func addPaths(to map[string]bool, path string, v any) {
	object, isObject := v.(map[string]any)
	list, isList := v.([]any)
	switch {
	case isObject && !slices.Contains([]string{"View", "Lists[].Port", "Lists[].Endpoints[].Endpoint", "Skipped[].Endpoint", "Frontends[]", "Unserved[].ServicePort"}, path):
		for name, value := range object {
			addPaths(to, strings.TrimPrefix(path+"."+name, "."), value)
		}
	case isList:
		for _, value := range list {
			addPaths(to, path+"[]", value)
		}
	default:
		to[path] = true
	}
}
