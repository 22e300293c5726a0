// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func addrs(list ...string) IPSet {
	var s IPSet
	for _, a := range list {
		s.Add(netip.MustParseAddr(a))
	}
	return s
}

// example returns a view of a dual-stack headless service with external IPs. The service
// has a pod on this node and a pod on another node.
func example() *View {
	both := Scopes{Internal: true, External: true}
	ready := Conditions{Ready: true, Serving: true}
	return &View{
		Service: &Service{
			Namespace: "default", Name: "kpng-example", Type: ClusterIP,
			IPs:        ServiceIPs{ExternalIPs: addrs("10.0.0.55", "1000::55"), Headless: true},
			Ports:      []PortMapping{{Protocol: TCP, Port: 6000, TargetPort: 6000}},
			IPFamilies: []Family{IPv4, IPv6},
		},
		Endpoints: []Endpoint{
			{Addr: addr("11.0.1.2"), Scopes: both, NodeName: "vm-001", Conditions: ready},
			{Addr: addr("11.0.2.2"), Local: true, Scopes: both, NodeName: "vm-002", Conditions: ready},
			{Addr: addr("1100::102"), Scopes: both, NodeName: "vm-001", Conditions: ready},
			{Addr: addr("1100::202"), Local: true, Scopes: both, NodeName: "vm-002", Conditions: ready},
		},
	}
}

func TestJSON(t *testing.T) {
	got, err := json.Marshal(example())
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join([]string{
		`{"Service":{"Namespace":"default","Name":"kpng-example","Type":"ClusterIP",`,
		`"IPs":{"ClusterIPs":{},"ExternalIPs":{"V4":["10.0.0.55"],"V6":["1000::55"]},"Headless":true},`,
		`"Ports":[{"Protocol":1,"Port":6000,"TargetPort":6000}],"IPFamilies":["IPv4","IPv6"]},`,
		`"Endpoints":[`,
		`{"IPs":{"V4":["11.0.1.2"]},"Scopes":{"Internal":true,"External":true},"NodeName":"vm-001","Ready":true,"Serving":true},`,
		`{"IPs":{"V4":["11.0.2.2"]},"Local":true,"Scopes":{"Internal":true,"External":true},"NodeName":"vm-002","Ready":true,"Serving":true},`,
		`{"IPs":{"V6":["1100::102"]},"Scopes":{"Internal":true,"External":true},"NodeName":"vm-001","Ready":true,"Serving":true},`,
		`{"IPs":{"V6":["1100::202"]},"Local":true,"Scopes":{"Internal":true,"External":true},"NodeName":"vm-002","Ready":true,"Serving":true}]}`,
	}, "")
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("JSON differs (-want +got):\n%s", diff)
	}
	var back View
	if err := json.Unmarshal(got, &back); err != nil {
		t.Fatal(err)
	}
	if !back.Equal(example()) {
		t.Errorf("the view read back differs from the one written: %s", got)
	}
}

// TestJSONKeepsNamesOfTheWire checks the fields whose Go names differ from the JSON
// names.
func TestJSONKeepsNamesOfTheWire(t *testing.T) {
	s := Service{
		AllPorts:     true,
		SourceRanges: []SourceRanges{{TargetIPs: addrs("203.0.113.1"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}},
	}
	got, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"IPs":{"ClusterIPs":{}},"MapIP":true,"IPFilters":[{"TargetIPs":{"V4":["203.0.113.1"]},"SourceRanges":["10.0.0.0/8"]}]}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("JSON differs (-want +got):\n%s", diff)
	}
	var back Service
	if err := json.Unmarshal(got, &back); err != nil {
		t.Fatal(err)
	}
	if !back.Equal(&s) {
		t.Errorf("the service read back differs from the one written: %s", got)
	}
}

// TestJSONQueries runs queries that users make with jq:
//
//	.Service.IPs.ExternalIPs.V6[0]
//	.Endpoints[]|select(.Local == true)|select(.IPs.V6 != null)|.IPs.V6[0]
func TestJSONQueries(t *testing.T) {
	text, err := json.Marshal(example())
	if err != nil {
		t.Fatal(err)
	}
	var doc any
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	field := func(v any, path ...string) any {
		for _, name := range path {
			m, ok := v.(map[string]any)
			if !ok {
				return nil
			}
			v = m[name]
		}
		return v
	}
	if got := field(doc, "Service", "IPs", "ExternalIPs", "V6").([]any)[0]; got != "1000::55" {
		t.Errorf("the service's first external IPv6 address is %v, want 1000::55", got)
	}
	var local []any
	for _, e := range field(doc, "Endpoints").([]any) {
		if v6 := field(e, "IPs", "V6"); field(e, "Local") == true && v6 != nil {
			local = append(local, v6.([]any)[0])
		}
	}
	if diff := cmp.Diff([]any{"1100::202"}, local); diff != "" {
		t.Errorf("the local endpoints' IPv6 addresses differ (-want +got):\n%s", diff)
	}
}

func TestJSONEndpointHasOneAddress(t *testing.T) {
	for _, text := range []string{`{}`, `{"IPs":{}}`, `{"IPs":{"V4":["10.0.0.1"],"V6":["fd00::1"]}}`} {
		var e Endpoint
		if err := json.Unmarshal([]byte(text), &e); err == nil || !strings.Contains(err.Error(), "addresses, want 1") {
			t.Errorf("reading %s returned %v", text, err)
		}
	}
}

func TestEndpointKey(t *testing.T) {
	// The endpoints are in the order of Compare.
	keyed := []struct {
		key      string
		endpoint Endpoint
	}{
		{"10.0.0.1", Endpoint{Addr: addr("10.0.0.1")}},
		{"10.0.0.1#8080", Endpoint{Addr: addr("10.0.0.1"), PortOverrides: []PortName{{Port: 8080}}}},
		{"10.0.0.1#http=8080", Endpoint{Addr: addr("10.0.0.1"), PortOverrides: []PortName{{"http", 8080}}}},
		{"10.0.0.1#http=8080,https=1", Endpoint{Addr: addr("10.0.0.1"), PortOverrides: []PortName{{"http", 8080}, {"https", 1}}}},
		{"10.0.0.1#http=9090", Endpoint{Addr: addr("10.0.0.1"), PortOverrides: []PortName{{"http", 9090}}}},
		{"10.0.0.2", Endpoint{Addr: addr("10.0.0.2")}},
		{"fd00::1", Endpoint{Addr: addr("fd00::1")}},
		{"fd00::1#http=8080", Endpoint{Addr: addr("fd00::1"), PortOverrides: []PortName{{"http", 8080}}}},
	}
	for _, c := range keyed {
		if got := c.endpoint.Key(); got != c.key {
			t.Errorf("Key() = %q, want %q", got, c.key)
		}
	}
	changed := keyed[1].endpoint
	changed.Conditions, changed.Scopes, changed.NodeName = Conditions{Ready: true}, Scopes{Internal: true}, "elsewhere"
	if got := changed.Key(); got != keyed[1].key {
		t.Errorf("with other conditions, lists and node the key is %q, want %q", got, keyed[1].key)
	}
}

func TestTargetPort(t *testing.T) {
	for _, c := range []struct {
		name      string
		overrides []PortName
		port      PortMapping
		want      int32
	}{
		{"a named port", []PortName{{"a", 1}, {"b", 2}}, PortMapping{Name: "b", TargetPort: 3}, 2},
		{"a named port that the endpoint does not serve", []PortName{{"a", 1}}, PortMapping{Name: "b", TargetPort: 3}, 0},
		{"an unnamed port with a named targetPort", []PortName{{"web", 1}}, PortMapping{TargetPortName: "web"}, 1},
		{"an unnamed port with another number", []PortName{{"", 1}}, PortMapping{TargetPort: 3}, 1},
		{"an unnamed port with its own number", nil, PortMapping{TargetPort: 3}, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := Endpoint{PortOverrides: c.overrides}
			if got := e.TargetPort(&c.port); got != c.want {
				t.Errorf("TargetPort = %d, want %d", got, c.want)
			}
		})
	}
}

func TestFamilies(t *testing.T) {
	for _, c := range []struct {
		name    string
		service Service
		want    []Family
	}{
		{"those of ipFamilies", Service{IPFamilies: []Family{IPv6}, IPs: ServiceIPs{ClusterIPs: addrs("10.0.0.1")}}, []Family{IPv6}},
		{"otherwise those of the cluster IPs", Service{IPs: ServiceIPs{ClusterIPs: addrs("fd00::1", "10.0.0.1"), ExternalIPs: addrs("192.0.2.1")}}, []Family{IPv4, IPv6}},
		{"for headless services, otherwise those of the external IPs", Service{IPs: ServiceIPs{Headless: true, ExternalIPs: addrs("2001:db8::1")}}, []Family{IPv6}},
		{"otherwise none", Service{IPs: ServiceIPs{ExternalIPs: addrs("192.0.2.1")}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := c.service.Families(); !slices.Equal(got, c.want) {
				t.Errorf("Families = %v, want %v", got, c.want)
			}
		})
	}
}

func TestIPSet(t *testing.T) {
	s := NewIPSet(netip.MustParseAddr("fd00::1"), netip.MustParseAddr("::ffff:10.0.0.1"), netip.MustParseAddr("10.0.0.2"),
		netip.MustParseAddr("10.0.0.1"), netip.Addr{})
	const want = "[10.0.0.1 10.0.0.2 fd00::1]"
	if s.String() != want || s.Len() != 3 || s.IsZero() {
		t.Errorf("the set is %v with %d addresses, want %s", s, s.Len(), want)
	}
	if v4, v6 := fmt.Sprint(s.Family(IPv4)), fmt.Sprint(s.Family(IPv6)); v4 != "[10.0.0.1 10.0.0.2]" || v6 != "[fd00::1]" {
		t.Errorf("the families have %s and %s", v4, v6)
	}
	var added IPSet
	for _, text := range []string{"10.0.0.1", "fd00::1%eth0", "::ffff:10.0.0.2", "fd00::1", "10.0.0.1"} {
		added.Add(netip.MustParseAddr(text))
	}
	if added.Add(netip.Addr{}); added != s {
		t.Errorf("adding makes %v, want %v", added, s)
	}
	text, err := json.Marshal(s)
	if want := `{"V4":["10.0.0.1","10.0.0.2"],"V6":["fd00::1"]}`; err != nil || string(text) != want {
		t.Errorf("JSON is %s, %v; want %s", text, err, want)
	}
	var read IPSet
	if err := json.Unmarshal(text, &read); err != nil || read != s {
		t.Errorf("read %v, %v from JSON", read, err)
	}
	if text, err := json.Marshal(IPSet{}); err != nil || string(text) != "{}" {
		t.Errorf("JSON of the empty set is %s, %v", text, err)
	}
}

func TestProtocolNumbers(t *testing.T) {
	for p, want := range map[Protocol]uint8{TCP: 6, UDP: 17, SCTP: 132, 9: 0} {
		if got := p.Number(); got != want {
			t.Errorf("%s has the number %d, want %d", p, got, want)
		}
	}
}
