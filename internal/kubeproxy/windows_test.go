// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"testing"

	"github.com/spf13/pflag"
)

// On Windows, kube-proxy has only the mode kernelspace.
func TestModesOfWindows(t *testing.T) {
	for config, accepted := range map[string]bool{
		"":                  true,
		"mode: kernelspace": true,
		"mode: kernelspace\nwinkernel: {networkName: Calico, enableDSR: true}\nfeatureGates: {WinDSR: true}": true,
		"mode: iptables": false,
		"mode: nftables": false,
		"mode: kernelspace\niptables: {syncPeriod: 1s, minSyncPeriod: 2s}": false,
		"clusterCIDR: x":     true, // without detectLocalMode, kube-proxy does not use clusterCIDR on Windows
		"bindAddress: 1.2.3": false,
	} {
		config = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" + config
		tr := &translation{flags: pflag.NewFlagSet("", pflag.ContinueOnError), backend: "kernelspace", windows: true}
		if err := tr.apply([]byte(config)); (err == nil) != accepted {
			t.Errorf("%s: error %v, want one: %t", config, err, !accepted)
		}
	}
}
