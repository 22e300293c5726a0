// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/kpng-project/kpng/test/internal/gotool"
	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// ServiceCIDRv4 and ServiceCIDRv6 are the address ranges of cluster IPs.
const (
	ServiceCIDRv4 = "10.96.0.0/16"
	ServiceCIDRv6 = "fd00:10:96::/112"
)

// Options changes the defaults that the package comment describes.
type Options struct {
	// Flags are additional flags of kube-apiserver. They override this package's flags.
	Flags []string
	// Program is the API server, as package gotool names it. The default is
	// gotool.KubeAPIServer.
	Program string
}

// Server is a kube-apiserver with its own etcd.
type Server struct {
	APIServer *Process
	Etcd      *Process

	options                 Options
	authority               *authority
	etcdPath, apiServerPath string
	// dir contains keys, logs, data and sockets.
	dir    string
	port   *port
	config *rest.Config
	client kubernetes.Interface
}

// Start starts a server that runs until the test ends.
func Start(t testing.TB, options Options) *Server {
	t.Helper()
	s, err := start(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	s.showLogsOnFailure(t)
	return s
}

// Run starts a server, calls f with the server, and stops the server.
func Run(ctx context.Context, options Options, f func(*Server) error) error {
	s, err := start(ctx, options)
	if err != nil {
		return err
	}
	return errors.Join(f(s), s.close())
}

// Replica starts another API server, which uses the etcd of s. The users of s can also
// use this API server. While s.APIServer is down, a test can make changes through the
// replica. The replica stops when the test ends.
func (s *Server) Replica(t testing.TB) *Server {
	t.Helper()
	r := &Server{
		Etcd:          s.Etcd,
		options:       s.options,
		authority:     s.authority,
		apiServerPath: s.apiServerPath,
		dir:           s.dir,
	}
	if err := r.startAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.closeAPIServer(); err != nil {
			t.Error(err)
		}
	})
	r.APIServer.showLogOnFailure(t)
	return r
}

// Config returns the client configuration of this server's administrator, without a rate
// limit. The caller may modify it.
func (s *Server) Config() *rest.Config { return rest.CopyConfig(s.config) }

// Client returns a client of the administrator.
func (s *Server) Client() kubernetes.Interface { return s.client }

// WaitReady waits until APIServer is ready. Call it after a restart of Etcd, because the
// API server takes a moment to reconnect.
func (s *Server) WaitReady(t testing.TB) {
	t.Helper()
	if err := s.APIServer.waitReady(t.Context()); err != nil {
		t.Fatalf("wait for %s: %v", s.APIServer.name, err)
	}
}

// Compact makes etcd drop old versions of objects. Afterwards, a watch from an old
// version fails with 410 Gone, unless the API server has the later changes in memory. Only
// this method compacts etcd.
func (s *Server) Compact(t testing.TB) {
	t.Helper()
	if err := s.compact(t.Context()); err != nil {
		t.Fatalf("compact etcd: %v", err)
	}
}

func (s *Server) compact(ctx context.Context) (err error) {
	client, err := s.etcdClient(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	now, err := client.Get(ctx, "/", clientv3.WithCountOnly())
	if err != nil {
		return err
	}
	_, err = client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical())
	return err
}

// start builds the programs if needed and starts them. If a program fails to start, no
// process remains.
func start(ctx context.Context, options Options) (_ *Server, err error) {
	s := &Server{options: options}
	if s.etcdPath, err = gotool.Build(ctx, gotool.Etcd); err != nil {
		return nil, err
	}
	if s.apiServerPath, err = gotool.Build(ctx, cmp.Or(options.Program, gotool.KubeAPIServer)); err != nil {
		return nil, err
	}
	if s.authority, err = newAuthority(); err != nil {
		return nil, err
	}
	// The path of t.TempDir would be too long for a unix socket.
	if s.dir, err = os.MkdirTemp("", "kpng-apiserver-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := s.writeKeys(); err != nil {
		return nil, err
	}
	if err := s.startEtcd(ctx); err != nil {
		return nil, err
	}
	if err := s.startAPIServer(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// writeKeys writes the key files, which all API servers of this etcd share.
func (s *Server) writeKeys() error {
	cert, key, err := s.authority.server()
	if err != nil {
		return err
	}
	serviceAccountKey, err := newKey()
	if err != nil {
		return err
	}
	serviceAccountPEM, err := encodeKey(serviceAccountKey)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"ca.crt":              s.authority.certPEM,
		"server.crt":          cert,
		"server.key":          key,
		"service-account.key": serviceAccountPEM,
	} {
		if err := os.WriteFile(s.path(name), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) startEtcd(ctx context.Context) error {
	peer := "unix://" + s.path("peer.sock")
	client := "unix://" + s.etcdSocket()
	socket := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", s.etcdSocket())
		},
	}}
	s.Etcd = &Process{
		name: "etcd",
		path: s.etcdPath,
		args: []string{
			"--data-dir=" + s.path("data"),
			"--listen-peer-urls=" + peer,
			"--initial-advertise-peer-urls=" + peer,
			"--initial-cluster=default=" + peer,
			"--listen-client-urls=" + client,
			"--advertise-client-urls=" + client,
			// With short intervals, etcd's only member elects itself quickly. Without fsync, etcd
			// is faster; its data need not survive a crash of the machine.
			"--heartbeat-interval=10",
			"--election-timeout=100",
			"--unsafe-no-fsync",
		},
		logPath: s.path("etcd.log"),
		ready: func(ctx context.Context) error {
			return probe(ctx, socket, "http://etcd/readyz")
		},
	}
	return s.Etcd.start(ctx)
}

func (s *Server) startAPIServer(ctx context.Context) (err error) {
	if s.port, err = reservePort(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			s.port.release()
		}
	}()
	if s.config, err = s.clientConfig("admin", "system:masters"); err != nil {
		return err
	}
	s.config.QPS = -1
	s.config.WarningHandler = rest.NoWarnings{} // tests use deprecated and discouraged fields on purpose
	s.config.ContentConfig = rest.ContentConfig{
		AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
		ContentType:        runtime.ContentTypeProtobuf,
	}
	web, err := rest.HTTPClientFor(s.config)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfigAndClient(s.config, web)
	if err != nil {
		return err
	}
	s.client = client
	s.APIServer = &Process{
		name: "kube-apiserver",
		path: s.apiServerPath,
		args: append([]string{
			"--etcd-servers=unix://" + s.etcdSocket(),
			"--bind-address=127.0.0.1",
			"--advertise-address=127.0.0.1",
			"--secure-port=" + strconv.Itoa(s.port.number),
			"--permit-port-sharing",
			"--tls-cert-file=" + s.path("server.crt"),
			"--tls-private-key-file=" + s.path("server.key"),
			"--client-ca-file=" + s.path("ca.crt"),
			"--authorization-mode=RBAC",
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + s.path("service-account.key"),
			"--service-account-signing-key-file=" + s.path("service-account.key"),
			"--service-cluster-ip-range=" + ServiceCIDRv4 + "," + ServiceCIDRv6,
			// Disable the plugin that requires a service account for each pod, because no
			// controller creates service accounts. Create no endpoint for the API server, because
			// its loopback address is invalid in endpoints.
			"--disable-admission-plugins=ServiceAccount",
			"--endpoint-reconciler-type=none",
			// Disable periodic compaction and the queueing of requests.
			"--etcd-compaction-interval=0",
			"--enable-priority-and-fairness=false",
			"--max-requests-inflight=0",
			"--max-mutating-requests-inflight=0",
		}, s.options.Flags...),
		logPath: s.path(fmt.Sprintf("kube-apiserver-%d.log", s.port.number)),
		ready: func(ctx context.Context) error {
			if err := probe(ctx, web, s.config.Host+"/readyz"); err != nil {
				return err
			}
			return s.allocates(ctx)
		},
	}
	return s.APIServer.start(ctx)
}

// allocates checks that the server can allocate cluster IPs of both families.
// Sometimes the server cannot do that right after it becomes ready.
func (s *Server) allocates(ctx context.Context) error {
	policy := corev1.IPFamilyPolicyRequireDualStack
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "ready-"},
		Spec: corev1.ServiceSpec{
			IPFamilyPolicy: &policy,
			Ports:          []corev1.ServicePort{{Port: 1}},
		},
	}
	dryRun := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	_, err := s.client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, service, dryRun)
	return err
}

// clientConfig returns the client configuration of a user in the given groups.
func (s *Server) clientConfig(user string, groups ...string) (*rest.Config, error) {
	cert, key, err := s.authority.client(user, groups...)
	if err != nil {
		return nil, err
	}
	return &rest.Config{
		Host: "https://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port.number)),
		TLSClientConfig: rest.TLSClientConfig{
			CAData:   s.authority.certPEM,
			CertData: cert,
			KeyData:  key,
		},
	}, nil
}

func (s *Server) close() error {
	var errs []error
	if s.APIServer != nil {
		errs = append(errs, s.closeAPIServer())
	}
	if s.Etcd != nil {
		errs = append(errs, s.Etcd.stop(syscall.SIGKILL))
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

func (s *Server) closeAPIServer() error {
	defer s.port.release()
	return s.APIServer.stop(syscall.SIGKILL)
}

func (s *Server) showLogsOnFailure(t testing.TB) {
	s.Etcd.showLogOnFailure(t)
	s.APIServer.showLogOnFailure(t)
}

func (s *Server) path(name string) string { return filepath.Join(s.dir, name) }

func (s *Server) etcdSocket() string { return s.path("etcd.sock") }
