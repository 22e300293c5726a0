// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/util/connrotation"
	"k8s.io/klog/v2"
)

// client is a client for the API groups that this package needs. With the typed clients of
// client-go, every program would link the types of all groups.
type client struct {
	core, discovery, networking rest.Interface
	connections                 *connrotation.Dialer
	// decoder decodes complete answers of all content types.
	decoder runtime.Decoder
}

// newClient returns a client with its own connections, so that closing them affects no
// other client. Closing only idle connections is not enough, because a connection with
// a canceled watch can still be busy. After ctx ends, the client opens no connections.
// The client converts each object to an item, with the store for the object's kind. It
// returns a complete object if there is no such store, or if the caller passes an object for
// the result.
func newClient(ctx context.Context, config *rest.Config, stores map[string]objectStore) (*client, error) {
	scheme := runtime.NewScheme()
	for _, add := range [...]func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})

	config = rest.CopyConfig(config)
	codecs := serializer.NewCodecFactory(scheme)
	config.NegotiatedSerializer = newNegotiation(codecs.WithoutConversion(), stores)
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.DisableCompression = true
	config.Timeout = 0
	if config.QPS == 0 && config.RateLimiter == nil {
		// The client sends few requests, so it needs no limit. The server has its own limit.
		config.QPS = -1
	}
	if config.UserAgent == "" {
		config.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	dial := config.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	}
	// An HTTP/2 transport stays in memory for half a minute after its last connection was
	// closed. No part of it may refer to the client: the client's stores refer to the state,
	// which would then stay, too.
	connections := connrotation.NewDialer(dial)
	config.Dial = func(dialling context.Context, network, address string) (net.Conn, error) {
		conn, err := connections.DialContext(dialling, network, address)
		if err == nil && ctx.Err() != nil {
			conn.Close()
			return nil, net.ErrClosed
		}
		return conn, err
	}
	connect, err := httpClient(config, connections)
	if err != nil {
		return nil, err
	}
	c := &client{connections: connections, decoder: codecs.UniversalDeserializer()}
	if c.core, err = group(config, connect, "/api", corev1.SchemeGroupVersion); err != nil {
		return nil, err
	}
	if c.discovery, err = group(config, connect, "/apis", discoveryv1.SchemeGroupVersion); err != nil {
		return nil, err
	}
	c.networking, err = group(config, connect, "/apis", networkingv1.SchemeGroupVersion)
	return c, err
}

func group(config *rest.Config, connect *http.Client, path string, version schema.GroupVersion) (rest.Interface, error) {
	config = rest.CopyConfig(config)
	config.APIPath = path
	config.GroupVersion = &version
	return rest.RESTClientForConfigAndClient(config, connect)
}

// httpClient returns an HTTP client for config. It is like rest.HTTPClientFor, except
// that no part of the client outlives the last reference to the client. client-go
// caches transports in a global map, and reads certificate files in goroutines that
// never end.
func httpClient(config *rest.Config, connections *connrotation.Dialer) (*http.Client, error) {
	settings, err := config.TransportConfig()
	if err != nil {
		return nil, err
	}
	if settings.Proxy == nil {
		settings.Proxy = http.ProxyFromEnvironment // the default; client-go does not cache transports with a Proxy
	}
	if t := &settings.TLS; t.CertFile != "" && t.KeyFile != "" && len(t.CertData) == 0 && len(t.KeyData) == 0 {
		files := &certificateFiles{cert: t.CertFile, key: t.KeyFile}
		if _, err := files.load(); err != nil {
			return nil, err
		}
		t.CertFile, t.KeyFile = "", ""
		t.GetCertHolder = &transport.GetCertHolder{GetCert: files.current}
		settings.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return &certificateReloader{files: files, connections: connections, next: next}
		})
	}
	roundTripper, err := transport.New(settings)
	if err != nil {
		return nil, err
	}
	return &http.Client{Transport: roundTripper}, nil
}

// certificateFiles is a client certificate in files that may change.
type certificateFiles struct {
	cert, key string // paths

	mu              sync.Mutex
	certPEM, keyPEM []byte
	loaded          *tls.Certificate
}

// load reads the files. It reports whether they have changed since the last call that
// returned no error. After an error the last certificate stays in use.
func (f *certificateFiles) load() (changed bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	certPEM, err := os.ReadFile(f.cert)
	if err != nil {
		return false, fmt.Errorf("read client certificate: %w", err)
	}
	keyPEM, err := os.ReadFile(f.key)
	if err != nil {
		return false, fmt.Errorf("read key of client certificate: %w", err)
	}
	if bytes.Equal(certPEM, f.certPEM) && bytes.Equal(keyPEM, f.keyPEM) {
		return false, nil
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return false, fmt.Errorf("load client certificate %s with key %s: %w", f.cert, f.key, err)
	}
	f.certPEM, f.keyPEM, f.loaded = certPEM, keyPEM, &pair
	return true, nil
}

// current returns the certificate that load has read last.
func (f *certificateFiles) current() (*tls.Certificate, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.loaded, nil
}

// certificateReloader reads certificate files before each request. If they have changed,
// it closes all connections, because a server checks the certificate of the connection at
// each request. Watches begin again every few minutes, so a new certificate is in use
// long before its predecessor expires.
type certificateReloader struct {
	files       *certificateFiles
	connections *connrotation.Dialer
	next        http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (r *certificateReloader) RoundTrip(request *http.Request) (*http.Response, error) {
	changed, err := r.files.load()
	if err != nil {
		klog.FromContext(request.Context()).Error(err, "Cannot reload the client certificate; using the last one")
	}
	if changed {
		r.connections.CloseAll()
	}
	return r.next.RoundTrip(request)
}

// server returns the base URL of the API server.
func (c *client) server() string {
	u := c.core.Get().URL()
	return u.Scheme + "://" + u.Host
}
