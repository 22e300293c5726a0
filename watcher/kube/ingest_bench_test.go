// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// The benchmarks in this file measure the code between client-go's reflector and the
// sink: converter, state, view and driver.

// benchService returns the i-th service as an API server would return it.
func benchService(i int) *corev1.Service {
	ip := fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("namespace-%d", i%100), Name: benchName(i), UID: types.UID(fmt.Sprintf("6e6b1f0c-0000-4000-8000-%012d", i)),
			ResourceVersion: strconv.Itoa(i), CreationTimestamp: metav1.Unix(int64(1_700_000_000+i), 0),
			Labels: map[string]string{"app": benchName(i)},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Selector: map[string]string{"app": benchName(i)},
			Ports:    []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80}},
		},
	}
}

func benchName(i int) string { return fmt.Sprintf("service-%06d", i) }

// benchSlice returns the EndpointSlice of the i-th service. If bit e of notReady is set,
// endpoint e is not ready.
func benchSlice(i, endpoints int, notReady uint) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("namespace-%d", i%100), Name: benchName(i) + "-x7k2p", UID: types.UID(fmt.Sprintf("9c1d4e0a-0000-4000-8000-%012d", i)),
			ResourceVersion: strconv.Itoa(i), Labels: map[string]string{discoveryv1.LabelServiceName: benchName(i)},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](8080)}},
	}
	for e := range endpoints {
		n := i*endpoints + e
		ready := notReady>>e&1 == 0
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("172.%d.%d.%d", 16+n>>16, n>>8&255, n&255)},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(ready), Serving: ptr.To(ready), Terminating: ptr.To(false)},
			NodeName:   ptr.To(fmt.Sprintf("node-%d", n%500)),
			Zone:       ptr.To(fmt.Sprintf("zone-%d", n%3)),
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("pod-%d", n), UID: types.UID(strconv.Itoa(n))},
		})
	}
	return s
}

// benchWatch contains the parts of Watch that receive objects from reflectors.
type benchWatch struct {
	state            *cluster.State
	services, slices objectStore
}

func newBenchWatch(b *testing.B) *benchWatch {
	converter, err := watcher.New(watcher.Options{})
	if err != nil {
		b.Fatal(err)
	}
	state := cluster.New(cluster.Options{})
	s := (&watch{state: state, converter: converter, unlisted: map[string]bool{services: true, endpointSlices: true}}).newStores(nil, 0)
	return &benchWatch{state: state, services: s.services, slices: s.slices}
}

// reduced returns the item of an object in a list.
func reduced(b *testing.B, s objectStore, o any) (i any) {
	var err error
	switch s := s.(type) {
	case *store[*corev1.Service, api.Service]:
		i, err = s.item(o)
	case *store[*discoveryv1.EndpointSlice, api.EndpointSlice]:
		i, err = s.item(o)
	}
	if err != nil {
		b.Fatal(err)
	}
	return i
}

// list passes a list to the store as a reflector does: it reduces each object separately,
// and then passes all items to Replace.
func list[T k8sruntime.Object](b *testing.B, store objectStore, objects []T) {
	all := make([]any, 0, len(objects))
	for _, o := range objects {
		all = append(all, reduced(b, store, o))
	}
	if err := store.Replace(all, "1"); err != nil {
		b.Error(err)
	}
}

// listAll calls list for services and EndpointSlices concurrently, like two reflectors.
func (w *benchWatch) listAll(b *testing.B, services []*corev1.Service, slices []*discoveryv1.EndpointSlice) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		list(b, w.services, services)
	}()
	list(b, w.slices, slices)
	<-done
}

func benchObjects(services, endpoints int) ([]*corev1.Service, []*discoveryv1.EndpointSlice) {
	var ss []*corev1.Service
	var es []*discoveryv1.EndpointSlice
	for i := range services {
		ss = append(ss, benchService(i))
		es = append(es, benchSlice(i, endpoints, 0))
	}
	// An API server sorts a list by namespace and name.
	byName := func(a, b metav1.Object) int {
		return slices.Compare([]string{a.GetNamespace(), a.GetName()}, []string{b.GetNamespace(), b.GetName()})
	}
	slices.SortFunc(ss, func(a, b *corev1.Service) int { return byName(a, b) })
	slices.SortFunc(es, func(a, b *discoveryv1.EndpointSlice) int { return byName(a, b) })
	return ss, es
}

// drain reads all changes.
func drain(_ context.Context, c *sink.Changes) error {
	for range c.Services {
	}
	return nil
}

func memory() (m runtime.MemStats) {
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m
}

func BenchmarkIngest(b *testing.B) {
	const services = 50_000
	for _, endpoints := range []int{10, 1} {
		b.Run(fmt.Sprintf("endpoints=%d", endpoints), func(b *testing.B) {
			ss, es := benchObjects(services, endpoints)
			var retained, allocated uint64
			var elapsed time.Duration
			for b.Loop() {
				b.StopTimer()
				before := memory()
				b.StartTimer()
				begin := time.Now()

				w := newBenchWatch(b)
				w.listAll(b, ss, es)
				source := feed.New(w.state, "node-7")
				if err := sink.Run(klog.NewContext(b.Context(), logr.Discard()), source, sink.Func(drain), sink.Options{Once: true}); err != nil {
					b.Fatal(err)
				}

				elapsed += time.Since(begin)
				b.StopTimer()
				after := memory()
				retained += after.HeapAlloc - before.HeapAlloc
				allocated += after.TotalAlloc - before.TotalAlloc
				runtime.KeepAlive(w)
				runtime.KeepAlive(source)
				b.StartTimer()
			}
			runtime.KeepAlive(ss)
			runtime.KeepAlive(es)
			n := float64(b.N * services)
			b.ReportMetric(n/elapsed.Seconds(), "services/s")
			b.ReportMetric(float64(allocated)/n, "allocated-B/service")
			b.ReportMetric(float64(retained)/n, "retained-B/service")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func BenchmarkRelistWithoutDifference(b *testing.B) {
	ss, es := benchObjects(50_000, 10)
	w := newBenchWatch(b)
	w.listAll(b, ss, es)
	before := w.state.Snapshot()
	b.ReportAllocs()
	for b.Loop() {
		w.listAll(b, ss, es)
	}
	if w.state.Snapshot() != before {
		b.Fatal("equal objects changed the state")
	}
}

// BenchmarkOneEndpointChanges measures the time from a watch event to the call of Sync,
// with 1,000 and with 50,000 services.
func BenchmarkOneEndpointChanges(b *testing.B) {
	type rig struct {
		services int
		watch    *benchWatch
		latency  []time.Duration
	}
	synced := make(chan time.Time)
	rigs := []*rig{{services: 1_000}, {services: 50_000}}
	for _, r := range rigs {
		r.watch = newBenchWatch(b)
		ss, es := benchObjects(r.services, 10)
		r.watch.listAll(b, ss, es)
		ctx, cancel := context.WithCancel(klog.NewContext(b.Context(), logr.Discard()))
		ended := make(chan struct{})
		passing := false // true during the driver's first pass, which calls Sync several times
		go func() {
			defer close(ended)
			_ = sink.Run(ctx, feed.New(r.watch.state, "node-7"), sink.Func(func(ctx context.Context, c *sink.Changes) error {
				at := time.Now()
				_ = drain(ctx, c)
				passing = passing || c.First
				if c.Last || !passing {
					synced <- at
					passing = false
				}
				return nil
			}), sink.Options{})
		}()
		<-synced
		defer func() { cancel(); <-ended }()
	}
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		n++
		for _, r := range rigs {
			b.StopTimer()
			event := benchSlice(n*7919%r.services, 10, 1+uint(n)%1023)
			b.StartTimer()
			begin := time.Now()
			if err := r.watch.slices.Update(event); err != nil {
				b.Fatal(err)
			}
			r.latency = append(r.latency, (<-synced).Sub(begin))
		}
	}
	small, large := percentile(rigs[0].latency, 50), percentile(rigs[1].latency, 50)
	b.ReportMetric(float64(small.Nanoseconds())/1000, "µs-p50-at-1000")
	b.ReportMetric(float64(large.Nanoseconds())/1000, "µs-p50-at-50000")
	b.ReportMetric(float64(percentile(rigs[1].latency, 99).Nanoseconds())/1000, "µs-p99-at-50000")
	b.ReportMetric(float64(large)/float64(small), "50000/1000")
	b.ReportMetric(0, "ns/op")
}

func percentile(all []time.Duration, p int) time.Duration {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[(len(sorted)-1)*p/100]
}
