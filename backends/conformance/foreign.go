// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conformance

import (
	"fmt"
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
	printed := &output{}
	cmd := exec.Command(netnstest.Program("nft"), args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), printed, printed
	ended, err := k.site.Start(cmd)
	if err == nil {
		err = <-ended
	}
	if err != nil {
		return "", fmt.Errorf("nft %s: %w\n%s", strings.Join(args, " "), err, printed)
	}
	return printed.String(), nil
}

// inventory returns the state of the node: links, addresses, routes, rules, and nft's
// tables with their content.
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
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("list the state of the node: %w", err)
	}
	rules, err := k.nft("", "list", "ruleset")
	return text.String() + rules, err
}
