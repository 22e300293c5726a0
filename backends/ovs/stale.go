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
	"github.com/kpng-project/kpng/internal/conntrack"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// staleConnections select tracked connections to lost endpoints of services. These are UDP
// connections, and TCP connections to services with resets. Without Endpoint, an element
// selects the connections to a frontend that go to none of its present endpoints.
type staleConnections map[openflow.Connections]bool

const tcp, udp = 6, 17

// collectStale returns the connections that are stale after ops.
func (d *dataplane) collectStale(ops []op) staleConnections {
	if !d.opts.forgets || d.cannotForget {
		return nil
	}
	stale := staleConnections{}
	add := func(frontend frontendAt, endpoint netip.AddrPort) {
		stale[openflow.Connections{Zone: d.opts.Zone, Protocol: frontend.protocol, Destination: frontend.AddrPort, Endpoint: endpoint}] = true
	}
	removed := map[[2]*kept][]netip.AddrPort{}
	addRemoved := func(frontend frontendAt, before, now *kept) {
		endpoints, known := removed[[2]*kept{before, now}]
		if !known {
			endpoints = before.endpointsWithout(now)
			removed[[2]*kept{before, now}] = endpoints
		}
		for _, e := range endpoints {
			add(frontend, e)
		}
	}
	// If a frontend was not programmed since the pass began, its former endpoints are in the
	// changed groups of its service.
	type part struct {
		service types.NamespacedName
		family  api.Family
	}
	groups := map[part]*kept{}
	for _, o := range ops {
		if _, ok := o.Key.(groupID); !ok || o.Old == nil || o.New == nil {
			continue
		}
		for _, b := range (*o.Old).(*group).buckets {
			if e := openflow.TranslatedTo(b.Actions); e.IsValid() {
				p := part{o.Service, familyOf(e)}
				if groups[p] == nil {
					groups[p] = &kept{}
				}
				groups[p].endpoints = append(groups[p].endpoints, e)
			}
		}
	}
	for _, o := range ops {
		switch k := o.Key.(type) {
		case frontendAt:
			of := part{o.Service, familyOf(k.AddrPort)}
			switch {
			case o.New == nil && k.protocol == tcp: // connections to a removed service stay
			case o.New == nil:
				add(k, netip.AddrPort{})
			case o.Old != nil:
				before, now := (*o.Old).(*kept), (*o.New).(*kept)
				addRemoved(k, before, now)
				if k.protocol == udp && before.rejects && !now.rejects {
					add(k, netip.AddrPortFrom(addressOf(d.opts.MasqueradeAddresses, of.family), refusingPort))
				}
			case k.protocol == tcp: // a new service, new resets, or a new pass
				add(k, netip.AddrPort{})
			case groups[of] != nil:
				addRemoved(k, groups[of], (*o.New).(*kept))
			}
		case openflow.FlowKey:
			for frontend := range d.frontends(k) {
				if d.kept[frontend] != nil {
					continue
				}
				if o.Old == nil {
					add(frontend, frontend.AddrPort) // earlier untranslated connections
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
func (d *dataplane) frontends(key openflow.FlowKey) iter.Seq[frontendAt] {
	return func(yield func(frontendAt) bool) {
		addr, protocol, port := openflow.Destination(key.Match)
		switch {
		case key.Table != d.opts.FirstTable+frontendTable, protocol != udp, port == 0:
		case addr.IsValid():
			yield(frontendAt{udp, netip.AddrPortFrom(addr, port)})
		default: // a node port
			for _, a := range d.planner.nodePortAddrs {
				if !yield(frontendAt{udp, netip.AddrPortFrom(a, port)}) {
					return
				}
			}
		}
	}
}

// repetition has connections that the switch must forget again. A packet may have restored
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

// of returns the endpoints of a frontend, or nil if the frontend of these connections
// does not exist.
func (d *dataplane) of(c openflow.Connections) *kept {
	return d.kept[frontendAt{c.Protocol, c.Destination}]
}

// forgetAgain repeats calls of forget that are due. If none is due, it sends some of the
// waiting messages.
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

// maxSearches limits the number of messages at a time. For each of them, the switch
// searches its table of connections.
const maxSearches = 16

// deleteConnections makes the switch forget connections, except those to endpoints that
// have come back. For each message that does not name a client, the switch searches its
// table of connections. So if there are several messages, deleteConnections lists the
// connections, if they are not too many, and names the clients. It also lists them if only
// some connections to a frontend are stale. It also lists TCP connections, because then it
// can reset idle clients. Otherwise, deleteConnections sends maxSearches messages, and
// leaves the remaining messages to Verify.
func (d *dataplane) deleteConnections(ctx context.Context, stale staleConnections) error {
	var protocols []uint8
	some := false
	for c := range stale {
		now := d.of(c)
		if now.sends(c.Endpoint) || now == nil && c.Protocol == tcp {
			delete(stale, c)
			continue
		}
		some = some || !c.Endpoint.IsValid() && now != nil || c.Protocol == tcp
		if !slices.Contains(protocols, c.Protocol) {
			protocols = append(protocols, c.Protocol)
		}
	}
	if (len(stale) > 1 || some) && countConnections(ctx, d.opts) <= d.opts.maxListed {
		if existing, err := listConnections(ctx, d.opts, protocols...); err == nil {
			return d.sendDeletions(ctx, slices.Collect(maps.Keys(existing.matching(stale, d.kept))))
		}
	}
	maps.DeleteFunc(stale, func(c openflow.Connections, _ bool) bool { return c.Protocol == tcp && !c.Endpoint.IsValid() })
	if len(stale) > maxSearches {
		stale = stale.wider()
	}
	if d.waiting == nil {
		d.waiting = staleConnections{}
	}
	maps.Copy(d.waiting, stale)
	return d.deleteNext(ctx)
}

// deleteNext sends some of the waiting messages.
func (d *dataplane) deleteNext(ctx context.Context) error {
	var next []openflow.Connections
	for c := range d.waiting {
		if len(next) == maxSearches {
			break
		}
		delete(d.waiting, c)
		if !d.of(c).sends(c.Endpoint) {
			next = append(next, c)
		}
	}
	return d.sendDeletions(ctx, next)
}

func (d *dataplane) sendDeletions(ctx context.Context, all []openflow.Connections) error {
	// The switch may take long for a message. It answers only after the last message of a
	// part.
	for part := range slices.Chunk(all, 16) {
		var messages []openflow.Message
		for _, c := range part {
			messages = append(messages, openflow.DeleteConnections(c))
			if c.Protocol == tcp && c.Source.IsValid() {
				messages = append(messages, d.challenge(c))
			}
		}
		err := d.conn.Send(ctx, messages...)
		var unsupported openflow.Error
		if errors.As(err, &unsupported) {
			d.cannotForget, d.waiting = true, nil
			klog.FromContext(ctx).Error(err, "Cannot delete tracked connections, so clients may keep removed endpoints; Open vSwitch can do it since version 3.1", "bridge", d.opts.Bridge)
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// challenge returns a message that sends a segment to the client of a TCP connection, also
// if the client is idle. For the switch, the client's answer is a packet of a new
// connection. So it reaches a present endpoint, or the node, and its receiver resets the
// connection.
func (d *dataplane) challenge(c openflow.Connections) openflow.Message {
	return openflow.SendIP(conntrack.Challenge(c.Destination, c.Source), openflow.Resubmit(d.opts.OutTable))
}

// wider returns fewer selections. Together they select at least the connections that c
// selects: all connections to each endpoint, and all or all untranslated connections to
// each address of frontends. So their number is not the product of the numbers of
// endpoints and frontends. Selections of TCP connections stay.
func (c staleConnections) wider() staleConnections {
	out := staleConnections{}
	for one := range c {
		switch addr := netip.AddrPortFrom(one.Destination.Addr(), 0); {
		case one.Protocol == tcp:
		case !one.Endpoint.IsValid():
			one.Destination = addr
		case one.Endpoint == one.Destination:
			one.Destination, one.Endpoint = addr, addr
		default:
			one.Destination = netip.AddrPort{}
		}
		out[one] = true
	}
	return out
}

// maxListed limits the connections of a listing, because clients may open very many. Each
// connection takes about 500 bytes in this process and in the switch.
const maxListed = 100_000

// countConnections returns the number of tracked connections. If it is not known,
// countConnections returns a high number.
func countConnections(ctx context.Context, o *options) int {
	text, err := control(ctx, o.RunDir, "dpctl/ct-get-nconns")
	if err != nil { // the kernel datapath has the connections
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

// connection matches a line of the command dpctl/dump-conntrack, by protocol.
var connection = map[uint8]*regexp.Regexp{tcp: lineOf("tcp"), udp: lineOf("udp")}

func lineOf(protocol string) *regexp.Regexp {
	return regexp.MustCompile(`(?m)^` + protocol + `,orig=\(src=([^,]+),dst=([^,]+),sport=(\d+),dport=(\d+)\),reply=\(src=([^,]+),dst=[^,]+,sport=(\d+),`)
}

// listConnections lists the connections of some protocols. Each result has a Source and
// an Endpoint.
func listConnections(ctx context.Context, o *options, protocols ...uint8) (all staleConnections, err error) {
	text, err := control(ctx, o.RunDir, "dpctl/dump-conntrack", fmt.Sprintf("zone=%d", o.Zone))
	if err != nil {
		return nil, err
	}
	return o.parseConnections(text, protocols...)
}

func (o *options) parseConnections(text string, protocols ...uint8) (all staleConnections, err error) {
	all = staleConnections{}
	parse := func(addr, port string) (a netip.AddrPort) {
		a, parseErr := netip.ParseAddrPort(net.JoinHostPort(addr, port))
		err = errors.Join(err, parseErr)
		return a
	}
	for _, protocol := range protocols {
		for _, m := range connection[protocol].FindAllStringSubmatch(text, -1) {
			all[openflow.Connections{Zone: o.Zone, Protocol: protocol, Source: parse(m[1], m[3]), Destination: parse(m[2], m[4]), Endpoint: parse(m[5], m[6])}] = true
		}
	}
	return all, err
}

// matching returns the connections of c that the argument wanted selects. The results
// have a Source and no Endpoint. The argument "now" has the present endpoints of each
// frontend.
func (c staleConnections) matching(wanted staleConnections, now map[frontendAt]*kept) staleConnections {
	out := staleConnections{}
	for one := range c {
		key := one
		key.Source = netip.AddrPort{}
		anyEndpoint := key
		anyEndpoint.Endpoint = netip.AddrPort{}
		if one.Protocol == tcp && one.Endpoint == one.Destination {
			continue // the connection began before the service existed
		}
		if wanted[key] || wanted[anyEndpoint] && !now[frontendAt{one.Protocol, one.Destination}].sends(one.Endpoint) {
			one.Endpoint = netip.AddrPort{}
			out[one] = true
		}
	}
	return out
}
