// SPDX-License-Identifier: Apache-2.0

package nodeview

import "github.com/kpng-project/kpng/api"

// anyPort stands for the target port of an endpoint that serves every port.
const anyPort int32 = -1

// wholeAddress reports whether the frontends of the service are addresses without ports.
// This holds for all-ports services and for services without ports.
func wholeAddress(svc *api.Service) bool { return svc.AllPorts || len(svc.Ports) == 0 }

// servedPorts appends to buf the ports of svc that can have a frontend. If wholeAddress
// is true for svc, it appends a single nil element instead.
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
// if it can have one. A port is identified by number and protocol: TCP 53 and UDP 53 are
// two ports. The API server rejects services in which two ports have the same identity or
// name. Manifests may contain such services; only the first of the two ports counts.
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

// matchPorts computes the fields targets and overrides of a selection. It appends their
// values to the given buffers.
func matchPorts(targets []int32, overrides [][]api.PortName, list []*api.EndpointSlice, ports []*api.PortMapping) ([]int32, [][]api.PortName) {
	for _, slice := range list {
		for _, p := range ports {
			targets = append(targets, targetPort(slice, p))
		}
		overrides = append(overrides, portOverrides(ports, targets[len(targets)-len(ports):]))
	}
	return targets, overrides
}

// targetPort returns the number of the slice's port that has the name and protocol of p.
// It returns 0 if there is no such port or the port has no number. Another slice of the
// service may have another number for the same name.
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
// appears under its own name, and an unnamed service port under the name of its target
// port. An unnamed port with a target port number appears only if the endpoint's port
// differs from that number.
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

func portFamily(port *api.PortMapping, f api.Family) api.PortFamily {
	if port == nil {
		return api.PortFamily{Family: f}
	}
	return api.PortFamily{Protocol: port.Protocol, Port: port.Port, Family: f}
}
