// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command direct-return is a load balancer for external IPs and load-balancer IPs. Any node
// can get the packets of a client. Without state, this node forwards the packets to the
// node of an endpoint. All nodes choose the same endpoint. The endpoint's node answers the
// client directly. README.md describes the features and limits.
package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/maglev"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/vishvananda/netlink"
)

// table is the whole table of a family. Each write replaces it in one transaction.
//
//go:embed table.nft
var table string

const (
	// slots is the number of slots of a frontend. A client's address and port are hashed to a
	// slot.
	slots = 251
	// chances is the number of endpoints of a slot that get packets. The first endpoint
	// gets new connections. The others keep the connections that they got when they were
	// the first.
	chances = 4
)

// balancer programs the frontends of a node.
type balancer struct {
	table   string
	devices []string // the devices on which packets arrive
}

// tables has the elements of a family. They are the arguments of table.nft from the fourth
// on.
type tables [6][]string

const (
	frontends = iota
	firstNode
	firstDevice
	nextNode
	nextDevice
	pods
)

// hop is the next hop to an endpoint.
type hop struct {
	node   netip.Addr
	device string
}

// SyncState replaces the tables.
func (b *balancer) SyncState(ctx context.Context, _ *api.Node, services []*api.View) error {
	all := map[api.Family]*tables{api.IPv4: {}, api.IPv6: {}}
	failed := sink.Failed{}
	for _, view := range services {
		for f := range nodeview.Frontends(view) {
			if f.Kind != nodeview.ExternalIP && f.Kind != nodeview.LoadBalancerIP || f.Protocol != api.TCP || f.Sources.Restricted {
				continue // not supported
			}
			if err := all[f.Family].add(&f); err != nil {
				failed[view.Key()] = err
			}
		}
	}
	for family, keyword := range map[api.Family]string{api.IPv4: "ip", api.IPv6: "ip6"} {
		if err := b.write(ctx, keyword, all[family]); err != nil {
			return err
		}
	}
	return failed.Err()
}

// add adds the elements of a frontend.
func (t *tables) add(f *nodeview.Frontend) error {
	frontend := fmt.Sprintf("%s . %d", f.Addr, f.Port)
	t[frontends] = append(t[frontends], frontend)
	hops := map[netip.Addr]hop{}
	for _, e := range f.Elsewhere.Endpoints {
		if _, known := hops[e.Addr]; known || e.Local {
			continue
		}
		h, err := route(e.Addr)
		if err != nil {
			return err
		}
		hops[e.Addr] = h
	}
	for slot := range slots {
		key := fmt.Sprintf("%s . %d", frontend, slot)
		order := owners(slot, f.Elsewhere.Endpoints)
		own := slices.IndexFunc(order, func(e nodeview.Target) bool { return e.Local })
		add := func(nodes, devices int, e nodeview.Target) {
			t[nodes] = append(t[nodes], fmt.Sprintf("%s : %s", key, hops[e.Addr].node))
			t[devices] = append(t[devices], fmt.Sprintf("%s : %s", key, hops[e.Addr].device))
		}
		if own >= 0 {
			t[pods] = append(t[pods], fmt.Sprintf("%s : %s . %d", key, order[own].Addr, order[own].Port))
			next := slices.IndexFunc(order[own:], func(e nodeview.Target) bool { return !e.Local })
			if next > 0 {
				add(nextNode, nextDevice, order[own+next])
			}
		}
		if own != 0 && len(order) > 0 {
			add(firstNode, firstDevice, order[0])
		}
	}
	return nil
}

// owners returns the endpoints of a slot by rendezvous hashing. A new endpoint does not
// change the order of the other endpoints. If it becomes the first of a slot, the former first
// endpoint becomes the second. That endpoint has the slot's connections.
func owners(slot int, endpoints []nodeview.Target) []nodeview.Target {
	score := func(e nodeview.Target) uint64 { return maglev.Hash(fmt.Appendf(nil, "%s %d", e.AddrPort(), slot)) }
	order := slices.SortedFunc(slices.Values(endpoints), func(a, b nodeview.Target) int { return cmp.Compare(score(b), score(a)) })
	return order[:min(len(order), chances)]
}

// route returns the next hop to an endpoint on another node. In a shared network, this is
// the node itself. Otherwise, it is the address of the node's tunnel device, such as VXLAN.
func route(endpoint netip.Addr) (hop, error) {
	routes, err := netlink.RouteGet(endpoint.AsSlice())
	if err != nil || len(routes) == 0 {
		return hop{}, fmt.Errorf("find route to %s: %w", endpoint, cmp.Or(err, errors.New("no route")))
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return hop{}, fmt.Errorf("find device to %s: %w", endpoint, err)
	}
	node, ok := netip.AddrFromSlice(routes[0].Gw)
	if !ok {
		node = endpoint
	}
	return hop{node.Unmap(), fmt.Sprintf("%q", link.Attrs().Name)}, nil
}

func (b *balancer) write(ctx context.Context, family string, t *tables) error {
	args := []any{family, b.table, strings.Join(b.devices, ", ")}
	for _, elements := range t {
		text := ""
		if len(elements) > 0 {
			text = "elements = { " + strings.Join(elements, ", ") + " }"
		}
		args = append(args, text)
	}
	return nft(ctx, fmt.Sprintf(table, args...))
}

// Cleanup deletes the tables.
func (b *balancer) Cleanup(ctx context.Context) error {
	var script strings.Builder
	for _, family := range []string{"ip", "ip6"} {
		for _, t := range []string{fmt.Sprintf("netdev %s-%s", b.table, family), family + " " + b.table} {
			fmt.Fprintf(&script, "add table %[1]s\ndelete table %[1]s\n", t)
		}
	}
	return nft(ctx, script.String())
}

// nft runs a script as one transaction. The script is a file, so a killed process leaves nft
// either all of it or nothing.
func nft(ctx context.Context, script string) error {
	file, err := os.CreateTemp("", "direct-return-*.nft")
	if err != nil {
		return fmt.Errorf("write nft script: %w", err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := file.WriteString(script); err != nil {
		return fmt.Errorf("write nft script: %w", err)
	}
	if out, err := exec.CommandContext(ctx, "nft", "-f", file.Name()).CombinedOutput(); err != nil {
		return fmt.Errorf("run nft: %w: %.500s", err, out)
	}
	return nil
}

func main() {
	b := &balancer{}
	cmd := app.Command(app.Options{Name: "direct-return", Sink: sink.FullStateOf(b), PortsOnly: true})
	cmd.Flags().StringVar(&b.table, "table", "kpng-direct-return", "the `name` of the nftables tables")
	cmd.Flags().StringSliceVar(&b.devices, "devices", []string{"eth0"}, "the `devices` on which packets of clients arrive")
	app.Execute(cmd)
}
