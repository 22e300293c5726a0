// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng/api"
)

// allowItem matches an item of annotation allow: FIRST-LAST/PROTOCOL, PORT/PROTOCOL or PROTOCOL.
var allowItem = regexp.MustCompile(`^(?:(\d+)(?:-(\d+))?/)?(\w+)$`)

var protocols = map[string]uint64{"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1}

// ports is a range of ports of a protocol.
type ports struct{ protocol, first, last uint64 }

// filter returns the elements for annotation allow of a service. A service with an invalid
// annotation fails, because a service without its filter would be open.
func filter(svc *api.Service, ip netip.Addr) ([]string, error) {
	lines := []string{fmt.Sprintf("filtered { %s }", ip)}
	var ranges []ports
	for item := range strings.SplitSeq(svc.Annotations[allow], ",") {
		item = strings.TrimSpace(item)
		if item == "ports" {
			for _, p := range svc.Ports {
				ranges = append(ranges, ports{uint64(p.Protocol.Number()), uint64(p.Port), uint64(p.Port)})
			}
			continue
		}
		m := allowItem.FindStringSubmatch(item)
		if m == nil {
			return nil, fmt.Errorf("parse annotation %s: invalid item %.40q", allow, item)
		}
		protocol, ok := protocols[m[3]]
		if n, err := strconv.ParseUint(m[3], 10, 8); err == nil {
			protocol, ok = n, true
		}
		if protocol == protocols["icmp"] && ip.Is6() {
			protocol = 58
		}
		first, err := strconv.ParseUint(cmp.Or(m[1], "0"), 10, 16)
		last, err2 := strconv.ParseUint(cmp.Or(m[2], m[1], "0"), 10, 16)
		switch hasPorts := m[1] != ""; {
		case !ok || err != nil || err2 != nil || first > last || hasPorts && protocol != 6 && protocol != 17 && protocol != 132:
			return nil, fmt.Errorf("parse annotation %s: no such protocol or ports: %.40q", allow, item)
		case hasPorts:
			ranges = append(ranges, ports{protocol, first, last})
		default:
			lines = append(lines, fmt.Sprintf("protocols { %s . %d }", ip, protocol))
		}
	}
	slices.SortFunc(ranges, func(a, b ports) int {
		return cmp.Or(cmp.Compare(a.protocol, b.protocol), cmp.Compare(a.first, b.first))
	})
	for i, r := range ranges {
		if i+1 < len(ranges) && ranges[i+1].protocol == r.protocol && ranges[i+1].first <= r.last {
			ranges[i+1] = ports{r.protocol, r.first, max(r.last, ranges[i+1].last)} // the kernel refuses overlaps
			continue
		}
		text := strings.TrimSuffix(fmt.Sprintf("%d-%d", r.first, r.last), fmt.Sprintf("-%d", r.first))
		lines = append(lines, fmt.Sprintf("ports { %s . %d . %s }", ip, r.protocol, text))
	}
	if len(lines) > maxItems {
		return nil, fmt.Errorf("parse annotation %s: more than %d items", allow, maxItems)
	}
	return lines, nil
}
