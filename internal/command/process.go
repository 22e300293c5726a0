// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	clientmetrics "k8s.io/client-go/tools/metrics"
)

// started is when the process started.
var started = time.Now()

// ProcessMetrics returns kpng's own metrics of a process with these flags.
func ProcessMetrics(flags *pflag.FlagSet) []prometheus.Collector {
	return append([]prometheus.Collector{newBuildInfo(), newCertificateMetrics(flags)}, clientMetrics()...)
}

// newBuildInfo returns a metric whose labels are the versions of the program.
func newBuildInfo() prometheus.Collector {
	version, revision := "unknown", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = s.Value
			}
		}
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kpng_build_info", Help: "1. The labels are the versions of the program.",
		ConstLabels: prometheus.Labels{"version": version, "revision": revision, "go_version": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH},
	})
	info.Set(1)
	return info
}

// certificateMetrics collects the expiry times of the certificates in files. It reads a
// file again for each scrape, because other programs renew it.
type certificateMetrics struct {
	desc *prometheus.Desc
	// files maps the use of a certificate to its PEM file.
	files map[string]string
}

// newCertificateMetrics returns the metrics of the certificates that the flags name.
func newCertificateMetrics(flags *pflag.FlagSet) *certificateMetrics {
	c := &certificateMetrics{
		desc: prometheus.NewDesc("kpng_certificate_expiry_timestamp_seconds",
			"Time when the certificate expires; 0 if it cannot be read.", []string{"use"}, nil),
		files: map[string]string{},
	}
	for use, flag := range map[string]string{"server": "tls-cert-file", "client": "api-tls-cert-file"} {
		if f := flags.Lookup(flag); f != nil && f.Value.String() != "" {
			c.files[use] = f.Value.String()
		}
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *certificateMetrics) Describe(to chan<- *prometheus.Desc) { to <- c.desc }

// Collect implements prometheus.Collector.
func (c *certificateMetrics) Collect(to chan<- prometheus.Metric) {
	for use, file := range c.files {
		expiry := 0.0
		if at, err := expiryOf(file); err == nil {
			expiry = float64(at.Unix())
		}
		to <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, expiry, use)
	}
}

// expiryOf returns the expiry time of the first certificate in a PEM file.
func expiryOf(file string) (time.Time, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return time.Time{}, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return time.Time{}, fmt.Errorf("%s has no PEM certificate", file)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return time.Time{}, err
	}
	return cert.NotAfter, nil
}

// clientMetrics counts the requests to API servers. The metrics have the names that all
// components of Kubernetes use. client-go has one set of such metrics in a process.
var clientMetrics = sync.OnceValue(func() []prometheus.Collector {
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "rest_client_requests_total", Help: "Requests to an API server, by status code, method and host.",
	}, []string{"code", "method", "host"})
	duration := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "rest_client_request_duration_seconds", Help: "Duration of requests to an API server, by verb and host.",
		Buckets: []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60},
	}, []string{"verb", "host"})
	limited := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "rest_client_rate_limiter_duration_seconds", Help: "Time that requests waited for the client's own rate limit, by verb and host.",
		Buckets: []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60},
	}, []string{"verb", "host"})
	clientmetrics.Register(clientmetrics.RegisterOpts{
		RequestResult:      results{requests},
		RequestLatency:     latencies{duration},
		RateLimiterLatency: latencies{limited},
	})
	return []prometheus.Collector{requests, duration, limited}
})

type results struct{ *prometheus.CounterVec }

func (r results) Increment(_ context.Context, code, method, host string) {
	r.WithLabelValues(code, method, host).Inc()
}

type latencies struct{ *prometheus.HistogramVec }

func (l latencies) Observe(_ context.Context, verb string, u url.URL, latency time.Duration) {
	l.WithLabelValues(verb, u.Host).Observe(latency.Seconds())
}

// componentPages are the pages that components of Kubernetes have on the address of their
// metrics: the process (KEP-4827), and the values of its flags (KEP-4828) as text and as
// JSON.
func componentPages(flags *pflag.FlagSet) map[string]http.HandlerFunc {
	text := func(w http.ResponseWriter) { w.Header().Set("Content-Type", "text/plain; charset=utf-8") }
	return map[string]http.HandlerFunc{
		"/statusz": func(w http.ResponseWriter, _ *http.Request) {
			text(w)
			up := time.Since(started).Round(time.Second)
			fmt.Fprintf(w, "kpng statusz\nWarning: This page is for people. Programs read /metrics.\n\nStarted: %s\nUp: %s\nVersion: %s\n",
				started.UTC().Format(time.RFC3339), up, Version())
		},
		"/flagz": func(w http.ResponseWriter, _ *http.Request) {
			text(w)
			fmt.Fprint(w, "kpng flagz\nWarning: This page is for people. Programs read /configz.\n\n")
			flags.VisitAll(func(f *pflag.Flag) { fmt.Fprintf(w, "%s=%s\n", f.Name, f.Value) })
		},
		"/configz": func(w http.ResponseWriter, _ *http.Request) {
			values := map[string]string{}
			flags.VisitAll(func(f *pflag.Flag) { values[f.Name] = f.Value.String() })
			w.Header().Set("Content-Type", "application/json")
			json.NewEncoder(w).Encode(map[string]any{"kpng": values})
		},
	}
}
