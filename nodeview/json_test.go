// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
)

func TestWriteFrontends(t *testing.T) {
	node := &api.Node{Name: thisNode.Name, Addresses: []api.NodeAddress{{Type: "InternalIP", IP: netip.MustParseAddr("10.9.0.1")}}}
	web := service(ofType(api.LoadBalancer), externalLocal, loadBalancerIPs("203.0.113.1"), sourceRangesFor("10.9.0.0/16"), nodePort(30080),
		func(s *api.Service) {
			s.Ports[0].Name, s.AffinitySeconds = "http", 60
		})
	all := service(mapIP, headless, externalIPs("192.0.2.1"), func(s *api.Service) { s.Name = "whole" })
	var views []*api.View
	for _, state := range []*api.ServiceState{
		{Service: web, Slices: endpointSlices("slice a http=8080\n10.0.0.1 ready @there\n10.0.0.3 serving terminating @there")},
		{Service: all, Slices: endpointSlices("slice a\n10.0.0.2 ready @here")},
	} {
		views = append(views, View(state, node))
	}
	var out strings.Builder
	if err := WriteFrontends(&out, node, views); err != nil {
		t.Fatal(err)
	}
	const there = `{"Verdict":"Forward","Endpoints":[{"Addr":"10.0.0.1","Port":8080,"NodeName":"there"}]}`
	const keep = `,"Keep":[{"Addr":"10.0.0.3","Port":8080,"NodeName":"there"}]`
	want := []string{
		`{"Name":"here","Addresses":[{"Type":"InternalIP","IP":"10.9.0.1"}]}`,
		`{"Namespace":"default","Name":"web","Kind":"ClusterIP","Addr":"10.96.0.1","Family":"IPv4","Protocol":"TCP","Port":80,` +
			`"PortName":"http","Elsewhere":` + there + `,"Node":` + there + keep + `,"Masquerade":"MasqueradeIfConfigured","AffinitySeconds":60}`,
		`{"Namespace":"default","Name":"web","Kind":"LoadBalancerIP","Addr":"203.0.113.1","Family":"IPv4","Protocol":"TCP","Port":80,` +
			`"PortName":"http","Elsewhere":{"Verdict":"Drop"},"Node":` + there + keep + `,` +
			`"Sources":{"Restricted":true,"Ranges":["10.9.0.0/16","203.0.113.1/32"]},"Masquerade":"MasqueradeNode","AffinitySeconds":60}`,
		`{"Namespace":"default","Name":"web","Kind":"NodePort","Family":"IPv4","Protocol":"TCP","Port":30080,` +
			`"PortName":"http","Elsewhere":{"Verdict":"Drop"},"Node":` + there + keep + `,"Masquerade":"MasqueradeNode","AffinitySeconds":60}`,
		`{"Namespace":"default","Name":"whole","Kind":"ExternalIP","Addr":"192.0.2.1","Family":"IPv4",` +
			`"Elsewhere":{"Verdict":"Forward","Endpoints":[{"Addr":"10.0.0.2","Local":true,"NodeName":"here"}]},` +
			`"Node":{"Verdict":"Forward","Endpoints":[{"Addr":"10.0.0.2","Local":true,"NodeName":"here"}]},"Masquerade":"MasqueradeAll"}`,
	}
	if diff := cmp.Diff(want, strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}

	for n := range 3 {
		if err := WriteFrontends(&fullWriter{n}, node, views); !errors.Is(err, errFull) {
			t.Errorf("a writer that fails after %d lines: error %v", n, err)
		}
	}
	if err := WriteViews(&fullWriter{1}, views); !errors.Is(err, errFull) {
		t.Errorf("WriteViews: a writer that fails: error %v", err)
	}

	out.Reset()
	if err := WriteFrontends(&out, nil, nil); err != nil || out.String() != "{}\n" {
		t.Errorf("without a node: wrote %q, error %v", out.String(), err)
	}
}

// fullWriter fails after a number of writes.
type fullWriter struct{ left int }

var errFull = errors.New("full")

func (w *fullWriter) Write(p []byte) (int, error) {
	if w.left == 0 {
		return 0, errFull
	}
	w.left--
	return len(p), nil
}

func TestParametersOfFrontendsInJSON(t *testing.T) {
	state := weighed(service(func(s *api.Service) { s.Algorithm, s.ResetConnections = api.HashClient, true }), 1, 1, 1)
	state.Slices[0].Endpoints[1].Conditions = api.Conditions{Serving: true, Terminating: true}
	state.Slices[0].Endpoints[2].Conditions = api.Conditions{Ready: true, Drain: true}
	for f := range Frontends(View(state, nil)) {
		text, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		const want = `,"Algorithm":"HashClient","ResetConnections":true,"Reset":[{"Addr":"10.1.0.2","Port":8080,"Weight":1}]}`
		if !strings.HasSuffix(string(text), want) {
			t.Errorf("%s, want the end %s", text, want)
		}
	}
	text, err := json.Marshal(namedFrontend{Fault: lostClaim})
	if err != nil || !strings.Contains(string(text), `"Fault":"another service owns it"`) {
		t.Errorf("a lost frontend: %s, error %v", text, err)
	}
}
