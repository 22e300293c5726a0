// SPDX-License-Identifier: Apache-2.0

package program

import (
	"slices"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
)

// localEndpoints counts the service ports that drop traffic because a traffic policy is
// Local and all endpoints are on other nodes. A backend must pass all Changes to the
// method sync. These calls must not overlap.
type localEndpoints struct {
	missing  *prometheus.GaugeVec
	services map[types.NamespacedName]droppingService // only services with ports that drop traffic
	pass     int
}

// droppingService has the ports of a service that drop traffic, according to the last
// delivery of the service.
type droppingService struct {
	ports []droppingPort
	pass  int // value of localEndpoints.pass at the last delivery
}

type droppingPort struct {
	port     *api.PortMapping
	family   api.Family
	internal bool // true for the internal traffic policy, false for the external one
}

var localEndpointsLabels = []string{"traffic_policy", "ip_family"}

func newLocalEndpoints() *localEndpoints {
	l := &localEndpoints{
		missing: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "kpng", Name: "service_ports_without_local_endpoints",
			Help: "Service ports that drop traffic, because their policy is Local and only other nodes have endpoints.",
		}, localEndpointsLabels),
		services: map[types.NamespacedName]droppingService{},
	}
	for _, family := range []api.Family{api.IPv4, api.IPv6} {
		l.gauge(droppingPort{family: family})
		l.gauge(droppingPort{family: family, internal: true})
	}
	return l
}

func (l *localEndpoints) gauge(p droppingPort) prometheus.Gauge {
	policy := "external"
	if p.internal {
		policy = "internal"
	}
	return l.missing.WithLabelValues(policy, p.family.String())
}

func (l *localEndpoints) sync(c *sink.Changes) {
	if c.First {
		l.pass++
	}
	for s := range c.Services {
		l.set(s.Key, droppingPorts(s.New))
	}
	if c.Last {
		for key, d := range l.services {
			if d.pass != l.pass && !slices.Contains(c.Failing, key) {
				l.set(key, nil)
			}
		}
	}
}

func (l *localEndpoints) set(key types.NamespacedName, ports []droppingPort) {
	for _, p := range l.services[key].ports {
		l.gauge(p).Dec()
	}
	for _, p := range ports {
		l.gauge(p).Inc()
	}
	if ports == nil {
		delete(l.services, key)
	} else {
		l.services[key] = droppingService{ports, l.pass}
	}
}

// droppingPorts returns the ports of a service that drop traffic from outside of this
// node. For each family and policy, the result has a port at most once.
func droppingPorts(view *api.View) []droppingPort {
	if view == nil || !view.Service.InternalTrafficToLocal && !view.Service.ExternalTrafficToLocal {
		return nil
	}
	var ports []droppingPort
	for f := range nodeview.Frontends(view) {
		p := droppingPort{f.ServicePort, f.Family, f.Kind == nodeview.ClusterIP}
		if f.Elsewhere.Verdict == nodeview.Drop && !slices.Contains(ports, p) {
			ports = append(ports, p)
		}
	}
	return ports
}
