// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/connlimit"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
)

// Serving holds the addresses for health checks and metrics. The zero value disables
// both.
type Serving struct {
	// Status is the handler of the path /status on the address of the health checks; nil
	// means none. See package status. It gets requests from clients on this machine only,
	// unless the flag --expose-status is set.
	Status http.Handler
	// Source describes the source of services, for the log.
	Source string

	health, metrics string
	exposeStatus    bool
	// proxyMode is the response to requests for the path /proxyMode, if not empty.
	// kube-proxy reports its mode to tools at the same path.
	proxyMode string
	profiling bool
	// wait makes Run wait for addresses that another process uses.
	wait  bool
	flags *pflag.FlagSet
}

// Register adds the flags: --healthz-bind-address, --expose-status,
// --metrics-bind-address and --profiling.
func (s *Serving) Register(fs *pflag.FlagSet) {
	s.flags = fs
	fs.StringVar(&s.health, "healthz-bind-address", "", "serve /healthz, /livez, /readyz and /status on this `host:port`, on loopback if the host is empty (off by default)")
	fs.BoolVar(&s.exposeStatus, "expose-status", false, "answer /status, which has the names and addresses of services, and /configz, /flagz and /statusz also to clients on other machines")
	fs.StringVar(&s.metrics, "metrics-bind-address", "", "serve /metrics, /configz, /flagz and /statusz on this `host:port`, on loopback if the host is empty (off by default)")
	fs.BoolVar(&s.profiling, "profiling", false, "also serve profiles of CPU time and memory at /debug/pprof/ on the metrics address")
}

// Run calls the function run and returns its result. During this call, it serves the
// health checks of h and the metrics of c and of the process. If Run cannot listen, it
// does not call run. If the HTTP server fails later, Run cancels the context of run.
//
// At the start, Run logs the version, the source and the values of all given flags, so
// flags must not contain secrets.
func (s *Serving) Run(ctx context.Context, h func() health.Report, c prometheus.Collector, run func(context.Context) error) error {
	var set []string
	s.flags.Visit(func(f *pflag.Flag) { set = append(set, "--"+f.Name+"="+f.Value.String()) })
	klog.FromContext(ctx).Info("Starting", "version", Version(), "source", s.Source, "flags", set)
	if s.profiling && s.metrics == "" {
		return usage.Errorf("--profiling needs --metrics-bind-address")
	}
	if s.exposeStatus && s.health == "" && s.metrics == "" {
		return usage.Errorf("--expose-status needs --healthz-bind-address or --metrics-bind-address")
	}
	registry := prometheus.NewRegistry()
	own := []prometheus.Collector{collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), c}
	for _, c := range append(own, ProcessMetrics(s.flags)...) {
		if err := registry.Register(c); err != nil {
			return fmt.Errorf("register metrics: %w", err)
		}
	}
	handlers := map[string]*http.ServeMux{} // keyed by address, because health checks and metrics can share one address
	handle := func(address, path string, h http.Handler) {
		if address == "" {
			return
		}
		if handlers[address] == nil {
			handlers[address] = http.NewServeMux()
		}
		handlers[address].Handle("GET "+path, h)
	}
	for _, path := range [...]string{"/livez", "/healthz", "/readyz"} {
		handle(s.health, path, health.Handler(h))
	}
	handle(s.metrics, "/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	// details serves a page that shows names and addresses.
	details := func(address, path string, h http.Handler) {
		if !s.exposeStatus {
			h = onlyLocal(h)
		}
		handle(address, path, h)
	}
	if s.Status != nil {
		details(s.health, "/status", s.Status)
	}
	for path, page := range componentPages(s.flags) {
		details(s.metrics, path, page)
	}
	if s.proxyMode != "" {
		handle(s.metrics, "/proxyMode", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, s.proxyMode)
		}))
	}
	if s.profiling {
		handle(s.metrics, "/debug/pprof/", http.HandlerFunc(pprof.Index))
		handle(s.metrics, "/debug/pprof/profile", http.HandlerFunc(pprof.Profile))
		handle(s.metrics, "/debug/pprof/trace", http.HandlerFunc(pprof.Trace))
	}

	group, running := errgroup.WithContext(ctx)
	serving, stopServing := context.WithCancel(running)
	defer stopServing()
	for address, handler := range handlers {
		l, err := listen(address)
		switch {
		case err == nil:
			klog.FromContext(ctx).V(1).Info("Serving health checks or metrics", "address", l.Addr())
			group.Go(func() error { return serve(serving, l, handler) })
		case s.wait && errors.Is(err, errInUse):
			klog.FromContext(ctx).Info("Waiting for an address that another process uses", "address", address)
			group.Go(func() error {
				l, err := listenWhenFree(serving, address)
				if l == nil {
					return err
				}
				return serve(serving, l, handler)
			})
		default:
			stopServing()
			return errors.Join(err, group.Wait())
		}
	}
	group.Go(func() error {
		defer stopServing()
		return run(running)
	})
	return group.Wait()
}

func listen(address string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, usage.Errorf("parse bind address %q, want host:port: %w", address, err)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port))
	if errors.Is(err, errInUse) {
		err = fmt.Errorf("%w; another program uses the address, possibly another kpng: "+
			"change --healthz-bind-address or --metrics-bind-address, or wait with --wait", err)
	}
	if err != nil {
		return nil, fmt.Errorf("serve health or metrics: %w", err)
	}
	return l, nil
}

// listenWhenFree listens when no other process uses the address any more. If ctx ends
// earlier, it returns nil.
func listenWhenFree(ctx context.Context, address string) (net.Listener, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(ownerInterval):
		}
		if l, err := listen(address); !errors.Is(err, errInUse) {
			return l, err
		}
	}
}

// maxConnections limits the open connections to an address. If there are more, the server
// closes the oldest connection of the machine that has the most connections.
const maxConnections = 512

func serve(ctx context.Context, l net.Listener, handler http.Handler) error {
	server := http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    1 << 14,
		ErrorLog:          slog.NewLogLogger(logr.ToSlogHandler(klog.FromContext(ctx).WithValues("address", l.Addr().String())), slog.LevelWarn),
	}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.Serve(connlimit.Listen(l, maxConnections)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve on %s: %w", l.Addr(), err)
	}
	return nil
}

// onlyLocal returns a handler that refuses requests from other machines. It also refuses
// requests whose host is a DNS name other than localhost. Otherwise a web page could read
// the response through a browser on this machine, with a name that resolves to 127.0.0.1.
func onlyLocal(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		client, _ := netip.ParseAddrPort(req.RemoteAddr)
		if !client.Addr().Unmap().IsLoopback() || !isAddress(req.Host) {
			http.Error(w, req.URL.Path+" is only for clients that connect to a loopback address of this machine; --expose-status allows others", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, req)
	})
}

// isAddress reports whether a Host header is an IP address or localhost.
func isAddress(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	_, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil || host == "localhost"
}
