// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"testing"

	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/reconcile"
	"github.com/kpng-project/kpng/sink"
)

func TestConformance(t *testing.T) {
	conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
		return reconcile.New(dataplane{site.Instance}, reconcile.Options[string, chain]{Equal: equal}), nil
	}, conformance.Options{
		Unsupported: map[conformance.Feature]string{
			conformance.NodePorts:          "a map of node ports is missing",
			conformance.AllPorts:           "a map of addresses without ports is missing",
			conformance.RejectUnknownPorts: "a set of cluster IPs is missing",
			conformance.SourceRanges:       "frontends with source ranges are not served",
			conformance.Affinity:           "each connection gets any endpoint",
			conformance.ShortCircuitPods:   "pods of this node are not distinguished from other sources",
			conformance.Masquerade:         "there is no such option",
			conformance.FlowCleanup:        "package node does it",
			conformance.HealthChecks:       "package node serves them",
		},
	})
}
