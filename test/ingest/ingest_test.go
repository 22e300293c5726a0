// SPDX-License-Identifier: Apache-2.0

// Package ingest measures how kpng reads a large cluster from a real API server. For
// comparison it also measures client-go's reflectors without kpng, and a shared-informer
// factory. Each measurement runs in its own process, so that heaps do not mix.
package ingest

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/metrics"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/bare"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	pkgruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
)

var services = flag.Int("services", 10_000, "number of services")

const (
	endpoints = 10
	rounds    = 5
)

// result is the measurement of one process.
type result struct {
	Synced   time.Duration
	CPU      time.Duration // until Synced
	Heap     uint64        // after a garbage collection, and for kpng after the first pass
	PeakHeap uint64        // maximum, including garbage
}

// ways contains the ways to read the cluster. Each function returns when it has read all
// objects. The function's result keeps the objects in memory, so that the heap can be
// measured.
var ways = map[string]func(context.Context, *rest.Config) (any, error){
	"reflector":            bareReflectors,
	"reflector-compressed": compressed(bareReflectors),
	"informers":            sharedInformers,
	"kpng":                 runProxy,
}

func TestMain(m *testing.M) {
	if way := os.Getenv("INGEST_WAY"); way != "" {
		if err := measure(ways[way]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// measure reads the cluster with readCluster, and prints the result.
func measure(readCluster func(context.Context, *rest.Config) (any, error)) error {
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("INGEST_KUBECONFIG"))
	if err != nil {
		return err
	}
	config.ContentType = pkgruntime.ContentTypeProtobuf
	config.QPS = -1
	config.DisableCompression = true
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	peak := samplePeakHeap(ctx)
	begin, cpu := time.Now(), cpuTime()
	alive, err := readCluster(ctx, config)
	if err != nil {
		return err
	}
	r := result{Synced: time.Since(begin), CPU: cpuTime() - cpu, PeakHeap: peak()}
	if p, ok := alive.(*kpng.Proxy); ok {
		// During the first pass, the heap also contains the views of one batch.
		if err := p.WaitSynced(ctx); err != nil {
			return err
		}
	}
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	r.Heap = m.HeapAlloc
	runtime.KeepAlive(alive)
	return json.NewEncoder(os.Stdout).Encode(r)
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// samplePeakHeap measures the heap's size every millisecond. The returned function stops
// the measurement and returns the maximum.
func samplePeakHeap(ctx context.Context) func() uint64 {
	ctx, cancel := context.WithCancel(ctx)
	peak := make(chan uint64)
	go func() {
		var most uint64
		sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				peak <- most
				return
			case <-ticker.C:
				metrics.Read(sample)
				most = max(most, sample[0].Value.Uint64())
			}
		}
	}()
	return func() uint64 { cancel(); return <-peak }
}

func compressed(way func(context.Context, *rest.Config) (any, error)) func(context.Context, *rest.Config) (any, error) {
	return func(ctx context.Context, config *rest.Config) (any, error) {
		config.DisableCompression = false
		return way(ctx, config)
	}
}

func bareReflectors(ctx context.Context, config *rest.Config) (any, error) {
	return nil, bare.Reflect(ctx, config)
}

func sharedInformers(ctx context.Context, config *rest.Config) (any, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	s, e := factory.Core().V1().Services().Informer(), factory.Discovery().V1().EndpointSlices().Informer()
	factory.StartWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), s.HasSynced, e.HasSynced) {
		return nil, ctx.Err()
	}
	return factory, nil
}

func runProxy(ctx context.Context, config *rest.Config) (any, error) {
	p, err := kpng.New(kpng.Options{Config: config, NodeName: "node-1", Sinks: []kpng.Sink{{
		Sink: sink.Func(func(_ context.Context, c *sink.Changes) error {
			for range c.Services {
			}
			return nil
		}),
	}}})
	if err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	select {
	case err := <-ended:
		return nil, err
	case <-p.State().Changed(0):
		return p, nil
	}
}

func BenchmarkRealIngest(b *testing.B) {
	server := apiserver.Start(b, apiserver.Options{})
	fill(b, server)
	kubeconfig := apiserver.Kubeconfig(b, server.Config())
	results := map[string][]result{}
	for b.Loop() {
		for range rounds {
			for way := range ways {
				results[way] = append(results[way], process(b, way, kubeconfig))
			}
		}
	}
	median := func(way string, of func(result) float64) float64 {
		values := []float64{}
		for _, r := range results[way] {
			values = append(values, of(r))
		}
		slices.SortFunc(values, cmp.Compare)
		return values[len(values)/2]
	}
	seconds := func(r result) float64 { return r.Synced.Seconds() }
	cpu := func(r result) float64 { return r.CPU.Seconds() }
	heap := func(r result) float64 { return float64(r.Heap) / 1e6 }
	peak := func(r result) float64 { return float64(r.PeakHeap) / 1e6 }
	for way := range ways {
		b.ReportMetric(median(way, seconds), way+"-s")
		b.ReportMetric(median(way, cpu), way+"-cpu-s")
		b.ReportMetric(median(way, heap), way+"-heap-MB")
		b.ReportMetric(median(way, peak), way+"-peak-MB")
	}
	b.ReportMetric(median("kpng", seconds)/median("reflector", seconds), "kpng/reflector")
	b.ReportMetric(median("kpng", cpu)/median("reflector", cpu), "kpng/reflector-cpu")
	b.ReportMetric(median("kpng", heap)/median("informers", heap), "kpng/informers-heap")
	b.ReportMetric(median("kpng", peak)/median("informers", peak), "kpng/informers-peak")
	b.ReportMetric(0, "ns/op")
}

// process measures one way to read the cluster, in a new process. The argument way is a
// key of the map ways.
func process(b *testing.B, way, kubeconfig string) result {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "INGEST_WAY="+way, "INGEST_KUBECONFIG="+kubeconfig)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		b.Fatalf("measuring %s: %v", way, err)
	}
	var r result
	if err := json.Unmarshal(out, &r); err != nil {
		b.Fatalf("measure %s: %v in %q", way, err, out)
	}
	return r
}

// fill creates services and their EndpointSlices.
func fill(b *testing.B, server *apiserver.Server) {
	b.Helper()
	client := server.Client()
	group, ctx := errgroup.WithContext(b.Context())
	group.SetLimit(16)
	for i := range *services {
		group.Go(func() error {
			name := fmt.Sprintf("service-%05d", i)
			_, err := client.CoreV1().Services("default").Create(ctx, &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
				Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			slice := &discoveryv1.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Name: name + "-x7k2p", Labels: map[string]string{discoveryv1.LabelServiceName: name, "app": name}},
				AddressType: discoveryv1.AddressTypeIPv4,
				Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080)}},
			}
			for e := range endpoints {
				n := i*endpoints + e
				slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
					Addresses:  []string{fmt.Sprintf("172.%d.%d.%d", 16+n>>16, n>>8&255, n&255)},
					Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
					NodeName:   ptr.To(fmt.Sprintf("node-%d", n%500)),
					TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("%s-%d", name, e)},
				})
			}
			_, err = client.DiscoveryV1().EndpointSlices("default").Create(ctx, slice, metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		b.Fatal(err)
	}
}
