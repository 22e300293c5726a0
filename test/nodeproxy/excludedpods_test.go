// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const optOut = "kpng.io/ebpf"

// cgroups is a world with the cgroups of pods.
type cgroups struct {
	*world
	root, kubepods *netnstest.Cgroup
	dns            string // the cluster IP and port of a service
}

// pod creates a pod and its cgroup.
func (w *cgroups) pod(name string, edit func(*corev1.Pod)) *netnstest.Cgroup {
	w.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}, Annotations: map[string]string{}},
		Spec:       corev1.PodSpec{NodeName: nodeName, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	edit(pod)
	phase := pod.Status.Phase
	pods := w.server.Client().CoreV1().Pods(w.namespace)
	created, err := pods.Create(w.t.Context(), pod, metav1.CreateOptions{})
	w.check(err)
	if phase != "" {
		created.Status.Phase = phase
		_, err = pods.UpdateStatus(w.t.Context(), created, metav1.UpdateOptions{})
		w.check(err)
	}
	uid := string(created.UID)
	if static := pod.Annotations["kubernetes.io/config.mirror"]; len(static) == 32 {
		uid = static
	}
	return w.kubepods.Below(w.t, "pod"+uid).Below(w.t, "container")
}

// handler returns the dataplane that handles a question to the service from a process in a
// cgroup.
func (w *cgroups) handler(c *netnstest.Cgroup) string {
	w.t.Helper()
	translated, left := w.counts()
	w.node.Cgroup = c
	defer func() { w.node.Cgroup = nil }()
	if answer := ask(w.node.client(w.t, w.dns)); answer != "pod1" {
		return fmt.Sprintf("answer %q", answer)
	}
	w.node.Cgroup = nil
	nowTranslated, nowLeft := w.counts()
	switch {
	case nowTranslated > translated && nowLeft == left:
		return "ebpf"
	case nowTranslated == translated && nowLeft > left:
		return "nftables"
	}
	return fmt.Sprintf("translated %d, left %d", nowTranslated-translated, nowLeft-left)
}

// counts returns two numbers of connections: translated for the connections that eBPF has
// handled, and left for the connections of excluded processes. eBPF leaves these to the other
// sink.
func (w *cgroups) counts() (translated, left int) {
	_, page := w.get(w.node, "http://"+metricsAddress+"/metrics")
	for line := range strings.Lines(page) {
		var n int
		if _, err := fmt.Sscanf(line, `kpng_ebpf_translated_total{hook="connect4"} %d`, &n); err == nil {
			translated += n
		}
		if _, err := fmt.Sscanf(line, `kpng_ebpf_translated_total{hook="sendmsg4"} %d`, &n); err == nil {
			translated += n
		}
		if _, err := fmt.Sscanf(line, `kpng_ebpf_left_total{reason="excluded"} %d`, &n); err == nil {
			left += n
		}
	}
	return translated, left
}

// label sets a label of an object in JSON, or removes it if value is nil.
func label(value any) []byte {
	patch, _ := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{optOut: value}}})
	return patch
}

const metricsAddress = "127.0.0.1:10249"

// TestPodsAndNamespacesOptOutOfEBPF checks which pods of the API server are left to nftables.
// The test makes the cgroups that kubelet would make.
func TestPodsAndNamespacesOptOutOfEBPF(t *testing.T) {
	w := &cgroups{world: newWorld(t)}
	bpffs := t.TempDir()
	if err := syscall.Mount("bpf", bpffs, "bpf", 0, "mode=700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(bpffs, 0); err != nil {
			t.Error(err)
		}
	})
	w.privileges = []string{"setpriv", "--bounding-set=-all,+bpf,+net_admin,+net_raw,+perfmon", "--inh-caps=-all", "--no-new-privs"}
	w.root = netnstest.NewCgroup(t)
	w.kubepods = w.root.Below(t, "kubepods")
	t.Cleanup(func() {
		sh(t, w.node.Command(w.kpng, "cleanup", "ebpf", "--bpffs", bpffs, "--cgroup", w.root.Dir)...)
	})
	w.node.Route(t, "10.0.0.0/8", "10.2.0.2", "client") // the kernel needs a route to cluster IPs
	dns := w.service("dns", corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}}})
	w.lead(dns, pod1, nodeName)
	w.dns = net.JoinHostPort(dns.Spec.ClusterIP, "53")

	const static = "5a105e8b9d40e1329780d62ea2265d8a"
	optedOut := func(p *corev1.Pod) { p.Labels[optOut] = "false" }
	plain := w.pod("plain", func(*corev1.Pod) {})
	labelled := w.pod("labelled", optedOut)
	plainPod, err := w.server.Client().CoreV1().Pods(w.namespace).Get(t.Context(), "plain", metav1.GetOptions{})
	w.check(err)
	pods := map[string]*netnstest.Cgroup{
		"plain": plain, "labelled": labelled,
		"a pod with another value": w.pod("other-value", func(p *corev1.Pod) { p.Labels[optOut] = "true" }),
		"a pod of another node":    w.pod("other-node", func(p *corev1.Pod) { optedOut(p); p.Spec.NodeName = "elsewhere" }),
		"a pod that has ended":     w.pod("ended", func(p *corev1.Pod) { optedOut(p); p.Status.Phase = corev1.PodSucceeded }),
		"a static pod":             w.pod("static", func(p *corev1.Pod) { optedOut(p); p.Annotations["kubernetes.io/config.mirror"] = static }),
		"a pod that names another": w.pod("naming", func(p *corev1.Pod) { optedOut(p); p.Annotations["kubernetes.io/config.mirror"] = string(plainPod.UID) }),
		"a process of the node":    w.root.Below(t, "system.slice"),
	}
	handlers := func(want map[string]string) {
		t.Helper()
		for name, c := range pods {
			await(t, "the handler of "+name, want[name], func() string { return w.handler(c) })
		}
	}
	all := func(handler string) map[string]string {
		all := map[string]string{}
		for name := range pods {
			all[name] = handler
		}
		return all
	}
	flags := []string{"--exclude-pods", optOut + "=false", "--bpffs", bpffs, "--cgroup", w.root.Dir, "--metrics-bind-address", metricsAddress}

	// Without the permission, all services are programmed, and the log names the permission.
	end := w.run("ebpf", healthz, flags...)
	handlers(all("ebpf"))
	if log := w.log.String(); !strings.Contains(log, "--exclude-pods needs the verbs list and watch for pods and namespaces") || !strings.Contains(log, "pods is forbidden") {
		t.Error("the log does not name the missing permission")
	}
	if err := end(os.Interrupt); err != nil {
		t.Error(err)
	}

	allowed := apiserver.Kubeconfig(t, w.server.User(t, append(slices.Clone(rights), rbacv1.PolicyRule{
		APIGroups: []string{""}, Resources: []string{"pods", "namespaces"}, Verbs: []string{"list", "watch"},
	})...))
	w.source = []string{"kube", "--kubeconfig", allowed}
	w.run("ebpf", healthz, flags...)
	want := all("ebpf")
	want["labelled"], want["a static pod"], want["a pod that names another"] = "nftables", "nftables", "nftables"
	for name, c := range pods { // the exclusion applies from the first connection on
		if got := w.handler(c); got != want[name] {
			t.Errorf("handler of %s is %s, want %s", name, got, want[name])
		}
	}

	// Set and remove labels of running pods and of their namespace.
	api := w.server.Client().CoreV1()
	patch := func(pod string, value any) {
		t.Helper()
		_, err := api.Pods(w.namespace).Patch(t.Context(), pod, types.MergePatchType, label(value), metav1.PatchOptions{})
		w.check(err)
	}
	patch("plain", "false")
	patch("labelled", nil)
	want["plain"], want["labelled"] = "nftables", "ebpf"
	handlers(want)
	pods["a new pod"] = w.pod("new", optedOut)
	want["a new pod"] = "nftables"
	handlers(want)

	patchNamespace := func(ctx context.Context, value any) {
		t.Helper()
		_, err := api.Namespaces().Patch(ctx, w.namespace, types.MergePatchType, label(value), metav1.PatchOptions{})
		w.check(err)
	}
	patchNamespace(t.Context(), "false")
	inNamespace := all("nftables")
	for _, name := range []string{"a pod of another node", "a pod that has ended", "a process of the node"} {
		inNamespace[name] = "ebpf"
	}
	handlers(inNamespace)
	patchNamespace(t.Context(), nil)
	handlers(want)
}
