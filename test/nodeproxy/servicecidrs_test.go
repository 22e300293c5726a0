// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestServiceCIDRsOfTheCluster sends real packets to addresses that are in ServiceCIDR
// objects but belong to no service. kpng must drop these packets. Meanwhile objects and
// permissions change.
func TestServiceCIDRsOfTheCluster(t *testing.T) {
	w := newWorld(t)
	t.Cleanup(func() { w.cleanUp("nftables") })
	// A pod answers at these addresses. So a packet that is not dropped gets an answer.
	const inDefault, inMore, outside = "10.96.255.7", "10.111.0.7", "10.112.0.7"
	for _, addr := range []string{inDefault, inMore, outside} {
		w.pods.Add(t, "eth0", addr+"/32")
		w.node.Route(t, addr+"/32", pod1, "pods")
		netnstest.Answer(t, w.pods.Do, addr+":5353", "pod")
	}
	web := w.service("web", corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: udpPort, Protocol: corev1.ProtocolUDP}}})
	w.lead(web, pod1, nodeName)
	reached := func() string {
		var names []string
		for name, addr := range map[string]string{"service": web.Spec.ClusterIP, "default": inDefault, "more": inMore, "outside": outside} {
			if ask(w.client.client(t, addr+":5353")) != "" {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return strings.Join(names, " ")
	}
	cidrs := w.server.Client().NetworkingV1().ServiceCIDRs()
	remove := func() {
		// No controller removes the finalizer of ServiceCIDRs here.
		_, err := cidrs.Patch(t.Context(), "more", "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		w.check(err)
		w.check(cidrs.Delete(t.Context(), "more", metav1.DeleteOptions{}))
	}
	start := func(kubeconfig string) func(os.Signal) error {
		return w.start(healthz, "kube", "--kubeconfig", kubeconfig, "to-local", "nftables", "--healthz-bind-address", healthz, "--service-cidr=auto")
	}

	// Without permission, nothing is dropped, and the log names the permission.
	end := start(w.kubeconfig)
	await(t, "reached without permission", "default more outside service", reached)
	await(t, "the log names the permission", true, func() bool {
		return strings.Contains(w.log.String(), "servicecidrs") && strings.Contains(w.log.String(), "networking.k8s.io")
	})
	w.check(end(os.Interrupt))

	allowed := apiserver.Kubeconfig(t, w.server.User(t, append(slices.Clone(rights), rbacv1.PolicyRule{
		APIGroups: []string{"networking.k8s.io"}, Resources: []string{"servicecidrs"}, Verbs: []string{"list", "watch"},
	})...))
	end = start(allowed)
	await(t, "reached with the default ServiceCIDR", "more outside service", reached)
	_, err := cidrs.Create(t.Context(), &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "more"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.111.0.0/24"}},
	}, metav1.CreateOptions{})
	w.check(err)
	await(t, "reached with two ServiceCIDRs", "outside service", reached)
	remove()
	await(t, "reached after the deletion", "more outside service", reached)

	// A killed process leaves its rules. A process that cannot list ServiceCIDRs keeps them.
	_ = end(syscall.SIGKILL)
	if got := reached(); got != "more outside service" {
		t.Errorf("after kpng was killed, %q are reached", got)
	}
	end = start(w.kubeconfig)
	if got := reached(); got != "more outside service" {
		t.Errorf("without ServiceCIDRs from the API server, %q are reached", got)
	}
	w.check(end(os.Interrupt))
}
