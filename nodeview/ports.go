// SPDX-License-Identifier: Apache-2.0

package nodeview

import "github.com/kpng-project/kpng/api"

// anyPort is the target port of an endpoint that serves every port.
const anyPort int32 = -1

// wholeAddress reports whether the service is served by whole addresses, regardless of
// the ports of service and slices: all-ports services and services without ports.
func wholeAddress(svc *api.Service) bool { return svc.AllPorts || len(svc.Ports) == 0 }

// servedPorts appends the ports of svc that can have a frontend to buf. For a service
// that is served by whole addresses it appends a single nil.
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

// portFault returns the reason why the service port at index i can have no frontend, or 0
// if it can have one. Number and protocol identify a port: TCP 53 and UDP 53 are two
// ports. The API server rejects services with two ports of the same identity or name.
// Manifests may contain them; the first one counts.
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

// overrideName returns the name of p in an endpoint's PortOverrides.
func overrideName(p *api.PortMapping) string {
	if p.Name != "" {
		return p.Name
	}
	return p.TargetPortName
}

// matchPorts appends the ports that each slice serves to the buffers, in the form of
// selection.targets and selection.overrides.
func matchPorts(targets []int32, overrides [][]api.PortName, list []*api.EndpointSlice, ports []*api.PortMapping) ([]int32, [][]api.PortName) {
	for _, slice := range list {
		for _, p := range ports {
			targets = append(targets, targetPort(slice, p))
		}
		overrides = append(overrides, portOverrides(ports, targets[len(targets)-len(ports):]))
	}
	return targets, overrides
}

// targetPort returns the port at the endpoints of slice that has the name and protocol of
// p. It returns 0 if there is none or it has no number. The slices of one service may
// give one name different numbers.
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

// portOverrides returns the target ports of an endpoint by name. A named service port
// appears under its name. An unnamed one appears under its target port name. If its
// target port is a number, it appears only if the endpoint's port differs.
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

// portFamily returns the identity of port, which may be nil, in one family.
func portFamily(port *api.PortMapping, f api.Family) api.PortFamily {
	if port == nil {
		return api.PortFamily{Family: f}
	}
	return api.PortFamily{Protocol: port.Protocol, Port: port.Port, Family: f}
}
