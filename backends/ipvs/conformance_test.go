// SPDX-License-Identifier: Apache-2.0

//go:build linux

package ipvs_test

import (
	"os/exec"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/kpng-project/kpng/conformance"
	"github.com/kpng-project/kpng/internal/backendtest"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
)

// TestConformance runs the cases of package conformance. It needs a kernel with IPVS:
//
//	CGO_ENABLED=0 go build -C test -o /tmp/kernel ./kernel
//	go test -exec /tmp/kernel ./backends/ipvs -patience 3m
func TestConformance(t *testing.T) {
	needIPVS(t)
	conformance.Run(t, newSink, conformance.Options{
		Patience: *backendtest.Patience,
		Report:   *backendtest.Report,
		Proxy:    "kpng ipvs",
		Unsupported: map[conformance.Feature]string{
			conformance.AllPorts:                "a virtual server has one protocol and port",
			conformance.AffinityAcrossFrontends: "each virtual server has its own affinity",
		},
		Exceptions: map[string]string{
			"with both policies Local, the node's own connections ignore them only at external addresses": "no virtual server has the list of all endpoints",
			"affinity ends only when a client has made no new connection for the timeout":                 "IPVS keeps the affinity until the client's closed connections have left its table, for two minutes",
			"each port of a service has its own affinity":                                                 "the scheduler rr takes turns in the same order at each port",
			"established TCP connections continue when their endpoint or service is removed":              "IPVS forgets the connections of a removed virtual server",
			"connections continue when their service with resets is deleted":                              "IPVS forgets the connections of a removed virtual server",
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
	return backendtest.NewSink(site, func(addrs nodeaddr.Source, connections sink.Sink) (sink.Sink, error) {
		return ipvs.New(ipvs.Options{Options: backends.Options{
			Instance: site.Instance, NodeAddresses: addrs, Conntrack: connections, Stats: true,
			PodInterfaces:       []string{site.PodInterfaces + "*"},
			MasqueradeAll:       site.Masquerade == conformance.MasqueradeAll,
			MasqueradeOutsiders: site.Masquerade == conformance.MasqueradeOutside,
		}, Interface: site.Instance})
	})
}
