// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"testing"

	"github.com/kpng-project/kpng/backends/conformance"
	"github.com/kpng-project/kpng/sink"
)

func TestConformance(t *testing.T) {
	conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
		return sink.FullStateOf(&backend{table: site.Instance, nodePorts: site.NodePortCIDRs}), nil
	}, conformance.Options{
		Unsupported: map[conformance.Feature]string{
			conformance.Affinity:         "each connection gets any endpoint",
			conformance.ShortCircuitPods: "pods of this node are not told from other sources",
			conformance.Masquerade:       "there is no such option",
			conformance.FlowCleanup:      "package conntrack does it",
			conformance.HealthChecks:     "package healthcheck serves them",
		},
	})
}
