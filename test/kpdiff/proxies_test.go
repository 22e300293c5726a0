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
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubernetes/pkg/proxy"
)

// kubeProxyOf returns kube-proxy's decisions. It calls code that all kube-proxy backends
// share.
func kubeProxyOf(c *clusterState) decided {
	labels := map[string]string{}
	if c.zone != "" {
		labels[corev1.LabelTopologyZone] = c.zone
	}
	p := newKubeProxyState()
	p.service(nil, c.service)
	for _, slice := range c.slices {
		p.slice(slice, false)
	}
	return orEmpty(p.decisions(labels)[c.service.Namespace+"/"+c.service.Name])
}

func newDecided() decided { return decided{map[string]string{}, map[string]int{}} }

// kubeProxyState has kube-proxy's records of the cluster. It follows events as kube-proxy's
// backends do.
type kubeProxyState []kubeProxyFamily

type kubeProxyFamily struct {
	family          corev1.IPFamily
	serviceChanges  *proxy.ServiceChangeTracker
	endpointChanges *proxy.EndpointsChangeTracker
	services        proxy.ServicePortMap
	endpoints       proxy.EndpointsMap
}

func newKubeProxyState() (s kubeProxyState) {
	for _, family := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
		s = append(s, kubeProxyFamily{
			family, proxy.NewServiceChangeTracker(family, nil, nil), proxy.NewEndpointsChangeTracker(family, thisNode, nil, nil),
			proxy.ServicePortMap{}, proxy.EndpointsMap{},
		})
	}
	return s
}

// service records an event of a service. A missing service is nil.
func (s kubeProxyState) service(old, new *corev1.Service) {
	for _, f := range s {
		f.serviceChanges.Update(old, new)
	}
}

// slice records an event of an EndpointSlice.
func (s kubeProxyState) slice(slice *discoveryv1.EndpointSlice, removed bool) {
	for _, f := range s {
		f.endpointChanges.EndpointSliceUpdate(slice, removed)
	}
}

// decisions returns the decisions about each service, by namespace and name, on a node with
// these labels.
func (s kubeProxyState) decisions(labels map[string]string) map[string]decided {
	all := map[string]decided{}
	of := func(name types.NamespacedName) decided {
		key := name.String()
		if _, ok := all[key]; !ok {
			all[key] = newDecided()
		}
		return all[key]
	}
	for _, f := range s {
		f.services.Update(f.serviceChanges)
		f.endpoints.Update(f.endpointChanges)
		for name := range f.services.HealthCheckNodePorts() {
			of(name).health[string(f.family)] = f.endpoints.LocalReadyEndpoints()[name]
		}
		for name, port := range f.services {
			d := of(name.NamespacedName)
			d.addKubeProxyPort(f.family, port, func(local bool) string {
				everywhere, here, _, usable := proxy.CategorizeEndpoints(f.endpoints[name], port, thisNode, labels)
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
	return all
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

// kpngOf returns kpng's decisions. It calls package watcher, and then package nodeview.
func kpngOf(t *testing.T, c *clusterState) decided {
	t.Helper()
	converter, err := watcher.New(watcher.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if !converter.WantsService(c.service) {
		return newDecided()
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
	return decidedBy(nodeview.View(state, node))
}

// decidedBy returns the decisions of a view, which may be nil.
func decidedBy(view *api.View) decided {
	d := newDecided()
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
