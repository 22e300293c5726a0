// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
)

// thisNode is the node whose views most tests compute.
var thisNode = &api.Node{Name: "here", Labels: map[string]string{"topology.kubernetes.io/zone": "zone-1"}}

// service returns the service default/web and applies edits to it. Without edits, the
// service has a cluster IP and an unnamed port 80 with target port 8080.
func service(edits ...func(*api.Service)) *api.Service {
	s := &api.Service{
		Namespace: "default", Name: "web", Type: api.ClusterIP,
		IPs:        api.ServiceIPs{ClusterIPs: ips("10.96.0.1")},
		IPFamilies: []api.Family{api.IPv4},
		Ports:      []api.PortMapping{{Protocol: api.TCP, Port: 80, TargetPort: 8080}},
	}
	for _, edit := range edits {
		edit(s)
	}
	return s
}

func dualStack(s *api.Service) {
	s.IPFamilies = []api.Family{api.IPv4, api.IPv6}
	s.IPs.ClusterIPs = ips("10.96.0.1", "fd00::1")
}

func ofType(t api.ServiceType) func(*api.Service) {
	return func(s *api.Service) { s.Type = t }
}

func externalLocal(s *api.Service) { s.ExternalTrafficToLocal = true }
func internalLocal(s *api.Service) { s.InternalTrafficToLocal = true }
func mapIP(s *api.Service)         { s.AllPorts = true }
func headless(s *api.Service)      { s.IPs.Headless, s.IPs.ClusterIPs = true, api.IPSet{} }

func externalIPs(addrs ...string) func(*api.Service) {
	return func(s *api.Service) { s.IPs.ExternalIPs = ips(addrs...) }
}

func loadBalancerIPs(addrs ...string) func(*api.Service) {
	return func(s *api.Service) { s.Type, s.IPs.LoadBalancerIPs = api.LoadBalancer, ips(addrs...) }
}

func nodePort(n int32) func(*api.Service) {
	return func(s *api.Service) { s.Ports[0].NodePort = n }
}

// ports replaces the service's ports. Specs are like "http=80", "dns=53/UDP", "80→web"
// (named targetPort) or "80→8080" (numeric targetPort).
func ports(specs ...string) func(*api.Service) {
	return func(s *api.Service) {
		s.Ports = nil
		for _, spec := range specs {
			spec, target, _ := strings.Cut(spec, "→")
			name, number, protocol := parsePort(spec)
			p := api.PortMapping{Name: name, Protocol: protocol, Port: number}
			if n, err := strconv.Atoi(target); err == nil {
				p.TargetPort = int32(n)
			} else {
				p.TargetPortName = target
			}
			s.Ports = append(s.Ports, p)
		}
	}
}

// parsePort parses "[name=]number[/protocol]".
func parsePort(s string) (name string, number int32, protocol api.Protocol) {
	if n, rest, ok := strings.Cut(s, "="); ok {
		name, s = n, rest
	}
	s, proto, _ := strings.Cut(s, "/")
	switch proto {
	case "", "TCP":
		protocol = api.TCP
	case "UDP":
		protocol = api.UDP
	case "SCTP":
		protocol = api.SCTP
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err)
	}
	return name, int32(n), protocol
}

func ips(addrs ...string) api.IPSet {
	var s api.IPSet
	for _, a := range addrs {
		s.Add(netip.MustParseAddr(a))
	}
	return s
}

// endpointSlices parses EndpointSlices from text. A line "slice NAME PORT…" begins a
// slice. If the line has no ports, the slice has the unnamed port 8080. Every other line
// is an endpoint: an address, conditions (ready implies serving), @node, host=name,
// zone=name, and hints like zones=z1,z2 and nodes=n1,n2.
func endpointSlices(text string) []*api.EndpointSlice {
	var out []*api.EndpointSlice
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
		case words[0] == "slice":
			s := &api.EndpointSlice{Namespace: "default", Name: words[1], ServiceName: "web", Family: api.IPv4}
			if len(words) == 2 {
				words = append(words, "8080")
			}
			for _, w := range words[2:] {
				name, number, protocol := parsePort(w)
				s.Ports = append(s.Ports, api.EndpointPort{Name: name, Protocol: protocol, Port: number})
			}
			out = append(out, s)
		default:
			s := out[len(out)-1]
			ep := endpoint(words)
			s.Family = api.FamilyOf(ep.Addr)
			s.Endpoints = append(s.Endpoints, ep)
		}
	}
	return out
}

func endpoint(words []string) api.SliceEndpoint {
	details := &api.EndpointDetails{}
	ep := api.SliceEndpoint{Addr: netip.MustParseAddr(words[0]), Details: details}
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		switch {
		case w == "ready":
			ep.Ready, ep.Serving = true, true
		case w == "unserving":
			ep.Serving = false
		case w == "serving":
			ep.Serving = true
		case w == "terminating":
			ep.Terminating = true
		case w[0] == '@':
			details.NodeName = w[1:]
		case key == "host":
			details.Hostname = value
		case key == "zone":
			details.Zone = value
		case key == "zones" || key == "nodes":
			if details.Hints == nil {
				details.Hints = &api.Hints{}
			}
			if key == "zones" {
				details.Hints.ForZones = strings.Split(value, ",")
			} else {
				details.Hints.ForNodes = strings.Split(value, ",")
			}
		default:
			panic("unknown word " + w)
		}
	}
	return ep
}

// describe returns a view's endpoints and unusable ports as lines. The line of an
// endpoint has its key, the word "local" if the endpoint is local, its scopes, and its
// scopes by port.
func describe(view *api.View) []string {
	var out []string
	for i := range view.Endpoints {
		e := &view.Endpoints[i]
		line := e.Key()
		if e.Local {
			line += " local"
		}
		line += scopesText(e.Scopes)
		for _, s := range e.PortScopes {
			line += fmt.Sprintf(" (%d/%s%s)", s.Port, s.Protocol, scopesText(s.Scopes))
		}
		out = append(out, line)
	}
	for i := range view.Draining {
		out = append(out, "draining "+view.Draining[i].Key())
	}
	for _, u := range view.Unusable {
		out = append(out, fmt.Sprintf("unusable %d/%s %s", u.Port, u.Protocol, u.Family))
	}
	return out
}

func scopesText(s api.Scopes) string {
	var out string
	if s.Internal {
		out += " internal"
	}
	if s.External {
		out += " external"
	}
	if s.Cluster {
		out += " cluster"
	}
	return out
}

// lines returns the trimmed non-empty lines of text.
func lines(text string) []string {
	var out []string
	for l := range strings.Lines(text) {
		if l = strings.TrimSpace(l); l != "" {
			out = append(out, l)
		}
	}
	return out
}

type viewCase struct {
	name    string
	service *api.Service // nil means the result of service()
	node    *api.Node    // nil means thisNode
	slices  string       // argument of endpointSlices
	want    string       // result of describe
}

func runViewCases(t *testing.T, cases []viewCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if c.service == nil {
				c.service = service()
			}
			if c.node == nil {
				c.node = thisNode
			}
			s := &api.ServiceState{Service: c.service, Slices: endpointSlices(c.slices)}
			got := View(s, c.node)
			if diff := cmp.Diff(lines(c.want), describe(got)); diff != "" {
				t.Errorf("view differs (-want +got):\n%s", diff)
			}
			slices.Reverse(s.Slices)
			for _, slice := range s.Slices {
				slices.Reverse(slice.Endpoints)
			}
			if again := View(s, c.node); !got.Equal(again) {
				t.Errorf("view depends on the order of arrival (-forwards +backwards):\n%s", cmp.Diff(describe(got), describe(again)))
			}
		})
	}
}
