// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestChangesArriveAsFastAsThoseOfServices changes EndpointSlices and routes in turn, and
// measures the time until the first connection reaches the new endpoint. kpng serves a
// Service with the same backend on the same node.
func TestChangesArriveAsFastAsThoseOfServices(t *testing.T) {
	w := newWorld(t)
	pods := []string{"10.1.0.1", "10.1.0.2"}
	for name, i := range map[string]int{"plain": 0, "behind": 0, "one": 0, "two": 1} {
		w.service("default", name, pods[i])
	}
	w.run("--status")
	w.start("./cmd/kpng", "kube", "--kubeconfig", w.kubeconfig, "to-local", "nftables", "--node-name", nodeName, "--healthz-bind-address=")
	for _, name := range []string{"endpoints", "routes"} {
		w.apply(gatewayOf(name, ""))
	}
	w.apply(routeOf("TCPRoute", "endpoints", "endpoints", "{name: behind, port: 80}"))
	w.apply(routeOf("TCPRoute", "routes", "routes", "{name: one, port: 80}"))
	plain, err := w.server.Client().CoreV1().Services("default").Get(t.Context(), "plain", metav1.GetOptions{})
	w.check(err)

	const service, endpoints, route = "endpoints of a Service", "endpoints of a Gateway", "a route"
	changes := map[string]struct {
		address string
		change  func(i int)
	}{
		service:   {plain.Spec.ClusterIP, func(i int) { w.service("default", "plain", pods[i]) }},
		endpoints: {w.address("endpoints"), func(i int) { w.service("default", "behind", pods[i]) }},
		route: {w.address("routes"), func(i int) {
			w.apply(routeOf("TCPRoute", "routes", "routes", "{name: "+[]string{"one", "two"}[i]+", port: 80}"))
		}},
	}
	for _, c := range changes {
		w.await(w.answers("tcp", c.address+":80", pods[0]))
	}
	took := map[string][]time.Duration{}
	for i := range 60 {
		for name, c := range changes {
			began := time.Now()
			c.change((i + 1) % 2)
			for {
				ip, err := w.ask("tcp", c.address+":80")
				if ip == pods[(i+1)%2] {
					break
				}
				if time.Since(began) > time.Minute {
					t.Fatalf("after a change of %s, %q answers (%v)", name, ip, err)
				}
			}
			took[name] = append(took[name], time.Since(began))
		}
	}
	median := func(name string) time.Duration {
		slices.Sort(took[name])
		return took[name][len(took[name])/2]
	}
	for _, name := range []string{endpoints, route} {
		ratio := float64(median(name)) / float64(median(service))
		t.Logf("%s: median %v, which is %.2f times that of a Service (%v)", name, median(name), ratio, median(service))
		if ratio > 3 {
			t.Errorf("a change of %s takes %.2f times as long as one of a Service", name, ratio)
		}
	}
}
