// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs_test

import (
	"context"
	"errors"
	"flag"
	"os/exec"
	"testing"
	"time"

	"github.com/kpng-project/kpng/backends/conformance"
	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/healthcheck"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

var patience = flag.Duration("patience", 20*time.Second, "how long the conformance kit waits, longer on a slow machine")

// TestConformance runs the cases of package conformance. It needs a kernel with IPVS:
//
//	CGO_ENABLED=0 go build -C test -o /tmp/kernel ./kernel
//	go test -exec /tmp/kernel ./backends/ipvs -patience 3m
func TestConformance(t *testing.T) {
	needIPVS(t)
	conformance.Run(t, newSink, conformance.Options{
		Patience: *patience,
		Unsupported: map[conformance.Feature]string{
			conformance.AllPorts:                "a virtual server has one protocol and port",
			conformance.AffinityAcrossFrontends: "each virtual server has its own affinity",
		},
		Exceptions: map[string]string{
			"with both policies Local, the node's own connections ignore them only at external addresses": "no virtual server has the list of all endpoints",
			"affinity ends only when a client has made no new connection for the timeout":                 "IPVS keeps the affinity until the client's closed connections have left its table, for two minutes",
			"each port of a service has its own affinity":                                                 "the scheduler rr takes turns in the same order at each port",
			"established TCP connections continue when their endpoint or service is removed":              "IPVS forgets the connections of a removed virtual server",
		},
		Setup: func(t *testing.T, _ conformance.Site) { modprobe(t, "ip_vs") },
	})
}

// needIPVS skips a test if the kernel has no module ip_vs.
func needIPVS(t *testing.T) {
	if exec.Command("modprobe", "--dry-run", "ip_vs").Run() != nil {
		t.Skip("the kernel has no IPVS; run this test with test/kernel")
	}
}

// modprobe loads a kernel module.
func modprobe(t *testing.T, name string) {
	t.Helper()
	if out, err := exec.Command("modprobe", name).CombinedOutput(); err != nil {
		t.Fatalf("modprobe %s: %v\n%s", name, err, out)
	}
}

func newSink(site conformance.Site) (sink.Sink, error) {
	addrs, err := nodeaddr.New(nodeaddr.Options{Selection: nodeaddr.Selection{CIDRs: site.NodePortCIDRs}})
	if err != nil {
		return nil, err
	}
	backend, err := ipvs.New(ipvs.Options{
		Instance:            site.Instance,
		Interface:           site.Instance,
		NodeAddresses:       addrs,
		Conntrack:           conntrack.New(conntrack.Options{NodeAddrs: addrs}),
		PodInterfaces:       []string{site.PodInterfaces + "*"},
		MasqueradeAll:       site.Masquerade == conformance.MasqueradeAll,
		MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside,
	})
	return &node{backend, healthcheck.New(healthcheck.Options{Addrs: addrs})}, err
}

// node is a backend and the health-check server that runs beside it on a node.
type node struct {
	*ipvs.Backend
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
