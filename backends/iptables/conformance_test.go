// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"testing"
	"time"

	"github.com/kpng-project/kpng/backends/conformance"
	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/healthcheck"
	"github.com/kpng-project/kpng/backends/iptables"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

var patience = flag.Duration("patience", 20*time.Second, "how long the conformance kit waits, longer on a slow machine")

// TestConformance runs the cases of package conformance with sets in flavour nft, and
// without sets in flavour legacy. So both flavours, and both ways to write frontends
// without endpoints, are tested.
func TestConformance(t *testing.T) {
	t.Run("nft", func(t *testing.T) { testConformance(t, iptables.NFT, false) })
	t.Run("legacy", func(t *testing.T) { testConformance(t, iptables.Legacy, true) })
}

func testConformance(t *testing.T, flavour iptables.Flavour, withoutIPSet bool) {
	conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
		addrs, err := nodeaddr.New(nodeaddr.Options{Selection: nodeaddr.Selection{CIDRs: site.NodePortCIDRs}})
		if err != nil {
			return nil, err
		}
		instance := fnv.New32a()
		instance.Write([]byte(site.Instance))
		backend, err := iptables.New(iptables.Options{
			Instance:            fmt.Sprintf("%06x", instance.Sum32()&0xffffff),
			Flavour:             flavour,
			WithoutIPSet:        withoutIPSet,
			NodeAddresses:       addrs,
			Conntrack:           conntrack.New(conntrack.Options{NodeAddrs: addrs}),
			PodInterfaces:       []string{site.PodInterfaces + "*"},
			MasqueradeAll:       site.Masquerade == conformance.MasqueradeAll,
			MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside,
		})
		return &node{backend, healthcheck.New(healthcheck.Options{Addrs: addrs})}, err
	}, conformance.Options{Patience: *patience})
}

// node is a backend and the health-check server that runs beside it on a node.
type node struct {
	*iptables.Backend
	health *healthcheck.Server
}

func (n *node) Start(ctx context.Context) error {
	return errors.Join(n.Backend.Start(ctx), n.health.Start(ctx))
}

func (n *node) Sync(ctx context.Context, c *sink.Changes) error {
	if err := n.health.Sync(ctx, c); err != nil {
		return err
	}
	return n.Backend.Sync(ctx, c)
}

func (n *node) Stop(ctx context.Context) error {
	return errors.Join(n.health.Stop(ctx), n.Backend.Stop(ctx))
}
