// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import "flag"

// flags are the values of the command-line flags.
type flags struct {
	kubeconfig string
	nodeName   string
	health     string
	metrics    string
	cni        cniConfig
}

func parseFlags() (f flags) {
	flag.StringVar(&f.kubeconfig, "kubeconfig", "", "connect to the API server of this `file` (default: the pod's service account, else kubectl's configuration)")
	flag.StringVar(&f.nodeName, "node-name", "", "be the agent of the Node of this `name` (default $NODE_NAME, else the host's name)")
	flag.StringVar(&f.health, "healthz", "127.0.0.1:10256", "serve /healthz, /livez and /readyz on this `host:port`")
	flag.StringVar(&f.metrics, "metrics", "127.0.0.1:10249", "serve /metrics and /proxyMode on this `host:port`, as kube-proxy does")
	flag.StringVar(&f.cni.file, "cni-config", "/etc/cni/net.d/10-kpng.conflist", "write the CNI configuration to this `file`")
	flag.StringVar(&f.cni.plugin, "plugin", "bridge", "connect pods with this CNI `plugin`: bridge or ptp")
	flag.IntVar(&f.cni.mtu, "mtu", 1500, "the MTU of pods, in `bytes`")
	flag.Parse()
	return f
}
