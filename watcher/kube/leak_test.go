// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"net/http/httptest"
	"testing"

	"github.com/kpng-project/kpng/cluster"
	"go.uber.org/goleak"
	"k8s.io/client-go/rest"
)

// The synctest bubbles of other tests also detect leaked goroutines, but have neither
// sockets nor HTTP/2.
func TestWatchLeaksNoGoroutines(t *testing.T) {
	leaks := goleak.IgnoreCurrent()
	s := &apiServer{objects: map[string]object{}, revision: 10, changed: make(chan struct{}), dropped: make(chan struct{})}
	s.set(service("web", proxyName, "x"), selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.0.0.1"))
	server := httptest.NewUnstartedServer(s)
	server.EnableHTTP2 = true
	server.StartTLS()

	ctx, cancel := context.WithCancel(t.Context())
	state := cluster.New(cluster.Options{})
	opts := named("x")
	opts.Config = &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	ended := make(chan error, 1)
	go func() { ended <- Watch(ctx, state, opts) }()
	<-state.Synced()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	server.Close()
	goleak.VerifyNone(t, leaks)
}
