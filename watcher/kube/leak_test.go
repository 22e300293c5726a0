// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/kubetest"
	"go.uber.org/goleak"
	"k8s.io/client-go/rest"
)

// secureServer returns an API server with HTTP/2, and the names of the client certificates
// of its requests.
func secureServer(t *testing.T) (s *kubetest.Server, server *httptest.Server, clients func() []string) {
	s = kubetest.New()
	var mu sync.Mutex
	var names []string
	server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, c := range r.TLS.PeerCertificates {
			mu.Lock()
			names = append(names, c.Subject.CommonName)
			mu.Unlock()
		}
		s.ServeHTTP(w, r)
	}))
	server.EnableHTTP2 = true
	server.TLS = &tls.Config{ClientAuth: tls.RequestClientCert}
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // discard errors about interrupted handshakes
	server.StartTLS()
	t.Cleanup(server.Close)
	return s, server, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(names)
	}
}

// writeCertificate writes a client certificate with the given name to the files.
func writeCertificate(t *testing.T, name, certFile, keyFile string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// watchUntilSynced starts Watch, and returns a function that ends it.
func watchUntilSynced(t *testing.T, state *cluster.State, opts Options) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Watch(ctx, state, opts) }()
	<-state.Changed(0)
	return func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// The synctest bubbles of other tests also detect leaked goroutines, but have neither
// sockets nor HTTP/2.
func TestWatchLeaksNoGoroutines(t *testing.T) {
	leaks := goleak.IgnoreCurrent()
	s, server, _ := secureServer(t)
	s.Set(service("web", proxyName, "x"), selectorless("byhand", proxyName, "x"), slice("byhand", "plain", "10.0.0.1"))
	opts := named("x")
	opts.Config = &rest.Config{Host: server.URL, TLSClientConfig: filesConfig(t)}
	watchUntilSynced(t, cluster.New(cluster.Options{}), opts)()
	server.Close()
	goleak.VerifyNone(t, leaks)
}

// filesConfig returns a configuration with a client certificate in files.
func filesConfig(t *testing.T) rest.TLSClientConfig {
	dir := t.TempDir()
	files := rest.TLSClientConfig{Insecure: true, CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key")}
	writeCertificate(t, "first", files.CertFile, files.KeyFile)
	return files
}

// Transports in global caches, and timers, must not refer to the state.
func TestStateIsFreedAfterWatch(t *testing.T) {
	_, server, _ := secureServer(t)
	files := filesConfig(t)
	var made, freed atomic.Int32
	for range 5 {
		for _, config := range []rest.TLSClientConfig{{Insecure: true}, files} {
			for _, opts := range []Options{{}, named("x")} {
				opts.Config = &rest.Config{Host: server.URL, TLSClientConfig: config}
				state := cluster.New(cluster.Options{})
				runtime.AddCleanup(state, func(int) { freed.Add(1) }, 0)
				made.Add(1)
				watchUntilSynced(t, state, opts)()
			}
		}
	}
	for last, since := freed.Load(), time.Now(); freed.Load() < made.Load(); time.Sleep(time.Millisecond) {
		runtime.GC()
		if now := freed.Load(); now > last {
			last, since = now, time.Now()
		}
		if time.Since(since) > 20*time.Second {
			t.Fatalf("%d of %d states were freed", freed.Load(), made.Load())
		}
	}
}

func TestCertificateFilesAreReloaded(t *testing.T) {
	s, server, clients := secureServer(t)
	files := filesConfig(t)
	state := cluster.New(cluster.Options{})
	defer watchUntilSynced(t, state, Options{Config: &rest.Config{Host: server.URL, TLSClientConfig: files}})()
	drop := func() {
		waitFor(t, func() bool {
			return len(s.Watched(services)) == 1 && len(s.Watched(endpointSlices)) == 1 && len(s.Watched(nodes)) == 1
		})
		s.Drop(nil)
	}
	writeCertificate(t, "second", files.CertFile, files.KeyFile)
	drop() // the next requests use the new certificate
	s.Set(service("web"))
	waitFor(t, func() bool { return state.Objects().Services.Len() == 1 && slices.Contains(clients(), "second") })

	// If the certificate and the key do not match, the last certificate remains in use.
	if err := os.WriteFile(files.KeyFile, []byte("incomplete"), 0o600); err != nil {
		t.Fatal(err)
	}
	drop()
	s.Set(service("api"))
	waitFor(t, func() bool { return state.Objects().Services.Len() == 2 })
	if got := clients(); got[0] != "first" || got[len(got)-1] != "second" {
		t.Errorf("client certificates of the requests: %q", got)
	}
}

func TestUnreadableCertificateFilesAreErrors(t *testing.T) {
	err := Watch(t.Context(), cluster.New(cluster.Options{}), Options{Config: &rest.Config{
		Host: "https://api.test", TLSClientConfig: rest.TLSClientConfig{CertFile: "no-cert", KeyFile: "no-key"},
	}})
	if err == nil || !strings.Contains(err.Error(), "read client certificate: open no-cert") {
		t.Errorf("error %v, want one that names the file", err)
	}
}

// waitFor waits until done returns true.
func waitFor(t *testing.T, done func() bool) {
	t.Helper()
	for since := time.Now(); !done(); time.Sleep(time.Millisecond) {
		if time.Since(since) > time.Minute {
			t.Fatal("timeout")
		}
	}
}
