// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/backends/userspace"
	windows "github.com/kpng-project/kpng/backends/windows/userspace"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spf13/pflag"
	"go.uber.org/goleak"
)

// withFlags gives p a command line.
func withFlags(t *testing.T, p *Proxy, args ...string) *Proxy {
	t.Helper()
	fs := pflag.NewFlagSet("userspace", pflag.ContinueOnError)
	p.Register(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestFlagsBecomeOptions(t *testing.T) {
	for _, tc := range []struct {
		name string
		args []string
		want userspace.Options
	}{
		{"none", nil, userspace.Options{NodePorts: nodeaddr.Selection{Primary: true}}},
		{"everything", []string{
			"--node-port-addresses=all,192.168.0.1/16", "--pod-cidr=10.1.2.3/16,fd01::/48", "--drain-timeout=1s", "--udp-timeout=2s", "--max-udp-clients=3",
		}, userspace.Options{
			NodePorts:    nodeaddr.Selection{All: true, CIDRs: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16")}},
			PodCIDRs:     []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd01::/48")},
			DrainTimeout: time.Second, UDPTimeout: 2 * time.Second, MaxUDPClients: 3,
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := withFlags(t, New(nil), tc.args...)
			got, err := p.options()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
			if len(p.Beside(nil)) != 1 {
				t.Error("health checks are not answered")
			}
		})
	}
	if beside := withFlags(t, New(nil), "--no-health-checks").Beside(nil); len(beside) > 0 {
		t.Errorf("there is %v beside the backend, which was not asked for", beside)
	}
}

func TestFlagsOfWindowsBecomeOptions(t *testing.T) {
	folder := t.TempDir()
	p := withFlags(t, NewWindows(), "--interface=svc0", "--state-file="+folder, "--address-timeout=1s")
	if diff := cmp.Diff(&windows.Options{Interface: "svc0", StateFile: folder, Timeout: time.Second}, p.netsh); diff != "" {
		t.Errorf("options (-want +got):\n%s", diff)
	}
	opts, err := p.options()
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"svc0"}; !slices.Equal(opts.ExcludeInterfaces, want) {
		t.Errorf("node ports are not served on %q, want %q", opts.ExcludeInterfaces, want)
	}
	if err := opts.Addresses.Cleanup(t.Context()); err == nil {
		t.Error("nothing was made of the options: the state file is a folder")
	}
}

func TestFlagsThatMakeNoSenseAreToldAtTheStart(t *testing.T) {
	for _, arg := range []string{"--node-port-addresses=eth0", "--pod-cidr=10.1.0.0", "--drain-timeout=-1s", "--address-timeout=-2s"} {
		p := withFlags(t, NewWindows(), arg, "--state-file="+filepath.Join(t.TempDir(), "f"))
		value := arg[strings.Index(arg, "=")+1:]
		if beside := p.Beside(nil); len(beside) > 0 {
			t.Errorf("%s: there is %v beside a backend that is none", arg, beside)
		}
		if n := testutil.CollectAndCount(p, "kpng_userspace_connections_total"); n != 0 {
			t.Errorf("%s: %d ports have metrics", arg, n)
		}
		for what, err := range map[string]error{"Start": p.Start(t.Context()), "Cleanup": p.Cleanup(t.Context())} {
			if err == nil || !strings.Contains(err.Error(), value) {
				t.Errorf("%s: %s returns %v, which does not say what is wrong", arg, what, err)
			}
		}
	}
}

func TestConnectionsAreProxiedAndCounted(t *testing.T) {
	defer goleak.VerifyNone(t)
	pod, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer pod.Close()
	go func() {
		for {
			c, err := pod.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, "hello")
			c.Close()
		}
	}()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(free.Addr().String())
	free.Close()

	p := withFlags(t, New(nil))
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(p)
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	view := nodeview.View(&api.ServiceState{
		Service: &api.Service{
			Namespace: "default", Name: "web", Type: api.ClusterIP,
			IPs:   api.ServiceIPs{ClusterIPs: api.NewIPSet(at.Addr())},
			Ports: []api.PortMapping{{Protocol: api.TCP, Port: int32(at.Port()), TargetPort: 8080}},
		},
		Slices: []*api.EndpointSlice{{
			Namespace: "default", Name: "web", ServiceName: "web", Family: api.IPv4,
			Ports:     []api.EndpointPort{{Protocol: api.TCP, Port: int32(pod.Addr().(*net.TCPAddr).Port)}},
			Endpoints: []api.SliceEndpoint{{Addr: at.Addr(), Conditions: api.Conditions{Ready: true, Serving: true}}},
		}},
	}, &api.Node{Name: "this-node"})
	changes := slices.Values([]sink.Change{{Key: view.Key(), New: view}})
	if err := p.Sync(t.Context(), &sink.Changes{First: true, Last: true, Services: changes}); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(c); err != nil || string(text) != "hello" {
		t.Errorf("the service says %q, error %v", text, err)
	}
	c.Close()
	if err := testutil.GatherAndCompare(registry, strings.NewReader(fmt.Sprintf(`
# HELP kpng_userspace_connections_total TCP connections and UDP clients that came.
# TYPE kpng_userspace_connections_total counter
kpng_userspace_connections_total{namespace="default",port="%d",protocol="TCP",service="web"} 1
# HELP kpng_healthcheck_ports_open Health-check node ports that are listened on, once for each node address.
# TYPE kpng_healthcheck_ports_open gauge
kpng_healthcheck_ports_open 0
`, at.Port())), "kpng_userspace_connections_total", "kpng_healthcheck_ports_open"); err != nil {
		t.Error(err)
	}
	if got := p.StopTimeout(); got <= 30*time.Second {
		t.Errorf("it gets %v to stop, and lets connections drain for 30 s", got)
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if c, err := net.Dial("tcp", at.String()); err == nil {
		c.Close()
		t.Error("the proxy has stopped, and the service is still served")
	}
}
