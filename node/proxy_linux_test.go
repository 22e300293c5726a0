// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ebpf"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/backends/ovs"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/node"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// inNamespace runs the test in a second process. In the second process, it returns false.
// The network namespace of that process has the interface eth0 with the addresses of the
// node and of its pods. In the first process, inNamespace returns true when the second
// process has ended.
func inNamespace(t *testing.T) (done bool) {
	t.Helper()
	const inside = "KPNG_TEST_INSIDE"
	if os.Getenv(inside) != "" {
		return false
	}
	n := netnstest.New(t)
	n.Stub(t, "eth0")
	for _, addr := range []string{"192.0.2.1/24", "10.1.0.1/32", "10.1.0.2/32"} {
		n.Add(t, "eth0", addr)
	}
	n.Route(t, "default", "192.0.2.254", "eth0")
	n.Set(t, "ipv4/ip_forward=0", "netfilter/nf_conntrack_tcp_timeout_established=100000")
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1")
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	ended, err := n.Start(cmd)
	if err == nil {
		err = <-ended
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	return true
}

// manifests returns services. The only endpoint of each service is a pod of this node.
func manifests(pod string) string {
	const object = `
apiVersion: v1
kind: Service
metadata: {name: %[1]s, namespace: default}
spec: {type: %[2]s, clusterIP: %[3]s, clusterIPs: [%[3]s], ipFamilies: [IPv4], ports: [{protocol: %[4]s, port: %[5]d, targetPort: %[6]d}]%[7]s}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-1, namespace: default, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
ports: [{protocol: %[4]s, port: %[6]d}]
endpoints: [%[8]s]
---
`
	endpoint := ""
	if pod != "" {
		endpoint = fmt.Sprintf("{addresses: [%s], nodeName: here, conditions: {ready: true, serving: true}}", pod)
	}
	return fmt.Sprintf(object, "web", "LoadBalancer", "10.96.0.1", "TCP", 80, 8080, ", externalTrafficPolicy: Local, healthCheckNodePort: 30100", endpoint) +
		fmt.Sprintf(object, "dns", "ClusterIP", "10.96.0.2", "UDP", 53, 5353, "", endpoint) +
		"apiVersion: v1\nkind: Node\nmetadata: {name: here}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.1}]}\n"
}

// cluster is a file of manifests.
type cluster string

func newCluster(t *testing.T) cluster {
	c := cluster(filepath.Join(t.TempDir(), "cluster.yaml"))
	c.set(t, "10.1.0.1")
	return c
}

// set sets the pod that is the endpoint of all services.
func (c cluster) set(t *testing.T, pod string) {
	t.Helper()
	if err := os.WriteFile(string(c)+".new", []byte(manifests(pod)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(string(c)+".new", string(c)); err != nil {
		t.Fatal(err)
	}
}

// options returns the options of a proxy for the cluster.
func (c cluster) options() (opts node.Options) {
	opts.Manifests, opts.NodeName = string(c), "here"
	return opts
}

// run runs the proxy until the test ends.
func run(t *testing.T, p *node.Proxy) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	waiting, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	if err := p.WaitApplied(waiting); err != nil {
		t.Fatal(err)
	}
}

func newNFTables(t *testing.T, o backends.Options) backends.Dataplane {
	t.Helper()
	d, err := nftables.New(nftables.Options{Options: o})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func await(t *testing.T, what string, reached func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !reached(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 30 s", what)
		}
	}
}

func here(f func() error) error { return f() }

// startPods starts pods that answer with their addresses.
func startPods(t *testing.T) {
	for _, pod := range []string{"10.1.0.1", "10.1.0.2"} {
		netnstest.Listen(t, here, pod+":8080", func(c net.Conn) { fmt.Fprint(c, pod) })
		netnstest.Answer(t, here, pod+":5353", pod)
	}
}

// answer returns the answer of the service web.
func answer() string {
	c, err := net.DialTimeout("tcp", "10.96.0.1:80", time.Second)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Second))
	b, _ := io.ReadAll(c)
	return string(b)
}

// client returns a function that sends a request to the service dns, always from the same
// port, and returns the answer.
func client(t *testing.T) func() string {
	c, err := net.Dial("udp", "10.96.0.2:53")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return func() string {
		c.SetDeadline(time.Now().Add(time.Second))
		b := make([]byte, 100)
		_, err := c.Write([]byte("?"))
		n := 0
		if err == nil {
			n, err = c.Read(b)
		}
		if err != nil {
			return err.Error()
		}
		return string(b[:n])
	}
}

func healthCheck() int {
	r, err := http.Get("http://192.0.2.1:30100/")
	if err != nil {
		return 0
	}
	r.Body.Close()
	return r.StatusCode
}

// TestNode runs a proxy with nftables. It connects to services, and then moves their
// endpoint to another pod. A client that always uses the same source port must reach
// the new pod, too.
func TestNode(t *testing.T) {
	if inNamespace(t) {
		return
	}
	startPods(t)
	c := newCluster(t)
	m := &recorder{}
	opts := c.options()
	opts.Metrics = m
	p, err := node.New(opts, newNFTables(t, backends.Options{NodePodCIDRs: true, MasqueradeOutsiders: true}))
	if err != nil {
		t.Fatal(err)
	}
	run(t, p)
	if got := answer(); got != "10.1.0.1" {
		t.Errorf("the service answers %q", got)
	}
	request := client(t)
	await(t, "the first pod answers", func() bool { return request() == "10.1.0.1" })
	await(t, "health check with an endpoint", func() bool { return healthCheck() == http.StatusOK })
	c.set(t, "10.1.0.2")
	await(t, "the second pod answers the same client", func() bool { return request() == "10.1.0.2" })
	c.set(t, "")
	await(t, "health check without endpoints", func() bool { return healthCheck() == http.StatusServiceUnavailable })
	for name, want := range map[string]int{"net.ipv4.ip_forward": 1, "net.netfilter.nf_conntrack_tcp_timeout_established": 86400} {
		if value, err := sysctl.Kernel.Read(name); err != nil || value != want {
			t.Errorf("%s is %d, error %v; want %d", name, value, err, want)
		}
	}
	for _, path := range []string{"/healthz", "/livez", "/readyz"} {
		if status := get(p.HealthHandler(), path); status != http.StatusOK {
			t.Errorf("%s answers with status %d", path, status)
		}
	}
	want := []string{"sink nftables", "backend nftables", "sink healthchecks", "conntrack", "health checks", "wrote", "deleted", "port open"}
	for _, event := range want {
		if !m.has(event) {
			t.Errorf("no event %q for metrics: %v", event, m.events)
		}
	}
}

func get(h http.Handler, path string) int {
	w := &response{}
	r, _ := http.NewRequest(http.MethodGet, path, nil)
	h.ServeHTTP(w, r)
	return w.status
}

type response struct {
	header http.Header
	status int
}

func (r *response) Header() http.Header {
	if r.header == nil {
		r.header = http.Header{}
	}
	return r.header
}
func (r *response) WriteHeader(status int) { r.status = status }
func (r *response) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	return len(b), nil
}

// recorder is a [node.Metrics] that records its events.
type recorder struct {
	mu     sync.Mutex
	events []string
}

func (r *recorder) add(event string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, event)
}

func (r *recorder) has(event string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Contains(r.events, event)
}

func (r *recorder) Sink(name string) sink.Observer {
	r.add("sink " + name)
	return sink.Observer{Synced: func(sink.SyncResult) { r.add("synced " + name) }}
}

func (r *recorder) Backend(name string) backends.Observer {
	r.add("backend " + name)
	return observer{r}
}

func (r *recorder) Conntrack() func(int, int, time.Duration, error) {
	r.add("conntrack")
	return func(_, deleted int, _ time.Duration, _ error) {
		if deleted > 0 {
			r.add("deleted")
		}
	}
}

func (r *recorder) HealthChecks() (func(int, int), func(types.NamespacedName, netip.AddrPort, error)) {
	r.add("health checks")
	return func(open, _ int) {
			if open == 1 {
				r.add("port open")
			}
		}, func(types.NamespacedName, netip.AddrPort, error) {
			r.add("port failed")
		}
}

type observer struct{ r *recorder }

func (o observer) Wrote(int, error)  { o.r.add("wrote") }
func (o observer) Holds(string, int) {}
func (o observer) Drifted(bool)      {}

// TestKernelSettingsAreReportedBesideKubeProxy checks that a proxy with a service-proxy name
// logs a wrong setting, and does not change it.
func TestKernelSettingsAreReportedBesideKubeProxy(t *testing.T) {
	if inNamespace(t) {
		return
	}
	opts := newCluster(t).options()
	opts.Services.ServiceProxyName = "other"
	p, err := node.New(opts, newNFTables(t, backends.Options{}))
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	var mu sync.Mutex
	logger := funcr.New(func(_, line string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintln(&log, line)
	}, funcr.Options{})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	if err := p.WaitSynced(ctx); err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for name, want := range map[string]int{"net.ipv4.ip_forward": 0, "net.netfilter.nf_conntrack_tcp_timeout_established": 100000} {
		if value, err := sysctl.Kernel.Read(name); err != nil || value != want {
			t.Errorf("%s is %d, error %v; want %d", name, value, err, want)
		}
	}
	if got := log.String(); !strings.Contains(got, "net.ipv4.ip_forward") || strings.Contains(got, "tcp_timeout_established") {
		t.Errorf("log %s\nwant only a report of ip_forward, because kube-proxy sets the others", got)
	}
}

// own stands for a sink of another module. It hides the sink inside it.
type own struct {
	hidden  backends.Dataplane
	started error
}

func (o *own) Start(ctx context.Context) error {
	if o.started != nil {
		return o.started
	}
	return o.hidden.Start(ctx)
}
func (o *own) Stop(ctx context.Context) error                  { return o.hidden.Stop(ctx) }
func (o *own) Sync(ctx context.Context, c *sink.Changes) error { return o.hidden.Sync(ctx, c) }

// TestOwnSinkGetsConnectionTracking runs a proxy with a sink that is not a backend of kpng.
// This sink itself keeps connections to removed endpoints.
func TestOwnSinkGetsConnectionTracking(t *testing.T) {
	if inNamespace(t) {
		return
	}
	startPods(t)
	c := newCluster(t)
	addrs, err := nodeaddr.Watch(t.Context(), nodeaddr.Options{})
	if err != nil {
		t.Fatal(err)
	}
	keep := sink.Func(func(context.Context, *sink.Changes) error { return nil })
	opts := c.options()
	opts.NodeAddresses = addrs
	p, err := node.New(opts, &own{hidden: newNFTables(t, backends.Options{Conntrack: keep, NodeAddresses: addrs, Sysctls: backends.IgnoreSysctls})})
	if err != nil {
		t.Fatal(err)
	}
	run(t, p)
	request := client(t)
	await(t, "the first pod answers", func() bool { return request() == "10.1.0.1" })
	c.set(t, "10.1.0.2")
	await(t, "the second pod answers the same client", func() bool { return request() == "10.1.0.2" })
	if value, err := sysctl.Kernel.Read("net.ipv4.ip_forward"); err != nil || value != 1 {
		t.Errorf("net.ipv4.ip_forward is %d, error %v; want 1", value, err)
	}
	if name := p.Status()[0].Name; name != "0" {
		t.Errorf("the dataplane has the name %q", name)
	}
}

// TestNodePortsOnLocalhost runs a proxy whose node ports are also at loopback addresses.
func TestNodePortsOnLocalhost(t *testing.T) {
	if inNamespace(t) {
		return
	}
	startPods(t)
	addrs, err := nodeaddr.Watch(t.Context(), nodeaddr.Options{Selection: nodeaddr.Selection{"primary", "localhost"}})
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t)
	const nodePort = `
apiVersion: v1
kind: Service
metadata: {name: local, namespace: default}
spec: {type: NodePort, clusterIP: 10.96.0.3, clusterIPs: [10.96.0.3], ipFamilies: [IPv4], externalTrafficPolicy: Local, ports: [{name: a, protocol: TCP, port: 80, targetPort: 8080, nodePort: 30080}, {name: b, protocol: UDP, port: 80, targetPort: 5353, nodePort: 30080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: local-1, namespace: default, labels: {kubernetes.io/service-name: local}}
addressType: IPv4
ports: [{name: a, protocol: TCP, port: 8080}, {name: b, protocol: UDP, port: 5353}]
endpoints: [{addresses: [10.1.0.2], nodeName: elsewhere, conditions: {ready: true, serving: true}}]
`
	if err := os.WriteFile(string(c), []byte(manifests("10.1.0.1")+"---"+nodePort), 0o600); err != nil {
		t.Fatal(err)
	}
	opts := c.options()
	opts.NodeAddresses = addrs
	p, err := node.New(opts, newNFTables(t, backends.Options{}))
	if err != nil {
		t.Fatal(err)
	}
	run(t, p)
	for _, network := range []string{"tcp", "udp"} {
		conn, err := net.DialTimeout(network, "127.0.0.1:30080", time.Second)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		fmt.Fprint(conn, "?")
		b := make([]byte, 100)
		if n, err := conn.Read(b); string(b[:n]) != "10.1.0.2" {
			t.Errorf("%s: answer %q, error %v", network, b[:n], err)
		}
	}
	var names []string
	for _, s := range p.Status() {
		names = append(names, s.Name)
	}
	if want := []string{"nftables", "healthchecks", "localhost"}; !slices.Equal(names, want) {
		t.Errorf("sinks %v, want %v", names, want)
	}
	if value, err := sysctl.Kernel.Read("net.ipv4.conf.all.route_localnet"); err != nil || value != 0 {
		t.Errorf("net.ipv4.conf.all.route_localnet is %d, error %v", value, err)
	}
}

// TestDataplaneAboveAnother runs a proxy with eBPF above nftables.
func TestDataplaneAboveAnother(t *testing.T) {
	if inNamespace(t) {
		return
	}
	bpffs := t.TempDir()
	if err := unix.Mount("bpf", bpffs, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(bpffs, unix.MNT_DETACH)
	startPods(t)
	m := &recorder{}
	above, err := ebpf.New(newNFTables(t, backends.Options{}), ebpf.Options{BPFFS: bpffs, Cgroup: netnstest.NewCgroup(t).Dir, HostNetworkOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t)
	opts := c.options()
	opts.Metrics = m
	p, err := node.New(opts, above)
	if err != nil {
		t.Fatal(err)
	}
	run(t, p)
	defer above.Cleanup(context.Background())
	if got := answer(); got != "10.1.0.1" {
		t.Errorf("the service answers %q", got)
	}
	if name := p.Status()[0].Name; name != "ebpf" {
		t.Errorf("the dataplane has the name %q", name)
	}
	for _, event := range []string{"sink ebpf", "backend ebpf", "backend nftables", "synced ebpf", "wrote"} {
		if !m.has(event) {
			t.Errorf("no event %q for metrics", event)
		}
	}
}

// TestConnectionTrackingOfOVS checks that the dataplane ovs keeps its own connection tracking.
func TestConnectionTrackingOfOVS(t *testing.T) {
	d, err := ovs.New(ovs.Options{Bridge: "br0"})
	if err != nil {
		t.Fatal(err)
	}
	m := &recorder{}
	opts := newCluster(t).options()
	opts.Metrics = m
	if _, err := node.New(opts, d); err != nil {
		t.Fatal(err)
	}
	if !m.has("backend ovs") || m.has("conntrack") {
		t.Errorf("events %v; want those of the backend, and no connection tracking", m.events)
	}
}

func TestErrorsNameTheDataplane(t *testing.T) {
	if inNamespace(t) {
		return
	}
	c := newCluster(t)
	nothing := func(context.Context, *sink.Changes) error { return nil }
	for name, test := range map[string]struct {
		planes []kpng.Sink
		want   string
	}{
		"no dataplane":   {nil, "no dataplane"},
		"nil":            {[]kpng.Sink{{Sink: sink.Func(nothing)}, {Options: sink.Options{Name: "mine"}}}, "dataplane 1 mine is nil"},
		"the same names": {[]kpng.Sink{{Sink: newNFTables(t, backends.Options{})}, {Sink: newNFTables(t, backends.Options{Instance: "b"})}}, `"nftables"`},
	} {
		opts := c.options()
		opts.Dataplanes = test.planes
		if _, err := node.New(opts); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", name, err, test.want)
		}
	}
	opts := c.options()
	opts.Dataplanes = []kpng.Sink{{Sink: &own{started: errors.New("no device")}, Options: sink.Options{Name: "mine"}}}
	p, err := node.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "mine") || !strings.Contains(err.Error(), "no device") {
		t.Errorf("error %v, want one that names the dataplane and the problem", err)
	}
}
