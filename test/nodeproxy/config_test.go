// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"fmt"
	"net"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/test/kubeproxy"
	corev1 "k8s.io/api/core/v1"
)

// TestConfigMapOfKubeProxyStartsKpng starts kpng with the ConfigMaps of kubeadm and kind.
// Only the path of the kubeconfig is replaced in them. kpng must program the same rules
// as with equal flags.
func TestConfigMapOfKubeProxyStartsKpng(t *testing.T) {
	w := newWorld(t)
	dns := w.service("dns", corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}},
	})
	w.lead(dns, pod1, nodeName)
	const second, established = "10.2.0.3", "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"
	w.node.Add(t, "client", second+"/24") // not an address of the Node object
	for name, flags := range map[string][]string{
		"kubeadm": nil,
		"kind":    {"--conntrack-max-per-core=0", "--min-sync-interval=1s"},
	} {
		equal := append([]string{"kube", "--kubeconfig", w.kubeconfig, "to-local", "nftables", "--cluster-cidr=10.244.0.0/16",
			"--node-port-addresses=all", "--healthz-bind-address=0.0.0.0:10256"}, flags...)
		end := w.start(healthz, equal...)
		want := w.rules()
		if err := end(os.Interrupt); err != nil {
			t.Error(err)
		}
		w.cleanUp("nftables")
		sh(t, w.node.Command("sh", "-c", "echo 100000 >"+established)...)

		end = w.start(healthz, "kube", "to-local", "nftables", "--config", kubeproxy.ConfigFile(t, name, w.kubeconfig))
		if got := w.rules(); got != want {
			t.Errorf("rules with the ConfigMap of %s:\n%s\nwith equal flags:\n%s", name, got, want)
		}
		for _, rule := range []string{"10.244.0.0/16", second} {
			if !strings.Contains(want, rule) {
				t.Errorf("no %s in the rules:\n%s", rule, want)
			}
		}
		nodePort := w.client.client(t, net.JoinHostPort(second, fmt.Sprint(dns.Spec.Ports[0].NodePort)))
		await(t, "the node port's answer", "pod1", func() string { return ask(nodePort) })
		if status, body := w.get(w.client, "http://"+nodeIP+":10256/healthz"); status != 200 {
			t.Errorf("health check with the ConfigMap of %s: %d %s", name, status, body)
		}
		if _, mode := w.get(w.node, "http://127.0.0.1:10249/proxyMode"); mode != "nftables" {
			t.Errorf("proxy mode with the ConfigMap of %s: %s", name, mode)
		}
		if _, metrics := w.get(w.node, "http://127.0.0.1:10249/metrics"); !strings.Contains(metrics, "\nkubeproxy_sync_proxy_rules_duration_seconds") {
			t.Errorf("no metric of kube-proxy with the ConfigMap of %s:\n%s", name, metrics)
		}
		if timeout := sh(t, w.node.Command("cat", established)...); timeout != "86400\n" {
			t.Errorf("timeout of connections with the ConfigMap of %s: %s", name, timeout)
		}
		if err := end(os.Interrupt); err != nil {
			t.Error(err)
		}
		w.cleanUp("nftables")
	}
}

// seeds matches the random seed of a table.
var seeds = regexp.MustCompile(` seed 0x[0-9a-f]+`)

// rules returns the words of the nftables rules, without the seed. The words are sorted,
// because the order of the elements of a map is random.
func (w *world) rules() string {
	w.t.Helper()
	words := strings.FieldsFunc(seeds.ReplaceAllString(sh(w.t, w.node.Command("nft", "list", "ruleset")...), ""), func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\t' })
	slices.Sort(words)
	return strings.Join(words, " ")
}
