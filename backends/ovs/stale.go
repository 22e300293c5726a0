// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// staleConnections select tracked UDP connections that keep clients away from the present
// endpoints of services. Without Endpoint, an element selects the connections to a frontend
// whose endpoint is not one of the frontend's.
type staleConnections map[openflow.Connections]bool

const udp = 17

// collectStale returns the connections that are stale after ops.
func (d *dataplane) collectStale(ops []op) staleConnections {
	if !d.opts.forgets || d.cannotForget {
		return nil
	}
	stale := staleConnections{}
	add := func(frontend, endpoint netip.AddrPort) {
		stale[openflow.Connections{Zone: d.opts.Zone, Protocol: udp, Destination: frontend, Endpoint: endpoint}] = true
	}
	removed := map[[2]*datagrams][]netip.AddrPort{}
	addRemoved := func(frontend netip.AddrPort, before, now *datagrams) {
		endpoints, known := removed[[2]*datagrams{before, now}]
		if !known {
			endpoints = before.endpointsWithout(now)
			removed[[2]*datagrams{before, now}] = endpoints
		}
		for _, e := range endpoints {
			add(frontend, e)
		}
	}
	// If a frontend was not programmed since the pass began, its endpoints before are those of
	// the changed groups of its service.
	type part struct {
		service types.NamespacedName
		family  api.Family
	}
	groups := map[part]*datagrams{}
	for _, o := range ops {
		if _, ok := o.Key.(groupID); !ok || o.Old == nil || o.New == nil {
			continue
		}
		for _, b := range (*o.Old).(*group).buckets {
			if e := openflow.TranslatedTo(b.Actions); e.IsValid() {
				p := part{o.Service, familyOf(e)}
				if groups[p] == nil {
					groups[p] = &datagrams{}
				}
				groups[p].endpoints = append(groups[p].endpoints, e)
			}
		}
	}
	for _, o := range ops {
		switch k := o.Key.(type) {
		case netip.AddrPort:
			switch {
			case o.New == nil:
				add(k, netip.AddrPort{})
			case o.Old != nil:
				before, now := (*o.Old).(*datagrams), (*o.New).(*datagrams)
				addRemoved(k, before, now)
				if before.rejects && !now.rejects {
					add(k, netip.AddrPortFrom(addressOf(d.opts.MasqueradeAddresses, familyOf(k)), refusingPort))
				}
			case groups[part{o.Service, familyOf(k)}] != nil:
				addRemoved(k, groups[part{o.Service, familyOf(k)}], (*o.New).(*datagrams))
			}
		case openflow.FlowKey:
			for frontend := range d.frontends(k) {
				if d.datagrams[frontend] != nil {
					continue
				}
				if o.Old == nil {
					add(frontend, frontend) // connections from before, which are not translated
				} else {
					add(frontend, netip.AddrPort{})
				}
			}
		}
	}
	return stale
}

func familyOf(a netip.AddrPort) api.Family { return api.FamilyOf(a.Addr()) }

// frontends yields each frontend of protocol UDP that a flow matches.
func (d *dataplane) frontends(key openflow.FlowKey) iter.Seq[netip.AddrPort] {
	return func(yield func(netip.AddrPort) bool) {
		addr, protocol, port := openflow.Destination(key.Match)
		switch {
		case key.Table != d.opts.FirstTable+frontendTable, protocol != udp, port == 0:
		case addr.IsValid():
			yield(netip.AddrPortFrom(addr, port))
		default: // a node port
			for _, a := range d.planner.nodePortAddrs {
				if !yield(netip.AddrPortFrom(a, port)) {
					return
				}
			}
		}
	}
}

// repetition are connections that the switch has to forget again. A packet may have restored
// them, because the datapath did not follow the flows yet.
type repetition struct {
	at    time.Time
	stale staleConnections
}

// forget makes the switch forget connections now, and once more later.
func (d *dataplane) forget(ctx context.Context, stale staleConnections) error {
	if len(stale) == 0 {
		return nil
	}
	d.repeat = append(d.repeat, repetition{time.Now().Add(repeatAfter), maps.Clone(stale)})
	return d.deleteConnections(ctx, stale)
}

// repeatAfter is a time after which the datapath follows all changes.
const repeatAfter = time.Second

// forgetAgain repeats forget if it is time. Otherwise it sends some of the messages that
// wait.
func (d *dataplane) forgetAgain(ctx context.Context, now time.Time) error {
	due := staleConnections{}
	for len(d.repeat) > 0 && !now.Before(d.repeat[0].at) {
		maps.Copy(due, d.repeat[0].stale)
		d.repeat = d.repeat[1:]
	}
	if len(due) > 0 {
		return d.deleteConnections(ctx, due)
	}
	return d.deleteNext(ctx)
}

// maxSearches limits the messages at a time for which the switch searches its table of
// connections.
const maxSearches = 16

// deleteConnections makes the switch forget connections, except those to endpoints that have
// come back. For each message that does not name a client, the switch searches its table of
// connections. So if there are several messages, deleteConnections lists the connections, if
// they are not too many, and names the clients. It also does so if only some connections to
// a frontend are stale. Otherwise it sends maxSearches messages, and lets the others wait
// for Verify.
func (d *dataplane) deleteConnections(ctx context.Context, stale staleConnections) error {
	some := false
	for c := range stale {
		switch now := d.datagrams[c.Destination]; {
		case now.sends(c.Endpoint):
			delete(stale, c)
		case !c.Endpoint.IsValid() && now != nil:
			some = true
		}
	}
	if (len(stale) > 1 || some) && countConnections(ctx, d.opts) <= d.maxListed {
		if existing, err := listConnections(ctx, d.opts); err == nil {
			return d.sendDeletions(ctx, slices.Collect(maps.Keys(existing.matching(stale, d.datagrams))))
		}
	}
	if len(stale) > maxSearches {
		stale = stale.wider()
	}
	if d.waiting == nil {
		d.waiting = staleConnections{}
	}
	maps.Copy(d.waiting, stale)
	return d.deleteNext(ctx)
}

// deleteNext sends some of the messages that wait.
func (d *dataplane) deleteNext(ctx context.Context) error {
	var next []openflow.Connections
	for c := range d.waiting {
		if len(next) == maxSearches {
			break
		}
		next = append(next, c)
		delete(d.waiting, c)
	}
	return d.sendDeletions(ctx, next)
}

func (d *dataplane) sendDeletions(ctx context.Context, all []openflow.Connections) error {
	// The switch may need long for a message, and answers only after the last of a part.
	for part := range slices.Chunk(all, 16) {
		messages := make([]openflow.Message, len(part))
		for i, c := range part {
			messages[i] = openflow.DeleteConnections(c)
		}
		err := d.conn.Send(ctx, messages...)
		var unsupported openflow.Error
		if errors.As(err, &unsupported) {
			d.cannotForget, d.waiting = true, nil
			klog.FromContext(ctx).Error(err, "Cannot delete tracked connections, so UDP clients may keep removed endpoints; Open vSwitch can do it since version 3.1", "bridge", d.opts.Bridge)
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// wider returns fewer selections that include those in c: all connections to each endpoint,
// and all or all untranslated ones to each address of frontends. So their number is not the
// product of both.
func (c staleConnections) wider() staleConnections {
	out := staleConnections{}
	for one := range c {
		switch addr := netip.AddrPortFrom(one.Destination.Addr(), 0); one.Endpoint {
		case netip.AddrPort{}:
			one.Destination = addr
		case one.Destination:
			one.Destination, one.Endpoint = addr, addr
		default:
			one.Destination = netip.AddrPort{}
		}
		out[one] = true
	}
	return out
}

// maxListed limits the connections of a listing, which clients may make very long. Each
// takes about 500 bytes in this process and in the switch.
const maxListed = 100_000

// countConnections returns the number of tracked connections. If it is not known,
// countConnections returns a high number.
func countConnections(ctx context.Context, o *Options) int {
	text, err := control(ctx, o.RunDir, "dpctl/ct-get-nconns")
	if err != nil { // the connections are in the kernel
		var count []byte
		count, err = os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		text = string(count)
	}
	n, parseErr := strconv.Atoi(strings.TrimSpace(text))
	if err != nil || parseErr != nil {
		return math.MaxInt
	}
	return n
}

// connection matches a line of the command dpctl/dump-conntrack.
var connection = regexp.MustCompile(`(?m)^udp,orig=\(src=([^,]+),dst=([^,]+),sport=(\d+),dport=(\d+)\),reply=\(src=([^,]+),dst=[^,]+,sport=(\d+),`)

// listConnections lists the UDP connections to services. Each has Source and Endpoint.
func listConnections(ctx context.Context, o *Options) (all staleConnections, err error) {
	text, err := control(ctx, o.RunDir, "dpctl/dump-conntrack", fmt.Sprintf("zone=%d", o.Zone))
	if err != nil {
		return nil, err
	}
	return o.parseConnections(text)
}

func (o *Options) parseConnections(text string) (all staleConnections, err error) {
	all = staleConnections{}
	for _, m := range connection.FindAllStringSubmatch(text, -1) {
		parse := func(addr, port string) (a netip.AddrPort) {
			a, parseErr := netip.ParseAddrPort(net.JoinHostPort(addr, port))
			err = errors.Join(err, parseErr)
			return a
		}
		all[openflow.Connections{Zone: o.Zone, Protocol: udp, Source: parse(m[1], m[3]), Destination: parse(m[2], m[4]), Endpoint: parse(m[5], m[6])}] = true
	}
	return all, err
}

// matching returns the connections in c, with Source but without Endpoint, that the set
// wanted selects. The argument now has what the frontends do with packets.
func (c staleConnections) matching(wanted staleConnections, now map[netip.AddrPort]*datagrams) staleConnections {
	out := staleConnections{}
	for one := range c {
		key := one
		key.Source = netip.AddrPort{}
		anyEndpoint := key
		anyEndpoint.Endpoint = netip.AddrPort{}
		if wanted[key] || wanted[anyEndpoint] && !now[one.Destination].sends(one.Endpoint) {
			one.Endpoint = netip.AddrPort{}
			out[one] = true
		}
	}
	return out
}
