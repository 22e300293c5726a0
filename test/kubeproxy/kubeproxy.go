// SPDX-License-Identifier: Apache-2.0

// Package kubeproxy makes Kubernetes' own service proxy available to tests: what
// kpng's backends are measured against, and what their conformance kit is
// calibrated with.
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

// Options say how a kube-proxy is configured. What they do not say has
// kube-proxy's defaults.
type Options struct {
	// Kubeconfig is the path of a kubeconfig file of the cluster.
	Kubeconfig string
	// Node is the name of the node, which must exist in the cluster: kube-proxy
	// waits for its addresses.
	Node string
	// MinSyncPeriod is the least time between two syncs; 0 is kube-proxy's
	// default, a second.
	MinSyncPeriod time.Duration
	// ClusterCIDR is where the pods are, as kube-proxy's configuration has it;
	// empty where there is no saying which traffic comes from pods.
	ClusterCIDR string
	// NodePortAddresses are the networks of the node's addresses at which node
	// ports are served; kube-proxy's default is its primary addresses.
	NodePortAddresses []string
	// MasqueradeAll gives all connections to cluster IPs the node's address.
	MasqueradeAll bool
}

// Command returns the program, which is built if it is not yet, and arguments
// that make it a proxy in nftables mode. It has to run as root, or with
// CAP_NET_ADMIN, in the network namespace of the node, from where it reaches
// the API server; it listens there on 127.0.0.1:10249 and :10256.
func Command(t testing.TB, o Options) []string {
	t.Helper()
	program, err := gotool.Build(t.Context(), gotool.KubeProxy)
	if err != nil {
		t.Fatal(err)
	}
	// The limits of connection tracking are the machine's and not a namespace's.
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

// quoted returns the words as the items of a list in YAML.
func quoted(words []string) string {
	var list []string
	for _, w := range words {
		list = append(list, strconv.Quote(w))
	}
	return strings.Join(list, ", ")
}
