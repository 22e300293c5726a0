// SPDX-License-Identifier: Apache-2.0

package nodeview

import "github.com/kpng-project/kpng/api"

// anyPort is the target port of an endpoint that takes every port.
const anyPort int32 = -1

// wholeAddress reports whether an address serves the service as a whole,
// whatever the ports of service and slices: an all-ports service does so, and
// one without ports has nothing else to go by.
func wholeAddress(svc *api.Service) bool { return svc.AllPorts || len(svc.Ports) == 0 }

// servedPorts appends to buf the ports of svc that can have a frontend; nil
// stands for the only "port" of a service that is served by whole addresses.
func servedPorts(buf []*api.PortMapping, svc *api.Service) []*api.PortMapping {
	if wholeAddress(svc) {
		return append(buf, nil)
	}
	for i := range svc.Ports {
		if portFault(svc.Ports, i) == 0 {
			buf = append(buf, &svc.Ports[i])
		}
	}
	return buf
}

// portFault says why the service port at index i can have no frontend, 0 if it
// can. The identity of a port is its number and protocol: TCP 53 and UDP 53
// are two. The API server refuses services with two ports of one identity or
// one name; manifests may have them, and the first counts.
func portFault(ports []api.PortMapping, i int) Fault {
	p := &ports[i]
	switch {
	case p.Protocol != api.TCP && p.Protocol != api.UDP && p.Protocol != api.SCTP:
		return UnknownProtocol
	case p.Port == 0:
		return NoPortNumber
	}
	for j := range ports[:i] {
		o := &ports[j]
		if o.Port == p.Port && o.Protocol == p.Protocol || overrideName(o) == overrideName(p) {
			return DuplicatePort
		}
	}
	return 0
}

// overrideName is the name under which an endpoint's PortOverrides give its
// number for p.
func overrideName(p *api.PortMapping) string {
	if p.Name != "" {
		return p.Name
	}
	return p.TargetPortName
}

// matchPorts appends to the buffers what each slice serves, as contest has it.
func matchPorts(targets []int32, overrides [][]api.PortName, list []*api.EndpointSlice, ports []*api.PortMapping) ([]int32, [][]api.PortName) {
	for _, slice := range list {
		for _, p := range ports {
			targets = append(targets, targetPort(slice, p))
		}
		overrides = append(overrides, portOverrides(ports, targets[len(targets)-len(ports):]))
	}
	return targets, overrides
}

// targetPort returns the port at the endpoints of slice that serves p: that of
// the same name and protocol; 0 if there is none or it has no number. The
// slices of one service may give one name different numbers.
func targetPort(slice *api.EndpointSlice, p *api.PortMapping) int32 {
	if p == nil {
		return anyPort
	}
	for i := range slice.Ports {
		if o := &slice.Ports[i]; o.Name == p.Name && o.Protocol == p.Protocol {
			return o.Port
		}
	}
	return 0
}

// portOverrides names the ports at an endpoint: one for each named service
// port it serves; for an unnamed one under the name of its targetPort; and
// where that is a number, only if the endpoint's is another.
func portOverrides(ports []*api.PortMapping, targets []int32) []api.PortName {
	var out []api.PortName
	for i, p := range ports {
		if p == nil || targets[i] == 0 {
			continue
		}
		if name := overrideName(p); name != "" || targets[i] != p.TargetPort {
			if out == nil {
				out = make([]api.PortName, 0, len(ports))
			}
			out = append(out, api.PortName{Name: name, Port: targets[i]})
		}
	}
	return out
}

// portFamily names port, which may be nil, in one family.
func portFamily(port *api.PortMapping, f api.Family) api.PortFamily {
	if port == nil {
		return api.PortFamily{Family: f}
	}
	return api.PortFamily{Protocol: port.Protocol, Port: port.Port, Family: f}
}
