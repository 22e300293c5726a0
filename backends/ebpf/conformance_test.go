// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"errors"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// TestConformance runs the cases of package conformance. The programs are attached to the
// cgroup of the node and its pods.
func TestConformance(t *testing.T) {
	bpffs := mountBPFFS(t)
	makeSink := func(site conformance.Site) (sink.Sink, error) {
		if site.Cgroup == "" {
			return nil, errors.New("the kit has made no cgroup, and the default is the root of this machine")
		}
		return backendtest.NewSink(site, func(addrs nodeaddr.Source, connections sink.Sink) (sink.Sink, error) {
			proxy, err := nftables.New(nftables.Options{Options: backends.Options{
				Instance:            site.Instance,
				NodeAddresses:       addrs,
				Conntrack:           connections,
				Stats:               true,
				PodInterfaces:       []string{site.PodInterfaces + "*"},
				MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside,
			}})
			if err != nil {
				return nil, err
			}
			return New(proxy, Options{Options: backends.Options{Instance: site.Instance, NodeAddresses: addrs, Stats: true}, Cgroup: site.Cgroup, BPFFS: bpffs, MaxFrontends: 4096, MaxEndpoints: 1 << 14, MaxMembers: 1 << 14, MaxClients: 4096})
		})
	}
	conformance.Run(t, makeSink, conformance.Options{
		Patience: *backendtest.Patience,
		Report:   *backendtest.Report,
		Proxy:    "kpng ebpf",
		Cgroup:   true,
		Exceptions: map[string]string{
			"an endpoint that connects to itself through its service sees an address of the node":                        "the connection does not leave the pod, whose network namespace has no address of the node",
			"at external addresses with policy Cluster, connections of the node and its pods get an address of the node": "a socket in a pod cannot have an address of the node, and replies reach it without one",
			"a request for resets does not end connections to ready endpoints":                                           "the backend cannot find sockets of pods that connected before the request, because sock_diag finds only sockets of one network namespace",
			"at a cluster IP, all connections get an address of the node if so configured":                               "a socket in a pod cannot have an address of the node, so the backend has no such option",
		},
	})
}
