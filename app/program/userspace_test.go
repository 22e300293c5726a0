// SPDX-License-Identifier: Apache-2.0

package program

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spf13/pflag"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/types"
)

func TestFlagsOfUserspace(t *testing.T) {
	for _, tc := range []struct {
		name      string
		args      []string
		want      userspace.Options
		nodePorts nodeaddr.Selection
	}{
		{"none", nil, userspace.Options{AddAddresses: true}, nodeaddr.Selection{"primary"}},
		{"everything", []string{
			"--add-addresses=false", "--interface=svc0", "--state-file=f", "--node-port-addresses=all,192.168.0.1/16", "--pod-cidr=10.1.2.3/16,fd01::/48",
			"--drain-timeout=1s", "--udp-timeout=2s", "--max-udp-clients=3", "--max-listeners=4",
		}, userspace.Options{
			Options:   backends.Options{ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd01::/48")}},
			Interface: "svc0", StateFile: "f",
			DrainTimeout: time.Second, UDPTimeout: 2 * time.Second, MaxUDPClients: 3, MaxListeners: 4,
		}, nodeaddr.Selection{"all", "192.168.0.1/16"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got userspace.Options
			var nodePorts nodeaddr.Selection
			fs := pflag.NewFlagSet("userspace", pflag.ContinueOnError)
			userspaceFlags(fs, &got, &nodePorts, &healthChecks{})
			if err := fs.Parse(tc.args); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.nodePorts, nodePorts); diff != "" {
				t.Errorf("addresses of node ports (-want +got):\n%s", diff)
			}
		})
	}
	if len(mustConfigure(t, Userspace()).Parts().Beside) != 1 {
		t.Error("no health checks are served")
	}
	if others := mustConfigure(t, Userspace(), "--no-health-checks").Parts().Beside; len(others) > 0 {
		t.Errorf("unexpected companions %v of the backend", others)
	}
}

func TestInvalidFlagsOfUserspace(t *testing.T) {
	for _, arg := range []string{"--node-port-addresses=eth0", "--pod-cidr=10.1.0.0", "--drain-timeout=-1s"} {
		b, err := configured(t, Userspace(), arg)
		if value := arg[strings.Index(arg, "=")+1:]; err == nil || !strings.Contains(err.Error(), value) {
			t.Errorf("%s: error %v does not name the problem", arg, err)
		}
		if n := len(b.Parts().Collectors); n != 0 {
			t.Errorf("%s: %d metrics", arg, n)
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

	p := mustConfigure(t, Userspace(), "--add-addresses=false")
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(p.Parts().Collectors...)
	stopper, _ := sink.As[sink.Stopper](p)
	starter, _ := sink.As[sink.Starter](p)
	if err := starter.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	svc := sinktest.Service("web", fmt.Sprintf("%s %d>%d", at.Addr(), at.Port(), pod.Addr().(*net.TCPAddr).Port))
	view := sinktest.View(sinktest.Node("this-node"), svc, at.Addr().String())
	changes := slices.Values([]sink.Change{{Key: view.Key(), New: view}})
	if err := p.Sync(t.Context(), &sink.Changes{First: true, Last: true, Services: changes}); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(c); err != nil || string(text) != "hello" {
		t.Errorf("the service answered %q, error %v", text, err)
	}
	c.Close()
	if err := testutil.GatherAndCompare(registry, strings.NewReader(fmt.Sprintf(`
# HELP kpng_userspace_connections_total TCP connections and UDP clients that came.
# TYPE kpng_userspace_connections_total counter
kpng_userspace_connections_total{namespace="default",port="%d",protocol="TCP",service="web"} 1
`, at.Port())), "kpng_userspace_connections_total"); err != nil {
		t.Error(err)
	}
	if s, ok := sink.As[interface{ StopTimeout() time.Duration }](p); !ok || s.StopTimeout() <= 30*time.Second {
		t.Error("the time limit of Stop is at most 30 s, but connections drain for 30 s")
	}
	if err := stopper.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if c, err := net.Dial("tcp", at.String()); err == nil {
		c.Close()
		t.Error("the service is still served after the proxy stopped")
	}
}

// onePort has the statistics of one port.
type onePort struct{}

func (onePort) PortStats(f func(service types.NamespacedName, protocol api.Protocol, port int32, connections, active, dialFailures, sent, received int64)) {
	f(types.NamespacedName{Namespace: "default", Name: "web"}, api.TCP, 80, 5, 2, 1, 100, 200)
}

func TestEachPortHasMetrics(t *testing.T) {
	const want = `
# HELP kpng_userspace_connections_active TCP connections and UDP clients that have not ended.
# TYPE kpng_userspace_connections_active gauge
kpng_userspace_connections_active{namespace="default",port="80",protocol="TCP",service="web"} 2
# HELP kpng_userspace_connections_total TCP connections and UDP clients that came.
# TYPE kpng_userspace_connections_total counter
kpng_userspace_connections_total{namespace="default",port="80",protocol="TCP",service="web"} 5
# HELP kpng_userspace_dial_failures_total Times that an endpoint did not take a connection or a datagram.
# TYPE kpng_userspace_dial_failures_total counter
kpng_userspace_dial_failures_total{namespace="default",port="80",protocol="TCP",service="web"} 1
# HELP kpng_userspace_received_bytes_total Bytes received from endpoints.
# TYPE kpng_userspace_received_bytes_total counter
kpng_userspace_received_bytes_total{namespace="default",port="80",protocol="TCP",service="web"} 200
# HELP kpng_userspace_sent_bytes_total Bytes sent to endpoints.
# TYPE kpng_userspace_sent_bytes_total counter
kpng_userspace_sent_bytes_total{namespace="default",port="80",protocol="TCP",service="web"} 100
`
	if err := testutil.CollectAndCompare(newPortMetrics("userspace", onePort{}), strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
