// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// slicesServer is an API server that only lists the EndpointSlices of kube-system/kpng.
type slicesServer struct {
	*httptest.Server
	mu    sync.Mutex
	items []discoveryv1.EndpointSlice
}

func newSlicesServer(t *testing.T) *slicesServer {
	s := &slicesServer{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		query := r.URL.Query()
		if r.URL.Path != "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices" || query.Has("watch") ||
			query.Get("labelSelector") != "kubernetes.io/service-name=kpng" {
			w.WriteHeader(http.StatusForbidden)
			w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`))
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		json.NewEncoder(w).Encode(discoveryv1.EndpointSliceList{
			TypeMeta: metav1.TypeMeta{Kind: "EndpointSliceList", APIVersion: "discovery.k8s.io/v1"}, Items: s.items,
		})
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *slicesServer) set(items ...discoveryv1.EndpointSlice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.items = items
}

// kubeconfig returns the path of a kubeconfig for the server.
func (s *slicesServer) kubeconfig(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"apiVersion": "v1", "kind": "Config", "current-context": "c",
"clusters": [{"name": "c", "cluster": {"server": "` + s.URL + `"}}],
"contexts": [{"name": "c", "context": {"cluster": "c"}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func sliceOf(port int32, name string, endpoints ...discoveryv1.Endpoint) discoveryv1.EndpointSlice {
	return discoveryv1.EndpointSlice{
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
	}
}

func endpointAt(address string, ready bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: []string{address}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}
}

// kpngServer is a server of a state with one service, whose name is the server's address.
type kpngServer struct {
	listener net.Listener
	stop     func()
}

func startServer(t *testing.T, address string) *kpngServer {
	t.Helper()
	state := cluster.New(cluster.Options{Resumable: true})
	state.Update(func(tx *cluster.Tx) {
		tx.SetService(&api.Service{Namespace: "at", Name: address, Type: api.ClusterIP,
			IPs: api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr("10.0.0.1"))}, Ports: []api.PortMapping{{Protocol: api.TCP, Port: 80}}})
	})
	state.SetSynced()
	server, err := remote.NewServer(state, remote.ServerOptions{ServeCluster: true})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		if err := server.Serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	s := &kpngServer{l, func() { cancel(); done.Wait() }}
	t.Cleanup(s.stop)
	return s
}

// A client finds the servers behind a Service. When its server ends, the client continues
// with another one, also with one that is new in the EndpointSlices.
func TestServersOfServiceAreFound(t *testing.T) {
	apiServer := newSlicesServer(t)
	first := startServer(t, "127.0.0.1:0")
	port := first.listener.Addr().(*net.TCPAddr).Port
	apiServer.set(sliceOf(int32(port), "grpc", endpointAt("127.0.0.1", true), endpointAt("127.0.0.9", false)), sliceOf(9, "metrics", endpointAt("127.0.0.1", true)))

	var source Source
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	source.RegisterAPI(fs)
	if err := fs.Parse([]string{"--api=service://kube-system/kpng:grpc", "--api-insecure", "--api-kubeconfig=" + apiServer.kubeconfig(t)}); err != nil {
		t.Fatal(err)
	}
	state := cluster.New(cluster.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- source.Watch(ctx, state) }()
	at := func(address string) {
		t.Helper()
		for s := state.Objects(); ; s = state.Objects() {
			if _, ok := s.Services.Get(types.NamespacedName{Namespace: "at", Name: address}); ok {
				return
			}
			select {
			case <-state.Changed(s.Revision):
			case err := <-ended:
				t.Fatalf("ended: %v", err)
			}
		}
	}
	at("127.0.0.1:0")

	second := "127.0.0.2:" + strconv.Itoa(port)
	startServer(t, second)
	apiServer.set(sliceOf(int32(port), "grpc", endpointAt("127.0.0.1", false), endpointAt("127.0.0.2", true)))
	first.stop()
	at(second)

	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAddressesOfSlices(t *testing.T) {
	ready, not := endpointAt("10.0.0.1", true), endpointAt("10.0.0.2", false)
	udp, noPort := sliceOf(53, "grpc", ready), sliceOf(0, "grpc", ready)
	protocol := corev1.ProtocolUDP
	udp.Ports[0].Protocol = &protocol
	noPort.Ports[0].Port = nil
	for _, test := range []struct {
		name   string
		port   string
		slices []discoveryv1.EndpointSlice
		want   []string
		err    string
	}{
		{"no slices", "", nil, nil, ""},
		{"only ready endpoints", "", []discoveryv1.EndpointSlice{sliceOf(1, "", ready, not)}, []string{"10.0.0.1:1"}, ""},
		{"no endpoint is ready", "", []discoveryv1.EndpointSlice{sliceOf(1, "", not)}, []string{"10.0.0.2:1"}, ""},
		{"an endpoint without conditions is ready", "", []discoveryv1.EndpointSlice{sliceOf(1, "", discoveryv1.Endpoint{Addresses: []string{"fd00::1"}})}, []string{"[fd00::1]:1"}, ""},
		{"several ports, none named", "", []discoveryv1.EndpointSlice{sliceOf(1, "a", ready), sliceOf(2, "b", ready)}, nil, "several ports"},
		{"the named port", "b", []discoveryv1.EndpointSlice{sliceOf(1, "a", ready), sliceOf(2, "b", ready)}, []string{"10.0.0.1:2"}, ""},
		{"the named port is missing", "c", []discoveryv1.EndpointSlice{sliceOf(1, "a", ready)}, nil, ""},
		{"the same endpoint twice", "", []discoveryv1.EndpointSlice{sliceOf(1, "", ready), sliceOf(1, "", ready)}, []string{"10.0.0.1:1"}, ""},
		{"useless slices", "grpc", []discoveryv1.EndpointSlice{udp, noPort, sliceOf(1, "grpc", discoveryv1.Endpoint{})}, nil, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := serverService{key: types.NamespacedName{Namespace: "ns", Name: "kpng"}, port: test.port}.addresses(test.slices)
			if !slices.Equal(got, test.want) || (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("addresses %v, error %v", got, err)
			}
		})
	}
}

func TestFlagsOfServerService(t *testing.T) {
	tls := []string{"--api-tls-ca-file=ca", "--api-tls-cert-file=c", "--api-tls-key-file=k"}
	for _, test := range []struct {
		args       []string
		serverName string
		err        string
	}{
		{append(tls, "--api=service://ns/kpng"), "kpng.ns.svc", ""},
		{append(tls, "--api=service://ns/kpng:grpc", "--api-tls-server-name=x"), "x", ""},
		{append(tls, "--api=tcp://10.0.0.1:1"), "", ""},
		{[]string{"--api=service://ns/kpng"}, "", "needs --api-tls-ca-file"},
		{[]string{"--api=service://ns"}, "", "is not service://NAMESPACE/NAME"},
		{[]string{"--api=service://ns/a/b"}, "", "is not service://NAMESPACE/NAME"},
		{[]string{"--api=service://ns/..,tcp://127.0.0.1:1"}, "", "is not service://NAMESPACE/NAME"},
		{[]string{"--api=service://ns/a,service://ns/b", "--api-insecure"}, "", "more than one"},
		{[]string{"--api=tcp://127.0.0.1:1", "--api-kubeconfig=x"}, "", "--api-kubeconfig needs"},
	} {
		var f apiFlags
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		f.register(fs)
		if err := fs.Parse(test.args); err != nil {
			t.Fatal(err)
		}
		opts, err := f.get(false)
		switch {
		case test.err == "" && err != nil, test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)):
			t.Errorf("%v: error %v, want %q", test.args, err, test.err)
		case err == nil && opts.TLS.ServerName != test.serverName:
			t.Errorf("%v: server name %q", test.args, opts.TLS.ServerName)
		}
	}
}

func TestFlagsOfFallback(t *testing.T) {
	for _, test := range []struct {
		args  []string
		local bool
		err   string
	}{
		{[]string{"--api-fallback=1m"}, true, ""},
		{[]string{"--api-fallback=1m", "--service-proxy-name=x", "--api-kubeconfig=f"}, true, ""},
		{[]string{"--api-fallback=1m"}, false, "needs to-local"},
		{[]string{"--api-fallback=-1s"}, true, "must not be negative"},
		{[]string{"--service-proxy-name=x"}, true, "--service-proxy-name needs --api-fallback"},
		{nil, false, ""},
	} {
		var s Source
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		s.RegisterAPI(fs)
		if err := fs.Parse(test.args); err != nil {
			t.Fatal(err)
		}
		_, err := s.api.get(s.fallback > 0)
		if err == nil {
			err = s.checkFallback(test.local)
		}
		if (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%v: error %v, want %q", test.args, err, test.err)
		}
	}
}
