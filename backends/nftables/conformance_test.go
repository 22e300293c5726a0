// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables_test

import (
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// TestConformance runs the cases of package conformance.
func TestConformance(t *testing.T) {
	conformance.Run(t, newSink, conformance.Options{Patience: *backendtest.Patience, Report: *backendtest.Report, Proxy: "kpng nftables"})
}

func newSink(site conformance.Site) (sink.Sink, error) {
	return backendtest.NewSink(site, func(addrs nodeaddr.Source, connections sink.Sink) (sink.Sink, error) {
		return nftables.New(nftables.Options{Options: backends.Options{
			Instance:            site.Instance,
			NodeAddresses:       addrs,
			Conntrack:           connections,
			Stats:               true,
			PodInterfaces:       []string{site.PodInterfaces + "*"},
			MasqueradeAll:       site.Masquerade == conformance.MasqueradeAll,
			MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside,
		}})
	})
}
