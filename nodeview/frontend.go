// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"iter"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/api"
)

// Kind is the kind of a frontend.
type Kind uint8

// The kinds of frontends.
const (
	// ClusterIP is one of Service.spec.clusterIPs.
	ClusterIP Kind = iota + 1
	// LoadBalancerIP is an ingress address of Service.status.loadBalancer.
	LoadBalancerIP
	// ExternalIP is one of Service.spec.externalIPs.
	ExternalIP
	// NodePort is a port of every node address that the backend admits.
	NodePort
)

var kindNames = [...]string{ClusterIP: "ClusterIP", LoadBalancerIP: "LoadBalancerIP", ExternalIP: "ExternalIP", NodePort: "NodePort"}

// String returns the name of the constant.
func (k Kind) String() string { return text(kindNames[:], k) }

// FrontendKey says where a frontend is. It is comparable, and unique within a
// service.
type FrontendKey struct {
	Kind Kind
	// Addr is the zero Addr for a node port: any node address of Family that the
	// backend admits.
	Addr   netip.Addr `json:",omitzero"`
	Family api.Family
	// Protocol and Port, 1 to 65535, are 0 if the frontend takes every protocol
	// and port of the address (Service.AllPorts).
	Protocol api.Protocol `json:",omitempty"`
	Port     int32        `json:",omitempty"`
}

// String returns the key as in "ClusterIP 10.96.0.10:53/UDP", "NodePort
// IPv4:30053/UDP" or "ExternalIP 10.0.0.55".
func (k FrontendKey) String() string {
	addr := k.Addr.String()
	if k.Kind == NodePort {
		addr = k.Family.String()
	}
	if k.Port == 0 && k.Protocol == 0 {
		return k.Kind.String() + " " + addr
	}
	if k.Addr.Is6() {
		addr = "[" + addr + "]"
	}
	return k.Kind.String() + " " + addr + ":" + strconv.Itoa(int(k.Port)) + "/" + k.Protocol.String()
}

// Claim returns what the frontend takes for its service alone.
func (k FrontendKey) Claim() api.Claim {
	addr := k.Addr
	if k.Kind == NodePort {
		addr = api.Unspecified(k.Family)
	}
	return api.Claim{IP: addr, Protocol: k.Protocol, Port: k.Port}
}

// Frontend is something to program, with everything decided. Frontends of one
// service port and family share their lists; do not change them.
type Frontend struct {
	FrontendKey
	// ServicePort is the service port that is served, nil for all ports.
	ServicePort *api.PortMapping `json:",omitempty"`

	// Elsewhere is what becomes of traffic that does not start on this node.
	Elsewhere Traffic
	// Node is what becomes of traffic that starts on this node: that of the node
	// itself and, as far as the backend can tell, of its pods. It differs from
	// Elsewhere for external frontends with externalTrafficPolicy Local, whose
	// list is short-circuited.
	Node Traffic

	// Sources says who gets in. It comes before all else, for sources on this
	// node too: who does not get in is dropped.
	Sources Sources `json:",omitzero"`
	// Masquerade says whose connections get a source address of this node.
	Masquerade Masquerade
	// Affinity is how long, after its last new connection, a client address
	// keeps its endpoint; 0 means there is no affinity. It is kept per service
	// port, and leads to an endpoint only while that is on the list that the
	// client's traffic uses.
	Affinity time.Duration `json:",omitempty"`
}

// Traffic is what becomes of some of a frontend's traffic.
type Traffic struct {
	Verdict Verdict
	// List identifies Endpoints among the lists of the service. It is 0 unless
	// Verdict is Forward.
	List ListID `json:"-"`
	// Endpoints are those to balance over, all of the frontend's family, in order
	// of address and ports. It is empty unless Verdict is Forward.
	Endpoints []Target `json:",omitempty"`
}

// ListID identifies a list of endpoints within its service, for backends that keep
// lists (as groups or maps, say) beside frontends. It is comparable and never 0.
//
// Within one view, lists have the same ListID if and only if they have the same
// endpoints with the same ports, whichever frontends use them. From one view of the
// service to the next a list keeps its ListID while endpoints come and go, in this
// process and in others, except where it becomes equal to another list of the
// service or stops to be so. A backend may always compare the lists of two views by
// their identities: what it has to change is what became of each.
type ListID uint64

// listID returns the identity of the Local or the Cluster list of a port and family.
func listID(port *api.PortMapping, family api.Family, local bool) ListID {
	id := ListID(family) << 32
	if local {
		id |= 1 << 40
	}
	if port != nil {
		id |= ListID(port.Protocol)<<16 | ListID(port.Port)
	}
	return id
}

// Target is an endpoint of a frontend.
type Target struct {
	*api.Endpoint
	// Port is the port at the endpoint, 0 if the port stays what it is.
	Port int32 `json:",omitempty"`
}

// Verdict says what to do with a new connection.
type Verdict uint8

// The verdicts.
const (
	// Forward: to one of the endpoints.
	Forward Verdict = iota
	// Reject: TCP reset, or port unreachable. No endpoint in the whole cluster is
	// usable.
	Reject
	// Drop: silently. Only other nodes have usable endpoints; whoever sent the
	// traffic here will notice, and the client must retry.
	Drop
)

var verdictNames = [...]string{Forward: "Forward", Reject: "Reject", Drop: "Drop"}

// String returns the name of the constant.
func (v Verdict) String() string { return text(verdictNames[:], v) }

// Masquerade says whose connections through a frontend get a source address of
// this node. Those of an endpoint of this node that reaches itself (hairpin) always do.
type Masquerade uint8

// The masquerade rules.
const (
	// MasqueradeIfAsked: those from outside the pod network, if the backend's
	// option (masquerade all, or cluster CIDR) asks for it. It holds for cluster IPs.
	MasqueradeIfAsked Masquerade = iota
	// MasqueradeAll: all. It holds for external frontends with policy Cluster.
	MasqueradeAll
	// MasqueradeNode: those of the node itself, which are short-circuited, but not
	// those of its pods, and never what comes from elsewhere. It holds for
	// external frontends with policy Local.
	MasqueradeNode
)

var masqueradeNames = [...]string{MasqueradeIfAsked: "MasqueradeIfAsked", MasqueradeAll: "MasqueradeAll", MasqueradeNode: "MasqueradeNode"}

// String returns the name of the constant.
func (m Masquerade) String() string { return text(masqueradeNames[:], m) }

// Frontends yields what is to be programmed for se, by service port, then by
// family, then by kind, each as the service lists them. No two have the same
// address, protocol and port. Of a nil se, the view of a service that is gone,
// there are none.
func Frontends(se *api.ServiceEndpoints) iter.Seq[Frontend] {
	return func(yield func(Frontend) bool) {
		lists := portLists{se: se}
		for s := range sites(se) {
			if s.Fault != 0 {
				continue
			}
			if lists.family == 0 || lists.port != s.ServicePort || lists.family != s.Family {
				lists.next(s.ServicePort, s.Family)
			}
			if !yield(frontend(s, &lists)) {
				return
			}
		}
	}
}

// frontend decides all about the frontend at s.
func frontend(s UnservedFrontend, lists *portLists) Frontend {
	svc := lists.se.Service
	f := Frontend{
		FrontendKey: s.FrontendKey,
		ServicePort: s.ServicePort,
		Elsewhere:   lists.traffic(lists.external),
		Node:        lists.traffic(lists.shortCircuit),
		Sources:     sourceRanges(svc, s.Addr),
		Masquerade:  masquerade(svc, s.Kind),
		Affinity:    affinity(svc),
	}
	if s.Kind == ClusterIP {
		f.Elsewhere = lists.traffic(lists.internal)
		f.Node = f.Elsewhere
	}
	return f
}

// portLists are the lists of one service port and family, which all its
// frontends share.
type portLists struct {
	se                               *api.ServiceEndpoints
	port                             *api.PortMapping
	family                           api.Family
	internal, external, shortCircuit list
	// distinct are the lists of all ports and families so far, each once.
	distinct []list
}

// list is a list of endpoints and its identity.
type list struct {
	id      ListID
	targets []Target
}

// next goes on to another port or family.
func (l *portLists) next(port *api.PortMapping, family api.Family) {
	l.port, l.family = port, family
	// Where both policies are the same, so are the lists; and with one of them
	// Cluster, its list is the Cluster list.
	pol := policiesOf(l.se.Service)
	l.internal = l.list(pol.internalLocal, func(s api.Scopes) bool { return s.Internal })
	l.external = l.internal
	if pol.internalLocal != pol.externalLocal {
		l.external = l.list(pol.externalLocal, func(s api.Scopes) bool { return s.External })
	}
	switch {
	case !pol.externalLocal:
		l.shortCircuit = l.external
	case !pol.internalLocal:
		l.shortCircuit = l.internal
	default:
		l.shortCircuit = l.list(false, func(s api.Scopes) bool { return s.Cluster })
	}
}

// list returns the Local or the Cluster list, which has the endpoints with the scope.
// If another list of the service is equal, it returns that one.
func (l *portLists) list(local bool, scope func(api.Scopes) bool) list {
	targets := targets(l.se, l.port, l.family, scope)
	if len(targets) == 0 {
		return list{}
	}
	for _, other := range l.distinct {
		if slices.Equal(other.targets, targets) {
			return other
		}
	}
	made := list{listID(l.port, l.family, local), targets}
	l.distinct = append(l.distinct, made)
	return made
}

// targets returns the endpoints of one port and family that are on a list.
func targets(se *api.ServiceEndpoints, port *api.PortMapping, family api.Family, on func(api.Scopes) bool) []Target {
	listed := func(e *api.Endpoint) bool {
		return api.FamilyOf(e.Addr) == family && on(e.ScopesOf(port))
	}
	n := 0
	for i := range se.Endpoints {
		if listed(&se.Endpoints[i]) {
			n++
		}
	}
	if n == 0 {
		return nil
	}
	out := make([]Target, 0, n)
	for i := range se.Endpoints {
		if e := &se.Endpoints[i]; listed(e) {
			t := Target{Endpoint: e}
			if port != nil {
				t.Port = e.TargetPort(port)
			}
			out = append(out, t)
		}
	}
	return out
}

func (l *portLists) traffic(list list) Traffic {
	return Traffic{Verdict: l.verdict(list.targets), List: list.id, Endpoints: list.targets}
}

// verdict decides about traffic that uses list.
func (l *portLists) verdict(list []Target) Verdict {
	switch {
	case len(list) > 0:
		return Forward
	case slices.Contains(l.se.Unusable, portFamily(l.port, l.family)):
		return Reject
	default:
		return Drop
	}
}

// masquerade decides whose source address changes at a frontend.
func masquerade(svc *api.Service, k Kind) Masquerade {
	switch {
	case k == ClusterIP:
		return MasqueradeIfAsked
	case externalPolicyLocal(svc):
		return MasqueradeNode
	default:
		return MasqueradeAll
	}
}

// affinity returns the time-out of the service's session affinity, 0 if it has
// none.
func affinity(svc *api.Service) time.Duration {
	if svc.SessionAffinity.ClientIP == nil {
		return 0
	}
	return time.Duration(svc.SessionAffinity.ClientIP.TimeoutSeconds) * time.Second
}

// HealthCheckPort returns the node port on which load balancers ask whether
// this node has endpoints of svc, 0 if there is none. Only services of type
// LoadBalancer with externalTrafficPolicy Local have one.
func HealthCheckPort(svc *api.Service) int32 {
	if svc.Type != api.LoadBalancer || !externalPolicyLocal(svc) {
		return 0
	}
	return svc.HealthCheckNodePort
}

// ReadyLocal returns what the health-check node port answers about a family:
// how many distinct addresses the ready endpoints on this node have.
func ReadyLocal(se *api.ServiceEndpoints, family api.Family) int {
	n := 0
	var last netip.Addr
	for i := range se.Endpoints {
		e := &se.Endpoints[i]
		if e.Local && e.Ready && api.FamilyOf(e.Addr) == family && e.Addr != last {
			n++
			last = e.Addr
		}
	}
	return n
}
