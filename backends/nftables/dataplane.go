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
	"k8s.io/apimachinery/pkg/types"
)

// Dataplane describes, in several lines, the elements that the kernel has for one
// frontend. If se is not nil, Dataplane compares them with the elements that se requires.
// A line with a superfluous element begins with "+", and a line with a missing element
// begins with "-".
//
// addr, protocol and port identify the frontend. If addr is an address of the node, the
// frontend is a node port. For an all-ports service, protocol and port are 0. Dataplane
// may be called at any time. If the backend was not started, Dataplane shows the table of
// another process.
func (b *Backend) Dataplane(ctx context.Context, addr netip.Addr, protocol api.Protocol, port int32, se *api.ServiceEndpoints) (string, error) {
	c := newConn(b.opts.NetNS, "")
	defer c.Close()
	var exists bool
	for i, name := range b.opts.tables() {
		l, err := c.inspect(ctx, name)
		if err != nil {
			return "", err
		}
		if i == 0 || l.active() {
			c.table, exists = name, l.exists
		}
	}
	if !exists {
		return fmt.Sprintf("there is no table inet %s\n", c.table), nil
	}

	f := nodeview.Frontend{FrontendKey: nodeview.FrontendKey{Addr: addr, Family: api.FamilyOf(addr), Protocol: protocol, Port: port}}
	should, slots, isNodePort := requiredElements(se, &f)
	is, err := c.elementsOf(ctx, &f, slots, isNodePort)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	fmt.Fprintf(&out, "table inet %s\n", c.table)
	if se == nil && len(is) == 0 {
		out.WriteString("  nothing leads to it\n")
	}
	for _, line := range is {
		sign := " "
		if se != nil && !slices.Contains(should, line) && !strings.HasPrefix(line, "nodeport-addresses") && !strings.HasPrefix(line, "cluster-ips") {
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

// elementsOf returns the elements that the kernel has for f, in the order in which the
// rules look them up. It looks up at least minSlots slots, even if the kernel lacks some
// of these slots. If isNodePort is true but the address of f has no node ports, a line
// reports this.
func (c *conn) elementsOf(ctx context.Context, f *nodeview.Frontend, minSlots int, isNodePort bool) (lines []string, err error) {
	// addLine adds a line for an element if the kernel has it. After an error, addLine does
	// nothing.
	addLine := func(id elementID, remark string) (ok bool) {
		var e element
		if err == nil {
			e, ok, err = c.getElement(ctx, id)
		}
		if ok {
			lines = append(lines, e.String()+remark)
		}
		if ok && (id.m.kind == kindSlots || id.m.kind == kindNodeSlots) {
			if e, found, err := c.getElement(ctx, e.endpointID()); found && err == nil {
				lines[len(lines)-1] = affineLine(id, e)
			}
		}
		return ok
	}
	for _, s := range allMatches {
		if s == matchService && f.Port == 0 {
			continue
		}
		if s == matchNodePort {
			admitted := addressElement(kindNodePortAddresses, f.Addr).elementID
			if !addLine(admitted, "") {
				if !isNodePort {
					continue
				}
				lines = append(lines, admitted.String()+" is missing: this address has no node ports")
			}
		}
		found := false
		for _, kinds := range [][3]mapKind{{kindFrontends, kindEndpoints, kindSlots}, {kindNodeFrontends, kindNodeEndpoints, kindNodeSlots}} {
			e, _ := frontendElement(mapID{kinds[0], s, f.Family}, f)
			if addLine(e.elementID, "") {
				found = true
			}
			for _, kind := range kinds[1:] {
				for slot := 0; addLine(slotID(mapID{kind, s, f.Family}, f, firstSlot+uint32(slot)), "") || slot < minSlots; slot++ {
				}
			}
		}
		if found {
			return lines, err
		}
	}
	addLine(addressElement(kindClusterIPs, f.Addr).elementID, " (unknown port)")
	return lines, err
}

// requiredElements returns the elements that the view se requires for f, the number of
// endpoints among them, and whether f is a node port. A nil view requires no elements.
func requiredElements(se *api.ServiceEndpoints, f *nodeview.Frontend) (lines []string, slots int, isNodePort bool) {
	if se == nil {
		return nil, 0, false
	}
	var slot elementID
	for want := range nodeview.Frontends(se) {
		samePort := want.Port == f.Port && want.Protocol == f.Protocol
		switch {
		case want.Kind == nodeview.NodePort && want.Family == f.Family && samePort:
		case want.Addr == f.Addr && (samePort || want.Port == 0):
		default:
			continue
		}
		var ignored numbering
		newPlanner().planFrontend(se, &want, newNumbers().future(types.NamespacedName{}, nil, &ignored), func(e element) {
			switch e.m.kind {
			case kindSlots, kindNodeSlots: // the element for the endpoint follows
				slot = e.elementID
			case kindEndpoints, kindNodeEndpoints:
				slots++
				if want.Affinity > 0 {
					lines = append(lines, affineLine(slot, e))
					break
				}
				fallthrough
			case kindFrontends, kindNodeFrontends:
				lines = append(lines, e.String())
			}
		})
		return lines, slots, want.Kind == nodeview.NodePort
	}
	return nil, 0, false
}

// affineLine returns the line for the slot of a frontend with session affinity. It shows
// the endpoint instead of the number of the endpoint.
func affineLine(slot elementID, endpoint element) string {
	_, data, _ := strings.Cut(endpoint.String(), " : ")
	return slot.String() + " : " + data
}
