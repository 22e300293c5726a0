// SPDX-License-Identifier: Apache-2.0

package program

import (
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/internal/hns/fakehns"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spf13/pflag"
	"go.uber.org/goleak"
)

func TestFlagsOfKernelspace(t *testing.T) {
	fakehns.Use(t, fakehns.New(fakehns.AllFeatures()))
	t.Setenv("KUBE_NETWORK", "l2bridge")
	t.Setenv("ProgramData", "/data")
	addr := netip.MustParseAddr
	addresses := cmp.Transformer("Addresses", func(s nodeaddr.Source) []netip.Addr {
		if s == nil {
			return nil
		}
		list, _ := s.Addresses()
		return list
	})
	for _, tc := range []struct {
		name string
		args []string
		want kernelspace.Options
	}{
		{"the environment names the network and the folder", nil, kernelspace.Options{
			Options: backends.Options{Instance: "kpng"}, Network: "l2bridge", StateFile: filepath.FromSlash("/data/kpng/kernelspace.journal"), HealthzPort: 10256,
		}},
		{"everything", []string{
			"--network=vxlan", "--instance=mine", "--state-file=mine.json", "--enable-dsr", "--source-vip=10.1.1.250,fd00::250",
			"--node-ip=192.168.0.1", "--node-ip=fd00:192::1", "--host-mac=00-15-5d-01-02-03",
			"--forward-healthcheck-vip", "--forward-healthcheck-port=10257", "--root-hnsendpoint-name=root",
		}, kernelspace.Options{
			Options: backends.Options{Instance: "mine", NodeAddresses: nodeaddr.Of(addr("192.168.0.1"), addr("fd00:192::1"))},
			Network: "vxlan", StateFile: "mine.json", EnableDSR: true, HostMAC: "00-15-5d-01-02-03",
			HealthzPort: 10257, RootEndpoint: "root", SourceVIPs: []netip.Addr{addr("10.1.1.250"), addr("fd00::250")},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := kernelspaceFlags{}
			fs := pflag.NewFlagSet("kernelspace", pflag.ContinueOnError)
			f.register(fs)
			if err := fs.Parse(tc.args); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, f.complete(), cmpopts.EquateComparable(netip.Addr{}), addresses); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
			if len(mustConfigure(t, Kernelspace(), tc.args...).Parts().Beside) != 1 {
				t.Error("no health checks are served")
			}
		})
	}
	if others := mustConfigure(t, Kernelspace(), "--no-health-checks").Parts().Beside; len(others) > 0 {
		t.Errorf("unexpected companions %v of the backend", others)
	}
	if _, err := configured(t, Kernelspace(), "--node-ip=10.0.0"); err == nil {
		t.Error("an invalid address is accepted")
	}
}

func TestLoadBalancersStayUntilCleanup(t *testing.T) {
	defer goleak.VerifyNone(t)
	fake := fakehns.New(fakehns.AllFeatures())
	fakehns.Use(t, fake)
	fake.AddNetwork(hns.Network{Name: "pods"})
	args := []string{"--network=pods", "--state-file=" + filepath.Join(t.TempDir(), "kpng.json")}
	backend, _ := sink.As[*command.Backend](Kernelspace())
	registry := prometheus.NewPedanticRegistry()
	var err error
	if backend.Metrics, err = metrics.New(registry, metrics.Options{}); err != nil {
		t.Fatal(err)
	}
	p := mustConfigure(t, backend, args...)
	registry.MustRegister(p.Parts().Collectors...)

	stopper, _ := sink.As[sink.Stopper](p)
	starter, _ := sink.As[sink.Starter](p)
	if err := starter.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	view := sinktest.View(sinktest.Node("this-node"), sinktest.Service("web", "10.96.0.1 80>8080"), "10.1.2.1")
	changes := slices.Values([]sink.Change{{Key: view.Key(), New: view}})
	if err := p.Sync(t.Context(), &sink.Changes{First: true, Last: true, Services: changes}); err != nil {
		t.Fatal(err)
	}
	if err := testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP kpng_hns_load_balancers Load balancers that HNS has for kpng.
# TYPE kpng_hns_load_balancers gauge
kpng_hns_load_balancers 1
# HELP kpng_hns_endpoints Endpoints that HNS has for kpng.
# TYPE kpng_hns_endpoints gauge
kpng_hns_endpoints 1
`), "kpng_hns_load_balancers", "kpng_hns_endpoints"); err != nil {
		t.Error(err)
	}
	if n, _ := testutil.GatherAndCount(registry, "kpng_hns_call_duration_seconds"); n == 0 {
		t.Error("no HNS call is counted")
	}
	if n, _ := testutil.GatherAndCount(registry, "kpng_hns_call_failures_total"); n != 0 {
		t.Error("a failed HNS call is counted")
	}
	if err := verify(t.Context(), p); err != nil {
		t.Error(err)
	}
	if err := stopper.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if !strings.Contains(fake.Dump(), "load balancer 10.96.0.1") {
		t.Errorf("HNS after the end of the program:\n%s", fake.Dump())
	}
	if err := mustConfigure(t, Kernelspace(), args...).Cleanup(t.Context()); err != nil {
		t.Error(err)
	}
	if left := fake.Dump(); left != "" {
		t.Errorf("HNS after Cleanup:\n%s", left)
	}
}

func TestEachKernelspaceInstanceHasItsStateFile(t *testing.T) {
	t.Setenv("ProgramData", "/data")
	for instance, want := range map[string]string{"kpng": "/data/kpng/kernelspace.journal", "beside": "/data/kpng/kernelspace-beside.journal"} {
		if got := kernelspaceStateFile(instance); got != filepath.FromSlash(want) {
			t.Errorf("instance %s: %s, want %s", instance, got, want)
		}
	}
}
