// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/kpng-project/kpng/health"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
)

// Serving says where a program serves health checks and metrics. The zero value
// serves neither.
type Serving struct {
	health, metrics string
}

// Register adds the flags: --healthz-bind-address and --metrics-bind-address.
func (s *Serving) Register(fs *pflag.FlagSet) {
	fs.StringVar(&s.health, "healthz-bind-address", "", "serve /healthz, /livez and /readyz on this `host:port`; without a host, on loopback only (off by default)")
	fs.StringVar(&s.metrics, "metrics-bind-address", "", "serve /metrics on this `host:port`; without a host, on loopback only (off by default)")
}

// Run serves while run runs, and returns what it returns. It returns an error,
// and run does not start, if it cannot listen; an error of serving ends run.
func (s *Serving) Run(ctx context.Context, h health.Handler, metrics prometheus.Gatherer, run func(context.Context) error) error {
	servers, err := listen(s.health, s.metrics, h, metrics)
	if err != nil {
		return err
	}
	group, running := errgroup.WithContext(ctx)
	serving, stopServing := context.WithCancel(running)
	for _, server := range servers {
		klog.FromContext(ctx).V(1).Info("Serving health or metrics", "address", server.listener.Addr())
		group.Go(func() error { return server.serve(serving) })
	}
	group.Go(func() error {
		defer stopServing()
		return run(running)
	})
	return group.Wait()
}

// NewRegistry returns a registry with the metrics of the process and of Go.
func NewRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

// server is an HTTP server that listens already.
type server struct {
	listener net.Listener
	http     http.Server
}

// listen opens what health checks and metrics are served on; one server serves
// both if they have the same address. An empty address means not to serve.
func listen(healthAddress, metricsAddress string, h health.Handler, metrics prometheus.Gatherer) ([]*server, error) {
	handlers := map[string]*http.ServeMux{}
	mux := func(address string) *http.ServeMux {
		if handlers[address] == nil {
			handlers[address] = http.NewServeMux()
		}
		return handlers[address]
	}
	if healthAddress != "" {
		for _, path := range []string{"/livez", "/healthz", "/readyz"} {
			mux(healthAddress).Handle("GET "+path, h)
		}
	}
	if metricsAddress != "" {
		mux(metricsAddress).Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	}
	var servers []*server
	for address, handler := range handlers {
		s, err := newServer(address, handler)
		if err != nil {
			for _, s := range servers {
				s.listener.Close()
			}
			return nil, err
		}
		servers = append(servers, s)
	}
	return servers, nil
}

func newServer(address string, handler http.Handler) (*server, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("bind address %q is not host:port: %w", address, err)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, fmt.Errorf("serving health or metrics: %w", err)
	}
	return &server{listener, http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    1 << 14,
	}}, nil
}

// serve serves until ctx ends.
func (s *server) serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.http.Close() })
	defer stop()
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving on %s: %w", s.listener.Addr(), err)
	}
	return nil
}
