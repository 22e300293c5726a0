// SPDX-License-Identifier: Apache-2.0

package kpng_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"flag"
	"fmt"
	"io"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"k8s.io/client-go/rest"
)

var (
	proxies  = flag.Int("proxies", 40, "the number of proxies that TestEndedProxiesKeepNothing makes in each case")
	useHTTP2 = flag.Bool("http2", false, "use HTTP/2 in TestEndedProxiesKeepNothing, which takes some minutes")
)

// crowdedServer returns an API server with many services, over TLS.
func crowdedServer(t *testing.T) *httptest.Server {
	var items []string
	for i := range 300 {
		items = append(items, fmt.Sprintf(`{"metadata":{"namespace":"default","name":"s%d"},"spec":{"clusterIP":"10.96.%d.%d","ports":[{"port":80,"protocol":"TCP"}]}}`, i, i/250, 1+i%250))
	}
	lists := map[string]string{
		"services":       `{"apiVersion":"v1","kind":"ServiceList","metadata":{"resourceVersion":"7"},"items":[` + strings.Join(items, ",") + `]}`,
		"nodes":          `{"apiVersion":"v1","kind":"NodeList","metadata":{"resourceVersion":"7"},"items":[]}`,
		"endpointslices": `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSliceList","metadata":{"resourceVersion":"7"},"items":[]}`,
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Query().Has("watch") {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		io.WriteString(w, lists[path.Base(r.URL.Path)])
	}))
	server.EnableHTTP2 = *useHTTP2
	server.TLS = &tls.Config{ClientAuth: tls.RequestClientCert}
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // discard errors about interrupted handshakes
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// keyPair returns a client certificate and its key, as PEM.
func keyPair(t *testing.T) (cert, key []byte) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kpng"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// remains counts the bytes on the heap and the goroutines that ended proxies have left.
type remains struct{ heap, goroutines int }

// exceeds reports whether r is more than 5 % above limit.
func (r remains) exceeds(limit remains) bool {
	return r.heap > limit.heap*105/100 || r.goroutines > limit.goroutines*105/100
}

func measure() remains {
	runtime.GC()
	runtime.GC() // the second collection frees what finalizers and pools kept
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return remains{int(m.HeapAlloc), runtime.NumGoroutine()}
}

// settle repeats the measurement until no value has decreased for a while, because
// connections end in the background. Timers keep a closed HTTP/2 connection in memory
// for up to 90 seconds.
func settle() remains {
	patience := 200 * time.Millisecond
	if *useHTTP2 {
		patience = 100 * time.Second
	}
	least, since := measure(), time.Now()
	for time.Since(since) < patience {
		time.Sleep(patience / 10)
		if now := measure(); now.heap < least.heap || now.goroutines < least.goroutines {
			least, since = remains{min(now.heap, least.heap), min(now.goroutines, least.goroutines)}, time.Now()
		}
	}
	return least
}

func TestEndedProxiesKeepNothing(t *testing.T) {
	server := crowdedServer(t)
	dir := t.TempDir()
	certFile, keyFile, tokenFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key"), filepath.Join(dir, "token")
	cert, key := keyPair(t)
	for file, content := range map[string][]byte{certFile: cert, keyFile: key, tokenFile: []byte("secret")} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	secure := func(c rest.TLSClientConfig) rest.TLSClientConfig {
		c.CAData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
		return c
	}
	for name, opts := range map[string]kpng.Options{
		"token":             {Config: &rest.Config{BearerToken: "secret", TLSClientConfig: secure(rest.TLSClientConfig{})}},
		"token file":        {Config: &rest.Config{BearerTokenFile: tokenFile, TLSClientConfig: secure(rest.TLSClientConfig{})}},
		"certificate":       {Config: &rest.Config{TLSClientConfig: secure(rest.TLSClientConfig{CertData: cert, KeyData: key})}},
		"certificate files": {Config: &rest.Config{TLSClientConfig: secure(rest.TLSClientConfig{CertFile: certFile, KeyFile: keyFile})}},
		"named": {
			Config:   &rest.Config{TLSClientConfig: secure(rest.TLSClientConfig{})},
			Services: watcher.Options{ServiceProxyName: "x"},
		},
		"manifests": demo(),
	} {
		t.Run(name, func(t *testing.T) {
			if opts.Config != nil {
				opts.Config.Host = server.URL
			}
			opts.NodeName = "n"
			runProxies(t, 10, opts)
			first := settle()
			runProxies(t, *proxies-10, opts)
			last := settle()
			t.Logf("after 10 proxies: %+v, after %d: %+v", first, *proxies, last)
			if last.exceeds(first) {
				t.Errorf("%d proxies left %+v, more than 5 %% above the %+v of 10 proxies", *proxies, last, first)
			}
		})
	}
}

// runProxies makes, runs and ends n proxies, one after the other.
func runProxies(t *testing.T, n int, opts kpng.Options) {
	opts.Sinks = []kpng.Sink{{Sink: sink.Func(func(context.Context, *sink.Changes) error { return nil })}}
	for range n {
		p, err := kpng.New(opts)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		if err := p.WaitSynced(ctx); err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
}
