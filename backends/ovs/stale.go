// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ovs

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/ovs/internal/openflow"
	"k8s.io/klog/v2"
)

// staleConnections are tracked UDP connections that keep clients away from the present
// endpoints of services.
type staleConnections map[openflow.Connections]bool

const udp = 17

func (d *dataplane) collectStale(u *unit, stale *staleConnections) {
	if d.opts.KeepConnections || d.cannotForget {
		return
	}
	add := func(frontend, endpoint netip.AddrPort) {
		if *stale == nil {
			*stale = staleConnections{}
		}
		(*stale)[openflow.Connections{Zone: d.opts.Zone, Protocol: udp, Destination: frontend, Endpoint: endpoint}] = true
	}
	if u.old != nil {
		for frontend, before := range u.old.datagrams {
			now, exists := d.datagramsOf(u.plan, frontend)
			if !exists {
				add(frontend, netip.AddrPort{})
				continue
			}
			for _, e := range before.endpoints {
				if !slices.Contains(now.endpoints, e) {
					add(frontend, e)
				}
			}
			if before.rejects && !now.rejects {
				add(frontend, netip.AddrPortFrom(addressOf(d.opts.MasqueradeAddresses, familyOf(frontend)), refusingPort))
			}
		}
		return
	}
	// The plan from before the pass is unknown, but its flows and groups are not.
	if u.plan != nil && len(u.plan.datagrams) > 0 {
		for id := range u.groupsTo {
			for actions := range d.groups[id] {
				e := openflow.TranslatedTo(actions)
				if _, remains := u.groupsTo[id][actions]; remains || !e.IsValid() {
					continue
				}
				for frontend, now := range u.plan.datagrams {
					if familyOf(frontend) == familyOf(e) && !slices.Contains(now.endpoints, e) {
						add(frontend, e)
					}
				}
			}
		}
	}
	for key := range u.set {
		if _, exists := d.flows[key]; exists {
			d.addFrontends(key, add)
		}
	}
	for key := range u.deleted {
		d.addFrontends(key, add)
	}
}

func familyOf(a netip.AddrPort) api.Family { return api.FamilyOf(a.Addr()) }

// datagramsOf returns what a plan does with packets to a frontend of protocol UDP.
func (d *dataplane) datagramsOf(p *plan, frontend netip.AddrPort) (datagrams, bool) {
	if p == nil {
		return datagrams{}, false
	}
	now, ok := p.datagrams[frontend]
	return now, ok
}

// addFrontends calls add for each frontend of protocol UDP that a flow matches.
func (d *dataplane) addFrontends(key openflow.FlowKey, add func(frontend, endpoint netip.AddrPort)) {
	addr, protocol, port := openflow.Destination(key.Match)
	switch {
	case key.Table != d.opts.FirstTable+frontendTable, protocol != udp, port == 0:
	case addr.IsValid():
		add(netip.AddrPortFrom(addr, port), netip.AddrPort{})
	default: // a node port
		for _, a := range d.planner.nodePortAddrs {
			add(netip.AddrPortFrom(a, port), netip.AddrPort{})
		}
	}
}

// forget makes the switch forget connections now, and once more later.
func (d *dataplane) forget(ctx context.Context, stale staleConnections) error {
	if len(stale) == 0 {
		return nil
	}
	if d.repeat == nil {
		d.repeat = staleConnections{}
	}
	maps.Copy(d.repeat, stale)
	d.repeatAt = time.Now().Add(repeatAfter)
	return d.deleteConnections(ctx, stale)
}

// repeatAfter is a time after which the datapath follows all changes.
const repeatAfter = time.Second

// forgetAgain repeats forget if it is time.
func (d *dataplane) forgetAgain(ctx context.Context, now time.Time) error {
	if len(d.repeat) == 0 || now.Before(d.repeatAt) {
		return nil
	}
	stale := d.repeat
	d.repeat = nil
	return d.deleteConnections(ctx, stale)
}

func (d *dataplane) deleteConnections(ctx context.Context, stale staleConnections) error {
	messages := make([]openflow.Message, 0, len(stale))
	for c := range stale {
		messages = append(messages, openflow.DeleteConnections(c))
	}
	err := d.conn.Send(ctx, messages...)
	var unsupported openflow.Error
	if errors.As(err, &unsupported) {
		d.cannotForget = true
		klog.FromContext(ctx).Error(err, "Cannot delete tracked connections, so UDP clients may keep removed endpoints; Open vSwitch can do it since version 3.1", "bridge", d.opts.Bridge)
		return nil
	}
	return err
}
