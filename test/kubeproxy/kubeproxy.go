// SPDX-License-Identifier: Apache-2.0

// Package kubeproxy runs kube-proxy in tests. These compare kpng's backends with it and
// check the conformance kit with it.
package kubeproxy

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/gotool"
)

// Options configure a kube-proxy. Everything else has kube-proxy's defaults.
type Options struct {
	// Kubeconfig is the path of a kubeconfig file of the cluster.
	Kubeconfig string
	// Node is the name of the node. Its Node object must exist, because kube-proxy waits for
	// its addresses.
	Node string
	// MinSyncPeriod is the minimum time between two syncs; 0 means kube-proxy's default, one
	// second.
	MinSyncPeriod time.Duration
	// ClusterCIDR is kube-proxy's setting for the pod network. Empty means that traffic from
	// pods cannot be detected.
	ClusterCIDR string
	// NodePortAddresses contain the node's addresses that have node ports. If empty,
	// kube-proxy uses the primary addresses.
	NodePortAddresses []string
	// MasqueradeAll masquerades all connections to cluster IPs.
	MasqueradeAll bool
}

// Command returns kube-proxy, built if needed, with arguments for nftables mode. It must
// run as root, or with CAP_NET_ADMIN, in the node's network namespace, which must reach
// the API server. It listens there on 127.0.0.1:10249 and :10256.
func Command(t testing.TB, o Options) []string {
	t.Helper()
	program, err := gotool.Build(t.Context(), gotool.KubeProxy)
	if err != nil {
		t.Fatal(err)
	}
	// The limits of connection tracking belong to the machine, not to the namespace.
	config := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
hostnameOverride: %q
clusterCIDR: %q
clientConnection: {kubeconfig: %q}
nodePortAddresses: [%s]
nftables: {minSyncPeriod: %s, masqueradeAll: %t}
conntrack: {maxPerCore: 0, min: 0, tcpCloseWaitTimeout: 0s, tcpEstablishedTimeout: 0s}
`, o.Node, o.ClusterCIDR, o.Kubeconfig, quoted(o.NodePortAddresses), o.MinSyncPeriod, o.MasqueradeAll)
	path := filepath.Join(t.TempDir(), "kube-proxy.yaml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{program, "--config=" + path}
}

// quoted returns the words as items of a YAML list.
func quoted(words []string) string {
	var list []string
	for _, w := range words {
		list = append(list, strconv.Quote(w))
	}
	return strings.Join(list, ", ")
}
