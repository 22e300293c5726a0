// SPDX-License-Identifier: Apache-2.0

// Package kubeproxy runs kube-proxy in tests, to compare it with kpng's backends and to
// check the conformance kit.
package kubeproxy

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/gotool"
)

// Options configures a kube-proxy. All other settings have kube-proxy's defaults.
type Options struct {
	// Kubeconfig is the path of a kubeconfig file of the cluster.
	Kubeconfig string
	// Node is the name of the node. The Node object must exist, because kube-proxy waits for
	// the node's addresses.
	Node string
	// Version is the minor version, such as 1.34. Empty means the version of this module.
	Version string
	// Mode is nftables, iptables or ipvs. Empty means nftables.
	Mode string
	// MinSyncPeriod is the minimum time between two syncs. 0 means one second.
	MinSyncPeriod time.Duration
	// ClusterCIDR is the address range of pods. If it is empty, kube-proxy cannot recognize
	// traffic from pods.
	ClusterCIDR string
	// NodePortAddresses contains the node addresses that accept traffic to node ports. If it
	// is empty, the node's primary addresses accept this traffic.
	NodePortAddresses []string
	// MasqueradeAll makes kube-proxy masquerade all connections to cluster IPs.
	MasqueradeAll bool
	// LocalhostNodePorts enables the feature gate KubeProxyNFTablesLocalhostNodePorts. With
	// it, kube-proxy serves node ports at loopback addresses in NodePortAddresses.
	LocalhostNodePorts bool
}

// Command builds kube-proxy if needed, and returns its path and arguments. kube-proxy
// needs CAP_NET_ADMIN. Run kube-proxy in the node's network namespace, from which the API
// server must be reachable. kube-proxy listens on 127.0.0.1:10249 and :10256.
func Command(t testing.TB, o Options) []string {
	t.Helper()
	name := gotool.KubeProxy
	if o.Version != "" {
		name = "kube-proxy-" + o.Version
	}
	program, err := gotool.Build(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	mode := cmp.Or(o.Mode, "nftables")
	settings := fmt.Sprintf("%s: {minSyncPeriod: %s, masqueradeAll: %t}", mode, o.MinSyncPeriod, o.MasqueradeAll)
	if mode == "ipvs" { // this mode uses masqueradeAll of the mode iptables
		settings = fmt.Sprintf("ipvs: {minSyncPeriod: %s}\niptables: {masqueradeAll: %t}", o.MinSyncPeriod, o.MasqueradeAll)
	}
	var gates string
	if o.LocalhostNodePorts {
		gates = "KubeProxyNFTablesLocalhostNodePorts: true"
	}
	// With zero as conntrack values, kube-proxy does not change the kernel's settings. A
	// change would affect the whole machine.
	config := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: %q
clusterCIDR: %q
clientConnection: {kubeconfig: %q}
nodePortAddresses: [%s]
featureGates: {%s}
%s
conntrack: {maxPerCore: 0, min: 0, tcpCloseWaitTimeout: 0s, tcpEstablishedTimeout: 0s}
`, mode, o.Node, o.ClusterCIDR, o.Kubeconfig, quoted(o.NodePortAddresses), gates, settings)
	path := filepath.Join(t.TempDir(), "kube-proxy.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{program, "--config=" + path}
}

// quoted returns words as the items of a YAML list.
func quoted(words []string) string {
	var list []string
	for _, w := range words {
		list = append(list, strconv.Quote(w))
	}
	return strings.Join(list, ", ")
}
