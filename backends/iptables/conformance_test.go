// SPDX-License-Identifier: Apache-2.0

//go:build linux

package iptables_test

import (
	"fmt"
	"hash/fnv"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/iptables"
	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// TestConformance runs the cases of package conformance with sets in flavour nft, and
// without sets in flavour legacy. So both flavours, and both ways to write frontends
// without endpoints, are tested.
func TestConformance(t *testing.T) {
	t.Run("nft", func(t *testing.T) { testConformance(t, "nft", false) })
	t.Run("legacy", func(t *testing.T) { testConformance(t, "legacy", true) })
}

func testConformance(t *testing.T, flavour string, withoutIPSet bool) {
	conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
		instance := fnv.New32a()
		instance.Write([]byte(site.Instance))
		return backendtest.NewSink(site, func(addrs nodeaddr.Source, connections sink.Sink) (sink.Sink, error) {
			return iptables.New(iptables.Options{Options: backends.Options{
				Instance:            fmt.Sprintf("%06x", instance.Sum32()&0xffffff),
				NodeAddresses:       addrs,
				Conntrack:           connections,
				Stats:               true,
				PodInterfaces:       []string{site.PodInterfaces + "*"},
				MasqueradeAll:       site.Masquerade == conformance.MasqueradeAll,
				MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside,
			}, Flavour: flavour, WithoutIPSet: withoutIPSet})
		})
	}, conformance.Options{Patience: *backendtest.Patience, Report: *backendtest.Report, Proxy: "kpng iptables"})
}
