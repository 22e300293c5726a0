// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// process writes the service of a gateway, and the status of an object.
func (s *source) process(ctx context.Context, out *cluster.State, i item) error {
	o := s.get(i.kind, i.key)
	if i.kind == "Gateway" && (o == nil || !s.serves(o)) {
		s.release(i.key)
		out.Update(func(tx *cluster.Tx) {
			tx.DeleteService(i.key)
			tx.ReplaceSlicesOf(i.key, slices.Values([]*api.EndpointSlice(nil)))
		})
	}
	if o == nil {
		return nil
	}
	now := o.Status
	now.Conditions = slices.Clone(now.Conditions)
	switch {
	case i.kind == "GatewayClass" && o.Spec.ControllerName == s.controller:
		set(&now.Conditions, o, "Accepted", true, "Accepted", "")
	case i.kind == "Gateway" && s.serves(o):
		s.serve(out, o, &now)
	case i.kind == "TCPRoute" || i.kind == "UDPRoute":
		s.report(o, &now)
	}
	if !s.writes || equality.Semantic.DeepEqual(o.Status, now) {
		return nil
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]string{"resourceVersion": o.ResourceVersion}, "status": now})
	if err == nil {
		_, err = s.client.Resource(resources[i.kind]).Namespace(o.Namespace).Patch(ctx, o.Name, types.MergePatchType, body, metav1.PatchOptions{}, "status")
	}
	return err
}

// serves reports whether a gateway has a class of this controller.
func (s *source) serves(g *object) bool {
	class := s.get("GatewayClass", types.NamespacedName{Name: g.Spec.GatewayClassName})
	return class != nil && class.Spec.ControllerName == s.controller
}

// serve writes the service of a gateway, and its status to now.
func (s *source) serve(out *cluster.State, g *object, now *status) {
	addrs, problem := s.usable(g), ""
	if s.writes {
		addrs, problem = s.assign(g)
	}
	service, list, attached := s.translate(g, addrs)
	out.Update(func(tx *cluster.Tx) {
		tx.SetService(service)
		tx.ReplaceSlicesOf(g.key(), slices.Values(list))
	})
	now.Addresses, now.Listeners = nil, nil
	for _, addr := range addrs {
		now.Addresses = append(now.Addresses, address{"IPAddress", addr.String()})
	}
	for i := range g.Spec.Listeners {
		l := &g.Spec.Listeners[i]
		is := listenerStatus{Name: l.Name, SupportedKinds: []routeKind{}, AttachedRoutes: attached[i]}
		if j := slices.IndexFunc(g.Status.Listeners, func(o listenerStatus) bool { return o.Name == l.Name }); j >= 0 {
			is.Conditions = slices.Clone(g.Status.Listeners[j].Conditions)
		}
		kind := routeKind{group, l.Protocol + "Route"}
		supported := protocols[l.Protocol] != api.UnknownProtocol
		if supported && l.admitsKind(kind.Kind) {
			is.SupportedKinds = append(is.SupportedKinds, kind)
		}
		resolved := supported && !slices.ContainsFunc(l.AllowedRoutes.Kinds, func(k routeKind) bool { return k != kind })
		set(&is.Conditions, g, "Accepted", supported, "UnsupportedProtocol", "")
		set(&is.Conditions, g, "ResolvedRefs", resolved, "InvalidRouteKinds", "")
		set(&is.Conditions, g, "Programmed", supported && problem == "", "Invalid", problem)
		set(&is.Conditions, g, "Conflicted", false, "NoConflicts", "")
		now.Listeners = append(now.Listeners, is)
	}
	set(&now.Conditions, g, "Accepted", len(service.Ports) > 0, "ListenersNotValid", "")
	set(&now.Conditions, g, "Programmed", len(service.Ports) > 0 && problem == "", "AddressNotUsable", problem)
}

// report writes the status of a route to now. It keeps what other controllers wrote.
func (s *source) report(r *object, now *status) {
	_, _, reason, message := s.resolve(r, "", r)
	now.Parents = []parentStatus{}
	entries := slices.Clone(r.Status.Parents) // of this controller: a new entry for each new parent
	for _, p := range r.Spec.ParentRefs {
		if !slices.ContainsFunc(entries, func(e parentStatus) bool { return e.ControllerName == s.controller && e.ParentRef == p }) {
			entries = append(entries, parentStatus{ParentRef: p, ControllerName: s.controller})
		}
	}
	for _, e := range entries {
		if e.ControllerName == s.controller {
			g := s.get("Gateway", e.ParentRef.gateway(r))
			if g == nil || !s.serves(g) || !slices.Contains(r.Spec.ParentRefs, e.ParentRef) {
				continue
			}
			accepted := "NoMatchingParent"
			for i := range g.Spec.Listeners {
				if l := &g.Spec.Listeners[i]; accepted != "Accepted" && e.ParentRef.selects(l) {
					accepted = map[bool]string{true: "Accepted", false: "NotAllowedByListeners"}[s.admits(g, l, r)]
				}
			}
			e.Conditions = slices.Clone(e.Conditions)
			set(&e.Conditions, r, "Accepted", accepted == "Accepted", accepted, "")
			set(&e.Conditions, r, "ResolvedRefs", reason == "ResolvedRefs", reason, message)
		}
		now.Parents = append(now.Parents, e)
	}
}

// set sets a condition. If it is true, its reason is its type.
func set(list *[]metav1.Condition, o *object, kind string, ok bool, reason, message string) {
	c := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, ObservedGeneration: o.Generation, Reason: reason, Message: message}
	if ok {
		c.Status, c.Reason = metav1.ConditionTrue, kind
	}
	meta.SetStatusCondition(list, c)
}

// usable returns the addresses of a gateway that are in the pools.
func (s *source) usable(g *object) (all []netip.Addr) {
	for _, a := range g.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Value); err == nil && s.free(g, addr) {
			all = append(all, addr)
		}
	}
	return all
}

// free reports whether a gateway may have an address. Addresses outside of the pools may be
// those of services.
func (s *source) free(g *object, a netip.Addr) bool {
	owner, taken := s.owners[a]
	return (!taken || owner == g.key()) && slices.ContainsFunc(s.pools, func(p netip.Prefix) bool { return p.Contains(a) })
}

func (s *source) release(key types.NamespacedName) {
	maps.DeleteFunc(s.owners, func(_ netip.Addr, owner types.NamespacedName) bool { return owner == key })
}

// assign assigns addresses to a gateway: those of its spec, or one of each pool.
func (s *source) assign(g *object) (addrs []netip.Addr, problem string) {
	has := s.usable(g)
	s.release(g.key())
	for _, want := range g.Spec.Addresses {
		addr, err := netip.ParseAddr(want.Value)
		if err != nil || !s.free(g, addr) {
			return nil, want.Value + " is no IP address of an address pool, or belongs to another Gateway"
		}
		addrs = append(addrs, addr)
	}
	for _, pool := range s.pools {
		if len(g.Spec.Addresses) > 0 {
			break
		}
		addr := pool.Masked().Addr().Next()
		if i := slices.IndexFunc(has, pool.Contains); i >= 0 {
			addr = has[i]
		}
		for pool.Contains(addr) && !s.free(g, addr) {
			addr = addr.Next()
		}
		if !pool.Contains(addr) {
			return nil, "no address is free in " + pool.String()
		}
		addrs = append(addrs, addr)
	}
	for _, addr := range addrs {
		s.owners[addr] = g.key()
	}
	return addrs, ""
}
