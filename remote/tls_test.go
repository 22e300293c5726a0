// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/remote"
	"google.golang.org/grpc"
)

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{key: newKey(t)}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return a
}

// pool returns a certificate pool that contains only this authority.
func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func tlsFiles(dir string) *remote.TLS {
	return &remote.TLS{
		CAFile: filepath.Join(dir, "ca"), CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key"),
		ServerName: "kpng.test",
	}
}

// issue creates a certificate for name. It writes the certificate, the key and the
// authority's certificate to the paths in files.
func (a *authority) issue(t testing.TB, files *remote.TLS, name string, organizations ...string) {
	t.Helper()
	a.issueUntil(t, files, time.Now().Add(time.Hour), name, organizations...)
}

// issueUntil is like issue, but the certificate expires at the time end.
func (a *authority) issueUntil(t testing.TB, files *remote.TLS, end time.Time, name string, organizations ...string) {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name, Organization: organizations},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: end,
		DNSNames: []string{"kpng.test"}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{
		files.CAFile:   {Type: "CERTIFICATE", Bytes: a.cert.Raw},
		files.CertFile: {Type: "CERTIFICATE", Bytes: cert},
		files.KeyFile:  {Type: "PRIVATE KEY", Bytes: private},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func (a *authority) newFiles(t testing.TB, name string, organizations ...string) *remote.TLS {
	files := tlsFiles(t.TempDir())
	a.issue(t, files, name, organizations...)
	return files
}

// try connects once and requests the view of the given node. It returns nil if the client
// receives an answer.
func try(t *testing.T, address, node string, files *remote.TLS) error {
	t.Helper()
	client, err := remote.NewClient(remote.ClientOptions{NodeName: node, DialOptions: remote.DialOptions{
		Addresses: []string{address}, TLS: files, FailFast: true,
	}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- client.Run(ctx) }()
	select {
	case <-client.Source().Changed():
		cancel()
		<-ended
		return nil
	case err := <-ended:
		return err
	}
}

func tryCluster(t *testing.T, address string, files *remote.TLS) error {
	t.Helper()
	state := cluster.New(cluster.Options{})
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		ended <- remote.Watch(ctx, state, remote.DialOptions{
			Addresses: []string{address}, TLS: files, FailFast: true,
		})
	}()
	select {
	case <-state.Changed(0):
		cancel()
		<-ended
		return nil
	case err := <-ended:
		return err
	}
}

// expect checks that err contains the text want. If want is empty, err must be nil.
func expect(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("error %v", err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("error %v, want one with %q", err, want)
	}
}

func TestCertificates(t *testing.T) {
	ca, foreign := newAuthority(t), newAuthority(t)
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	l := listen(t, "127.0.0.1:0")
	address := l.Addr().String()
	opts := quick
	opts.TLS = ca.newFiles(t, "server")
	opts.NodeCertificates = true
	opts.ServeCluster, opts.ClusterReaders = true, []string{"relays", "relay-1"}
	serveOn(t, state, l, opts)

	node := ca.newFiles(t, "system:node:n")
	stranger := foreign.newFiles(t, "system:node:n")
	stranger.CAFile = node.CAFile
	wrongName := *node
	wrongName.ServerName = "another.test"
	distrustful := *node
	distrustful.CAFile = foreign.newFiles(t, "x").CAFile

	for _, test := range []struct {
		name, node string
		files      *remote.TLS
		want       string
	}{
		{"a node may read its own view", "n", node, ""},
		{"a node may not read another node's view", "m", node, "PermissionDenied"},
		{"a node may not read a view without a node name", "", node, "PermissionDenied"},
		{"a certificate without a node name may read no view", "n", ca.newFiles(t, "n"), "PermissionDenied"},
		{"a client without TLS is refused", "n", nil, "Unavailable"},
		{"a certificate of another authority is refused", "n", stranger, "Unavailable"},
		{"a server with another name is refused", "n", &wrongName, "another.test"},
		{"a server of another authority is refused", "n", &distrustful, "unknown authority"},
	} {
		t.Run(test.name, func(t *testing.T) { expect(t, try(t, address, test.node, test.files), test.want) })
	}
	for _, test := range []struct {
		name  string
		files *remote.TLS
		want  string
	}{
		{"a cluster reader is accepted by name", ca.newFiles(t, "relay-1"), ""},
		{"a cluster reader is accepted by organization", ca.newFiles(t, "x", "relays"), ""},
		{"other certificates are refused", node, "PermissionDenied"},
	} {
		t.Run(test.name, func(t *testing.T) { expect(t, tryCluster(t, address, test.files), test.want) })
	}
}

func TestClusterIsServedOnlyIfEnabled(t *testing.T) {
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	address := socket(t)
	serve(t, state, address, quick)
	expect(t, tryCluster(t, address, nil), "Unimplemented")
}

// The test renews the server's certificate and its authority while the server runs.
func TestCertificatesAreReloaded(t *testing.T) {
	old, renewed := newAuthority(t), newAuthority(t)
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	l := listen(t, "127.0.0.1:0")
	opts := quick
	opts.TLS = old.newFiles(t, "server")
	serveOn(t, state, l, opts)
	before, after := old.newFiles(t, "n"), renewed.newFiles(t, "n")
	expect(t, try(t, l.Addr().String(), "n", before), "")
	expect(t, try(t, l.Addr().String(), "n", after), "unknown authority")

	later := time.Now().Add(time.Minute)
	if err := os.WriteFile(opts.TLS.CertFile, []byte("half a certif"), 0o600); err != nil {
		t.Fatal(err)
	}
	os.Chtimes(opts.TLS.CertFile, later, later)
	expect(t, try(t, l.Addr().String(), "n", before), "") // while files are invalid, the old certificates stay in use

	renewed.issue(t, opts.TLS, "server")
	later = later.Add(time.Minute)
	os.Chtimes(opts.TLS.CertFile, later, later)
	expect(t, try(t, l.Addr().String(), "n", after), "")
	expect(t, try(t, l.Addr().String(), "n", before), "unknown authority")
}

// The kubelet keeps its certificate and key in one file, behind a link. When the kubelet
// renews them, it replaces the link. Servers and clients must read such files.
func TestLinkToCertificateAndKeyIsFollowed(t *testing.T) {
	old, renewed := newAuthority(t), newAuthority(t)
	state := cluster.New(cluster.Options{})
	state.SetSynced()
	dir := t.TempDir()
	link := filepath.Join(dir, "current.pem")
	rotate := func(name string, a *authority) {
		t.Helper()
		files := a.newFiles(t, "server")
		var both []byte
		for _, file := range []string{files.CertFile, files.KeyFile} {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			both = append(both, text...)
		}
		if err := errors.Join(os.WriteFile(filepath.Join(dir, name), both, 0o600), os.RemoveAll(link), os.Symlink(filepath.Join(dir, name), link)); err != nil {
			t.Fatal(err)
		}
	}
	rotate("1.pem", old)
	l := listen(t, "127.0.0.1:0")
	opts := quick
	opts.TLS = &remote.TLS{CAFile: old.newFiles(t, "x").CAFile, CertFile: link, KeyFile: link}
	serveOn(t, state, l, opts)
	client := old.newFiles(t, "n")
	expect(t, try(t, l.Addr().String(), "n", client), "")
	rotate("2.pem", renewed)
	expect(t, try(t, l.Addr().String(), "n", client), "unknown authority")
	client.CAFile = renewed.newFiles(t, "x").CAFile
	expect(t, try(t, l.Addr().String(), "n", client), "")
}

func TestPlaintextIsForThisMachine(t *testing.T) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	server, err := remote.NewServer(cluster.New(cluster.Options{}), remote.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	expect(t, server.Serve(t.Context(), l), "TLS")
	if _, err := remote.NewClient(remote.ClientOptions{DialOptions: remote.DialOptions{Addresses: []string{"192.0.2.1:1"}}}); err == nil {
		t.Error("a client may use plaintext to another machine")
	}
	if _, err := remote.NewClient(remote.ClientOptions{DialOptions: remote.DialOptions{Addresses: []string{"192.0.2.1:1"}, Insecure: true}}); err != nil {
		t.Error(err)
	}
}

// Either all nodes have the same certificate, as in a DaemonSet, or each node has its own
// certificate. In both cases, all relays have the same certificate.
func TestNodesMayShareACertificate(t *testing.T) {
	for _, test := range []struct {
		name, cert       string
		nodeCertificates bool
		hosts            []string // source address of each stream; the limit is two streams per peer
		want             string   // error of the last stream
	}{
		{"nodes at their own addresses", "system:node:n", false, []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"}, ""},
		{"one node", "system:node:n", false, []string{"127.0.0.2", "127.0.0.2", "127.0.0.2"}, "CN=system:node:n at 127.0.0.2 has 2 streams"},
		{"a node's certificate at any address", "system:node:n", true, []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"}, "CN=system:node:n has 2 streams"},
		{"relays at their own addresses", "relays", true, []string{"127.0.0.2", "127.0.0.3", "127.0.0.4"}, ""},
		{"one relay", "relays", true, []string{"127.0.0.2", "127.0.0.2", "127.0.0.2"}, "CN=relays at 127.0.0.2 has 2 streams"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ca := newAuthority(t)
			opts := quick
			opts.TLS, opts.NodeCertificates = ca.newFiles(t, "server"), test.nodeCertificates
			opts.MaxStreamsPerPeer = 2
			opts.ServeCluster, opts.ClusterReaders = true, []string{"relays"}
			l := listen(t, "0.0.0.0:0")
			serveOn(t, manyServices(1), l, opts)
			files := ca.newFiles(t, test.cert)
			creds := clientCredentials(t, ca, files.CertFile, files.KeyFile)
			for i, host := range test.hosts {
				dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}
				conn, err := grpc.NewClient(fmt.Sprint("passthrough:///127.0.0.1:", l.Addr().(*net.TCPAddr).Port), grpc.WithTransportCredentials(creds),
					grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
						return dialer.DialContext(ctx, "tcp4", address)
					}))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { conn.Close() })
				if test.cert == "relays" {
					var stream grpc.BidiStreamingClient[clusterv1.WatchRequest, clusterv1.WatchResponse]
					if stream, err = clusterv1.NewClusterClient(conn).Watch(t.Context()); err != nil {
						t.Fatal(err)
					}
					stream.Send(&clusterv1.WatchRequest{}) // Recv returns the error
					_, err = stream.Recv()
				} else {
					stream := open(t, conn)
					request(t, stream, nil)
					_, err = stream.Recv()
				}
				if i == len(test.hosts)-1 {
					expect(t, err, test.want)
				} else {
					expect(t, err, "")
				}
			}
		})
	}
}
