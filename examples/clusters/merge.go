// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"k8s.io/apimachinery/pkg/types"
)

// merger merges the services of clusters. With forget, it omits the endpoints of another
// cluster while that cluster's state is stale.
type merger struct{ forget bool }

// merge returns a service of this cluster, with its endpoints in all clusters that have the
// service. The first snapshot is that of this cluster.
func (m merger) merge(key types.NamespacedName, in []*cluster.Snapshot) (*api.Service, []*api.EndpointSlice) {
	var own api.ServiceState
	var all []*api.EndpointSlice
	for i, snapshot := range in {
		if snapshot == nil || i > 0 && m.forget && snapshot.Stale {
			continue
		}
		state, _ := snapshot.States.Get(key)
		switch {
		case i == 0 && (state == nil || state.Service == nil):
			return nil, nil
		case i == 0:
			own, all = *state, slices.Clone(state.Slices)
		case state != nil && state.Service != nil:
			for _, slice := range state.Slices {
				all = append(all, imported(fmt.Sprint(i, ":new:"), slice, own.Slices, false), imported(fmt.Sprint(i, ":drain:"), slice, own.Slices, true))
			}
		}
	}
	return own.Service, all
}

// imported returns a part of a slice of another cluster. With drain, the part has the ports
// for which this cluster has a ready endpoint. The slice's endpoints get no new connections
// at these ports. Without drain, the part has the other ports. Node names and topology
// hints are those of the other cluster, so they are omitted. The prefix makes the name
// unique, because names in Kubernetes have no colon.
func imported(prefix string, slice *api.EndpointSlice, own []*api.EndpointSlice, drain bool) *api.EndpointSlice {
	part := *slice
	part.Name = prefix + slice.Name
	part.Ports = slices.DeleteFunc(slices.Clone(slice.Ports), func(p api.EndpointPort) bool { return serves(own, slice.Family, p) != drain })
	part.Endpoints = slices.Clone(slice.Endpoints)
	for i := range part.Endpoints {
		e := &part.Endpoints[i]
		d := e.Details.Value()
		d.NodeName, d.Hints = "", nil
		e.Details, e.Drain = &d, e.Drain || drain
	}
	return &part
}

// serves reports whether a ready endpoint in the slices has a port.
func serves(list []*api.EndpointSlice, family api.Family, p api.EndpointPort) bool {
	return slices.ContainsFunc(list, func(s *api.EndpointSlice) bool {
		return s.Family == family && slices.ContainsFunc(s.Ports, func(o api.EndpointPort) bool { return o.Name == p.Name && o.Protocol == p.Protocol }) &&
			slices.ContainsFunc(s.Endpoints, func(e api.SliceEndpoint) bool { return e.Ready && !e.Drain })
	})
}
