// SPDX-License-Identifier: Apache-2.0

package watcher

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/api"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestNodeConversion(t *testing.T) {
	in := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: "a", UID: "1", Labels: map[string]string{"topology.kubernetes.io/zone": "z"},
			DeletionTimestamp: &metav1.Time{},
		},
		Spec: corev1.NodeSpec{
			PodCIDR:  "10.1.0.0/24",
			PodCIDRs: []string{"10.1.0.0/24", "fd00::/64", "x"},
			Taints:   []corev1.Taint{{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}},
		},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeHostName, Address: "a"},
			{Type: corev1.NodeInternalIP, Address: "192.0.2.1"},
			{Type: corev1.NodeExternalIP, Address: "2001:db8::1"},
			{Type: corev1.NodeInternalIP, Address: "y"},
		}},
	}
	want := &api.Node{
		Name: "a", UID: "1", Labels: map[string]string{"topology.kubernetes.io/zone": "z"}, Deleting: true,
		PodCIDRs:  prefixes("10.1.0.0/24", "fd00::/64"),
		Taints:    []api.Taint{{Key: "k", Value: "v", Effect: "NoSchedule"}},
		Addresses: []api.NodeAddress{{Type: "InternalIP", IP: addrs("192.0.2.1")[0]}, {Type: "ExternalIP", IP: addrs("2001:db8::1")[0]}},
	}
	got, problems := newConverter(t, Options{}).Node(in)
	if diff := cmp.Diff(want, got, cmpOptions); diff != "" {
		t.Errorf("node (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{
		`status.addresses[3].address: "y" is not an IP address`,
		`spec.podCIDRs[2]: "x" is not a CIDR`,
	}, messages(problems)); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}

func TestEmptyNode(t *testing.T) {
	got, problems := newConverter(t, Options{}).Node(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	if diff := cmp.Diff(&api.Node{Name: "a"}, got); diff != "" || problems != nil {
		t.Errorf("node (-want +got):\n%s\nproblems %v", diff, problems)
	}
}

func TestLegacyPodCIDRIsUsedIfPodCIDRsIsEmpty(t *testing.T) {
	got, _ := newConverter(t, Options{}).Node(&corev1.Node{Spec: corev1.NodeSpec{PodCIDR: "10.1.0.0/24"}})
	if diff := cmp.Diff(prefixes("10.1.0.0/24"), got.PodCIDRs, cmpOptions); diff != "" {
		t.Errorf("pod CIDRs (-want +got):\n%s", diff)
	}
}
