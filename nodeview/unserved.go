// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// Fault is the reason why a service does not get a frontend that its object defines.
type Fault uint8

// The reasons why a service does not get a frontend.
const (
	// OtherFamily: the service is not served in the family of the address.
	OtherFamily Fault = iota + 1
	// UnknownProtocol: the port's protocol is not TCP, UDP or SCTP.
	UnknownProtocol
	// NoPortNumber: the port has no number, or the service has no ports.
	NoPortNumber
	// DuplicatePort: an earlier port of the service has the same name, the same protocol and
	// number, or the same protocol and node port.
	DuplicatePort
	// Lost: another service owns the address, protocol and port.
	Lost
)

var faultTexts = [...]string{
	OtherFamily:     "the service is not served in this family",
	UnknownProtocol: "the protocol is unknown",
	NoPortNumber:    "it has no port number",
	DuplicatePort:   "an earlier port of the service has the same number and protocol, or name",
	Lost:            "another service owns it",
}

// String describes the fault.
func (f Fault) String() string { return text(faultTexts[:], f) }

// UnservedFrontend is a frontend that the object of a service defines, but that the
// service does not get.
type UnservedFrontend struct {
	FrontendKey
	// ServicePort is the frontend's service port. It is nil if all ports are meant.
	ServicePort *api.PortMapping `json:",omitempty"`
	Fault       Fault
	// If Fault is Lost, Winner is the service that owns the address, protocol and port.
	Winner types.NamespacedName `json:",omitzero"`
}

// String describes the frontend and the reason.
func (u UnservedFrontend) String() string {
	if u.Fault == Lost {
		return fmt.Sprintf("%s: service %s owns it", u.FrontendKey, u.Winner)
	}
	return fmt.Sprintf("%s: %s", u.FrontendKey, u.Fault)
}

// Unserved yields the frontends that the object of the service defines, but that
// [Frontends] omits. Both functions use the same order. A program can log these
// frontends. If se is nil, there are none.
func Unserved(se *api.ServiceEndpoints) iter.Seq[UnservedFrontend] {
	return func(yield func(UnservedFrontend) bool) {
		for s := range namedFrontends(se) {
			if s.Fault != 0 && !yield(s) {
				return
			}
		}
	}
}

// namedFrontends yields each frontend that the object of the service defines, once. A
// frontend that is served has Fault 0. If se is nil, there are none.
func namedFrontends(se *api.ServiceEndpoints) iter.Seq[UnservedFrontend] {
	return func(yield func(UnservedFrontend) bool) {
		if se == nil {
			return
		}
		svc := se.Service
		if wholeAddress(svc) {
			var fault Fault
			if !svc.AllPorts {
				fault = NoPortNumber
			}
			portFrontends(se, nil, fault, 0, yield)
			return
		}
		for i := range svc.Ports {
			fault := portFault(svc.Ports, i)
			if !portFrontends(se, &svc.Ports[i], fault, cmp.Or(fault, nodePortFault(svc.Ports, i)), yield) {
				return
			}
		}
	}
}

// portFrontends yields the frontends of one port. If the port cannot have frontends,
// fault says why. If the node port cannot have a frontend, nodePortFault says why.
func portFrontends(se *api.ServiceEndpoints, port *api.PortMapping, fault, nodePortFault Fault, yield func(UnservedFrontend) bool) bool {
	served := se.Service.Families()
	for _, family := range [...]api.Family{api.IPv4, api.IPv6} {
		s := UnservedFrontend{FrontendKey: FrontendKey{Family: family}, ServicePort: port}
		if port != nil {
			s.Protocol, s.Port = port.Protocol, port.Port
		}
		addrs := se.Service.FrontendIPs(family) // addrs[i] has the addresses of Kind ClusterIP+i
		for i, list := range addrs {
			for j, addr := range list {
				// If an address occurs twice, only the first occurrence gets a frontend.
				if slices.Contains(list[:j], addr) || named(addrs[:i], addr) {
					continue
				}
				s.Kind, s.Addr = ClusterIP+Kind(i), addr
				s.Fault, s.Winner = frontendFault(se, s.FrontendKey, fault, served)
				if !yield(s) {
					return false
				}
			}
		}
		if port != nil && port.NodePort != 0 && slices.Contains(served, family) {
			s.Kind, s.Addr, s.Port = NodePort, netip.Addr{}, port.NodePort
			s.Fault, s.Winner = frontendFault(se, s.FrontendKey, nodePortFault, served)
			if !yield(s) {
				return false
			}
		}
	}
	return true
}

// nodePortFault returns why the port at index i can have no frontend at its node port, or
// 0 if it can have one. Call it only if portFault returned 0 for the same port.
func nodePortFault(ports []api.PortMapping, i int) Fault {
	if ports[i].NodePort == 0 {
		return 0
	}
	for j, o := range ports[:i] {
		if o.NodePort == ports[i].NodePort && o.Protocol == ports[i].Protocol && portFault(ports, j) == 0 {
			return DuplicatePort
		}
	}
	return 0
}

func named(lists [][]netip.Addr, a netip.Addr) bool {
	return slices.ContainsFunc(lists, func(list []netip.Addr) bool { return slices.Contains(list, a) })
}

func frontendFault(se *api.ServiceEndpoints, k FrontendKey, port Fault, served []api.Family) (Fault, types.NamespacedName) {
	switch {
	case !slices.Contains(served, k.Family):
		return OtherFamily, types.NamespacedName{}
	case port != 0:
		return port, types.NamespacedName{}
	}
	claim := k.Claim()
	for i := range se.Lost {
		if se.Lost[i].Claim == claim {
			return Lost, se.Lost[i].Winner
		}
	}
	return 0, types.NamespacedName{}
}
