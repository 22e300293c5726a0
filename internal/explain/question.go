// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"k8s.io/apimachinery/pkg/types"
)

// Question selects services by name or by address. The zero value selects all services.
type Question struct {
	service types.NamespacedName
	addr    netip.Addr
	// nodePorts is the family of a node port. It is 0 if the question names no node port.
	nodePorts api.Family
	// port and protocol are 0 if the question does not name them.
	port     int32
	protocol api.Protocol
}

// Parse parses NAME, NAMESPACE/NAME, IP, IP:PORT or IP:PORT/PROTOCOL. In place of the IP
// of a node port, text may have IPv4 or IPv6. A NAME alone is in the namespace "default".
func Parse(text string) (Question, error) {
	if addr, err := netip.ParseAddr(text); err == nil {
		return Question{addr: addr.Unmap()}, nil
	}
	before, after, slash := strings.Cut(text, "/")
	var q Question
	if at, err := netip.ParseAddrPort(before); err == nil {
		q = Question{addr: at.Addr().Unmap(), port: int32(at.Port())}
	} else if family, port, ok := strings.Cut(before, ":"); ok && q.nodePorts.UnmarshalText([]byte(family)) == nil {
		number, _ := strconv.ParseUint(port, 10, 16)
		q.port = int32(number)
	}
	if q.port > 0 {
		if !slash {
			return q, nil
		}
		for _, p := range [...]api.Protocol{api.TCP, api.UDP, api.SCTP} {
			if strings.EqualFold(after, p.String()) {
				q.protocol = p
				return q, nil
			}
		}
		return Question{}, fmt.Errorf("%q: the protocol is not tcp, udp or sctp", text)
	}
	if bracketed := brackets(before); bracketed != "" {
		return Question{}, fmt.Errorf("%q: write an IPv6 address with a port as %s", text, bracketed)
	}
	if !slash {
		before, after = "default", text
	}
	if before == "" || after == "" || strings.ContainsAny(text, ".:[]") || strings.Contains(after, "/") {
		return Question{}, fmt.Errorf("%q is neither [NAMESPACE/]NAME nor IP[:PORT[/PROTOCOL]]", text)
	}
	return Question{service: types.NamespacedName{Namespace: before, Name: after}}, nil
}

// brackets adds the brackets that an IPv6 address with a port needs. If s is not an IPv6
// address with a port, it returns "". The text fd00::1:80 is also an address without a
// port.
func brackets(s string) string {
	i := max(strings.LastIndexByte(s, ':'), 0)
	port, err := strconv.ParseUint(strings.TrimPrefix(s[i:], ":"), 10, 16)
	addr, addrErr := netip.ParseAddr(s[:i])
	if err != nil || addrErr != nil || port == 0 || !addr.Is6() {
		return ""
	}
	return netip.AddrPortFrom(addr, uint16(port)).String()
}

// Name returns the address of a frontend as a text for [Parse]. The name of a node port
// begins with its family, because it applies to all node addresses.
func Name(k nodeview.FrontendKey) string {
	q := Question{addr: k.Addr, port: k.Port, protocol: k.Protocol}
	if k.Kind == nodeview.NodePort {
		q.nodePorts = k.Family
	}
	return q.address()
}

// ClaimText describes a claim, for people.
func ClaimText(c api.Claim) string {
	switch {
	case c.Port == 0:
		return c.IP.String()
	case !c.IP.IsValid():
		return fmt.Sprintf("node port %d/%s", c.Port, c.Protocol)
	default:
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(c.IP, uint16(c.Port)), c.Protocol)
	}
}

// Service returns the service that q names, or the zero value if q names no service.
func (q Question) Service() types.NamespacedName { return q.service }

// Addr returns the address that q names, or the zero value if q names no address.
func (q Question) Addr() netip.Addr { return q.addr }

// address returns the question's address. The port and the protocol follow if the
// question has them.
func (q Question) address() string {
	text := q.addr.String()
	switch {
	case q.nodePorts != 0:
		text = fmt.Sprintf("%s:%d", q.nodePorts, q.port)
	case q.port != 0:
		text = netip.AddrPortFrom(q.addr, uint16(q.port)).String()
	}
	if q.protocol != api.UnknownProtocol {
		text += "/" + strings.ToLower(q.protocol.String())
	}
	return text
}

// matches reports whether a frontend is at the question's address, port and protocol. A
// node port matches at all node addresses and loopback addresses, even if the proxy
// serves the port only at some of these addresses.
func (q Question) matches(k nodeview.FrontendKey, node *api.Node) bool {
	asksProtocol := q.protocol == api.UnknownProtocol || q.protocol == k.Protocol
	if q.nodePorts != 0 {
		return k.Kind == nodeview.NodePort && k.Family == q.nodePorts && k.Port == q.port && asksProtocol
	}
	if k.Kind == nodeview.NodePort {
		isOurs := q.addr.IsLoopback() || slices.ContainsFunc(node.Addresses, func(a api.NodeAddress) bool { return a.IP == q.addr })
		if !isOurs || k.Family != api.FamilyOf(q.addr) {
			return false
		}
	} else if k.Addr != q.addr {
		return false
	}
	allPorts := k.Port == 0 && k.Protocol == api.UnknownProtocol
	return allPorts || (q.port == 0 || q.port == k.Port) && asksProtocol
}
