// SPDX-License-Identifier: Apache-2.0

package command

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
)

func TestCertificateMetrics(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cert.pem")
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.String("tls-cert-file", "", "")
	flags.String("api-tls-cert-file", "", "")
	if got := testutil.CollectAndCount(newCertificateMetrics(flags)); got != 0 {
		t.Errorf("%d metrics without certificates", got)
	}
	if err := flags.Set("tls-cert-file", file); err != nil {
		t.Fatal(err)
	}
	metrics := newCertificateMetrics(flags)
	check := func(want string) {
		t.Helper()
		text := "# HELP kpng_certificate_expiry_timestamp_seconds Time when the certificate expires; 0 if it cannot be read.\n# TYPE kpng_certificate_expiry_timestamp_seconds gauge\n"
		if err := testutil.CollectAndCompare(metrics, strings.NewReader(text+`kpng_certificate_expiry_timestamp_seconds{use="server"} `+want+"\n")); err != nil {
			t.Error(err)
		}
	}
	check("0")
	for _, unix := range []int64{1_800_000_000, 1_900_000_000} { // the second one is a renewed certificate
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Unix(unix, 0)}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		check(map[int64]string{1_800_000_000: "1.8e+09", 1_900_000_000: "1.9e+09"}[unix])
	}
	if err := os.WriteFile(file, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	check("0")
}

func TestRequestsToAPIServersAreCounted(t *testing.T) {
	server := httptest.NewServer(nil) // answers 404
	defer server.Close()
	registry := prometheus.NewRegistry()
	registry.MustRegister(clientMetrics()...)
	getService(t.Context(), &rest.Config{Host: server.URL}, "", fields.Everything(), func(*corev1.Service) bool { return true })
	want := "# HELP rest_client_requests_total Requests to an API server, by status code, method and host.\n# TYPE rest_client_requests_total counter\n" +
		`rest_client_requests_total{code="404",host="` + strings.TrimPrefix(server.URL, "http://") + `",method="GET"} 1` + "\n"
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "rest_client_requests_total"); err != nil {
		t.Error(err)
	}
	if n, err := testutil.GatherAndCount(registry, "rest_client_request_duration_seconds"); n != 1 || err != nil {
		t.Errorf("%d durations, error %v", n, err)
	}
}
