// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"cmp"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/distinct"
	"github.com/kpng-project/kpng/internal/lookup"
)

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
	var check portCheck
	for i := range svc.Ports {
		if fault, _ := check.next(&svc.Ports[i]); fault == 0 {
			buf = append(buf, &svc.Ports[i])
		}
	}
	return buf
}

// portCheck finds those ports of a service that can have no frontend.
type portCheck struct {
	names            distinct.Set[string]
	ports, nodePorts distinct.Set[portNumber]
}

type portNumber struct {
	protocol api.Protocol
	number   int32
}

// next returns the reason why a port can have no frontends, and the reason why it can have
// no frontend at its node port. If the frontends are possible, the reason is 0. Call next
// with each port of the service, in their order.
func (c *portCheck) next(p *api.PortMapping) (all, nodePort fault) {
	if all = c.portFault(p); all != 0 {
		return all, all
	}
	return 0, c.nodePortFault(p)
}

// portFault returns the reason why the port p can have no frontend, or 0 if a frontend is
// possible. A port is identified by number and protocol: TCP 53 and UDP 53 are two ports.
// The API server rejects services in which two ports have the same identity or name. Other
// sources may have such services. Then only the first of the two ports counts.
func (c *portCheck) portFault(p *api.PortMapping) fault {
	newPort := c.ports.Add(portNumber{p.Protocol, p.Port})
	newName := c.names.Add(overrideName(p))
	switch {
	case p.Protocol != api.TCP && p.Protocol != api.UDP && p.Protocol != api.SCTP:
		return unknownProtocol
	case p.Port == 0:
		return noPortNumber
	case !newPort || !newName:
		return duplicatePort
	}
	return 0
}

// nodePortFault returns the reason why p can have no frontend at its node port, or 0 if
// this frontend is possible. Call it only if portFault returned 0 for p.
func (c *portCheck) nodePortFault(p *api.PortMapping) fault {
	if p.NodePort != 0 && !c.nodePorts.Add(portNumber{p.Protocol, p.NodePort}) {
		return duplicatePort
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
		numbers := slicePorts(slice, len(ports))
		for _, p := range ports {
			targets = append(targets, targetPort(slice, numbers, p))
		}
		overrides = append(overrides, portOverrides(ports, targets[len(targets)-len(ports):]))
	}
	return targets, overrides
}

type slicePort struct {
	name     string
	protocol api.Protocol
}

// slicePorts returns the port numbers of a slice by name and protocol. It returns nil if a
// linear search for the given number of service ports is cheaper.
func slicePorts(slice *api.EndpointSlice, ports int) map[slicePort]int32 {
	const few = 16
	if min(ports, len(slice.Ports)) <= few {
		return nil
	}
	numbers := make(map[slicePort]int32, len(slice.Ports))
	for _, o := range slices.Backward(slice.Ports) { // among duplicates, the first one counts
		numbers[slicePort{o.Name, o.Protocol}] = o.Port
	}
	return numbers
}

// targetPort returns the number of the slice's port that has the name and protocol of p.
// If there is no such port, or if it has no number, targetPort returns 0. Another slice of
// the service may have another number for the same name. The argument numbers is the
// result of slicePorts.
func targetPort(slice *api.EndpointSlice, numbers map[slicePort]int32, p *api.PortMapping) int32 {
	if p == nil {
		return anyPort
	}
	if numbers != nil {
		return numbers[slicePort{p.Name, p.Protocol}]
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
	lookup.Sort(out, func(a, b api.PortName) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func portFamily(port *api.PortMapping, f api.Family) api.PortFamily {
	if port == nil {
		return api.PortFamily{Family: f}
	}
	return api.PortFamily{Protocol: port.Protocol, Port: port.Port, Family: f}
}
