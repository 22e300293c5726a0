// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/pem"
	"io"
	"log"
	"net"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/kubetest"
	"k8s.io/client-go/rest"
)

// closing is a connection that records that it was closed.
type closing struct {
	net.Conn
	wait *sync.WaitGroup
	once sync.Once
}

func (c *closing) Close() error {
	c.once.Do(c.wait.Done)
	return c.Conn.Close()
}

// With HTTP/2 all watches share one connection, which is in use until the last watch is
// canceled.
func TestConnectionsAreClosedAfterWatches(t *testing.T) {
	server := httptest.NewUnstartedServer(kubetest.New())
	server.EnableHTTP2 = true
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // discard errors about interrupted handshakes
	server.StartTLS()
	defer server.Close()
	for range 20 {
		var open sync.WaitGroup
		config := &rest.Config{
			Host: server.URL,
			TLSClientConfig: rest.TLSClientConfig{
				CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
			},
			Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := new(net.Dialer).DialContext(ctx, network, address)
				if err != nil {
					return nil, err
				}
				open.Add(1)
				return &closing{Conn: conn, wait: &open}, nil
			},
		}
		ctx, cancel := context.WithCancel(t.Context())
		state := cluster.New(cluster.Options{})
		ended := make(chan error)
		go func() { ended <- Watch(ctx, state, Options{Config: config}) }()
		<-state.Changed(0)
		cancel()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		closed := make(chan struct{})
		go func() {
			open.Wait()
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(time.Minute):
			t.Fatal("a connection is still open")
		}
	}
}

func TestLateConnectionIsClosed(t *testing.T) {
	dialling, goOn := make(chan struct{}, 10), make(chan struct{})
	near, far := net.Pipe()
	defer far.Close()
	ctx, end := context.WithCancel(t.Context())
	c, err := newClient(ctx, &rest.Config{Host: "http://api.test", Dial: func(context.Context, string, string) (net.Conn, error) {
		dialling <- struct{}{}
		<-goOn
		return near, nil
	}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	result := make(chan error)
	go func() { result <- c.core.Get().MaxRetries(0).Do(t.Context()).Error() }()
	<-dialling
	end()
	c.connections.CloseAll()
	close(goOn)
	if err := <-result; err == nil {
		t.Error("a new connection after close")
	}
	if _, err := far.Read(make([]byte, 1)); err == nil {
		t.Error("the connection is still open")
	}
}
