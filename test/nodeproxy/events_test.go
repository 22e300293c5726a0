// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestEvents checks the Events of a kpng with the least permissions that it needs for
// Events, and the log of a kpng without these permissions.
func TestEvents(t *testing.T) {
	w := newWorld(t)
	t.Cleanup(func() { w.cleanUp("nftables") })
	claim := func(name string) {
		w.service(name, corev1.ServiceSpec{ExternalIPs: []string{"192.0.2.7"}, Ports: []corev1.ServicePort{{Port: 80}}})
	}
	claim("a") // "a" wins, because it is older than "b" or has the same age
	claim("b")
	web := w.service("web", corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal, Ports: []corev1.ServicePort{{Port: 80}},
	})
	netnstest.Listen(t, w.node.Do, net.JoinHostPort(nodeIP, fmt.Sprint(web.Spec.HealthCheckNodePort)), func(net.Conn) {})

	args := func(kubeconfig string) []string {
		return []string{"kube", "--kubeconfig", kubeconfig, "to-local", "nftables", "--healthz-bind-address", healthz, "--events"}
	}
	end := w.start(healthz, args(w.kubeconfig)...)
	complaints := func() int { return strings.Count(w.log.String(), "Cannot write an event") }
	await(t, "a complaint", 1, complaints)
	claim("c") // another lost claim
	w.flushed()
	if err := end(os.Interrupt); err != nil {
		t.Error(err)
	}
	if n := complaints(); n != 1 || !strings.Contains(w.log.String(), "events.k8s.io") {
		t.Errorf("%d complaints about permissions", n)
	}

	allowed := apiserver.Kubeconfig(t, w.server.User(t, append(slices.Clone(rights), rbacv1.PolicyRule{
		APIGroups: []string{"events.k8s.io"}, Resources: []string{"events"}, Verbs: []string{"create"},
	})...))
	end = w.start(healthz, args(allowed)...)
	want := "Service b ClaimLost, Service c ClaimLost, Service web FailedToStartServiceHealthcheck"
	await(t, "events", want, func() string { return w.eventsIn(w.namespace) })
	w.flushed()
	await(t, "an event of the node", "Node nodeproxy ServiceRulesChanged", func() string { return w.eventsIn(metav1.NamespaceDefault) })
	if err := end(os.Interrupt); err != nil {
		t.Error(err)
	}

	end = w.start(healthz, args(allowed)...) // writes the same Events, then a new one
	claim("d")
	await(t, "events", "Service b ClaimLost, Service c ClaimLost, Service d ClaimLost, Service web FailedToStartServiceHealthcheck",
		func() string { return w.eventsIn(w.namespace) })
	if err := end(os.Interrupt); err != nil {
		t.Error(err)
	}
	if n := complaints(); n != 0 {
		t.Errorf("%d complaints:\n%s", n, w.log)
	}
}

// flushed changes the rules of kpng, and waits until kpng has repaired them.
func (w *world) flushed() {
	w.t.Helper()
	list := func() string { return sh(w.t, w.node.Command("nft", "list", "map", "inet", "kpng", "services4")...) }
	before := len(list())
	sh(w.t, w.node.Command("nft", "flush", "map", "inet", "kpng", "services4")...)
	await(w.t, "the rules are repaired", true, func() bool { return len(list()) >= before })
}

// eventsIn returns the objects and reasons of kpng's Events in a namespace.
func (w *world) eventsIn(namespace string) string {
	w.t.Helper()
	events := w.server.Client().EventsV1().Events(namespace)
	list, err := events.List(w.t.Context(), metav1.ListOptions{})
	w.check(err)
	var found []string
	for _, e := range list.Items {
		if e.ReportingController == "kpng" {
			found = append(found, e.Regarding.Kind+" "+e.Regarding.Name+" "+e.Reason)
		}
	}
	slices.Sort(found)
	return strings.Join(found, ", ")
}
