// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the default codec, which rawCodec uses
	"google.golang.org/grpc/keepalive"
	"k8s.io/klog/v2"
)

// ServerOptions are the settings of a server. With the zero value, a server uses
// plaintext and accepts only loopback addresses and unix sockets.
type ServerOptions struct {
	// If TLS is not nil, every client must use TLS.
	TLS *TLS
	// Insecure allows plaintext also on addresses that other machines can reach.
	Insecure bool

	// With NodeCertificates, a client gets the view of node N only if its certificate has
	// the common name system:node:N. NodeCertificates needs TLS.
	NodeCertificates bool

	// With ServeCluster, other kpng servers can read the state of the whole cluster and
	// relay it to their clients. With TLS, only the clients in ClusterReaders may read it.
	ServeCluster bool
	// ClusterReaders names the clients that may read the cluster's state. Each element is a
	// common name or an organization in client certificates.
	ClusterReaders []string

	// The following fields limit the resources that clients use. Clients at the same IP
	// address are one peer. All clients at unix sockets are also one peer. With TLS, clients
	// with different common names are different peers. With NodeCertificates, clients with
	// the same common name system:node:N are one peer, even at different addresses.

	// MaxConnections limits the connections of all peers together. Default 20,000.
	//
	// Connections count after their TLS handshake. A quarter of this number may be in the
	// handshake at the same time. If there are more, the server finds the IPv4 address or
	// IPv6 /64 network with the most handshakes, and closes the oldest connection in this
	// group. Connections without certificates that come from one IPv6 /64 network can
	// together use at most half of MaxConnections.
	MaxConnections int
	// MaxConnectionsPerPeer limits the connections of one IP address, or of all unix sockets.
	// Default 256.
	MaxConnectionsPerPeer int
	// MaxStreamsPerPeer limits the open streams of a peer. A client needs one stream. A
	// malicious client can use about 4 MB of the server's memory per stream. Default 32.
	MaxStreamsPerPeer int
	// StreamRate limits the average number of new streams of a peer per second. It limits
	// the work for first answers, which may contain the whole state. A burst of
	// MaxStreamsPerPeer new streams is allowed. Default 20.
	StreamRate float64
	// SendTimeout limits the time that a client needs to read a message, and the average
	// time for 64 KB of an answer. The server disconnects slower clients. If the cluster
	// changes too much during an answer, SendTimeout limits the time of the whole answer.
	// Default 30 s.
	SendTimeout time.Duration
	// ConnectionAge is the lifetime of a connection, plus or minus at most 10 %. At its
	// end, the server requests that the client connect again, and ends the client's
	// streams within a minute. So clients also spread over new servers, and their
	// certificates are checked again. A client that connects again receives only the
	// changes. Default 30 minutes.
	ConnectionAge time.Duration
	// CacheBytes limits the cache of marshalled views, approximately. Default 64 MiB.
	CacheBytes int

	// After the server has sent a change, it gathers further changes for the time
	// batchInterval. Default 10 ms; a negative value means no wait. Only tests set it.
	batchInterval time.Duration
}

// Server sends views of a cluster's state to clients. With ServeCluster, it also sends
// the state itself.
type Server struct {
	opts     ServerOptions
	state    *cluster.State
	instance []byte // random bytes, with which tokens of this server begin

	served     atomic.Bool
	published  *publisher
	views      *views
	beginnings *beginnings
	peers      *peers
}

// NewServer returns a server of the given state. It answers clients when the state is
// synced. The state should have the option Resumable of [cluster.Options]. Otherwise, if
// objects were deleted while a client was disconnected, the client has to start over.
func NewServer(state *cluster.State, opts ServerOptions) (*Server, error) {
	switch {
	case opts.TLS == nil && opts.NodeCertificates:
		return nil, errors.New("NodeCertificates needs TLS")
	case opts.TLS == nil && len(opts.ClusterReaders) > 0:
		return nil, errors.New("ClusterReaders needs TLS")
	case opts.TLS != nil && opts.ServeCluster && len(opts.ClusterReaders) == 0:
		return nil, errors.New("ServeCluster with TLS needs ClusterReaders")
	}
	for _, o := range []struct {
		name  string
		value any
		valid bool
	}{
		{"MaxConnections", opts.MaxConnections, opts.MaxConnections >= 0},
		{"MaxConnectionsPerPeer", opts.MaxConnectionsPerPeer, opts.MaxConnectionsPerPeer >= 0},
		{"MaxStreamsPerPeer", opts.MaxStreamsPerPeer, opts.MaxStreamsPerPeer >= 0},
		{"StreamRate", opts.StreamRate, opts.StreamRate >= 0}, // NaN is invalid
		{"SendTimeout", opts.SendTimeout, opts.SendTimeout >= 0},
		{"ConnectionAge", opts.ConnectionAge, opts.ConnectionAge >= 0},
		{"CacheBytes", opts.CacheBytes, opts.CacheBytes >= 0},
	} {
		if !o.valid {
			return nil, fmt.Errorf("%s is %v, want 0 for the default or a positive value", o.name, o.value)
		}
	}
	opts.batchInterval = cmp.Or(opts.batchInterval, 10*time.Millisecond)
	opts.MaxConnections = cmp.Or(opts.MaxConnections, transport.DefaultMaxConnections)
	opts.MaxConnectionsPerPeer = cmp.Or(opts.MaxConnectionsPerPeer, transport.DefaultMaxConnectionsPerPeer)
	opts.MaxStreamsPerPeer = cmp.Or(opts.MaxStreamsPerPeer, transport.DefaultMaxStreamsPerPeer)
	opts.StreamRate = cmp.Or(opts.StreamRate, transport.DefaultStreamRate)
	opts.SendTimeout = cmp.Or(opts.SendTimeout, transport.DefaultSendTimeout)
	opts.ConnectionAge = cmp.Or(opts.ConnectionAge, transport.DefaultConnectionAge)
	opts.CacheBytes = cmp.Or(opts.CacheBytes, transport.DefaultCacheBytes)
	instance := make([]byte, 16)
	rand.Read(instance) // cannot fail
	views := newViews(opts.CacheBytes)
	return &Server{
		opts:       opts,
		state:      state,
		instance:   instance,
		published:  &publisher{state: state, interval: opts.batchInterval},
		views:      views,
		beginnings: newBeginnings(views),
		peers:      newPeers(opts),
	}, nil
}

// Serve accepts clients on the listeners until ctx ends. Then it closes the listeners,
// waits up to 5 s for answers in progress, and returns nil. It returns an error if a
// listener would be insecure, if a listener fails, or if Serve was called before.
func (s *Server) Serve(ctx context.Context, listeners ...net.Listener) error {
	defer func() {
		for _, l := range listeners {
			l.Close()
		}
	}()
	creds, err := s.credentials(ctx, listeners)
	if err != nil {
		return err
	}
	if s.served.Swap(true) {
		return errors.New("server is already serving or has ended")
	}
	server := grpc.NewServer(s.grpcOptions(creds)...)
	localv1.RegisterSetsServer(server, setsServer{Server: s})
	if s.opts.ServeCluster {
		clusterv1.RegisterClusterServer(server, clusterServer{Server: s})
	}

	group, serving := errgroup.WithContext(ctx)
	group.Go(func() error { return s.published.run(serving, s.beginnings.forget) })
	for _, l := range listeners {
		group.Go(func() error {
			klog.FromContext(ctx).Info("Serving", "address", l.Addr().String(), "tls", s.opts.TLS != nil)
			if err := server.Serve(&limitedListener{l, s.peers}); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				return fmt.Errorf("serve on %s: %w", l.Addr(), err)
			}
			return nil
		})
	}
	group.Go(func() error {
		<-serving.Done()
		s.published.wakeAll(func() { s.published.stopped.Store(true) })
		timer := time.AfterFunc(stopTimeout, server.Stop)
		defer timer.Stop()
		server.GracefulStop()
		return nil
	})
	err = group.Wait()
	server.Stop()
	return err
}

// stopTimeout limits the time for answers in progress when the server stops.
const stopTimeout = 5 * time.Second

// maxRequest is the maximum size of a message from a client. A WatchReq is smaller,
// because it has little more than a name, a token and 8 KB of digests.
const maxRequest = 16 << 10

// requestWindow is the flow-control window for a client's messages. The window is fixed.
// Otherwise gRPC would send a ping with each request to measure the bandwidth. The size
// is the default of HTTP/2.
const requestWindow = 64 << 10

func (s *Server) grpcOptions(creds credentials.TransportCredentials) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(connCredentials{creds}),
		grpc.ForceServerCodecV2(rawCodec{encoding.GetCodecV2("proto")}),
		grpc.ConnectionTimeout(5 * time.Second),
		grpc.MaxConcurrentStreams(uint32(s.opts.MaxStreamsPerPeer)),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.ReadBufferSize(1 << 10), // requests are short, except the first
		grpc.SharedWriteBuffer(true), // saves 32 KB per idle connection; default in newer versions of gRPC
		grpc.StaticStreamWindowSize(requestWindow),
		grpc.StaticConnWindowSize(requestWindow),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second,
			MaxConnectionAge: s.opts.ConnectionAge, MaxConnectionAgeGrace: time.Minute,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second}),
	}
}

// credentials returns the credentials for all connections. It returns an error if a
// listener needs TLS and TLS is not configured.
func (s *Server) credentials(ctx context.Context, listeners []net.Listener) (credentials.TransportCredentials, error) {
	if s.opts.TLS != nil {
		config, err := transport.TLS(*s.opts.TLS).Server(klog.FromContext(ctx))
		if err != nil {
			return nil, err
		}
		return credentials.NewTLS(config), nil
	}
	for _, l := range listeners {
		if err := transport.CheckPlaintext(l.Addr()); err != nil && !s.opts.Insecure {
			return nil, fmt.Errorf("%w (flags --tls-ca-file, --tls-cert-file and --tls-key-file, or --insecure)", err)
		}
	}
	return insecure.NewCredentials(), nil
}

// Stats returns statistics. The command kpng to-api exports them as metrics. It is safe
// for concurrent use.
func (s *Server) Stats() transport.Stats {
	r := &s.peers.refusals
	r.mu.Lock()
	defer r.mu.Unlock()
	return transport.Stats{
		Streams:     int(s.peers.streams.Load()),
		Views:       s.views.computed.Load(),
		Values:      s.views.values.Load(),
		Bytes:       s.peers.sent.Load(),
		Refused:     r.count,
		LastRefused: r.last,
		Refusal:     r.reason,
		Stalled:     s.peers.stalled.Load(),
	}
}

// Streams calls add for each open stream, in no particular order. It is safe for
// concurrent use.
//
// The argument node is the node whose view the client receives. It is empty if the client
// reads the state of the whole cluster. The argument peer is the client's certificate or
// IP address, as in [ServerOptions]. The argument since is the time of the client's first
// request. The argument revision is the last revision of the server's state that the
// client has. It is 0 until the client has received the first answer. Revisions that
// change nothing for the client count as received.
func (s *Server) Streams(add func(node, peer string, since time.Time, revision uint64)) {
	s.peers.mu.Lock()
	open := slices.Collect(maps.Keys(s.peers.open))
	s.peers.mu.Unlock()
	for _, o := range open {
		add(o.node, o.peer, o.since, o.revision.Load())
	}
}
