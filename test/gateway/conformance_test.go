// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kindOfRoute has the names that differ between TCPRoutes and UDPRoutes.
type kindOfRoute struct {
	kind, resource, protocol, network string
	port                              int // of the services
}

// name returns the name of a Gateway.
func (k kindOfRoute) name(gateway string) string { return gateway + "-" + k.network }

// gateway returns a Gateway with a listener for each port. The listeners have the names l1,
// l2 and so on, and admit only routes of this kind.
func (k kindOfRoute) gateway(name string, ports ...int) string {
	var all []string
	for i, port := range ports {
		all = append(all, fmt.Sprintf("{name: l%d, protocol: %s, port: %d, allowedRoutes: {kinds: [{kind: %s}]}}", i+1, k.protocol, port, k.kind))
	}
	return k.gatewayWith(name, strings.Join(all, ", "))
}

func (k kindOfRoute) gatewayWith(name, listeners string) string {
	return fmt.Sprintf(`
kind: Gateway
metadata: {name: %s, namespace: default}
spec:
  gatewayClassName: cluster-ip
  listeners: [%s]`, k.name(name), listeners)
}

// route returns a route. The argument parent is the name of the Gateway, and may have more
// fields of the reference.
func (k kindOfRoute) route(name, parent string, backends ...string) string {
	gateway, fields, _ := strings.Cut(parent, ", ")
	return fmt.Sprintf(`
kind: %s
metadata: {name: %s, namespace: default}
spec:
  parentRefs: [{name: %s, %s}]
  rules: [{backendRefs: [%s]}]`, k.kind, name, k.name(gateway), fields, strings.Join(backends, ", "))
}

// backend returns a reference to a Service.
func (k kindOfRoute) backend(service string) string {
	return fmt.Sprintf("{name: %s, port: %d}", service, k.port)
}

// at returns a port of a Gateway, with its address.
func (k kindOfRoute) at(w *world, gateway string, port int) string {
	return fmt.Sprintf("%s:%d", w.address(k.name(gateway)), port)
}

// TestConformanceCases has a subtest for each case of the Gateway API's conformance tests, of
// version 1.6, for TCPRoutes and UDPRoutes. The subtests have the names of the cases.
func TestConformanceCases(t *testing.T) {
	w := newWorld(t)
	for i := range 3 {
		w.service("default", fmt.Sprintf("v%d", i+1), fmt.Sprintf("10.1.0.%d", i+1))
	}
	w.run("--status")
	tcp := kindOfRoute{"TCPRoute", "tcproutes", "TCP", "tcp", 80}
	udp := kindOfRoute{"UDPRoute", "udproutes", "UDP", "udp", 53}

	t.Run("UDPRoute", func(t *testing.T) {
		w.apply(udp.gateway("simple", 5300))
		w.apply(udp.route("simple", "simple, sectionName: l1", udp.backend("v1")))
		w.await(w.answers("udp", udp.at(w, "simple", 5300), "10.1.0.1"))
		w.await(w.has("udproutes", "simple", "Accepted=True Accepted", "ResolvedRefs=True ResolvedRefs"))
	})

	notAllowed := func(k kindOfRoute, listener string) {
		w.apply(k.gatewayWith("other", listener))
		w.apply(k.route("other", "other, sectionName: other", k.backend("v1")))
		w.await(w.has(k.resource, "other", "Accepted=False NotAllowedByListeners"))
		w.await(w.has("gateways", k.name("other"), "other=0 attached", "other.Accepted=False UnsupportedProtocol"))
	}
	t.Run("TCPRouteInvalidNonTCPListener", func(t *testing.T) {
		notAllowed(tcp, "{name: other, protocol: HTTP, port: 5300, allowedRoutes: {kinds: [{kind: HTTPRoute}]}}")
	})
	t.Run("UDPRouteNotAllowedByListeners", func(t *testing.T) {
		notAllowed(udp, "{name: other, protocol: TLS, port: 443, tls: {mode: Passthrough}, allowedRoutes: {namespaces: {from: Same}}}")
	})

	for _, k := range []kindOfRoute{tcp, udp} {
		t.Run(k.kind+"InvalidBackendRefNonexistent", func(t *testing.T) {
			w.apply(k.gateway("missing", 9300))
			w.apply(k.route("missing", "missing, sectionName: l1", k.backend("nonexistent")))
			w.await(w.has(k.resource, "missing", "Accepted=True Accepted", "ResolvedRefs=False BackendNotFound"))
		})

		t.Run(k.kind+"InvalidCrossNamespaceBackendRef", func(t *testing.T) {
			ns := w.server.Namespace(t)
			w.service(ns, "secret", "10.1.0.9")
			w.apply(k.gateway("crossing", 9321))
			w.apply(k.route("crossing", "crossing, sectionName: l1", fmt.Sprintf("{name: secret, namespace: %s, port: %d}", ns, k.port)))
			w.await(w.has(k.resource, "crossing", "Accepted=True Accepted", "ResolvedRefs=False RefNotPermitted"))
		})

		t.Run(k.kind+"ReferenceGrant", func(t *testing.T) {
			ns := w.server.Namespace(t)
			w.service(ns, "granted", "10.1.0.9")
			w.apply(fmt.Sprintf(`
kind: ReferenceGrant
metadata: {name: routes, namespace: %s}
spec:
  from: [{group: gateway.networking.k8s.io, kind: %s, namespace: default}]
  to: [{group: "", kind: Service, name: granted}]`, ns, k.kind))
			w.apply(k.gateway("granted", 9330))
			w.apply(k.route("granted", "granted, sectionName: l1", fmt.Sprintf("{name: granted, namespace: %s, port: %d}", ns, k.port)))
			w.await(w.answers(k.network, k.at(w, "granted", 9330), "10.1.0.9"))
			w.await(w.has(k.resource, "granted", "Accepted=True Accepted", "ResolvedRefs=True ResolvedRefs"))
			w.check(w.client.Resource(resource("referencegrants")).Namespace(ns).Delete(t.Context(), "routes", metav1.DeleteOptions{}))
			w.await(w.has(k.resource, "granted", "Accepted=True Accepted", "ResolvedRefs=False RefNotPermitted"))
			w.await(w.answers(k.network, k.at(w, "granted", 9330), ""))
		})

		t.Run(k.kind+"MultipleRoutesAttachment", func(t *testing.T) {
			w.apply(k.gateway("shared", 9310))
			w.apply(k.route("older", "shared, sectionName: l1", k.backend("v1")))
			w.await(w.has(k.resource, "older", "Accepted=True Accepted"))
			time.Sleep(1100 * time.Millisecond) // creation times have whole seconds
			w.apply(k.route("newer", "shared, sectionName: l1", k.backend("v2")))
			w.await(w.has(k.resource, "newer", "Accepted=True Accepted"))
			w.await(w.has("gateways", k.name("shared"), "l1=2 attached", "l1.Accepted=True Accepted"))
			older := w.answers(k.network, k.at(w, "shared", 9310), "10.1.0.1")
			w.await(older)
			for range 100 {
				if wrong := older(); wrong != "" {
					t.Fatal(wrong)
				}
			}
		})

		attachAll := map[string]string{"TCP": "ParentRefAttachAll", "UDP": "ParentRefAttachAllListeners"}[k.protocol]
		t.Run(k.kind+attachAll, func(t *testing.T) {
			w.apply(k.gateway("all", 9310, 9311, 9312, 9313))
			w.apply(k.route("all", "all", k.backend("v1")))
			w.await(w.has(k.resource, "all", "Accepted=True Accepted"))
			w.await(w.has("gateways", k.name("all"), "l1=1 attached", "l2=1 attached", "l3=1 attached", "l4=1 attached"))
			for port := 9310; port <= 9313; port++ {
				w.await(w.answers(k.network, k.at(w, "all", port), "10.1.0.1"))
			}
		})

		t.Run(k.kind+"ParentRefPortAndSectionName", func(t *testing.T) {
			w.apply(k.gateway("several", 9300, 9301, 9302))
			for i, parent := range []string{"port: 9300", "sectionName: l2", "sectionName: l3, port: 9302"} {
				name := fmt.Sprintf("v%d", i+1)
				w.apply(k.route("several-"+name, "several, "+parent, k.backend(name)))
				w.await(w.has(k.resource, "several-"+name, "Accepted=True Accepted"))
				w.await(w.answers(k.network, k.at(w, "several", 9300+i), fmt.Sprintf("10.1.0.%d", i+1)))
			}
		})

		t.Run(k.kind+"WeightedRouting", func(t *testing.T) {
			w.apply(k.gateway("weighted", 9300))
			backend := func(service string, weight int) string {
				return fmt.Sprintf("{name: %s, port: %d, weight: %d}", service, k.port, weight)
			}
			w.apply(k.route("weighted", "weighted, sectionName: l1", backend("v1", 70), backend("v2", 30), backend("v3", 0)))
			address := k.at(w, "weighted", 9300)
			w.await(w.answers(k.network, address, "10.1.0.2"))
			const asked = 4000
			seen := map[string]int{}
			for range asked {
				ip, err := w.ask(k.network, address)
				w.check(err)
				seen[ip]++
			}
			// The standard deviation of the measured share is 0.7 %.
			if share := float64(seen["10.1.0.1"]) / asked; math.Abs(share-0.7) > 0.035 || seen["10.1.0.3"] > 0 {
				t.Errorf("answers by endpoint: %v, want shares of 70 %%, 30 %% and 0 %%", seen)
			}
		})
	}
}
