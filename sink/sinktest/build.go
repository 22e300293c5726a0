// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// Service returns a service with cluster IPs and ports:
//
//	sinktest.Service("web", "10.96.0.1 fd00::1 80>8080 dns=53:30053/UDP")
//
// The argument name is NAMESPACE/NAME, or only NAME in the namespace default. Each word
// of text is a cluster IP or a port. A port has the form
//
//	[NAME=]PORT[:NODEPORT][>TARGETPORT][/PROTOCOL]
//
// The default target port is PORT, and the default protocol is TCP. The type of the service
// is ClusterIP, or NodePort if a port has a node port. The functions in edits modify the
// service afterwards. Service panics if text is invalid.
func Service(name, text string, edits ...func(*api.Service)) *api.Service {
	namespace, base, ok := strings.Cut(name, "/")
	if !ok {
		namespace, base = "default", name
	}
	s := &api.Service{Namespace: namespace, Name: base, Type: api.ClusterIP}
	var ips []netip.Addr
	for _, word := range strings.Fields(text) {
		if ip, err := netip.ParseAddr(word); err == nil {
			ips = append(ips, ip)
			continue
		}
		port := parsePort(word)
		if port.NodePort != 0 {
			s.Type = api.NodePort
		}
		s.Ports = append(s.Ports, port)
	}
	s.IPs.ClusterIPs = api.NewIPSet(ips...)
	s.IPFamilies = s.Families()
	for _, edit := range edits {
		edit(s)
	}
	return s
}

func parsePort(word string) api.PortMapping {
	rest, protocol, ok := strings.Cut(word, "/")
	if !ok {
		protocol = "TCP"
	}
	p := api.PortMapping{}
	for _, known := range []api.Protocol{api.TCP, api.UDP, api.SCTP} {
		if known.String() == protocol {
			p.Protocol = known
		}
	}
	if name, after, ok := strings.Cut(rest, "="); ok {
		p.Name, rest = name, after
	}
	rest, target, hasTarget := strings.Cut(rest, ">")
	port, nodePort, hasNodePort := strings.Cut(rest, ":")
	p.Port = parseNumber(word, port)
	p.TargetPort = p.Port
	if hasTarget {
		p.TargetPort = parseNumber(word, target)
	}
	if hasNodePort {
		p.NodePort = parseNumber(word, nodePort)
	}
	if p.Protocol == api.UnknownProtocol {
		panic(fmt.Sprintf("sinktest: %q is neither an address nor a port: unknown protocol", word))
	}
	return p
}

func parseNumber(word, text string) int32 {
	number, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		panic(fmt.Sprintf("sinktest: %q is neither an address nor a port: %v", word, err))
	}
	return int32(number)
}

// Slices returns the endpoint slices of a service, one for each family:
//
//	sinktest.Slices(web, "10.1.0.1@node-1 10.1.0.2@node-2~draining")
//
// Each word of endpoints has the form
//
//	ADDRESS[@NODE][~STATE]
//
// STATE is "unready", "draining" (terminating, but still serving) or "ended" (terminating
// and not serving). By default, an endpoint is ready. Each slice has all ports of the
// service. Slices panics if endpoints is invalid.
func Slices(service *api.Service, endpoints string) []*api.EndpointSlice {
	var slices []*api.EndpointSlice
	of := map[api.Family]*api.EndpointSlice{}
	for _, word := range strings.Fields(endpoints) {
		e := parseEndpoint(word)
		family := api.FamilyOf(e.Addr)
		s := of[family]
		if s == nil {
			s = &api.EndpointSlice{
				Namespace: service.Namespace, Name: service.Name + "-" + strings.ToLower(family.String()),
				ServiceName: service.Name, Family: family,
			}
			for _, p := range service.Ports {
				s.Ports = append(s.Ports, api.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.TargetPort})
			}
			of[family], slices = s, append(slices, s)
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return slices
}

func parseEndpoint(word string) api.SliceEndpoint {
	rest, state, _ := strings.Cut(word, "~")
	addr, node, _ := strings.Cut(rest, "@")
	e := api.SliceEndpoint{Addr: netip.MustParseAddr(addr), Details: &api.EndpointDetails{NodeName: node}}
	switch state {
	case "":
		e.Conditions = api.Conditions{Ready: true, Serving: true}
	case "unready":
	case "draining":
		e.Conditions = api.Conditions{Serving: true, Terminating: true}
	case "ended":
		e.Conditions = api.Conditions{Terminating: true}
	default:
		panic(fmt.Sprintf("sinktest: endpoint %q has an unknown state", word))
	}
	return e
}

// Node returns a node with these internal addresses. It panics if an address is invalid.
func Node(name string, addrs ...string) *api.Node {
	n := &api.Node{Name: name}
	for _, a := range addrs {
		n.Addresses = append(n.Addresses, api.NodeAddress{Type: "InternalIP", IP: netip.MustParseAddr(a)})
	}
	return n
}

// View returns a node's view of a service. The argument endpoints has the same form as in
// [Slices]:
//
//	sinktest.View(sinktest.Node("node-1"), sinktest.Service("web", "10.96.0.1 80"), "10.1.0.1@node-1")
//
// The node may be nil. For a service with other slices, call [nodeview.View].
func View(node *api.Node, service *api.Service, endpoints string) *api.View {
	return nodeview.View(&api.ServiceState{Service: service, Slices: Slices(service, endpoints)}, node)
}
