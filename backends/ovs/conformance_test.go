// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/internal/ovstest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// dirVariable is the environment variable from which the process of the sink reads the
// directory of the switch.
const dirVariable = "KPNG_OVS_DIR"

// The tables of the two instances that the kit runs, and the table of the test's own
// flows, which forward packets. In most cases, only one instance runs. It has the second
// table, because the last instance commits the connections of the node itself.
const (
	firstTable, secondTable, forwardTable = 10, 30, 50
)

var (
	nodeAddrs    = []netip.Addr{netip.MustParseAddr("192.168.1.2"), netip.MustParseAddr("fd00:192:168:1::2")}
	hairpinAddrs = []netip.Addr{netip.MustParseAddr("169.254.77.1"), netip.MustParseAddr("fd00:169:254::1")}
)

// TestConformance runs the cases of package conformance. All interfaces of the node are
// ports of a bridge with the userspace datapath. The flows of the test forward packets
// between these ports, as the agent of a pod network does.
func TestConformance(t *testing.T) {
	conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
		opts := Options{Options: backends.Options{Stats: true, MasqueradeAll: site.Masquerade == conformance.MasqueradeAll, MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside, ClusterCIDRs: site.ClusterCIDRs}, Bridge: ovstest.Bridge, RunDir: os.Getenv(dirVariable), FirstTable: secondTable, OutTable: forwardTable, MasqueradeAddresses: nodeAddrs, HairpinAddresses: hairpinAddrs, PodCIDRs: site.PodCIDRs}
		if site.Instance == "kpng-second" {
			opts.Instance, opts.FirstTable, opts.OutTable, opts.Chained = "1", firstTable, secondTable, true
		}
		return backendtest.NewSink(site, func(addrs nodeaddr.Source, _ sink.Sink) (sink.Sink, error) {
			opts.NodeAddresses = addrs
			return New(opts)
		})
	}, conformance.Options{
		Patience:          *backendtest.Patience,
		Report:            *backendtest.Report,
		Proxy:             "kpng ovs",
		SoftwareChecksums: true,
		Exceptions: map[string]string{
			"affinity ends only when a client has made no new connection for the timeout": "the switch looks for idle flows at intervals, so the affinity lasts up to a second longer",
		},
		Setup: func(t *testing.T, site conformance.Site) {
			s := ovstest.New(t, site.Start)
			t.Setenv(dirVariable, s.Dir)
			attach(t, s, site)
		},
	})
}

// port is an interface of the node that becomes a port of the bridge.
type port struct {
	name string
	// neighbours are hosts at the other end of the link, by family.
	neighbours []netip.Addr
	// destinations are the networks behind the port, including neighbours.
	destinations []string
}

// attach makes all interfaces of the node ports of the bridge. The addresses and routes of
// the node move to the bridge's local port.
func attach(t *testing.T, s *ovstest.Switch, site conformance.Site) {
	t.Helper()
	ports := []port{
		{"eth0", []netip.Addr{netip.MustParseAddr("192.168.1.1")}, []string{
			"192.168.1.0/24", "192.168.2.0/24", "203.0.113.0/24", "10.244.2.0/24",
			"fd00:192:168:1::/64", "fd00:192:168:2::/64", "fd00:203:113::/64", "fd00:10:244:2::/64",
		}},
		{"eth1", []netip.Addr{netip.MustParseAddr("192.168.3.1")}, []string{"0.0.0.0/0", "::/0"}},
	}
	for i, name := range []string{"a", "b", "c"} {
		addr := fmt.Sprintf("10.244.1.%d", 10+i)
		ports = append(ports, port{site.PodInterfaces + name, []netip.Addr{netip.MustParseAddr(addr)}, []string{
			addr, fmt.Sprintf("fd00:10:244:1::%x", 16+i),
		}})
	}
	macs := map[string]net.HardwareAddr{}
	var err error
	for _, p := range ports {
		ovstest.Await(t, "the neighbour at "+p.name, func() bool {
			macs[p.name], err = neighbour(site, p)
			return err == nil && macs[p.name] != nil
		})
		s.Vsctl(t, "add-port", ovstest.Bridge, p.name)
	}
	if err := site.Do(func() error { return moveToBridge(ports) }); err != nil {
		t.Fatal(err)
	}
	local := strings.Trim(strings.TrimSpace(s.Vsctl(t, "get", "interface", ovstest.Bridge, "mac_in_use")), `"`)
	number := func(name string) string { return strings.TrimSpace(s.Vsctl(t, "get", "interface", name, "ofport")) }

	const ownCookie = 0x77
	var flows strings.Builder
	flow := func(format string, args ...any) {
		fmt.Fprintf(&flows, "cookie=%#x,%s\n", ownCookie, fmt.Sprintf(format, args...))
	}
	flow("table=0,priority=200,arp actions=NORMAL")
	for icmpType := 133; icmpType <= 137; icmpType++ { // neighbour discovery
		flow("table=0,priority=200,icmp6,icmp_type=%d actions=NORMAL", icmpType)
	}
	for _, ip := range []string{"ip", "ipv6"} {
		flow("table=0,priority=100,%s actions=resubmit(,%d)", ip, firstTable)
		// While an instance has no flows, packets skip its tables.
		flow("table=%d,priority=1,%s actions=resubmit(,%d)", firstTable, ip, secondTable)
		flow("table=%d,priority=1,%s actions=resubmit(,%d)", secondTable, ip, forwardTable)
		// A translated packet may leave by the port by which it arrived.
		flow("table=%d,priority=100,%s actions=load:0xffff->NXM_OF_IN_PORT[],resubmit(,%d)", forwardTable, ip, forwardTable+1)
	}
	destination := func(to string, priority int) string {
		field, bits := "ip,nw_dst", 0
		if strings.Contains(to, ":") {
			field = "ipv6,ipv6_dst"
		}
		if p, err := netip.ParsePrefix(to); err == nil {
			bits = p.Bits()
		} else {
			bits = netip.MustParseAddr(to).BitLen()
		}
		return fmt.Sprintf("table=%d,priority=%d,%s=%s", forwardTable+1, priority+bits, field, to)
	}
	for _, p := range ports {
		for _, to := range p.destinations {
			flow("%s actions=mod_dl_src:%s,mod_dl_dst:%s,output:%s", destination(to, 10), local, macs[p.name], number(p.name))
		}
	}
	addrs, err := machineAddrs(site)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		flow("%s actions=mod_dl_dst:%s,LOCAL", destination(a.String(), 500), local)
	}
	// The node may have addresses of services, and connect from them.
	for _, network := range externalNetworks {
		flow("%s,ct_state=+trk+rpl actions=mod_dl_dst:%s,LOCAL", destination(network, 500), local)
	}
	s.OfctlWith(t, flows.String(), "add-flows", "-")
}

// neighbour returns the address of a host's interface. It returns nil if the address is
// not known yet.
func neighbour(site conformance.Site, p port) (mac net.HardwareAddr, err error) {
	addr := p.neighbours[0]
	err = site.Do(func() error {
		c, err := net.Dial("udp", netip.AddrPortFrom(addr, 9).String())
		if err != nil {
			return err
		}
		defer c.Close()
		c.Write([]byte("who has")) // ignore the error: the packet only triggers ARP
		neighbours, err := netlink.NeighList(0, netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		for _, n := range neighbours {
			if n.IP.String() == addr.String() && len(n.HardwareAddr) == 6 {
				mac = n.HardwareAddr
			}
		}
		return nil
	})
	return mac, err
}

// machineAddrs returns the addresses of the bridge's local port.
func machineAddrs(site conformance.Site) (all []netip.Addr, err error) {
	err = site.Do(func() error {
		link, err := netlink.LinkByName(ovstest.Bridge)
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		for _, a := range addrs {
			addr, _ := netip.AddrFromSlice(a.IP)
			all = append(all, addr.Unmap())
		}
		return err
	})
	return all, err
}

// externalNetworks have the external IPs and load-balancer IPs of the kit.
var externalNetworks = []string{"198.18.0.0/16", "fd00:198:18::/112"}

// moveToBridge moves addresses and routes to the bridge's local port. It runs in the
// network namespace of the node. The node's own connections to node ports, and to external
// addresses that the node has, have to reach the bridge, too. So rules send these
// connections to the bridge before the kernel delivers them locally.
func moveToBridge(ports []port) error {
	local, err := netlink.LinkByName(ovstest.Bridge)
	if err != nil {
		return err
	}
	// The node receives packets with its own addresses as their source, when it connects to
	// its own node ports.
	if err := setSysctls("ipv4/conf/"+ovstest.Bridge+"/accept_local=1", "ipv4/conf/"+ovstest.Bridge+"/rp_filter=0"); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(local); err != nil {
		return err
	}
	var addrs []netlink.Addr
	var routes []netlink.Route
	for _, p := range ports {
		link, err := netlink.LinkByName(p.name)
		if err != nil {
			return err
		}
		// With the userspace datapath, the kernel still sees the packets that arrive at a
		// port. The kernel must not process these packets. So give the port another
		// hardware address, to which no host sends packets, and make the kernel ignore ARP
		// requests for other addresses.
		if err := setSysctls("ipv4/conf/" + p.name + "/arp_ignore=1"); err != nil {
			return err
		}
		if err := netlink.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 1, byte(link.Attrs().Index)}); err != nil {
			return fmt.Errorf("change the hardware address of %s: %w", p.name, err)
		}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			of, err := netlink.RouteList(link, family)
			if err != nil {
				return err
			}
			routes = append(routes, slices.DeleteFunc(of, func(r netlink.Route) bool { return r.Protocol == unix.RTPROT_KERNEL })...)
		}
		of, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range of {
			if a.IP.IsLinkLocalUnicast() {
				continue
			}
			if err := netlink.AddrDel(link, &a); err != nil {
				return err
			}
			addrs = append(addrs, a)
		}
	}
	for _, a := range addrs {
		if err := netlink.AddrReplace(local, &netlink.Addr{IPNet: a.IPNet, Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("move address %s: %w", a, err)
		}
	}
	slices.SortStableFunc(routes, func(a, b netlink.Route) int { return len(a.Gw) - len(b.Gw) }) // gateways last
	for _, r := range routes {
		moved := netlink.Route{LinkIndex: local.Attrs().Index, Dst: r.Dst, Gw: r.Gw, Scope: r.Scope, Table: r.Table}
		if err := netlink.RouteReplace(&moved); err != nil {
			return fmt.Errorf("move route %s: %w", r, err)
		}
	}
	return sendServicesToBridge(local)
}

// setSysctls changes kernel settings of the current network namespace.
func setSysctls(settings ...string) error {
	for _, setting := range settings {
		name, value, _ := strings.Cut(setting, "=")
		if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}

// sendServicesToBridge adds rules for the node's own connections to node ports and external
// addresses.
func sendServicesToBridge(local netlink.Link) error {
	const table = 100
	for i, f := range []struct {
		family  int
		gateway string
		any     string
		addrs   []string
	}{
		{netlink.FAMILY_V4, "192.168.3.1", "0.0.0.0/0", []string{"192.168.1.2/32", "192.168.3.2/32"}},
		{netlink.FAMILY_V6, "fd00:192:168:3::1", "::/0", []string{"fd00:192:168:1::2/128", "fd00:192:168:3::2/128"}},
	} {
		_, dst, _ := net.ParseCIDR(f.any)
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: local.Attrs().Index, Dst: dst, Gw: net.ParseIP(f.gateway), Table: table}); err != nil {
			return fmt.Errorf("add route for node ports: %w", err)
		}
		for i, addr := range f.addrs {
			rule := netlink.NewRule()
			rule.Family, rule.Table, rule.Priority, rule.IifName = f.family, table, 10+i, "lo"
			_, rule.Dst, _ = net.ParseCIDR(addr)
			rule.Dport = netlink.NewRulePortRange(30000, 32767)
			if err := netlink.RuleAdd(rule); err != nil {
				return fmt.Errorf("add rule for node ports: %w", err)
			}
		}
		external := netlink.NewRule()
		external.Family, external.Table, external.Priority, external.IifName = f.family, table, 50, "lo"
		_, external.Dst, _ = net.ParseCIDR(externalNetworks[i])
		if err := netlink.RuleAdd(external); err != nil {
			return fmt.Errorf("add rule for external addresses: %w", err)
		}
		// The rule for addresses of the machine must come after these rules.
		localRule := netlink.NewRule()
		localRule.Family, localRule.Table, localRule.Priority = f.family, unix.RT_TABLE_LOCAL, 100
		if err := netlink.RuleAdd(localRule); err != nil {
			return err
		}
		first := netlink.NewRule()
		first.Family, first.Table, first.Priority = f.family, unix.RT_TABLE_LOCAL, 0
		if err := netlink.RuleDel(first); err != nil {
			return err
		}
	}
	return nil
}
