// SPDX-License-Identifier: Apache-2.0

//go:build linux

package world

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// World is a node and the hosts around it. See the package comment.
type World struct {
	Node, Node2, Router, Client, Beyond *Host
	// Local has the pods on Node, and Remote has the pods on Node2.
	Local, Remote []*Host
	// SCTP is true if the kernel has SCTP sockets. Then pods also answer SCTP connections.
	SCTP bool
	// Cgroup is the cgroup of Node and Local, or nil.
	Cgroup *netnstest.Cgroup

	hosts []*Host
}

// The address ranges of the world, one per family.
var (
	// ServiceCIDRs contain cluster IPs.
	ServiceCIDRs = prefixes("10.96.0.0/16", "fd00:10:96::/112")
	// ExternalCIDRs contain external IPs and load-balancer IPs.
	ExternalCIDRs = prefixes("198.18.0.0/16", "fd00:198:18::/112")
	// ClusterCIDRs contain the addresses of all pods, and PodCIDRs contain the addresses of
	// the pods on Node.
	ClusterCIDRs = prefixes("10.244.0.0/16", "fd00:10:244::/48")
	PodCIDRs     = prefixes("10.244.1.0/24", "fd00:10:244:1::/64")
	// NodeCIDRs contain the addresses of nodes, except their addresses in pod networks.
	NodeCIDRs = prefixes("192.168.0.0/16", "fd00:192:168::/48")
	// ClientCIDRs contain the addresses of Client.
	ClientCIDRs = prefixes("203.0.113.0/24", "fd00:203:113::/64")
)

// NodePodCIDR returns the network of the pods on Node (0) or Node2 (1).
func NodePodCIDR(node int, f api.Family) netip.Prefix {
	return []map[api.Family]netip.Prefix{PodCIDRs, prefixes("10.244.2.0/24", "fd00:10:244:2::/64")}[node][f]
}

// PodInterfaces is the prefix of the names of Node's interfaces to its pods.
const PodInterfaces = "pod-"

var (
	// PodPorts are the ports on which pods and nodes answer TCP and UDP.
	PodPorts = []uint16{8080, 8081, 8082}
	// ServicePorts are the ports on which the host beyond answers at all addresses of
	// services.
	ServicePorts = []uint16{80, 81, 82, 8080, 8081}
)

// clientAddrs is the number of addresses of Client in Host.Addrs, per family.
const clientAddrs = 24

// CrowdCIDRs contain further addresses of Client, from which it can connect. The router has
// one route to them, so that they need no entries in its neighbour table.
var CrowdCIDRs = prefixes("203.0.113.128/25", "fd00:203:113::1:0/112")

func prefixes(v4, v6 string) map[api.Family]netip.Prefix {
	return map[api.Family]netip.Prefix{api.IPv4: netip.MustParsePrefix(v4), api.IPv6: netip.MustParsePrefix(v6)}
}

// Options are settings of a world.
type Options struct {
	// Cgroup makes a cgroup for the node and its pods.
	Cgroup bool
	// SoftwareChecksums makes hosts compute the checksums of the packets that they send.
	SoftwareChecksums bool
}

// New makes a world. It needs root.
func New(opts Options) (w *World, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("make network namespaces: need root")
	}
	w = &World{}
	defer func() {
		if err != nil {
			w.Close()
		}
	}()
	if opts.Cgroup {
		if w.Cgroup, err = netnstest.MakeCgroup(); err != nil {
			return w, err
		}
	}
	for _, h := range []struct {
		name string
		host **Host
	}{{"router", &w.Router}, {"node", &w.Node}, {"node2", &w.Node2}, {"client", &w.Client}, {"beyond", &w.Beyond}} {
		if *h.host, err = w.host(h.name); err != nil {
			return w, err
		}
	}
	w.Node.Cgroup = w.Cgroup
	return w, w.build(planner{softwareChecksums: opts.SoftwareChecksums})
}

// Close stops the servers and releases the namespaces and the cgroup.
func (w *World) Close() error {
	for _, h := range w.hosts {
		h.close()
	}
	if w.Cgroup == nil {
		return nil
	}
	return w.Cgroup.Close()
}

func (w *World) host(name string) (*Host, error) {
	namespace, err := netnstest.Make()
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", name, err)
	}
	h := &Host{Namespace: namespace, Name: name}
	w.hosts = append(w.hosts, h)
	return h, nil
}

func (w *World) build(plan planner) error {
	for _, h := range []*Host{w.Node, w.Node2, w.Router} {
		plan.setSysctls(h, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1",
			// Exempt all ICMP errors from rate limits. For ICMPv6, the value is a list of limited
			// types, and type 0 is unused.
			"ipv4/icmp_ratemask=0", "ipv6/icmp/ratemask=0")
	}
	// Links, with the addresses of both ends.
	plan.addLink(w.Router, "client", []string{"203.0.113.1/24", "fd00:203:113::1/64"}, w.Client, "eth0", nil)
	for i := range clientAddrs {
		plan.addAddrs(w.Client, "eth0", fmt.Sprintf("203.0.113.%d/24", 10+i), fmt.Sprintf("fd00:203:113::%x/64", 16+i))
	}
	plan.addLocalNetworks(w.Client, CrowdCIDRs[api.IPv4].String(), CrowdCIDRs[api.IPv6].String())
	plan.setSysctls(w.Client, "ipv6/ip_nonlocal_bind=1")
	plan.addRoutes(w.Router, "client", []string{"203.0.113.10", "fd00:203:113::10"}, CrowdCIDRs[api.IPv4].String(), CrowdCIDRs[api.IPv6].String())
	plan.addLink(w.Router, "node", []string{"192.168.1.1/24", "fd00:192:168:1::1/64"}, w.Node, "eth0", []string{"192.168.1.2/24", "fd00:192:168:1::2/64"})
	plan.addLink(w.Router, "node2", []string{"192.168.2.1/24", "fd00:192:168:2::1/64"}, w.Node2, "eth0", []string{"192.168.2.2/24", "fd00:192:168:2::2/64"})
	plan.addLink(w.Beyond, "eth0", []string{"192.168.3.1/24", "fd00:192:168:3::1/64"}, w.Node, "eth1", []string{"192.168.3.2/24", "fd00:192:168:3::2/64"})
	// Routes.
	for _, h := range []*Host{w.Client, w.Node2} {
		gateways := map[*Host][]string{w.Client: {"203.0.113.1", "fd00:203:113::1"}, w.Node2: {"192.168.2.1", "fd00:192:168:2::1"}}[h]
		plan.addRoutes(h, "eth0", gateways, "0.0.0.0/0", "::/0")
	}
	for _, cidrs := range []map[api.Family]netip.Prefix{ServiceCIDRs, ExternalCIDRs, PodCIDRs, prefixes("192.168.3.0/24", "fd00:192:168:3::/64")} {
		plan.addRoutes(w.Router, "node", []string{"192.168.1.2", "fd00:192:168:1::2"}, cidrs[api.IPv4].String(), cidrs[api.IPv6].String())
	}
	plan.addRoutes(w.Router, "node2", []string{"192.168.2.2", "fd00:192:168:2::2"}, "10.244.2.0/24", "fd00:10:244:2::/64")
	for _, to := range [][]string{{"203.0.113.0/24", "fd00:203:113::/64"}, {"192.168.2.0/24", "fd00:192:168:2::/64"}, {"10.244.2.0/24", "fd00:10:244:2::/64"}} {
		plan.addRoutes(w.Node, "eth0", []string{"192.168.1.1", "fd00:192:168:1::1"}, to...)
	}
	plan.addRoutes(w.Node, "eth1", []string{"192.168.3.1", "fd00:192:168:3::1"}, "0.0.0.0/0", "::/0")
	plan.addRoutes(w.Beyond, "eth0", []string{"192.168.3.2", "fd00:192:168:3::2"}, "0.0.0.0/0", "::/0")
	// The host w.Beyond has every address of a service. It does not answer echo requests,
	// because such an answer would not show which host sent it.
	for _, cidrs := range []map[api.Family]netip.Prefix{ServiceCIDRs, ExternalCIDRs} {
		plan.addLocalNetworks(w.Beyond, cidrs[api.IPv4].String(), cidrs[api.IPv6].String())
	}
	plan.setSysctls(w.Beyond, "ipv4/icmp_echo_ignore_all=1", "ipv6/icmp/echo_ignore_all=1", "ipv6/ip_nonlocal_bind=1")
	// Pods.
	for i, name := range []string{"a", "b", "c", "d", "e"} {
		node, number, pods := w.Node, 1, &w.Local
		if i >= 3 {
			node, number, pods = w.Node2, 2, &w.Remote
		}
		pod, err := w.host(name)
		if err != nil {
			return err
		}
		*pods = append(*pods, pod)
		pod.Cgroup = node.Cgroup
		addrs := []string{fmt.Sprintf("10.244.%d.%d/32", number, 10+i), fmt.Sprintf("fd00:10:244:%d::%x/128", number, 16+i)}
		gateways := []string{fmt.Sprintf("10.244.%d.1", number), fmt.Sprintf("fd00:10:244:%d::1", number)}
		plan.addLink(node, PodInterfaces+name, []string{gateways[0] + "/32", gateways[1] + "/128"}, pod, "eth0", addrs)
		plan.addRoutes(node, PodInterfaces+name, nil, addrs...)
		plan.addRoutes(pod, "eth0", nil, gateways[0]+"/32", gateways[1]+"/128")
		plan.addRoutes(pod, "eth0", gateways, "0.0.0.0/0", "::/0")
	}
	if plan.err != nil {
		return plan.err
	}
	w.SCTP = hasSCTP()
	for _, h := range append([]*Host{w.Node, w.Node2, w.Client}, append(w.Local, w.Remote...)...) {
		if err := h.serve(PodPorts); err != nil {
			return err
		}
		if w.SCTP {
			if err := h.serveStream(unix.IPPROTO_SCTP, PodPorts[0]); err != nil {
				return err
			}
		}
	}
	return w.Beyond.serve(ServicePorts)
}

// planner adds links, addresses and routes. After the first error its methods do nothing.
type planner struct {
	softwareChecksums bool
	err               error
}

func (p *planner) do(h *Host, f func() error) {
	if p.err == nil {
		if err := h.Do(f); err != nil {
			p.err = fmt.Errorf("set up %s: %w", h.Name, err)
		}
	}
}

// setSysctls changes kernel settings.
func (p *planner) setSysctls(h *Host, settings ...string) {
	if p.err == nil {
		if err := h.Sysctl(settings...); err != nil {
			p.err = fmt.Errorf("set up %s: %w", h.Name, err)
		}
	}
}

// addLink connects two hosts with a pair of interfaces that have these addresses.
func (p *planner) addLink(h *Host, name string, addrs []string, peer *Host, peerName string, peerAddrs []string) {
	p.do(h, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: peerName, PeerNamespace: netlink.NsFd(peer.FD)}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("add link %s: %w", name, err)
		}
		if err := p.prepareLink(name); err != nil {
			return err
		}
		return netlink.LinkSetUp(veth)
	})
	p.do(peer, func() error {
		link, err := netlink.LinkByName(peerName)
		if err != nil {
			return err
		}
		if err := p.prepareLink(peerName); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
	p.addAddrs(h, name, addrs...)
	p.addAddrs(peer, peerName, peerAddrs...)
}

// prepareLink applies the option SoftwareChecksums to an interface.
func (p *planner) prepareLink(name string) error {
	if !p.softwareChecksums {
		return nil
	}
	return netnstest.DisableChecksumOffload(name)
}

// addAddrs adds addresses to an interface of h and to h.Addrs.
func (p *planner) addAddrs(h *Host, name string, addrs ...string) {
	for _, addr := range addrs {
		p.do(h, func() error {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(addr)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD // without this flag, a new IPv6 address is unusable at first
			h.Addrs.Add(netip.MustParsePrefix(addr).Addr())
			if err := netlink.AddrAdd(link, a); err != nil {
				return fmt.Errorf("add address %s to %s: %w", addr, name, err)
			}
			return nil
		})
	}
}

// addRoutes adds a route to each of the given destinations. The first gateway is for IPv4
// and the second for IPv6. Without gateways, the destinations are on the interface's
// link.
func (p *planner) addRoutes(h *Host, name string, gateways []string, to ...string) {
	for _, cidr := range to {
		p.do(h, func() error {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			dst, err := netlink.ParseIPNet(cidr)
			if err != nil {
				return err
			}
			route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst}
			switch {
			case gateways == nil:
				route.Scope = netlink.SCOPE_LINK
			case netip.MustParsePrefix(cidr).Addr().Is4():
				route.Gw = net.ParseIP(gateways[0])
			default:
				route.Gw = net.ParseIP(gateways[1])
			}
			if err := netlink.RouteAdd(route); err != nil {
				return fmt.Errorf("add route to %s: %w", cidr, err)
			}
			return nil
		})
	}
}

// addLocalNetworks makes the host accept packets to all addresses in cidrs.
func (p *planner) addLocalNetworks(h *Host, cidrs ...string) {
	for _, cidr := range cidrs {
		p.do(h, func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			dst, err := netlink.ParseIPNet(cidr)
			if err != nil {
				return err
			}
			route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST}
			if err := netlink.RouteAdd(route); err != nil {
				return fmt.Errorf("add local network %s: %w", cidr, err)
			}
			return nil
		})
	}
}
