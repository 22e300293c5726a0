// SPDX-License-Identifier: Apache-2.0

//go:build linux

package reference

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"sync"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// counters counts traffic. New connections are counted by named counters of nftables, which
// keep their numbers when the rules are replaced. Connection tracking provides the active
// connections and the bytes.
type counters struct {
	mu sync.Mutex
	// names maps each service port and endpoint to the name of its counter. All numbers in
	// the keys are 0.
	names map[backends.Stats]string
	flows map[countedFlow]backends.Stats
}

type countedFlow struct {
	protocol           api.Protocol
	frontend, endpoint netip.AddrPort
}

// count returns the nft statement that counts a new connection to an endpoint.
func (r *ruleset) count(f *nodeview.Frontend, e nodeview.Target) string {
	if f.ServicePort == nil {
		return ""
	}
	service, port, at := r.service, f.ServicePort.Name, fmt.Sprintf("%s-%d", e.Addr, e.Port)
	s := backends.Stats{Service: service, Port: port, Protocol: f.Protocol, Endpoint: e.AddrPort()}
	name := r.counterOf[s]
	if name == "" {
		switch r.opts.Fault {
		case CountsServices:
			service, port = types.NamespacedName{}, ""
		case CountsPositions:
			at = fmt.Sprint(slices.Index(f.Elsewhere.Endpoints, e))
		case CountsAgain:
			at = fmt.Sprint(rand.Uint64())
		}
		name = objectName("n", service, port, f.Protocol, f.Family, at)
		r.counterOf[s] = name
		r.counters[name] = ""
	}
	return "counter name " + name
}

// set replaces the present counters by those of a ruleset.
func (c *counters) set(opts *Options, r *ruleset, services []*api.View) error {
	if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_acct", []byte("1"), 0); err != nil {
		return fmt.Errorf("count bytes of connections: %w", err)
	}
	nodes, err := nodePortAddrs(opts.NodePortCIDRs)
	if err != nil {
		return err
	}
	flows := map[countedFlow]backends.Stats{}
	for _, view := range services {
		for f := range nodeview.Frontends(view) {
			if f.ServicePort == nil {
				continue
			}
			for e := range f.Existing.All() {
				for at := range f.At(nodes) {
					flows[countedFlow{f.Protocol, at, e.AddrPort()}] = backends.Stats{Service: view.Key(), Port: f.ServicePort.Name, Protocol: f.Protocol, Endpoint: e.AddrPort()}
				}
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names, c.flows = r.counterOf, flows
	return nil
}

// counterLine matches a counter in nft's output.
var counterLine = regexp.MustCompile(`counter (\S+) \{\s+packets (\d+)`)

// Stats implements backends.Counter.
func (p *Proxy) Stats(_ context.Context, yield func(backends.Stats) bool) error {
	c := &p.counters
	c.mu.Lock()
	defer c.mu.Unlock()
	text, err := nft("list", "counters", "table", "inet", p.opts.Table)
	if err != nil {
		return fmt.Errorf("nft: %w: %.500s", err, text)
	}
	connections := map[string]int64{}
	for _, m := range counterLine.FindAllSubmatch(text, -1) {
		connections[string(m[1])], _ = strconv.ParseInt(string(m[2]), 10, 64)
	}
	all := map[backends.Stats]*backends.Stats{}
	for s, name := range c.names {
		counted := s
		counted.Connections = connections[name]
		all[s] = &counted
	}
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			return fmt.Errorf("list flows: %w", err)
		}
		for _, flow := range flows {
			protocol := map[uint8]api.Protocol{unix.IPPROTO_TCP: api.TCP, unix.IPPROTO_UDP: api.UDP}[flow.Forward.Protocol]
			s := all[c.flows[countedFlow{protocol, addrPort(flow.Forward.DstIP, flow.Forward.DstPort), addrPort(flow.Reverse.SrcIP, flow.Reverse.SrcPort)}]]
			if s == nil {
				continue
			}
			s.FromClients += int64(flow.Forward.Bytes)
			s.ToClients += int64(flow.Reverse.Bytes)
			if p.opts.Fault == CountsPackets {
				s.Connections += int64(flow.Forward.Packets)
			}
			if tcp, ok := flow.ProtoInfo.(*netlink.ProtoInfoTCP); ok && tcp.State == nl.TCP_CONNTRACK_ESTABLISHED {
				s.Active++
			}
		}
	}
	for _, s := range all {
		switch p.opts.Fault {
		case CountsNothing:
			s.Connections = 0
		case CountsFirstPackets:
			s.FromClients, s.ToClients = 100*s.Connections, 0
		case NeverInactive:
			s.Active = s.Connections
		}
		if !yield(*s) {
			return nil
		}
	}
	return nil
}
