// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/kube"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// program selects the API server of the tests in this file. The nightly tests also use
// gotool.OldKubeAPIServer.
var program = flag.String("program", "", "the API server of the tests of watches, as package gotool names it")

// follow starts a Watch that runs until the test ends, and returns its state.
func follow(t *testing.T, s *Server, opts kube.Options) *cluster.State {
	state := cluster.New(cluster.Options{})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	opts.Config = s.Config()
	go func() { ended <- kube.Watch(ctx, state, opts) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return state
}

// waitForState waits until the state has the given services and endpoints. Each line is a
// service, followed by its endpoints.
func waitForState(t *testing.T, state *cluster.State, limit time.Duration, want ...string) {
	t.Helper()
	var got []string
	for begin := time.Now(); time.Since(begin) < limit; time.Sleep(20 * time.Millisecond) {
		got = nil
		snapshot := state.Snapshot()
		for key, s := range snapshot.States.All() {
			if s.Service == nil || key.Name == "kubernetes" {
				continue
			}
			line := []string{key.Name}
			for _, slice := range s.Slices {
				for _, e := range slice.Endpoints {
					line = append(line, e.Addr.String())
				}
			}
			got = append(got, strings.Join(line, " "))
		}
		for name := range snapshot.Nodes.All() {
			got = append(got, "node "+name)
		}
		if slices.Equal(got, want) && state.IsSynced() {
			return
		}
	}
	t.Fatalf("after %v: %q, want %q", limit, got, want)
}

func endpointSlice(service, name, ip string, labels map[string]string) *discoveryv1.EndpointSlice {
	port, portName := int32(8080), ""
	all := map[string]string{discoveryv1.LabelServiceName: service}
	for key, value := range labels {
		all[key] = value
	}
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: all},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Port: &port, Name: &portName}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{ip}}},
	}
}

// proxies are the options of a general and a named proxy, with the labels of their services.
var proxies = map[string]struct {
	opts   kube.Options
	labels map[string]string
}{
	"general": {kube.Options{NodeName: "n1"}, nil},
	"named":   {kube.Options{NodeName: "n1", Options: watcher.Options{ServiceProxyName: "x"}}, map[string]string{watcher.LabelServiceProxyName: "x"}},
}

func TestWatchFollowsServer(t *testing.T) {
	s := Start(t, Options{Program: *program})
	ctx := t.Context()
	core, discovery := s.Client().CoreV1(), s.Client().DiscoveryV1()
	for _, name := range []string{"n1", "n2"} {
		if _, err := core.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for name, proxy := range proxies {
		t.Run(name, func(t *testing.T) {
			ns := s.Namespace(t)
			service := func(name string, change func(*corev1.Service)) *corev1.Service {
				o := &corev1.Service{
					ObjectMeta: metav1.ObjectMeta{Name: name, Labels: proxy.labels},
					Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Port: 80}}},
				}
				change(o)
				created, err := core.Services(ns).Create(ctx, o, metav1.CreateOptions{})
				if err != nil {
					t.Fatal(err)
				}
				return created
			}
			plain := func(*corev1.Service) {}
			web := service("web", plain)
			service("db", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone; s.Labels = nil })
			slice, err := discovery.EndpointSlices(ns).Create(ctx, endpointSlice("web", "web-1", "10.1.0.1", proxy.labels), metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			opts := proxy.opts
			opts.FailFast = true // so that an error ends the test
			opts.Skip = func(o *corev1.Service) bool { return o.Namespace != ns }
			state := follow(t, s, opts)
			waitForState(t, state, time.Minute, "web 10.1.0.1", "node n1")

			slice.Endpoints[0].Addresses[0] = "10.1.0.2"
			if _, err := discovery.EndpointSlices(ns).Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			service("api", plain)
			service("cache", func(s *corev1.Service) { s.Spec.ClusterIP = corev1.ClusterIPNone; s.Labels = nil })
			waitForState(t, state, time.Minute, "api", "web 10.1.0.2", "node n1")
			if err := core.Services(ns).Delete(ctx, web.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			waitForState(t, state, time.Minute, "api", "node n1")
		})
	}
}

// Resource versions go back when etcd is restored from a backup. The API server then
// accepts watches from the higher versions, but delivers nothing.
func TestWatchFollowsRestoredServer(t *testing.T) {
	s := Start(t, Options{Program: *program})
	ctx := t.Context()
	core := s.Client().CoreV1()
	for name, proxy := range proxies {
		service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: proxy.labels}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
		create(t, s, metav1.NamespaceDefault, service)
		if _, err := s.Client().DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Create(ctx, endpointSlice(name, name, "10.1.0.1", proxy.labels), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	s.APIServer.Kill(t)
	s.Etcd.Stop(t)
	if err := os.CopyFS(s.path("backup"), os.DirFS(s.path("data"))); err != nil {
		t.Fatal(err)
	}
	s.Etcd.Start(t)
	s.APIServer.Start(t)

	states := map[string]*cluster.State{}
	for name, proxy := range proxies {
		states[name] = follow(t, s, proxy.opts)
		waitForState(t, states[name], time.Minute, name+" 10.1.0.1")
	}
	update := func(ip string) {
		for name, proxy := range proxies {
			if _, err := s.Client().DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Update(ctx, endpointSlice(name, name, ip, proxy.labels), metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range 200 {
		o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c", i)}}
		if _, err := core.ConfigMaps(metav1.NamespaceDefault).Create(ctx, o, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	update("10.1.0.2")
	for name, state := range states {
		waitForState(t, state, time.Minute, name+" 10.1.0.2")
	}

	s.APIServer.Kill(t)
	s.Etcd.Stop(t)
	if err := os.RemoveAll(s.path("data")); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(s.path("data"), os.DirFS(s.path("backup"))); err != nil {
		t.Fatal(err)
	}
	s.Etcd.Start(t)
	s.APIServer.Start(t)
	begin := time.Now()
	update("10.1.0.3")
	for name, state := range states {
		waitForState(t, state, 2*time.Minute, name+" 10.1.0.3")
	}
	t.Logf("the states followed after %v", time.Since(begin))
}
