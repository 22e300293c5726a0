// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/ordering"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// connection is an entry of the connection-tracking table.
type connection struct {
	protocol       uint8
	from, to       netip.AddrPort
	endpoint, back netip.AddrPort // source and destination of the replies
	zone           uint16
	state          uint8 // the TCP state; 0 means established
}

// udp returns a UDP connection with this source port, destination and endpoint.
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

// encode encodes the message that creates an entry.
func (c connection) encode(w *netfilter.Builder) {
	at := w.Begin(unix.NFNL_SUBSYS_CTNETLINK<<8, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nfproto(api.FamilyOf(c.to.Addr())))
	encodeTuple(w, ctaTupleOrig, c.protocol, c.from, c.to)
	encodeTuple(w, ctaTupleReply, c.protocol, c.endpoint, c.back)
	w.Uint32(3, 1<<3) // status: confirmed
	w.Uint32(7, 3600) // timeout
	if c.protocol == unix.IPPROTO_TCP {
		const established = 3
		info := w.Nest(ctaProtoInfo)
		tcp := w.Nest(ctaProtoInfoTCP)
		w.Bytes(ctaProtoInfoTCPState, cmp.Or(c.state, established))
		w.EndNest(tcp)
		w.EndNest(info)
	}
	if c.zone != 0 {
		w.Bytes(ctaZone, byte(c.zone>>8), byte(c.zone))
	}
	w.End(at)
}

func encodeTuple(w *netfilter.Builder, kind uint16, protocol uint8, src, dst netip.AddrPort) {
	ipSrc, ipDst := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
	if src.Addr().Is6() {
		ipSrc, ipDst = ctaIPv6Src, ctaIPv6Dst
	}
	tuple := w.Nest(kind)
	ip := w.Nest(ctaTupleIP)
	w.Bytes(ipSrc, src.Addr().AsSlice()...)
	w.Bytes(ipDst, dst.Addr().AsSlice()...)
	w.EndNest(ip)
	proto := w.Nest(ctaTupleProto)
	w.Bytes(ctaProtoNum, protocol)
	w.Bytes(ctaProtoSrcPort, byte(src.Port()>>8), byte(src.Port()))
	w.Bytes(ctaProtoDstPort, byte(dst.Port()>>8), byte(dst.Port()))
	w.EndNest(proto)
	w.EndNest(tuple)
}

// createEntries adds entries to the table of a namespace.
func createEntries(t testing.TB, netNS int, connections ...connection) {
	t.Helper()
	c := netfilter.NewConn(netNS)
	defer c.Close()
	for chunk := range slices.Chunk(connections, batchSize) {
		n := 0
		err := c.Each(t.Context(), func(w *netfilter.Builder) {
			for _, c := range chunk {
				c.encode(w)
			}
		}, func(err error) {
			if err != nil {
				t.Fatalf("create entry %s, which needs root and the kernel module nf_conntrack_netlink: %v", chunk[n], err)
			}
			n++
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// clearTable deletes all entries of a namespace.
func clearTable(t testing.TB, netNS int) {
	t.Helper()
	c := netfilter.NewConn(netNS)
	defer c.Close()
	err := c.Query(t.Context(), func(w *netfilter.Builder) { encodeDeletion(w, api.IPv4, nil) }, func([]byte) {})
	if err != nil {
		t.Fatal(err)
	}
}

// tableEntries returns the sorted entries of the table of a namespace.
func tableEntries(t testing.TB, netNS int) []string {
	t.Helper()
	conn := netfilter.NewConn(netNS)
	defer conn.Close()
	var found []connection
	err := conn.Query(t.Context(), func(w *netfilter.Builder) {
		w.End(w.Begin(ctGet, unix.NLM_F_DUMP, unix.AF_UNSPEC))
	}, func(entry []byte) {
		var c connection
		for kind, data := range netfilter.Attributes(entry) {
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
	})
	if err != nil {
		t.Fatal(err)
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

// service returns the view that the string text describes with these lines:
//
//	ip ADDR…                  cluster IPs
//	external ADDR…            external IPs
//	port N[:NODEPORT][/TCP]   a UDP or TCP port; the target port is N + 5000
//	ready ADDR…               endpoints, on another node
//	draining ADDR…            endpoints that terminate and still serve
//	dying ADDR…               endpoints that terminate and no longer serve
//	local                     both traffic policies are Local
//	reset                     connections to lost endpoints are reset
//	all-ports
func service(t testing.TB, name, text string) *api.View {
	t.Helper()
	lines := strings.Split(text, "\n")
	var words, endpoints []string
	var external api.IPSet
	for _, line := range lines {
		kind, values, _ := strings.Cut(line, " ")
		for _, value := range strings.Fields(values) {
			switch kind {
			case "ip":
				words = append(words, value)
			case "external":
				external.Add(netip.MustParseAddr(value))
			case "port":
				if !strings.HasSuffix(value, "/TCP") {
					value += "/UDP"
				}
				words = append(words, value)
			case "ready":
				endpoints = append(endpoints, value)
			case "draining":
				endpoints = append(endpoints, value+"~draining")
			case "dying":
				endpoints = append(endpoints, value+"~ended")
			}
		}
	}
	svc := sinktest.Service("test/"+name, strings.Join(words, " "))
	svc.IPs.ExternalIPs, svc.IPFamilies = external, []api.Family{api.IPv4, api.IPv6}
	svc.AllPorts = slices.Contains(lines, "all-ports")
	svc.ResetConnections = slices.Contains(lines, "reset")
	svc.InternalTrafficToLocal = slices.Contains(lines, "local")
	svc.ExternalTrafficToLocal = svc.InternalTrafficToLocal
	for i := range svc.Ports {
		p := &svc.Ports[i]
		p.Name, p.TargetPort = strings.ToLower(fmt.Sprintf("%s-%d", p.Protocol, p.Port)), p.Port+5000
	}
	return sinktest.View(sinktest.Node("here"), svc, strings.Join(endpoints, " "))
}

// changesBetween returns the incremental changes between two states.
func changesBetween(before, now []*api.View) *sink.Changes {
	changes := map[types.NamespacedName]*sink.Change{}
	at := func(key types.NamespacedName) *sink.Change {
		if changes[key] == nil {
			changes[key] = &sink.Change{Key: key}
		}
		return changes[key]
	}
	for _, view := range before {
		at(view.Key()).Old = view
	}
	for _, view := range now {
		at(view.Key()).New = view
	}
	var list []sink.Change
	for _, c := range changes {
		if c.Old == nil || c.New == nil || !c.Old.Equal(c.New) {
			list = append(list, *c)
		}
	}
	slices.SortFunc(list, func(a, b sink.Change) int { return ordering.Keys(a.Key, b.Key) })
	return &sink.Changes{Services: slices.Values(list)}
}

// wholePass returns a batch that is a complete pass.
func wholePass(now []*api.View) *sink.Changes {
	c := inPass(now...)
	c.First, c.Last = true, true
	return c
}

// inPass returns a batch in the middle of a pass: neither the first nor the last batch.
func inPass(now ...*api.View) *sink.Changes {
	c := changesBetween(nil, now)
	services := slices.Collect(c.Services)
	for i := range services {
		services[i].Unsure = true
	}
	c.Services = slices.Values(services)
	return c
}
