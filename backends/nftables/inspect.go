// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
)

// Inspect implements [backends.Inspector]. Its lines are elements. The endpoints of a list
// may be in any slots, so a missing endpoint has no slot. If an endpoint has several slots,
// Inspect shows the first.
func (b *backend) Inspect(ctx context.Context, addr netip.Addr, protocol api.Protocol, port int32, view *api.View) (string, error) {
	c := newConn(b.opts.NetNS, "")
	defer c.Close()
	var exists bool
	for i, name := range b.opts.tables() {
		l, err := c.inspect(ctx, name)
		if err != nil {
			return "", err
		}
		if i == 0 || l.active() {
			c.Table, exists = name, l.Exists
		}
	}
	if !exists {
		return fmt.Sprintf("there is no table inet %s\n", c.Table), nil
	}

	d := inspection{ctx: ctx, conn: c}
	fmt.Fprintf(&d.out, "table inet %s\n", c.Table)
	f := nodeview.Frontend{FrontendKey: nodeview.FrontendKey{Addr: addr, Family: api.FamilyOf(addr), Protocol: protocol, Port: port}}
	d.show(&f, requiredFrontend(view, &f), view != nil)
	return d.out.String(), d.err
}

// inspection collects the lines of Inspect. After an error, its methods do nothing.
type inspection struct {
	ctx  context.Context
	conn *conn
	out  strings.Builder
	err  error
}

// get returns an element of the kernel.
func (d *inspection) get(id elementID) (e element, ok bool) {
	if d.err == nil {
		e, ok, d.err = d.conn.getElement(d.ctx, id)
	}
	return e, ok
}

func (d *inspection) line(sign, format string, args ...any) {
	fmt.Fprintf(&d.out, sign+" "+format+"\n", args...)
}

// show adds the lines for f, in the order in which the rules look up the elements. The
// argument want is the frontend that the view requires, or nil. If compare is false, show
// only shows the elements in the kernel.
func (d *inspection) show(f, want *nodeview.Frontend, compare bool) {
	sign := map[bool]string{true: "+", false: " "}[compare && want == nil]
	for _, s := range allMatches {
		if s == matchService && f.Port == 0 {
			continue
		}
		if s == matchNodePort {
			admitted := addressElement(kindNodePortAddresses, f.Addr).elementID
			if e, ok := d.get(admitted); ok {
				d.line(" ", "%s", e)
			} else if want != nil && want.Kind == nodeview.NodePort {
				d.line(" ", "%s is missing: this address has no node ports", admitted)
			} else {
				continue
			}
		}
		e, _ := frontendElement(mapID{kindFrontends, s, f.Family}, f)
		got, ok := d.get(e.elementID)
		if !ok {
			if want != nil && matchOf(want) == s {
				d.line("-", "%s", e.elementID)
			}
			continue
		}
		d.line(sign, "%s", got)
		key := listKey{family: f.Family, protocol: f.Protocol, port: f.Port}
		if s == matchAddress {
			key.protocol, key.port = 0, 0
		}
		l := list{listKey: key, number: got.value.number() &^ handlingMask}
		shortcut := got.value.number()&handlingMask == uint32(handleLocal)
		var elsewhere, node *nodeview.Traffic
		if want != nil {
			elsewhere, node = &want.Elsewhere, &want.Node
		}
		d.list(&l, elsewhere, compare)
		if !shortcut {
			return
		}
		if e, ok := d.get(l.shortcutID()); ok {
			d.line(sign, "%s", e)
			l.number = e.value.number()
			d.list(&l, node, compare)
		} else if want != nil {
			d.line("-", "%s", l.shortcutID())
		}
		return
	}
	if e, ok := d.get(addressElement(kindClusterIPs, f.Addr).elementID); ok {
		d.line(" ", "%s (unknown port)", e)
	} else if want == nil {
		d.line(" ", "nothing leads to it")
	}
}

// list adds the lines for a list. The argument want has the endpoints that the list should
// have. If want is nil, the list should have no endpoints.
func (d *inspection) list(l *list, want *nodeview.Traffic, compare bool) {
	missing := map[string]bool{}
	if want != nil {
		for _, t := range limited(want, isNumbered(l.number)) {
			missing[endpointText(l, endpointValue(t.Addr, t.Port))] = true
		}
	}
	n := len(missing)
	if e, ok := d.get(l.id()); ok {
		c, _ := classOfElement(&e.elementID, &e.value)
		d.line(" ", "%s (%s)", e, c.name())
	} else {
		d.line("-", "%s", l.id())
	}
	seen := map[value]bool{}
	for slot := 0; ; slot++ {
		e, ok := d.get(l.slotID(slot))
		if !ok {
			if slot < n {
				continue
			}
			break
		}
		if isNumbered(l.number) && seen[e.value] {
			continue // the endpoint has several slots
		}
		seen[e.value] = true
		endpoint := e
		if isNumbered(l.number) {
			d.line(" ", "%s", e)
			if endpoint, ok = d.get(l.numberID(e.value.number() & endpointMask)); !ok {
				continue
			}
		}
		text, sign := endpointText(l, endpoint.value), " "
		if compare && !missing[text] {
			sign = "+"
		}
		delete(missing, text)
		d.line(sign, "%s", endpoint)
	}
	for _, text := range slices.Sorted(maps.Keys(missing)) {
		d.line("-", "%s %s : %s", l.slotID(0).m.name(), formatNumber(l.number), text)
	}
}

// endpointText returns the text of the endpoint in the value of an element of the list.
func endpointText(l *list, v value) string {
	return format(mapID{kindEndpoints, l.match(), l.family}.description().data, v.data[:])
}

// requiredFrontend returns the frontend of view that f identifies, or nil.
func requiredFrontend(view *api.View, f *nodeview.Frontend) *nodeview.Frontend {
	for want := range nodeview.Frontends(view) {
		samePort := want.Port == f.Port && want.Protocol == f.Protocol
		switch {
		case want.Kind == nodeview.NodePort && want.Family == f.Family && samePort:
		case want.Addr == f.Addr && (samePort || want.Port == 0):
		default:
			continue
		}
		return &want
	}
	return nil
}
