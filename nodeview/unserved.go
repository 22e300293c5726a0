// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/distinct"
	"github.com/kpng-project/kpng/internal/elements"
	"k8s.io/apimachinery/pkg/types"
)

// fault is the reason why a service does not get a frontend that its object defines.
type fault uint8

// The reasons why a service does not get a frontend.
const (
	// otherFamily: the service is not served in the family of the address.
	otherFamily fault = iota + 1
	// unknownProtocol: the port's protocol is not TCP, UDP or SCTP.
	unknownProtocol
	// noPortNumber: the port has no number, or the service has no ports.
	noPortNumber
	// duplicatePort: an earlier port of the service has the same name, or the same protocol
	// and number, or the same protocol and node port.
	duplicatePort
	// lostClaim: another service owns the address, protocol and port.
	lostClaim
)

var faultTexts = [...]string{
	otherFamily:     "the service is not served in this family",
	unknownProtocol: "the protocol is unknown",
	noPortNumber:    "it has no port number",
	duplicatePort:   "an earlier port of the service has the same number and protocol, or name",
	lostClaim:       "another service owns it",
}

// String describes the fault.
func (f fault) String() string { return text(faultTexts[:], f) }

// namedFrontend is a frontend that the object of a service defines. If Fault is not 0, the
// service does not get it.
type namedFrontend struct {
	FrontendKey
	// ServicePort is the frontend's service port. It is nil if the frontend is for all
	// ports.
	ServicePort *api.PortMapping `json:",omitempty"`
	Fault       fault
	// If Fault is lostClaim, Winner is the service that owns the address, protocol and port.
	// It may be unknown.
	Winner types.NamespacedName `json:",omitzero"`
}

// why returns the reason why the service does not get the frontend.
func (u *namedFrontend) why() string {
	if u.Winner.Name != "" {
		return fmt.Sprintf("service %s owns it", u.Winner)
	}
	return u.Fault.String()
}

// Unserved yields those frontends of a service's object that [Frontends] omits, each with
// the reason. Both functions use the same order. A program can log these frontends. If view
// is nil, there are none.
func Unserved(view *api.View) iter.Seq2[FrontendKey, string] {
	return func(yield func(FrontendKey, string) bool) {
		for _, u := range unserved(view) {
			if !yield(u.FrontendKey, u.why()) {
				return
			}
		}
	}
}

func unserved(view *api.View) (all []namedFrontend) {
	for u := range namedFrontends(view) {
		if u.Fault != 0 {
			all = append(all, u)
		}
	}
	return all
}

// namedFrontends yields each frontend of a service's object once. A served frontend has
// Fault 0. If view is nil, there are no frontends.
func namedFrontends(view *api.View) iter.Seq[namedFrontend] { return allNamed(view, newNamer) }

// namedClasses yields classes: frontends without an address. There is one class for each
// kind, port and family of the frontends that namedFrontends yields. If a class has a
// fault, all frontends of the class have the same fault.
func namedClasses(view *api.View) iter.Seq[namedFrontend] { return allNamed(view, newClassNamer) }

func allNamed(view *api.View, newNamer func(*api.View) namer) iter.Seq[namedFrontend] {
	return func(yield func(namedFrontend) bool) {
		if view == nil {
			return
		}
		svc := view.Service
		n := newNamer(view)
		if wholeAddress(svc) {
			var all fault
			if !svc.AllPorts {
				all = noPortNumber
			}
			n.portFrontends(nil, all, 0, yield)
			return
		}
		var check portCheck
		for i := range svc.Ports {
			all, nodePort := check.next(&svc.Ports[i])
			if !n.portFrontends(&svc.Ports[i], all, nodePort, yield) {
				return
			}
		}
	}
}

// namer has the data that are the same for all ports of a service.
type namer struct {
	served []api.Family
	// addrs[f][i] has the IPv4 (f = 0) or IPv6 (f = 1) addresses of addressKinds[i]. If the
	// service has an address twice, only the first occurrence gets a frontend.
	addrs [2][3][]netip.Addr
	lost  []api.LostClaim
	// byClaim has the elements of lost. It is nil if a linear search is cheaper.
	byClaim map[api.Claim]types.NamespacedName
}

func newNamer(view *api.View) namer {
	n := namer{served: view.Service.Families(), lost: view.Lost}
	var seen distinct.Set[netip.Addr]
	for i, set := range elements.Sets(view.Service) {
		for a := range set.All() {
			if seen.Add(a) {
				list := n.list(i, a)
				*list = append(*list, a)
			}
		}
	}
	const few = 8
	if len(view.Lost) > few {
		n.byClaim = make(map[api.Claim]types.NamespacedName, len(view.Lost))
		for _, l := range view.Lost {
			n.byClaim[l.Claim] = l.Winner
		}
	}
	return n
}

// newClassNamer returns a namer for classes: for each kind and family, the zero address
// replaces the addresses.
func newClassNamer(view *api.View) namer {
	n := namer{served: view.Service.Families()}
	for i, set := range elements.Sets(view.Service) {
		for a := range set.All() {
			*n.list(i, a) = noAddr
		}
	}
	return n
}

var noAddr = []netip.Addr{{}}

// addressKinds are the kinds of the sets that [elements.Sets] returns.
var addressKinds = [...]Kind{ClusterIP, LoadBalancerIP, ExternalIP}

// list returns the list in n.addrs for the address a of addressKinds[i].
func (n *namer) list(i int, a netip.Addr) *[]netip.Addr {
	if a.Is4() {
		return &n.addrs[0][i]
	}
	return &n.addrs[1][i]
}

// portFrontends yields the frontends of one port. If the port cannot have frontends, the
// argument all says why. If the node port cannot have a frontend, the argument nodePort
// says why.
func (n *namer) portFrontends(port *api.PortMapping, all, nodePort fault, yield func(namedFrontend) bool) bool {
	for f, family := range [...]api.Family{api.IPv4, api.IPv6} {
		s := namedFrontend{FrontendKey: FrontendKey{Family: family}, ServicePort: port}
		if port != nil {
			s.Protocol, s.Port = port.Protocol, port.Port
		}
		for i, list := range n.addrs[f] {
			for _, addr := range list {
				s.Kind, s.Addr = addressKinds[i], addr
				s.Fault, s.Winner = n.frontendFault(s.FrontendKey, all)
				if !yield(s) {
					return false
				}
			}
		}
		if port != nil && port.NodePort != 0 && slices.Contains(n.served, family) {
			s.Kind, s.Addr, s.Port = NodePort, netip.Addr{}, port.NodePort
			s.Fault, s.Winner = n.frontendFault(s.FrontendKey, nodePort)
			if !yield(s) {
				return false
			}
		}
	}
	return true
}

func (n *namer) frontendFault(k FrontendKey, port fault) (fault, types.NamespacedName) {
	switch {
	case !slices.Contains(n.served, k.Family):
		return otherFamily, types.NamespacedName{}
	case port != 0:
		return port, types.NamespacedName{}
	}
	claim := k.Claim()
	if n.byClaim != nil {
		if winner, ok := n.byClaim[claim]; ok {
			return lostClaim, winner
		}
		return 0, types.NamespacedName{}
	}
	for i := range n.lost {
		if n.lost[i].Claim == claim {
			return lostClaim, n.lost[i].Winner
		}
	}
	return 0, types.NamespacedName{}
}
