// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// question says what is to be explained: a service, what is at an address, or, if
// it is zero, everything.
type question struct {
	service types.NamespacedName
	addr    netip.Addr
	// port and protocol are 0 for all.
	port     int32
	protocol api.Protocol
}

// parseQuestion reads NAME, NAMESPACE/NAME, IP, IP:PORT or IP:PORT/PROTOCOL. The
// namespace of NAME is default.
func parseQuestion(s string) (question, error) {
	if addr, err := netip.ParseAddr(s); err == nil {
		return question{addr: addr.Unmap()}, nil
	}
	before, after, slash := strings.Cut(s, "/")
	if at, err := netip.ParseAddrPort(before); err == nil && at.Port() > 0 {
		q := question{addr: at.Addr().Unmap(), port: int32(at.Port())}
		if !slash {
			return q, nil
		}
		for _, p := range [...]api.Protocol{api.TCP, api.UDP, api.SCTP} {
			if strings.EqualFold(after, p.String()) {
				q.protocol = p
				return q, nil
			}
		}
		return question{}, fmt.Errorf("%q: the protocol is none of tcp, udp and sctp", s)
	}
	if !slash {
		before, after = "default", s
	}
	if before == "" || after == "" || strings.ContainsAny(s, ".:[]") || strings.Contains(after, "/") {
		return question{}, fmt.Errorf("%q is neither [NAMESPACE/]NAME nor IP[:PORT[/PROTOCOL]]", s)
	}
	return question{service: types.NamespacedName{Namespace: before, Name: after}}, nil
}

// text returns the address as it was asked for.
func (q question) text() string {
	text := q.addr.String()
	if q.port != 0 {
		text = netip.AddrPortFrom(q.addr, uint16(q.port)).String()
	}
	if q.protocol != api.UnknownProtocol {
		text += "/" + q.protocol.String()
	}
	return text
}

// asksFor reports whether a frontend is at the address that was asked for. Node
// ports are at all addresses of the node; which of them a backend admits, it
// decides.
func (q question) asksFor(k nodeview.FrontendKey, node *api.Node) bool {
	if k.Kind == nodeview.NodePort {
		isOurs := slices.ContainsFunc(node.Addresses, func(a api.NodeAddress) bool { return a.IP == q.addr })
		if !isOurs || k.Family != api.FamilyOf(q.addr) {
			return false
		}
	} else if k.Addr != q.addr {
		return false
	}
	allPorts := k.Port == 0 && k.Protocol == api.UnknownProtocol
	return allPorts || (q.port == 0 || q.port == k.Port) && (q.protocol == api.UnknownProtocol || q.protocol == k.Protocol)
}
