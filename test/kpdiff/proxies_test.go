// SPDX-License-Identifier: Apache-2.0

package kpdiff

import (
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/healthport"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/proxy"
)

// kubeProxy returns kube-proxy's decisions. It calls code that all kube-proxy backends
// share.
func kubeProxy(c *cluster) decided {
	d := decided{map[string]string{}, map[string]int{}}
	labels := map[string]string{}
	if c.zone != "" {
		labels[corev1.LabelTopologyZone] = c.zone
	}
	for _, family := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
		serviceChanges := proxy.NewServiceChangeTracker(family, nil, nil)
		serviceChanges.Update(nil, c.service)
		services := proxy.ServicePortMap{}
		services.Update(serviceChanges)
		endpointChanges := proxy.NewEndpointsChangeTracker(family, thisNode, nil, nil)
		for _, slice := range c.slices {
			endpointChanges.EndpointSliceUpdate(slice, false)
		}
		endpoints := proxy.EndpointsMap{}
		endpoints.Update(endpointChanges)

		for key := range services.HealthCheckNodePorts() {
			d.health[string(family)] = endpoints.LocalReadyEndpoints()[key]
		}
		for name, port := range services {
			d.addKubeProxyPort(family, port, func(local bool) string {
				everywhere, here, _, usable := proxy.CategorizeEndpoints(endpoints[name], port, thisNode, labels)
				list := everywhere
				if local {
					list = here
				}
				switch {
				case !usable:
					return "reject"
				case len(list) == 0:
					return "drop"
				}
				var texts []string
				for _, e := range list {
					texts = append(texts, e.String())
				}
				return forwarded(texts)
			})
		}
	}
	return d
}

// addKubeProxyPort adds the frontends of a service port. The function describeTraffic
// returns what happens to traffic. If its argument local is true, only endpoints on this
// node may receive the traffic.
func (d *decided) addKubeProxyPort(family corev1.IPFamily, port proxy.ServicePort, describeTraffic func(local bool) string) {
	affinity := port.StickyMaxAgeSeconds()
	local := port.ExternalPolicyLocal()
	external := func(sources []string) string {
		return externally(describeTraffic(local), describeTraffic(false), affinity, local, sources)
	}
	at := func(address string) string { return frontendAt(address, port.Protocol(), port.Port()) }

	d.frontends[at(port.ClusterIP().String())] = describeTraffic(port.InternalPolicyLocal()) + stickiness(affinity)
	for _, ip := range port.ExternalIPs() {
		d.frontends[at(ip.String())] = external(nil)
	}
	var sources []string
	for _, r := range port.LoadBalancerSourceRanges() {
		sources = append(sources, r.String())
	}
	for _, ip := range port.LoadBalancerVIPs() {
		d.frontends[at(ip.String())] = external(sources)
	}
	if port.NodePort() != 0 {
		d.frontends[nodeFrontendAt(family, port.Protocol(), port.NodePort())] = external(nil)
	}
}

// kpng returns kpng's decisions. It calls package watcher, and then package nodeview.
func kpng(t *testing.T, c *cluster) decided {
	t.Helper()
	d := decided{map[string]string{}, map[string]int{}}
	converter, err := watcher.New(watcher.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if !converter.WantsService(c.service) {
		return d
	}
	state := &api.ServiceState{}
	state.Service, _ = converter.Service(c.service)
	for _, slice := range c.slices {
		if !converter.WantsSlice(slice) {
			continue
		}
		if slice, _ := converter.EndpointSlice(slice); slice != nil {
			state.Slices = append(state.Slices, slice)
		}
	}
	node := &api.Node{Name: thisNode}
	if c.zone != "" {
		node.Labels = map[string]string{"topology.kubernetes.io/zone": c.zone}
	}
	view := nodeview.View(state, node)
	if view == nil {
		return d
	}
	if healthport.Of(view.Service) != 0 {
		for _, family := range view.Service.Families() {
			d.health[family.String()] = healthport.Ready(view, family)
		}
	}
	for f := range nodeview.Frontends(view) {
		protocol, affinity := corev1.Protocol(f.Protocol.String()), int(f.Affinity.Seconds())
		at := frontendAt(f.Addr.String(), protocol, int(f.Port))
		if f.Kind == nodeview.NodePort {
			at = nodeFrontendAt(corev1.IPFamily(f.Family.String()), protocol, int(f.Port))
		}
		if f.Kind == nodeview.ClusterIP {
			d.frontends[at] = trafficText(f.Elsewhere) + stickiness(affinity)
			continue
		}
		var sources []string
		if f.Sources.Restricted {
			sources = []string{}
		}
		for _, r := range f.Sources.Ranges {
			sources = append(sources, r.String())
		}
		local := f.Masquerade == nodeview.MasqueradeNode
		d.frontends[at] = externally(trafficText(f.Elsewhere), trafficText(f.Node), affinity, local, sources)
	}
	return d
}

func trafficText(traffic nodeview.Traffic) string {
	switch traffic.Verdict {
	case nodeview.Reject:
		return "reject"
	case nodeview.Drop:
		return "drop"
	}
	var texts []string
	for _, e := range traffic.Endpoints {
		texts = append(texts, netip.AddrPortFrom(e.Addr, uint16(e.Port)).String())
	}
	return forwarded(texts)
}
