// SPDX-License-Identifier: Apache-2.0

package kube_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"path"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/watcher/kube"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// newAPIServer returns an API server with three objects that never change.
func newAPIServer() *httptest.Server {
	typeMeta := func(kind, version string) metav1.TypeMeta { return metav1.TypeMeta{Kind: kind, APIVersion: version} }
	named := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "default", Name: name, ResourceVersion: "1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}}
	}
	lists := map[string]any{
		"services": corev1.ServiceList{TypeMeta: typeMeta("ServiceList", "v1"), ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: []corev1.Service{{
			ObjectMeta: named("web"),
			Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.80", Ports: []corev1.ServicePort{{Port: 80}}},
		}}},
		"endpointslices": discoveryv1.EndpointSliceList{TypeMeta: typeMeta("EndpointSliceList", "discovery.k8s.io/v1"), ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: []discoveryv1.EndpointSlice{{
			ObjectMeta:  named("web-x7k2p"),
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.5"}}},
		}}},
		"nodes": corev1.NodeList{TypeMeta: typeMeta("NodeList", "v1"), ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: []corev1.Node{{
			ObjectMeta: metav1.ObjectMeta{Name: "node-1", ResourceVersion: "1"},
		}}},
	}
	return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.FormValue("sendInitialEvents") != "": // by informers
			http.Error(w, "streaming lists are not supported", http.StatusUnprocessableEntity)
		case r.FormValue("watch") != "":
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			if err := json.NewEncoder(w).Encode(lists[path.Base(r.URL.Path)]); err != nil {
				log.Print(err)
			}
		}
	}))
}

// show prints the names of all objects.
func show(state *cluster.State) {
	snapshot := state.Objects()
	for key := range snapshot.Services.All() {
		fmt.Println("service", key)
	}
	for key := range snapshot.Slices.All() {
		fmt.Println("slice", key)
	}
	for name := range snapshot.Nodes.All() {
		fmt.Println("node", name)
	}
}

// A program fills a state from an API server. Programs usually get Config from
// kube.LoadConfig.
func ExampleWatch() {
	server := newAPIServer()
	defer server.Close()

	ctx, stop := context.WithCancel(context.Background())
	state := cluster.New(cluster.Options{})
	ended := make(chan error)
	go func() {
		ended <- kube.Watch(ctx, state, kube.Options{Config: &rest.Config{Host: server.URL}, NodeName: "node-1"})
	}()
	<-state.Changed(0)
	show(state)
	stop()
	fmt.Println(<-ended)
	// Output:
	// service default/web
	// slice default/web-x7k2p
	// node node-1
	// <nil>
}

// A program that already runs informers passes them to Watch. kpng.Options has a field
// for informers too.
func ExampleInformers() {
	server := newAPIServer()
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		log.Fatal(err)
	}

	factory := informers.NewSharedInformerFactory(client, 0)
	shared := &kube.Informers{ // call Informer before factory.Start, because Informer registers an informer at the factory
		Services:       factory.Core().V1().Services().Informer(),
		EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
		Nodes:          factory.Core().V1().Nodes().Informer(),
	}
	ctx, stop := context.WithCancel(context.Background())
	factory.Start(ctx.Done())
	state := cluster.New(cluster.Options{})
	ended := make(chan error)
	go func() { ended <- kube.Watch(ctx, state, kube.Options{Informers: shared}) }()
	<-state.Changed(0)
	show(state)
	stop()
	fmt.Println(<-ended)
	factory.Shutdown() // waits until the informers have stopped
	// Output:
	// service default/web
	// slice default/web-x7k2p
	// node node-1
	// <nil>
}
