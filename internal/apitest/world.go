// SPDX-License-Identifier: Apache-2.0

package apitest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/kpng-project/kpng/api"
	"k8s.io/apimachinery/pkg/types"
)

// World is a cluster of random services, EndpointSlices and nodes, which refer to each
// other. Endpoints run on nodes and have hints for nodes and zones. Some services claim
// the same address. All traffic policies and endpoint conditions occur.
type World struct {
	r     *rand.Rand
	nodes int
	// services[n] is true if service number n exists.
	services []bool
}

// Writer receives the objects of a World. A cluster.Tx is a Writer.
type Writer interface {
	SetService(*api.Service)
	DeleteService(types.NamespacedName)
	SetSlice(*api.EndpointSlice)
	DeleteSlice(types.NamespacedName)
	SetNode(*api.Node)
	DeleteNode(string)
}

// NewWorld returns a World with the given number of nodes, and at most the given number
// of services.
func NewWorld(r *rand.Rand, nodes, services int) *World {
	return &World{r: r, nodes: nodes, services: make([]bool, services)}
}

// NodeName returns the name of node number n.
func NodeName(n int) string { return fmt.Sprintf("node-%d", n) }

// WriteAll writes all nodes, services and EndpointSlices.
func (w *World) WriteAll(to Writer) {
	for n := range w.nodes {
		to.SetNode(w.node(n))
	}
	for i := range w.services {
		w.services[i] = true
		to.SetService(w.service(i))
		w.writeSlices(i, to)
	}
}

// Change writes one random change, usually of endpoints.
func (w *World) Change(to Writer) {
	i := w.r.IntN(len(w.services))
	key := serviceKey(i)
	switch w.r.IntN(10) {
	case 0:
		to.SetNode(w.node(w.r.IntN(w.nodes)))
	case 1:
		to.DeleteNode(NodeName(w.r.IntN(w.nodes)))
	case 2:
		w.services[i] = false
		to.DeleteService(key)
		for _, name := range sliceNames(key) {
			to.DeleteSlice(types.NamespacedName{Namespace: key.Namespace, Name: name})
		}
	case 3, 4:
		w.services[i] = true
		to.SetService(w.service(i))
	case 5:
		to.DeleteSlice(types.NamespacedName{Namespace: key.Namespace, Name: sliceNames(key)[w.r.IntN(2)]})
	default:
		w.writeSlices(i, to)
	}
}

func serviceKey(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: fmt.Sprintf("ns-%d", i%3), Name: fmt.Sprintf("svc-%d", i)}
}

func sliceNames(key types.NamespacedName) [2]string {
	return [2]string{key.Name + "-4", key.Name + "-6"}
}

func (w *World) node(n int) *api.Node {
	node := &api.Node{
		Name:      NodeName(n),
		UID:       types.UID(NodeName(n)),
		Labels:    map[string]string{"kubernetes.io/hostname": NodeName(n)},
		Addresses: []api.NodeAddress{{Type: "InternalIP", IP: netip.AddrFrom4([4]byte{192, 168, byte(n >> 8), byte(n)})}},
		PodCIDRs:  []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(n), 0}), 24)},
	}
	if zone := w.r.IntN(4); zone > 0 {
		node.Labels["topology.kubernetes.io/zone"] = zoneName(zone)
	}
	if w.r.IntN(8) == 0 {
		node.Taints = []api.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Effect: "NoSchedule"}}
	}
	return node
}

func zoneName(n int) string { return fmt.Sprintf("zone-%d", n) }

func (w *World) service(i int) *api.Service {
	key := serviceKey(i)
	s := &api.Service{
		Namespace: key.Namespace,
		Name:      key.Name,
		UID:       types.UID(key.String()),
		Created:   time.Unix(1700000000+int64(w.r.IntN(3)), 0).UTC(),
		Type:      [...]api.ServiceType{api.ClusterIP, api.ClusterIP, api.NodePort, api.LoadBalancer, api.ExternalName}[w.r.IntN(5)],
		IPs: api.ServiceIPs{
			ClusterIPs: api.NewIPSet(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})),
		},
		IPFamilies:             [][]api.Family{{api.IPv4}, {api.IPv6, api.IPv4}, nil}[w.r.IntN(3)],
		Labels:                 map[string]string{"app": key.Name, "tier": fmt.Sprint(w.r.IntN(2))},
		InternalTrafficToLocal: w.r.IntN(4) == 0,
		ExternalTrafficToLocal: w.r.IntN(3) == 0,
		AllPorts:               w.r.IntN(20) == 0,
		Ports:                  w.ports(),
	}
	if w.r.IntN(2) == 0 {
		s.IPs.ExternalIPs.Add(netip.AddrFrom4([4]byte{198, 51, 100, byte(w.r.IntN(40))})) // few addresses, so that services compete for them
	}
	if s.Type == api.LoadBalancer {
		lb := netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})
		s.IPs.LoadBalancerIPs.Add(lb)
		s.SourceRanges = []api.SourceRanges{{TargetIPs: api.NewIPSet(lb), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
		s.HealthCheckNodePort = 32000
		s.LoadBalancerClass = [...]string{"", "example.com/lb"}[w.r.IntN(2)]
	}
	if w.r.IntN(4) == 0 {
		s.AffinitySeconds = 10800
	}
	return s
}

func (w *World) ports() []api.PortMapping {
	ports := []api.PortMapping{
		{Name: "http", Protocol: api.TCP, Port: 80, TargetPort: 8080, AppProtocol: "http"},
		{Name: "dns", Protocol: api.UDP, Port: 53, TargetPortName: "dns", NodePort: 30000 + w.r.Int32N(50)},
		{Name: "sctp", Protocol: api.SCTP, Port: 90, TargetPort: 90},
	}
	return ports[:1+w.r.IntN(len(ports))]
}

func (w *World) writeSlices(i int, to Writer) {
	key := serviceKey(i)
	for f, name := range sliceNames(key) {
		family := [...]api.Family{api.IPv4, api.IPv6}[f]
		s := &api.EndpointSlice{
			Namespace: key.Namespace, Name: name, ServiceName: key.Name, Family: family,
			Labels: map[string]string{"tier": fmt.Sprint(w.r.IntN(2))},
			Ports: []api.EndpointPort{
				{Name: "http", Protocol: api.TCP, Port: 8080}, {Name: "dns", Protocol: api.UDP, Port: 5353 + w.r.Int32N(2)},
			}[:1+w.r.IntN(2)],
			TriggerTime: time.Unix(int64(w.r.IntN(1<<30)), 0),
		}
		for n := range w.r.IntN(6) {
			s.Endpoints = append(s.Endpoints, w.endpoint(family, i, n))
		}
		to.SetSlice(s)
	}
}

func (w *World) endpoint(family api.Family, service, n int) api.SliceEndpoint {
	d := &api.EndpointDetails{NodeName: NodeName(w.r.IntN(w.nodes)), Zone: zoneName(1 + w.r.IntN(3))}
	e := api.SliceEndpoint{
		Addr:    netip.AddrFrom4([4]byte{172, 16 + byte(n), byte(service >> 8), byte(service)}),
		Details: d,
		Conditions: [...]api.Conditions{
			{Ready: true, Serving: true}, {Ready: true, Serving: true}, {Ready: true, Serving: true}, {Serving: true, Terminating: true}, {},
		}[w.r.IntN(5)],
	}
	if family == api.IPv6 {
		e.Addr = netip.AddrFrom16([16]byte{0: 0xfe, 13: byte(n), 14: byte(service >> 8), 15: byte(service)})
	}
	if w.r.IntN(2) == 0 {
		d.Target = &types.NamespacedName{Namespace: "pods", Name: fmt.Sprintf("pod-%d", n)}
	}
	switch w.r.IntN(8) {
	case 0:
	case 1:
		d.Hints = &api.Hints{ForNodes: []string{d.NodeName}, ForZones: []string{d.Zone}}
	default:
		d.Hints = &api.Hints{ForZones: []string{d.Zone}}
	}
	return e
}
