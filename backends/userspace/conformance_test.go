// SPDX-License-Identifier: Apache-2.0

//go:build linux

package userspace_test

import (
	"hash/fnv"
	"strconv"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

func TestConformance(t *testing.T) {
	conformance.Run(t, func(site conformance.Site) (sink.Sink, error) {
		instance := fnv.New32a()
		instance.Write([]byte(site.Instance))
		return backendtest.NewSink(site, func(addrs nodeaddr.Source, _ sink.Sink) (sink.Sink, error) {
			return userspace.New(userspace.Options{
				Options: backends.Options{
					Instance:      strconv.Itoa(100 + int(instance.Sum32()%80)),
					ClusterCIDRs:  site.PodCIDRs,
					NodeAddresses: addrs,
					Stats:         true,
				},
				AddAddresses: true,
			})
		})
	}, conformance.Options{Patience: *backendtest.Patience, Report: *backendtest.Report, Proxy: "kpng userspace", Unsupported: map[conformance.Feature]string{
		conformance.SCTP:               "Go has no SCTP sockets",
		conformance.AllPorts:           "a socket listens on one port",
		conformance.SourceAddress:      "an endpoint sees the proxy as its client",
		conformance.Masquerade:         "an endpoint sees the proxy as its client, with any option",
		conformance.Restart:            "connections go through the process",
		conformance.RangesBeforeReject: "the host rejects all clients where the backend does not listen",
		conformance.EndpointRefusals:   "the client is connected before an endpoint refuses; UDP refusals are not forwarded",
	}})
}
