// SPDX-License-Identifier: Apache-2.0

package nodeview

import (
	"iter"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/distinct"
)

// Kind is the kind of a frontend.
type Kind string

// The kinds of frontends.
const (
	// ClusterIP is one of Service.spec.clusterIPs.
	ClusterIP Kind = "ClusterIP"
	// LoadBalancerIP is an ingress address of Service.status.loadBalancer.
	LoadBalancerIP Kind = "LoadBalancerIP"
	// ExternalIP is one of Service.spec.externalIPs.
	ExternalIP Kind = "ExternalIP"
	// NodePort is one port at several addresses: all node addresses at which the backend
	// serves node ports.
	NodePort Kind = "NodePort"
)

// FrontendKey identifies a frontend within its service. It can be a map key.
type FrontendKey struct {
	Kind Kind
	// Addr is the address. A node port has the zero Addr, because it applies to each node
	// address of Family where the backend serves node ports.
	Addr   netip.Addr `json:",omitzero"`
	Family api.Family
	// Protocol and Port are 0 if the frontend is for every protocol and port of the
	// address (Service.AllPorts). Otherwise Port is 1 to 65535.
	Protocol api.Protocol `json:",omitempty"`
	Port     int32        `json:",omitempty"`
}

// String returns the key in the form "ClusterIP 10.96.0.10:53/UDP", "NodePort
// IPv4:30053/UDP" or "ExternalIP 10.0.0.55".
func (k FrontendKey) String() string {
	addr := k.Addr.String()
	if k.Kind == NodePort {
		addr = k.Family.String()
	}
	if k.Port == 0 && k.Protocol == 0 {
		return string(k.Kind) + " " + addr
	}
	if k.Addr.Is6() {
		addr = "[" + addr + "]"
	}
	return string(k.Kind) + " " + addr + ":" + strconv.Itoa(int(k.Port)) + "/" + k.Protocol.String()
}

// At yields the addresses and ports of the frontend on a node. The node serves node ports
// at the given addresses. The port is 0 if the frontend is for every port.
func (k FrontendKey) At(nodePortAddrs []netip.Addr) iter.Seq[netip.AddrPort] {
	return func(yield func(netip.AddrPort) bool) {
		if k.Kind != NodePort {
			yield(netip.AddrPortFrom(k.Addr, uint16(k.Port)))
			return
		}
		for _, a := range nodePortAddrs {
			if api.FamilyOf(a) == k.Family && !yield(netip.AddrPortFrom(a, uint16(k.Port))) {
				return
			}
		}
	}
}

// Claim returns the claim of the frontend. At most one service at a time has this claim.
func (k FrontendKey) Claim() api.Claim {
	c := api.Claim{IP: k.Addr, Protocol: k.Protocol, Port: k.Port}
	if k.Kind == NodePort {
		c.Family = k.Family
	}
	return c
}

// Frontend is a frontend to program, with all decisions about its traffic. The frontends
// of one service port and family share their lists, so callers must not modify the lists.
type Frontend struct {
	FrontendKey
	// ServicePort is the service port, or nil for an all-ports service.
	ServicePort *api.PortMapping `json:",omitempty"`

	// The decision Elsewhere applies to traffic that does not start on this node.
	Elsewhere Traffic
	// The decision Node applies to traffic that starts on this node: in the node itself and,
	// if the backend can detect it, in the node's pods. It differs from Elsewhere only for
	// external frontends with externalTrafficPolicy Local: traffic that starts on this node
	// uses the Cluster list (short circuit).
	Node Traffic
	// Existing has the endpoints to which existing flows may continue.
	Existing Existing

	// Sources are the admitted sources. A backend first drops traffic from all other
	// sources, even if the traffic starts on this node.
	Sources Sources `json:",omitzero"`
	// Masquerade selects connections. The backend replaces their source by a node
	// address.
	Masquerade Masquerade
	// After a client's last new connection, the client's address keeps its endpoint for the
	// time Affinity. 0 means no affinity. Each service port has its own affinity. The
	// affinity applies only while the endpoint is on the list for the client's traffic.
	Affinity time.Duration `json:",omitempty"`
	// Algorithm chooses the endpoint of a new connection that has no affinity.
	Algorithm api.Algorithm `json:",omitempty"`
}

// Traffic is the decision for a part of the traffic to a frontend.
type Traffic struct {
	Verdict Verdict
	// List is the ID of the list in the field Endpoints. It is 0 unless Verdict is Forward.
	List ListID `json:"-"`
	// Endpoints are the endpoints among which to balance, sorted by address and ports.
	// All are of the frontend's family. The list is empty unless Verdict is Forward. It
	// contains no endpoint whose weight is zero.
	Endpoints []Target `json:",omitempty"`
}

// ListID identifies a list of endpoints within its service. Backends can use it if they
// program lists separately from frontends, for example as groups or maps. The ID of a
// list is never 0.
//
// In a view, two lists have the same ListID if and only if they have the same endpoints
// with the same ports. This holds for lists of different frontends, too. A list keeps its
// ListID when its endpoints change, and all processes use the same ListIDs. A ListID may
// change only when two lists of the service become equal or begin to differ. A backend
// may always compare the lists of two views by ListID and program the differences.
type ListID uint64

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
	// Port is the endpoint's port, or 0 to keep the destination port of packets.
	Port int32 `json:",omitempty"`
}

// AddrPort returns the address and port of the endpoint.
func (t Target) AddrPort() netip.AddrPort { return netip.AddrPortFrom(t.Addr, uint16(t.Port)) }

// Verdict says what to do with a new connection.
type Verdict uint8

// The verdicts.
const (
	// Forward sends the connection to one of the endpoints.
	Forward Verdict = iota
	// Reject answers with a TCP reset or ICMP port unreachable, because no endpoint in the
	// cluster is usable.
	Reject
	// Drop discards packets silently, because only other nodes have usable endpoints. The
	// load balancer's health checks detect that this node has no endpoint. The client must
	// retry.
	Drop
)

var verdictNames = [...]string{Forward: "Forward", Reject: "Reject", Drop: "Drop"}

// String returns the name of the constant.
func (v Verdict) String() string { return text(verdictNames[:], v) }

// Masquerade selects connections through a frontend. The backend replaces their source by
// an address of this node. The backend always replaces the source of hairpin connections.
// A hairpin connection goes from an endpoint of this node to the same endpoint.
type Masquerade string

// The masquerade rules.
const (
	// MasqueradeIfConfigured selects the connections that an option of the backend defines: none,
	// all (masquerade all), or connections from outside the pod network (cluster CIDR). It
	// applies to cluster IPs.
	MasqueradeIfConfigured Masquerade = "MasqueradeIfConfigured"
	// MasqueradeAll selects all connections. It applies to external frontends with policy
	// Cluster.
	MasqueradeAll Masquerade = "MasqueradeAll"
	// MasqueradeNode selects short-circuited connections of the node itself, but no
	// connections of its pods or from elsewhere. It applies to external frontends with
	// policy Local.
	MasqueradeNode Masquerade = "MasqueradeNode"
)

// Frontends yields the frontends to program for view. They are sorted by service port, then
// family, then kind. Ports, and the addresses of one kind, have the same order as in the
// service. No two frontends have the same address, protocol and port. If view is nil,
// because the service was deleted, Frontends yields nothing.
func Frontends(view *api.View) iter.Seq[Frontend] {
	return decided(view, namedFrontends(view))
}

// Classes yields the classes of a view. A class is a frontend without an address. There
// is one class for each combination of kind, service port and family for which the
// service has addresses. All frontends of the view with this combination have the
// decisions of the class, and differ only in their addresses and Sources. The order is
// that of [Frontends]. The cost does not depend on the number of addresses. The view may
// have no frontend of a class, because other services, or frontends of another kind, own
// its addresses.
func Classes(view *api.View) iter.Seq[Frontend] {
	return decided(view, namedClasses(view))
}

// decided yields those frontends in named that are served, with all decisions.
func decided(view *api.View, named iter.Seq[namedFrontend]) iter.Seq[Frontend] {
	return func(yield func(Frontend) bool) {
		lists := newPortLists(view)
		for s := range named {
			if s.Fault != 0 && s.Fault != lostClaim {
				continue
			}
			// Prepare the lists even for lost claims, so that no ListID depends on other
			// services.
			if lists.port != s.ServicePort || lists.family != s.Family {
				lists.prepare(s.ServicePort, s.Family)
			}
			if s.Fault == 0 && !yield(frontend(s, lists)) {
				return
			}
		}
	}
}

// frontend returns a Frontend with the key and service port of s and with all decisions.
func frontend(s namedFrontend, lists *portLists) Frontend {
	svc := lists.view.Service
	f := Frontend{
		FrontendKey: s.FrontendKey,
		ServicePort: s.ServicePort,
		Elsewhere:   lists.traffic(lists.external),
		Node:        lists.traffic(lists.shortCircuit),
		Existing:    lists.existing,
		Sources:     lists.sourcesAt(s.FrontendKey),
		Masquerade:  masquerade(svc, s.Kind),
		Affinity:    affinity(svc),
		Algorithm:   svc.Algorithm,
	}
	if s.Kind == ClusterIP {
		f.Elsewhere = lists.traffic(lists.internal)
		f.Node = f.Elsewhere
	}
	return f
}

// portLists has the lists that all frontends of one service port and family share.
type portLists struct {
	view                             *api.View
	port                             *api.PortMapping
	family                           api.Family
	internal, external, shortCircuit list
	existing                         Existing
	// The method list has made the list in first, and then the lists in distinct. The key of
	// a list in distinct is its hash. There are no duplicates, and most services have a
	// single list.
	first     list
	firstHash uint64
	distinct  map[uint64][]list
	// samples is the result of samplesOf. For each value of existing that the method prepare
	// has made so far, firstPorts has the first service port with this value. Its keys are
	// hashes of the target ports of this service port at the samples.
	samples    map[api.Family][]*api.Endpoint
	firstPorts map[uint64]*api.PortMapping
	// unusable has the elements of view.Unusable. noEndpoint is the verdict for an empty list
	// of the port and family.
	unusable   distinct.Set[api.PortFamily]
	noEndpoint Verdict
	// sources is the result of sourcesByAddress. It is nil before sourcesAt needs it.
	sources map[netip.Addr]Sources
}

func newPortLists(view *api.View) *portLists {
	l := &portLists{view: view}
	if view != nil {
		for _, u := range view.Unusable {
			l.unusable.Add(u)
		}
	}
	return l
}

type list struct {
	id      ListID
	targets []Target
}

func (l *portLists) prepare(port *api.PortMapping, family api.Family) {
	l.port, l.family = port, family
	l.existing = l.existingOf(port, family)
	l.noEndpoint = Drop
	if l.unusable.Has(portFamily(port, family)) {
		l.noEndpoint = Reject
	}
	// If both policies are equal, internal and external traffic use the same list. If either
	// policy is Cluster, short-circuited traffic uses the same Cluster list.
	pol := policiesOf(l.view.Service)
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

// The method list returns the endpoints for which the function scope returns true. The
// argument local says whether these endpoints are the Local list or the Cluster list. If
// an equal list already exists, the method returns the existing list with its ID.
func (l *portLists) list(local bool, scope func(api.Scopes) bool) list {
	targets, hash := targets(l.view, l.port, l.family, scope)
	if len(targets) == 0 {
		return list{}
	}
	if hash == l.firstHash && slices.Equal(l.first.targets, targets) {
		return l.first
	}
	for _, other := range l.distinct[hash] {
		if slices.Equal(other.targets, targets) {
			return other
		}
	}
	made := list{listID(l.port, l.family, local), targets}
	if l.first.targets == nil {
		l.first, l.firstHash = made, hash
		return made
	}
	if l.distinct == nil {
		l.distinct = map[uint64][]list{}
	}
	l.distinct[hash] = append(l.distinct[hash], made)
	return made
}

// targets returns the endpoints of one port and family with matching scopes. It also
// returns a hash of the positions and ports of these endpoints.
func targets(view *api.View, port *api.PortMapping, family api.Family, match func(api.Scopes) bool) (out []Target, hash uint64) {
	listed := func(e *api.Endpoint) bool {
		return api.FamilyOf(e.Addr) == family && match(scopesOf(e, port))
	}
	n := 0
	for i := range view.Endpoints {
		if listed(&view.Endpoints[i]) {
			n++
		}
	}
	if n == 0 {
		return nil, 0
	}
	out = make([]Target, 0, n)
	var last *api.Endpoint // the previous endpoint, because endpoints of an EndpointSlice share their list of ports
	for i := range view.Endpoints {
		if e := &view.Endpoints[i]; listed(e) {
			t := Target{Endpoint: e}
			switch {
			case port == nil:
			case last != nil && sharePorts(last, e):
				t.Port = out[len(out)-1].Port
			default:
				t.Port = e.TargetPort(port)
			}
			last = e
			out = append(out, t)
			hash = (hash^uint64(i)<<16^uint64(t.Port))*0x9e3779b97f4a7c15 + 1
		}
	}
	return out, hash
}

// sharePorts reports whether the PortOverrides of both endpoints are in the same memory.
func sharePorts(a, b *api.Endpoint) bool {
	return len(a.PortOverrides) > 0 && len(a.PortOverrides) == len(b.PortOverrides) && &a.PortOverrides[0] == &b.PortOverrides[0]
}

// sourcesAt returns the sources that the service admits at a frontend. A class has no
// address. So it has no source ranges, unless it is a class of node ports.
func (l *portLists) sourcesAt(k FrontendKey) Sources {
	switch {
	case len(l.view.Service.SourceRanges) == 0:
		return Sources{}
	case k.Kind == NodePort:
		k.Addr = anyAddr(k.Family)
	case !k.Addr.IsValid():
		return Sources{}
	}
	if l.sources == nil {
		l.sources = sourcesByAddress(l.view.Service)
	}
	return l.sources[k.Addr]
}

func (l *portLists) traffic(list list) Traffic {
	t := Traffic{Verdict: Forward, List: list.id, Endpoints: list.targets}
	if len(list.targets) == 0 {
		t.Verdict = l.noEndpoint
	}
	return t
}

func masquerade(svc *api.Service, k Kind) Masquerade {
	switch {
	case k == ClusterIP:
		return MasqueradeIfConfigured
	case externalPolicyLocal(svc):
		return MasqueradeNode
	default:
		return MasqueradeAll
	}
}

// affinity returns the session affinity timeout of the service, or 0 if it has none.
func affinity(svc *api.Service) time.Duration {
	return time.Duration(svc.AffinitySeconds) * time.Second
}
