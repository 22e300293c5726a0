// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/mdlayher/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// connection is an entry of the table.
type connection struct {
	protocol       uint8
	from, to       netip.AddrPort
	endpoint, back netip.AddrPort // who answers, and to whom
	zone           uint16
}

// udp returns the connection of a client at port sport, to one address and port,
// answered by another.
func udp(sport uint16, to, endpoint string) connection {
	c := connection{protocol: unix.IPPROTO_UDP, to: netip.MustParseAddrPort(to), endpoint: netip.MustParseAddrPort(endpoint)}
	c.from = netip.AddrPortFrom(netip.MustParseAddr("10.2.0.2"), sport)
	if c.to.Addr().Is6() {
		c.from = netip.AddrPortFrom(netip.MustParseAddr("fd02::2"), sport)
	}
	c.back = c.from
	return c
}

func (c connection) String() string {
	protocol := map[uint8]string{unix.IPPROTO_UDP: "udp", unix.IPPROTO_TCP: "tcp"}[c.protocol]
	s := fmt.Sprintf("%s %d: %s by %s", protocol, c.from.Port(), c.to, c.endpoint)
	if c.zone != 0 {
		s += fmt.Sprintf(" in zone %d", c.zone)
	}
	return s
}

func (c connection) message() []byte {
	b := header(api.FamilyOf(c.to.Addr()))
	b = append(b, tupleAttr(ctaTupleOrig, c.protocol, c.from, c.to)...)
	b = append(b, tupleAttr(ctaTupleReply, c.protocol, c.endpoint, c.back)...)
	b = append(b, attr(3, binary.BigEndian.AppendUint32(nil, 1<<3)...)...) // status: confirmed
	b = append(b, attr(7, binary.BigEndian.AppendUint32(nil, 3600)...)...) // time-out
	if c.protocol == unix.IPPROTO_TCP {
		b = append(b, nested(4, nested(1, attr(1, 3)))...) // established
	}
	if c.zone != 0 {
		b = append(b, attr(ctaZone, byte(c.zone>>8), byte(c.zone))...)
	}
	return b
}

func tupleAttr(kind uint16, protocol uint8, src, dst netip.AddrPort) []byte {
	ipSrc, ipDst := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
	if src.Addr().Is6() {
		ipSrc, ipDst = ctaIPv6Src, ctaIPv6Dst
	}
	port := func(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }
	return nested(kind,
		nested(ctaTupleIP, attr(ipSrc, src.Addr().AsSlice()...), attr(ipDst, dst.Addr().AsSlice()...)),
		nested(ctaTupleProto, attr(ctaProtoNum, protocol), attr(ctaProtoSrcPort, port(src.Port())...), attr(ctaProtoDstPort, port(dst.Port())...)),
	)
}

// enter makes entries in the table of a namespace.
func enter(t testing.TB, netNS int, connections ...connection) {
	t.Helper()
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: netNS})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for some := range slices.Chunk(connections, batch) {
		var messages []netlink.Message
		for _, c := range some {
			messages = append(messages, netlink.Message{
				Header: netlink.Header{Type: unix.NFNL_SUBSYS_CTNETLINK << 8, Flags: netlink.Request | netlink.Create | netlink.Excl | netlink.Acknowledge},
				Data:   c.message(),
			})
		}
		if _, err := c.SendMessages(messages); err != nil {
			t.Fatal(err)
		}
		for i := range messages {
			if _, err := c.Receive(); err != nil {
				t.Fatalf("entering %s, which needs root and the kernel's nf_conntrack_netlink: %v", some[i], err)
			}
		}
	}
}

// empty deletes all entries of a namespace.
func empty(t testing.TB, netNS int) {
	t.Helper()
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: netNS})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Execute(netlink.Message{Header: netlink.Header{Type: ctDelete, Flags: netlink.Request | netlink.Acknowledge}, Data: header(api.IPv4)}); err != nil {
		t.Fatal(err)
	}
}

// entries returns what the table has, in order.
func entries(t testing.TB, netNS int) []string {
	t.Helper()
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: netNS})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var found []connection
	messages, err := c.Execute(netlink.Message{Header: netlink.Header{Type: ctGet, Flags: netlink.Request | netlink.Dump}, Data: []byte{unix.AF_UNSPEC, 0, 0, 0}})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range messages {
		var c connection
		for kind, data := range attrs(m.Data[headerLen:]) {
			switch kind {
			case ctaTupleOrig:
				t := parseTuple(data)
				c.protocol, c.from, c.to = t.protocol, t.src, t.dst
			case ctaTupleReply:
				t := parseTuple(data)
				c.endpoint, c.back = t.src, t.dst
			case ctaZone:
				c.zone = binary.BigEndian.Uint16(data)
			}
		}
		found = append(found, c)
	}
	return texts(found)
}

func texts(list []connection) []string {
	slices.SortFunc(list, func(a, b connection) int {
		return cmp.Or(a.to.Addr().Compare(b.to.Addr()), cmp.Compare(a.from.Port(), b.from.Port()), cmp.Compare(a.protocol, b.protocol))
	})
	out := []string{}
	for _, c := range list {
		out = append(out, c.String())
	}
	return out
}

// service describes a service by text, a line each:
//
//	ip ADDR…                cluster IPs
//	external ADDR…          external IPs
//	port NUMBER[/tcp] [NODEPORT]   to port NUMBER + 5000 of endpoints
//	ready ADDR…             endpoints, on another node
//	draining ADDR…          endpoints that serve and terminate
//	dying ADDR…             endpoints that terminate and do not serve
//	local                   both traffic policies are Local
//	all-ports
func service(t testing.TB, name, text string) *api.ServiceEndpoints {
	t.Helper()
	svc := &api.Service{Namespace: "test", Name: name, Type: api.ClusterIP}
	slicesOf := map[api.Family]*api.EndpointSlice{}
	var ports []api.EndpointPort
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		for _, value := range fields[1:] {
			switch fields[0] {
			case "ip":
				svc.IPs.ClusterIPs.Add(netip.MustParseAddr(value))
				svc.IPFamilies = []api.Family{api.IPv4, api.IPv6}
			case "external":
				svc.IPs.ExternalIPs.Add(netip.MustParseAddr(value))
				svc.IPFamilies = []api.Family{api.IPv4, api.IPv6}
			case "ready", "draining", "dying":
				addr := netip.MustParseAddr(value)
				f := api.FamilyOf(addr)
				if slicesOf[f] == nil {
					slicesOf[f] = &api.EndpointSlice{Namespace: "test", Name: f.String(), ServiceName: name, Family: f}
				}
				slicesOf[f].Endpoints = append(slicesOf[f].Endpoints, api.SliceEndpoint{Addr: addr, NodeName: "elsewhere", Conditions: api.Conditions{
					Ready: fields[0] == "ready", Serving: fields[0] != "dying", Terminating: fields[0] != "ready",
				}})
			}
		}
		switch fields[0] {
		case "port":
			var port, nodePort int32
			protocol, number := api.UDP, fields[1]
			if n, ok := strings.CutSuffix(number, "/tcp"); ok {
				number, protocol = n, api.TCP
			}
			fmt.Sscan(number, &port)
			if len(fields) > 2 {
				fmt.Sscan(fields[2], &nodePort)
				svc.Type = api.NodePort
			}
			portName := strings.ToLower(fmt.Sprintf("%s-%d", protocol, port))
			svc.Ports = append(svc.Ports, api.PortMapping{Name: portName, Protocol: protocol, Port: port, NodePort: nodePort})
			ports = append(ports, api.EndpointPort{Name: portName, Protocol: protocol, Port: port + 5000})
		case "local":
			svc.InternalTrafficToLocal, svc.ExternalTrafficToLocal = true, true
		case "all-ports":
			svc.AllPorts = true
		}
	}
	state := &api.ServiceState{Service: svc}
	for _, f := range slices.Sorted(maps.Keys(slicesOf)) {
		slicesOf[f].Ports = ports
		state.Slices = append(state.Slices, slicesOf[f])
	}
	return nodeview.View(state, &api.Node{Name: "here"})
}

// difference returns the incremental changes between two states.
func difference(before, now []*api.ServiceEndpoints) *sink.Changes {
	changes := map[types.NamespacedName]*sink.Change{}
	at := func(key types.NamespacedName) *sink.Change {
		if changes[key] == nil {
			changes[key] = &sink.Change{Key: key}
		}
		return changes[key]
	}
	for _, se := range before {
		at(se.Key()).Old = se
	}
	for _, se := range now {
		at(se.Key()).New = se
	}
	var list []sink.Change
	for _, c := range changes {
		if c.Old == nil || c.New == nil || !c.Old.Equal(c.New) {
			list = append(list, *c)
		}
	}
	slices.SortFunc(list, func(a, b sink.Change) int { return api.CompareKeys(a.Key, b.Key) })
	return &sink.Changes{Services: slices.Values(list)}
}

// whole returns a pass over a state in one batch.
func whole(now []*api.ServiceEndpoints) *sink.Changes {
	c := inPass(now...)
	c.First, c.Last = true, true
	return c
}

// inPass returns a batch in the middle of a pass.
func inPass(now ...*api.ServiceEndpoints) *sink.Changes {
	c := difference(nil, now)
	services := slices.Collect(c.Services)
	for i := range services {
		services[i].Unsure = true
	}
	c.Services = slices.Values(services)
	return c
}
