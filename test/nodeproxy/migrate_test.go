// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"fmt"
	"io"
	"net"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/traffic"
	"github.com/kpng-project/kpng/test/kubeproxy"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestKubeProxyAndKpngReplaceEachOther moves a node from kube-proxy to kpng and back under
// traffic, as DaemonSets and the tasks of the Helm chart do: both proxies use the same ports,
// the old proxy ends when the new proxy starts, and "kpng wait" delays the cleanup.
func TestKubeProxyAndKpngReplaceEachOther(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) { replaceKubeProxy(t, mode) })
	}
}

func replaceKubeProxy(t *testing.T, mode string) {
	w := newWorld(t)
	w.node.Route(t, "default", "10.2.0.2", "client") // to send to cluster IPs
	service := w.service("web", corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{
		{Name: "tcp", Port: 80, NodePort: 30080}, {Name: "udp", Port: 80, Protocol: corev1.ProtocolUDP, NodePort: 30080},
	}})
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, p := range service.Spec.Ports {
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: new(int32(udpPort))})
	}
	for _, pod := range []string{pod1, pod2} {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{pod}, NodeName: new(nodeName), Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
		netnstest.Listen(t, w.pods.Do, net.JoinHostPort(pod, fmt.Sprint(udpPort)), func(c net.Conn) { io.Copy(c, c) })
	}
	_, err := w.server.Client().DiscoveryV1().EndpointSlices(w.namespace).Create(t.Context(), slice, metav1.CreateOptions{})
	w.check(err)

	kubeProxy := kubeproxy.Command(t, kubeproxy.Options{Kubeconfig: apiserver.Kubeconfig(t, w.server.Config()), Node: nodeName, Mode: mode, ClusterCIDR: "10.1.0.0/16"})
	kpng := slices.Concat(least, []string{w.kpng}, w.source, []string{"to-local", "nftables", "--node-name", nodeName, "--cluster-cidr", "10.1.0.0/16",
		"--healthz-bind-address", healthz, "--metrics-bind-address", "127.0.0.1:10249", "--kubeproxy-metrics", "--wait"})
	sh := func(args ...string) { t.Helper(); sh(t, w.node.Command(args...)...) }

	before := w.configuration()
	end := w.process(kubeProxy)
	sh(w.kpng, "wait", "kube-proxy")
	requests := traffic.New(t)
	for _, c := range []*client{
		{name: "client to a node port", from: w.client, to: nodeIP + ":30080"},
		{name: "node to a cluster IP", from: w.node, to: service.Spec.ClusterIP + ":80"},
	} {
		c.connect(t)
		requests.Start(c.name, c.from.Namespace, c.request)
	}
	moreRequests := func() {
		t.Helper()
		made := requests.Made()
		await(t, "100 more requests", true, func() bool { return requests.Made() >= made+100 })
	}
	moreRequests()
	requests.Report(t, "kube-proxy")
	for _, step := range []struct {
		to            string
		start         []string
		wait, cleanup []string
		left          string
	}{
		{"kpng", kpng, []string{w.kpng, "wait", "kpng"}, []string{kubeProxy[0], "--cleanup"}, "kube-"},
		{"kube-proxy", kubeProxy, []string{w.kpng, "wait", "kube-proxy"}, append(least, w.kpng, "cleanup", "nftables"), "kpng"},
	} {
		endOld := end
		end = w.process(step.start) // the old process still has the ports
		endOld()
		sh(step.wait...)
		moreRequests()
		sh(step.cleanup...)
		moreRequests()
		if failed, slow := requests.Report(t, step.to); failed > 0 || slow > 0 {
			t.Errorf("%s: %d requests failed, %d may have lost a packet", step.to, failed, slow)
		}
		// kubelet makes this chain too, so kube-proxy does not remove it.
		now := strings.Join(slices.DeleteFunc(strings.Split(w.configuration(), "\n"), func(line string) bool { return strings.Contains(line, "KUBE-FIREWALL") }), "\n")
		if strings.Contains(strings.ToLower(now), step.left) {
			t.Errorf("with %s, the node still has rules of %s:\n%s", step.to, step.left, now)
		}
	}
	requests.End()
	end()
	sh(kubeProxy[0], "--cleanup")
	if after := w.configuration(); mode == "nftables" && after != before {
		t.Errorf("configuration of the node before:\n%s\nand after:\n%s", before, after)
	}
}

// process starts a process on the node. The returned function sends SIGTERM to it, and
// waits for its end.
func (w *network) process(args []string) (end func()) {
	w.t.Helper()
	args = w.node.Command(args...)
	cmd := exec.Command(args[0], args[1:]...)
	log := new(buffer)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	w.check(cmd.Start())
	ended := false
	end = func() {
		if ended {
			return
		}
		ended = true
		cmd.Process.Signal(syscall.SIGTERM)
		timer := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
		defer timer.Stop()
		cmd.Wait()
	}
	w.t.Cleanup(func() {
		end()
		if w.t.Failed() {
			w.t.Logf("log of %s:\n%s", args, log)
		}
	})
	return end
}
