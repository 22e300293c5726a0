// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// Dataplane says in several lines what the kernel has for one frontend, read from its
// maps, and, if se is not nil, how that differs from what the view says it should have:
// a line that should not be there begins with "+", one that is missing with "-".
//
// The frontend is that of addr, protocol and port; or of the node port, if addr is one
// of the node's. Both protocol and port are 0 for an all-ports service. It may be
// called at any time, also on a backend that was not started: then another process
// programs the table.
func (b *Backend) Dataplane(ctx context.Context, addr netip.Addr, protocol api.Protocol, port int32, se *api.ServiceEndpoints) (string, error) {
	c := newConn(b.opts.NetNS, b.opts.tables()[0])
	defer c.Close()
	for _, name := range b.opts.tables() {
		t, err := c.inspect(ctx, name)
		if err != nil {
			return "", err
		}
		if t.active() {
			c.table = name
		}
	}
	if ok, _, err := c.exists(ctx); err != nil {
		return "", err
	} else if !ok {
		return fmt.Sprintf("there is no table inet %s\n", c.table), nil
	}

	f := nodeview.Frontend{FrontendKey: nodeview.FrontendKey{Addr: addr, Family: api.FamilyOf(addr), Protocol: protocol, Port: port}}
	should, isNodePort := desired(se, &f)
	is, err := c.frontend(ctx, &f, isNodePort)
	if err != nil {
		return "", err
	}
	if se == nil {
		return fmt.Sprintf("table inet %s\n  %s\n", c.table, strings.Join(orNothing(is), "\n  ")), nil
	}
	var out strings.Builder
	fmt.Fprintf(&out, "table inet %s\n", c.table)
	for _, line := range is {
		sign := " "
		if !slices.Contains(should, line) && !strings.HasPrefix(line, "nodeport-addresses") {
			sign = "+"
		}
		fmt.Fprintf(&out, "%s %s\n", sign, line)
	}
	for _, line := range should {
		if !slices.Contains(is, line) {
			fmt.Fprintf(&out, "- %s\n", line)
		}
	}
	return out.String(), nil
}

func orNothing(lines []string) []string {
	if len(lines) == 0 {
		return []string{"nothing leads to it"}
	}
	return lines
}

// frontend returns the elements that the kernel has for f, found in the order in which
// a packet meets them, and for what isNodePort whether its address is one of node ports: which
// are is a matter of settings.
func (c *conn) frontend(ctx context.Context, f *nodeview.Frontend, isNodePort bool) ([]string, error) {
	var lines []string
	for _, s := range []match{matchService, matchNodePort, matchAddress} {
		if s == matchService && f.Port == 0 {
			continue
		}
		if s == matchNodePort {
			admitted := addressElement(mapID{kind: nodePortAddresses}, f.Addr)
			_, ok, err := c.get(ctx, admitted.elementID)
			switch {
			case err != nil:
				return nil, err
			case ok:
				lines = append(lines, admitted.String())
			case isNodePort:
				lines = append(lines, admitted.String()+" is not there: no node ports are served at this address")
			default:
				continue
			}
		}
		found := false
		for _, roles := range [][2]mapKind{{frontends, endpoints}, {nodeFrontends, nodeEndpoints}} {
			key, _ := frontendKey(mapID{roles[0], s, f.Family}, f)
			e, ok, err := c.get(ctx, key.elementID)
			if err != nil {
				return nil, err
			}
			if !ok {
				continue
			}
			found = true
			lines = append(lines, e.String())
			for slot := 0; ; slot++ {
				key, at := frontendKey(mapID{roles[1], s, f.Family}, f)
				w := keyWriter{&key.elementID, at}
				w.slot(slot)
				e, ok, err := c.get(ctx, key.elementID)
				if err != nil {
					return nil, err
				}
				if !ok {
					break
				}
				lines = append(lines, e.String())
			}
		}
		if found {
			return lines, nil
		}
	}
	e, ok, err := c.get(ctx, addressElement(mapID{kind: clusterIPs}, f.Addr).elementID)
	if ok {
		lines = append(lines, e.String()+" (unknown port)")
	}
	return lines, err
}

// desired returns the elements that the view se, if there is one, wants for f, and whether
// that is a node port.
func desired(se *api.ServiceEndpoints, f *nodeview.Frontend) (lines []string, isNodePort bool) {
	if se == nil {
		return nil, false
	}
	p := newPlanner()
	for want := range nodeview.Frontends(se) {
		samePort := want.Port == f.Port && want.Protocol == f.Protocol
		switch {
		case want.Kind == nodeview.NodePort && want.Family == f.Family && samePort:
		case want.Addr == f.Addr && (samePort || want.Port == 0):
		default:
			continue
		}
		isNodePort = want.Kind == nodeview.NodePort
		p.frontend(se, &want, func(e element) {
			if e.m.kind <= nodeEndpoints {
				lines = append(lines, e.String())
			}
		}, func(object) {})
		break
	}
	return lines, isNodePort
}
