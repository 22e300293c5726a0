// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/kpng-project/kpng/api/clusterv1"
	"github.com/kpng-project/kpng/api/localv1"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote/transport"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that rawCodec falls back to
	"google.golang.org/grpc/keepalive"
	"k8s.io/klog/v2"
)

// ServerOptions are a server's settings. The zero value serves loopback and unix
// sockets in plaintext.
type ServerOptions struct {
	// TLS, if not nil, is asked of every client.
	TLS *transport.TLS
	// Insecure allows plaintext where other machines can see it.
	Insecure bool

	// NodeCertificates lets a client watch only the node that its certificate
	// is made out to, with the common name system:node:NAME. It needs TLS.
	NodeCertificates bool

	// ServeCluster serves the state of the whole cluster, too, for a kpng that
	// hands it on. With TLS, ClusterReaders names who may have it.
	ServeCluster bool
	// ClusterReaders are common names or organisations of certificates.
	ClusterReaders []string

	// BatchInterval is how long the server waits for more after a change until
	// it tells its clients. Default 10 ms; negative means not at all.
	BatchInterval time.Duration
	// Limits bound what clients can take.
	Limits Limits
	// StopTimeout is how long answers that are being sent may take when the
	// server stops. Default 5 s.
	StopTimeout time.Duration
}

// Limits bound what clients can take from a server. A peer is an IP address or all of unix
// sockets, and with TLS the common name of a certificate there. With NodeCertificates it is the
// common name alone. Zero values stand for the defaults.
type Limits struct {
	// Connections are those of all peers together. Default 20,000.
	Connections int
	// ConnectionsPerPeer are those of one IP address, or of unix sockets.
	// Default 256.
	ConnectionsPerPeer int
	// StreamsPerPeer are open at once. A client needs one, and one that means harm can make
	// each cost about 4 MB. Default 32.
	StreamsPerPeer int
	// StreamRate is how many streams a second a peer may open in the long run,
	// since the first answer of each may be everything; as many as
	// StreamsPerPeer in a burst. Default 20.
	StreamRate float64
	// SendTimeout is how long a client may take for one message, and for each 64 KB of an
	// answer, until its connection is closed. A stream also ends if its answer takes longer
	// and the cluster has changed too much meanwhile. Default 30 s.
	SendTimeout time.Duration
	// CacheBytes is about how much memory is used to keep marshalled views.
	// Default 64 MiB.
	CacheBytes int
}

// DefaultLimits returns those that zero values stand for.
func DefaultLimits() Limits {
	return Limits{
		Connections:        20_000,
		ConnectionsPerPeer: 256,
		StreamsPerPeer:     32,
		StreamRate:         20,
		SendTimeout:        30 * time.Second,
		CacheBytes:         64 << 20,
	}
}

// Server serves views of a cluster's state, and the state itself if asked to.
type Server struct {
	opts     ServerOptions
	state    cluster.Reader
	instance []byte // tells this server's tokens from another's

	served    atomic.Bool
	published *publisher
	views     *views
	peers     *peers
	stopping  chan struct{}
}

// NewServer returns a server of what state has, from when it has synced on. The state is one
// with [cluster.Options].Resumable: otherwise clients start over after any deletion.
func NewServer(state cluster.Reader, opts ServerOptions) (*Server, error) {
	switch {
	case opts.TLS == nil && opts.NodeCertificates:
		return nil, errors.New("NodeCertificates needs TLS")
	case opts.TLS == nil && len(opts.ClusterReaders) > 0:
		return nil, errors.New("ClusterReaders needs TLS")
	case opts.TLS != nil && opts.ServeCluster && len(opts.ClusterReaders) == 0:
		return nil, errors.New("ServeCluster with TLS needs ClusterReaders: nobody could read it")
	}
	opts.BatchInterval = cmp.Or(opts.BatchInterval, 10*time.Millisecond)
	opts.StopTimeout = cmp.Or(opts.StopTimeout, 5*time.Second)
	limits := DefaultLimits()
	opts.Limits.Connections = cmp.Or(opts.Limits.Connections, limits.Connections)
	opts.Limits.ConnectionsPerPeer = cmp.Or(opts.Limits.ConnectionsPerPeer, limits.ConnectionsPerPeer)
	opts.Limits.StreamsPerPeer = cmp.Or(opts.Limits.StreamsPerPeer, limits.StreamsPerPeer)
	opts.Limits.StreamRate = cmp.Or(opts.Limits.StreamRate, limits.StreamRate)
	opts.Limits.SendTimeout = cmp.Or(opts.Limits.SendTimeout, limits.SendTimeout)
	opts.Limits.CacheBytes = cmp.Or(opts.Limits.CacheBytes, limits.CacheBytes)
	instance := make([]byte, 16)
	rand.Read(instance) // never fails
	return &Server{
		opts:      opts,
		state:     state,
		instance:  instance,
		published: &publisher{state: state, interval: opts.BatchInterval, next: make(chan struct{})},
		views:     newViews(opts.Limits.CacheBytes),
		peers:     &peers{limits: opts.Limits, byHost: map[string]int{}, byName: map[string]*account{}},
		stopping:  make(chan struct{}),
	}, nil
}

// Serve serves on the listeners until ctx ends, and closes them; then it returns
// nil. Answers that are being sent get StopTimeout to end. It returns an error if a
// listener is one on which it must not serve, or fails, and on the second call.
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
		return errors.New("server serves already, or has served")
	}
	server := grpc.NewServer(s.grpcOptions(creds)...)
	localv1.RegisterSetsServer(server, setsServer{Server: s})
	if s.opts.ServeCluster {
		clusterv1.RegisterClusterServer(server, clusterServer{Server: s})
	}

	group, serving := errgroup.WithContext(ctx)
	group.Go(func() error { return s.published.run(serving) })
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
		close(s.stopping)
		timer := time.AfterFunc(s.opts.StopTimeout, server.Stop)
		defer timer.Stop()
		server.GracefulStop()
		return nil
	})
	err = group.Wait()
	server.Stop()
	return err
}

// maxRequest is the largest message that a client may send. A WatchReq has a name
// and a token.
const maxRequest = 16 << 10

// requestWindow is how much a client may send that nobody has read yet: the least
// that HTTP/2 has without being asked. It is fixed, as grpc would send a ping with
// each request to find out whether more of it were faster.
const requestWindow = 64 << 10

// connectionAge is about how long a connection lasts, within 10 %. Then the client comes back
// with its token. So the authorities of now are applied to it, and clients spread over servers.
const connectionAge = 30 * time.Minute

func (s *Server) grpcOptions(creds credentials.TransportCredentials) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(connCredentials{creds}),
		grpc.ForceServerCodecV2(rawCodec{encoding.GetCodecV2("proto")}),
		grpc.ConnectionTimeout(10 * time.Second),
		grpc.MaxConcurrentStreams(uint32(s.opts.Limits.StreamsPerPeer)),
		grpc.MaxRecvMsgSize(maxRequest),
		grpc.MaxHeaderListSize(16 << 10),
		grpc.ReadBufferSize(4 << 10),
		grpc.SharedWriteBuffer(true), // the default of newer versions: 32 KB less for an idle connection
		grpc.StaticStreamWindowSize(requestWindow),
		grpc.StaticConnWindowSize(requestWindow),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second,
			MaxConnectionAge: connectionAge, MaxConnectionAgeGrace: time.Minute,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second}),
	}
}

// credentials returns how connections are secured, and an error if they would not
// be where they have to.
func (s *Server) credentials(ctx context.Context, listeners []net.Listener) (credentials.TransportCredentials, error) {
	if s.opts.TLS != nil {
		config, err := s.opts.TLS.Server(klog.FromContext(ctx))
		if err != nil {
			return nil, err
		}
		return credentials.NewTLS(config), nil
	}
	for _, l := range listeners {
		if err := transport.CheckPlaintext(l.Addr()); err != nil && !s.opts.Insecure {
			return nil, err
		}
	}
	return insecure.NewCredentials(), nil
}

// Stats are what a server has done so far, and what it has to do.
type Stats struct {
	// Streams are open now.
	Streams int
	// Views were computed and marshalled, of Values services and endpoints.
	Views, Values uint64
	// Bytes are those of the messages that were sent, without framing and TLS.
	Bytes uint64
	// Refused are the connections and streams that a limit did not admit.
	Refused uint64
	// Stalled are the connections and streams that ended because a client took too little.
	Stalled uint64
}

// Stats may be called by anybody at any time.
func (s *Server) Stats() Stats {
	return Stats{
		Streams: int(s.peers.streams.Load()),
		Views:   s.views.computed.Load(),
		Values:  s.views.values.Load(),
		Bytes:   s.peers.sent.Load(),
		Refused: s.peers.refused.Load(),
		Stalled: s.peers.stalled.Load(),
	}
}
