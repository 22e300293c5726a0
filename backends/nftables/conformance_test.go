// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables_test

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

// TestConformance runs the cases of package conformance.
func TestConformance(t *testing.T) {
	conformance.Run(t, newSink, conformance.Options{Patience: *patience})
}

func newSink(site conformance.Site) (sink.Sink, error) {
	addrs, err := nodeaddr.New(nodeaddr.Options{Selection: nodeaddr.Selection{CIDRs: site.NodePortCIDRs}})
	if err != nil {
		return nil, err
	}
	backend, err := nftables.New(nftables.Options{
		Instance:            site.Instance,
		NodeAddresses:       addrs,
		Conntrack:           conntrack.New(conntrack.Options{NodeAddrs: addrs}),
		PodInterfaces:       []string{site.PodInterfaces + "*"},
		MasqueradeAll:       site.Masquerade == conformance.MasqueradeAll,
		MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside,
	})
	return &node{backend, healthcheck.New(healthcheck.Options{Addrs: addrs})}, err
}

// node is a sink that consists of a backend and a health-check server.
type node struct {
	*nftables.Backend
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
