// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ebpf

import (
	"context"
	"errors"
	"flag"
	"testing"
	"time"

	"github.com/kpng-project/kpng/backends/conformance"
	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/healthcheck"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

var patience = flag.Duration("patience", 20*time.Second, "how long the conformance kit waits, longer on a slow machine")

// TestConformance runs the cases of package conformance. The programs are attached to the
// cgroup of the node and its pods.
func TestConformance(t *testing.T) {
	bpffs := mountBPFFS(t)
	makeSink := func(site conformance.Site) (sink.Sink, error) {
		if site.Cgroup == "" {
			return nil, errors.New("the kit has made no cgroup, and the default is the root of this machine")
		}
		addrs, err := nodeaddr.New(nodeaddr.Options{Selection: nodeaddr.Selection{CIDRs: site.NodePortCIDRs}})
		if err != nil {
			return nil, err
		}
		proxy, err := nftables.New(nftables.Options{
			Instance:            site.Instance,
			NodeAddresses:       addrs,
			Conntrack:           conntrack.New(conntrack.Options{NodeAddrs: addrs}),
			PodInterfaces:       []string{site.PodInterfaces + "*"},
			MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside,
		})
		if err != nil {
			return nil, err
		}
		backend, err := New(proxy, Options{Instance: site.Instance, Cgroup: site.Cgroup, BPFFS: bpffs, MaxFrontends: 4096, MaxEndpoints: 1 << 14, MaxMembers: 1 << 14, MaxClients: 4096})
		return &nodeSink{backend, healthcheck.New(healthcheck.Options{Addrs: addrs})}, err
	}
	conformance.Run(t, makeSink, conformance.Options{
		Patience: *patience,
		Cgroup:   true,
		Exceptions: map[string]string{
			"an endpoint that connects to itself through its service sees an address of the node": "at a cluster IP, the connection does not leave the pod, and needs no masquerading",
			"at a cluster IP, all connections get an address of the node if so configured":        "the backend has no such option",
		},
	})
}

// nodeSink is a backend and the health-check server that runs beside it on a node.
type nodeSink struct {
	*Backend
	health *healthcheck.Server
}

func (n *nodeSink) Start(ctx context.Context) error {
	return errors.Join(n.Backend.Start(ctx), n.health.Start(ctx))
}

func (n *nodeSink) Sync(ctx context.Context, c *sink.Changes) error {
	if err := n.health.Sync(ctx, c); err != nil {
		return err
	}
	return n.Backend.Sync(ctx, c)
}

func (n *nodeSink) Stop(ctx context.Context) error {
	return errors.Join(n.health.Stop(ctx), n.Backend.Stop(ctx))
}
