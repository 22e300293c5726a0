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
		Setup:    func(t *testing.T, _ conformance.Site) { modprobe(t, "ip_vs") },
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
