// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// foreignRules are rules that do not belong to the proxy. They exist during the whole
// test. They have no effect on packets.
const foreignRules = `
table inet somebody {
	comment "of no concern to proxies"
	map services {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 192.0.2.1 . tcp . 443 : accept }
	}
	chain forward {
		type filter hook forward priority filter; policy accept;
		ct mark 0x00000001 counter drop
	}
	chain prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		ip daddr . meta l4proto . th dport vmap @services
	}
}
`

// nft runs the command nft on the node.
func (k *kit) nft(stdin string, args ...string) (string, error) {
	return k.command(stdin, "nft", args...)
}

// command runs a program on the node and returns what it prints.
func (k *kit) command(stdin, program string, args ...string) (string, error) {
	printed := &output{}
	cmd := exec.Command(netnstest.Program(program), args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), printed, printed
	ended, err := k.site.Start(cmd)
	if err == nil {
		err = <-ended
	}
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, printed)
	}
	return printed.String(), nil
}

// legacyRules returns the rules and the user-defined chains in flavour legacy of iptables.
// The programs read only tables that the kernel has loaded. They cannot delete tables, so
// an empty table does not count. If the programs are missing or fail, the result is empty.
func (k *kit) legacyRules() string {
	var text strings.Builder
	for _, program := range []string{"iptables-legacy-save", "ip6tables-legacy-save"} {
		saved, err := k.command("", program)
		if err != nil {
			continue
		}
		table := ""
		for line := range strings.Lines(saved) {
			switch fields := strings.Fields(line); {
			case strings.HasPrefix(line, "*"):
				table = fields[0][1:]
			case strings.HasPrefix(line, "-A "), strings.HasPrefix(line, ":") && len(fields) > 1 && fields[1] == "-":
				fmt.Fprintf(&text, "%s: table %s: %s", program, table, line)
			}
		}
	}
	return text.String()
}

// virtualServers returns the virtual servers and destinations in the content of
// /proc/net/ip_vs, without the numbers of connections.
func virtualServers(content string) string {
	const header = 3
	var text strings.Builder
	n := 0
	for line := range strings.Lines(content) {
		if n++; n > header {
			fields := strings.Fields(line)
			fmt.Fprintf(&text, "virtual server: %s\n", strings.Join(fields[:min(len(fields), 4)], " "))
		}
	}
	return text.String()
}

// inventory returns the state of the node: links, addresses, routes, rules, nft's tables
// with their content, rules in flavour legacy of iptables, sets of ipset, and virtual
// servers of IPVS.
func (k *kit) inventory() (string, error) {
	var text strings.Builder
	err := k.site.Do(func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, link := range links {
			fmt.Fprintf(&text, "link %s\n", link.Attrs().Name)
			addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
			if err != nil {
				return err
			}
			for _, addr := range addrs {
				fmt.Fprintf(&text, "address %s\n", addr)
			}
		}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, route := range routes {
				if route.Table == unix.RT_TABLE_LOCAL && route.Protocol == unix.RTPROT_KERNEL {
					continue // the kernel adds these routes some time after the addresses
				}
				fmt.Fprintf(&text, "route %s\n", route)
			}
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, rule := range rules {
				fmt.Fprintf(&text, "rule %s\n", rule)
			}
		}
		servers, err := os.ReadFile("/proc/thread-self/net/ip_vs")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		text.WriteString(virtualServers(string(servers)))
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("list the state of the node: %w", err)
	}
	text.WriteString(k.legacyRules())
	if sets, err := k.command("", "ipset", "save"); err == nil { // without ipset, or without ip_set in the kernel, there are no sets
		text.WriteString(sets)
	}
	rules, err := k.nft("", "list", "ruleset")
	return text.String() + rules, err
}
