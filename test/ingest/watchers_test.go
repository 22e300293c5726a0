// SPDX-License-Identifier: Apache-2.0

package ingest

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/kubeproxy"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// BenchmarkWatchers measures the costs of one node for the API server, with kpng and with
// kube-proxy: the memory of the connection with its watches, the CPU time for a changed
// EndpointSlice, and the CPU time for a start. It records the requests of one real process.
// Then many clients, each with a connection of its own, send the same requests and do not
// decode the answers.
func BenchmarkWatchers(b *testing.B) {
	server := apiserver.Start(b, apiserver.Options{})
	*services = 200
	fill(b, server)
	if _, err := server.Client().CoreV1().Nodes().Create(b.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node-0"},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}},
	}, metav1.CreateOptions{}); err != nil {
		b.Fatal(err)
	}
	process := findProcess(b, "kube-apiserver")
	reads := map[string][]read{"kpng": record(b, server, runKpng), "kube-proxy": record(b, server, runKubeProxy)}
	for name, all := range reads {
		for _, r := range all {
			b.Log(name, r)
		}
	}
	results := map[string][]float64{}
	for b.Loop() {
		for name, all := range reads {
			for unit, value := range measureNodes(b, server, process, all) {
				unit = name + "-" + unit
				results[unit] = append(results[unit], value)
			}
		}
	}
	for unit, values := range results {
		slices.Sort(values)
		b.ReportMetric(values[len(values)/2], unit)
	}
	b.ReportMetric(0, "ns/op")
}

// measureNodes starts many nodes and changes an endpoint while they watch. The result has a
// value for each unit.
func measureNodes(b *testing.B, server *apiserver.Server, process processDir, reads []read) map[string]float64 {
	const nodes, changes = 500, 50
	client := server.Client().DiscoveryV1().EndpointSlices("default")
	slice, err := client.Get(b.Context(), "service-00000-x7k2p", metav1.GetOptions{})
	if err != nil {
		b.Fatal(err)
	}
	var received atomic.Int64
	measure := func(do func()) (cpu time.Duration, bytes float64) {
		received.Store(0)
		begin := process.cpu(b)
		do()
		for before := int64(-1); before != received.Load(); { // until nothing more arrives
			before = received.Load()
			time.Sleep(time.Second)
		}
		return process.cpu(b) - begin, float64(received.Load())
	}
	change := func() {
		for i := range changes {
			slice.Endpoints[0].Conditions.Ready = ptr.To(i%2 == 1)
			if slice, err = client.Update(b.Context(), slice, metav1.UpdateOptions{}); err != nil {
				b.Fatal(err)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	unwatched, _ := measure(change)
	memory := liveMemory(b, server)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	starting, first := measure(func() {
		for n := range nodes {
			node := newNode(b, server.Config())
			for _, r := range reads {
				node.start(b, ctx, r.of(n, slice.ResourceVersion), &received)
			}
		}
	})
	memory = liveMemory(b, server) - memory
	watched, bytes := measure(change)
	return map[string]float64{
		"cpu-ms/start": float64(starting.Milliseconds()) / nodes,
		"KB/start":     first / nodes / 1000,
		"KB/node":      memory / nodes / 1000,
		"cpu-us/event": float64((watched - unwatched).Microseconds()) / (nodes * changes),
		"B/event":      bytes / (nodes * changes),
	}
}

// liveMemory returns the memory of heap and stacks that is in use after a garbage
// collection of the API server.
func liveMemory(b *testing.B, server *apiserver.Server) (bytes float64) {
	b.Helper()
	get := func(path, parameter string) []byte {
		text, err := server.Client().Discovery().RESTClient().Get().AbsPath(path).Param("gc", parameter).DoRaw(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		return text
	}
	get("/debug/pprof/heap", "1")
	get("/debug/pprof/heap", "1") // only the second collection frees a sync.Pool
	for line := range strings.Lines(string(get("/metrics", ""))) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "go_memstats_heap_alloc_bytes" || name == "go_memstats_stack_inuse_bytes" {
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				b.Fatal(err)
			}
			bytes += n
		}
	}
	return bytes
}

// read is a GET request that a proxy sends to the API server.
type read struct {
	path  string
	query url.Values
	// The values of the headers Accept and Accept-Encoding.
	accept, encoding string
}

func (r read) watch() bool { return r.query.Get("watch") != "" }

// of returns the request that another node would send. A watch without initial events
// continues at the given resource version.
func (r read) of(node int, revision string) read {
	r.query = maps.Clone(r.query)
	if r.watch() && !r.query.Has("sendInitialEvents") {
		r.query.Set("resourceVersion", revision)
	}
	if name := "metadata.name="; strings.HasPrefix(r.query.Get("fieldSelector"), name) {
		r.query.Set("fieldSelector", fmt.Sprint(name, "node-", node))
	}
	return r
}

// record returns the reads that a proxy sends from its start until it only watches.
func record(b *testing.B, server *apiserver.Server, run func(*testing.B, *rest.Config) (stop func())) (reads []read) {
	target, err := url.Parse(server.Config().Host)
	if err != nil {
		b.Fatal(err)
	}
	forward := httputil.NewSingleHostReverseProxy(target)
	forward.FlushInterval = -1
	if forward.Transport, err = rest.TransportFor(server.Config()); err != nil {
		b.Fatal(err)
	}
	forward.ErrorLog = log.New(io.Discard, "", 0)
	var mu sync.Mutex
	connections := map[string]bool{}
	between := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodGet {
			mu.Lock()
			reads = append(reads, read{req.URL.Path, req.URL.Query(), req.Header.Get("Accept"), req.Header.Get("Accept-Encoding")})
			connections[req.RemoteAddr] = true
			mu.Unlock()
		}
		forward.ServeHTTP(w, req)
	}))
	between.EnableHTTP2 = true
	between.StartTLS()
	b.Cleanup(between.Close)
	defer run(b, &rest.Config{Host: between.URL, TLSClientConfig: rest.TLSClientConfig{
		CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: between.Certificate().Raw}),
	}})()
	for before := -1; ; {
		time.Sleep(3 * time.Second)
		mu.Lock()
		n, watches := len(reads), 0
		for _, r := range reads {
			if r.watch() {
				watches++
			}
		}
		mu.Unlock()
		if watches >= 3 && n == before {
			break
		}
		before = n
	}
	mu.Lock()
	defer mu.Unlock()
	if len(connections) != 1 {
		b.Fatalf("the proxy opened %d connections, and the measurement opens one", len(connections))
	}
	return reads
}

// runKpng runs kpng in this process.
func runKpng(b *testing.B, config *rest.Config) (stop func()) {
	b.Helper()
	p, err := kpng.New(kpng.Options{Config: config, NodeName: "node-0", Sinks: []kpng.Sink{{
		Sink: sink.Func(func(context.Context, *sink.Changes) error { return nil }),
	}}})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	return func() {
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	}
}

// runKubeProxy runs a real kube-proxy in a network namespace.
func runKubeProxy(b *testing.B, config *rest.Config) (stop func()) {
	b.Helper()
	ns := netnstest.New(b)
	address := strings.TrimPrefix(config.Host, "https://")
	netnstest.Relay(b, ns.Do, address, "tcp", address)
	command := kubeproxy.Command(b, kubeproxy.Options{Kubeconfig: apiserver.Kubeconfig(b, config), Node: "node-0"})
	cmd := exec.Command(command[0], command[1:]...)
	ended, err := ns.Start(cmd)
	if err != nil {
		b.Fatal(err)
	}
	return func() {
		cmd.Process.Kill()
		<-ended
	}
}

// node is a client with a connection of its own.
type node struct {
	*http.Client
	host string
}

func newNode(b *testing.B, config *rest.Config) node {
	b.Helper()
	tls, err := rest.TLSConfigFor(config)
	if err != nil {
		b.Fatal(err)
	}
	if config.BearerToken != "" {
		b.Fatal("nodes need a certificate")
	}
	return node{&http.Client{Transport: &http.Transport{TLSClientConfig: tls, ForceAttemptHTTP2: true, DisableCompression: true}}, config.Host}
}

// start sends a request. It counts the received bytes until ctx ends.
func (n node) start(b *testing.B, ctx context.Context, r read, received *atomic.Int64) {
	b.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, n.host+r.path+"?"+r.query.Encode(), nil)
	if err != nil {
		b.Fatal(err)
	}
	req.Header.Set("Accept", r.accept)
	if r.encoding != "" {
		req.Header.Set("Accept-Encoding", r.encoding)
	}
	resp, err := n.Do(req)
	if err != nil {
		b.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		b.Fatalf("%s: %s: %s", req.URL, resp.Status, text)
	}
	go func() {
		defer resp.Body.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := resp.Body.Read(buf)
			received.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
}

// processDir is the folder of a process in /proc.
type processDir string

// findProcess returns the child of this process that runs the named program.
func findProcess(b *testing.B, name string) processDir {
	b.Helper()
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if fields := stat(dir); len(fields) > 3 && fields[1] == "("+name[:min(15, len(name))]+")" && fields[3] == strconv.Itoa(os.Getpid()) {
			return processDir(dir)
		}
	}
	b.Fatalf("no child process runs %s", name)
	return ""
}

// stat returns the fields of /proc/PID/stat.
func stat(dir string) []string {
	text, _ := os.ReadFile(dir + "/stat") // an empty result if the process has ended
	return strings.Fields(string(text))
}

// cpu returns the CPU time of the process, in steps of 10 ms.
func (p processDir) cpu(b *testing.B) time.Duration {
	b.Helper()
	ticks := 0
	for _, field := range stat(string(p))[13:15] {
		n, err := strconv.Atoi(field)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
