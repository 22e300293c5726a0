// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"
	"time"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/remote/collector"
	"github.com/kpng-project/kpng/remote/transport"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
)

// toAPI serves the state of the source over gRPC.
func toAPI(source *app.Source, selects bool) *cobra.Command {
	var (
		f       serverFlags
		serving app.Serving
	)
	cmd := &cobra.Command{
		Use:   "to-api",
		Short: "Serve each node's view, and the state of the cluster, over gRPC",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			server, err := f.get()
			if err != nil {
				return err
			}
			return server.run(cmd.Context(), source, &serving)
		},
	}
	cmd.Flags().SortFlags = false
	f.register(cmd.Flags())
	serving.Register(cmd.Flags())
	if selects {
		source.RegisterAllPorts(cmd.Flags())
	}
	return cmd
}

// serverFlags say where and how to serve.
type serverFlags struct {
	listen       []string
	mode         string
	tls          transport.TLS
	serveCluster bool
	options      remote.ServerOptions
}

func (f *serverFlags) register(fs *pflag.FlagSet) {
	limits := remote.DefaultLimits()
	fs.StringSliceVar(&f.listen, "listen", []string{transport.DefaultAddress}, "serve on this `address`, tcp://host:port or unix:///path; may be given several times")
	fs.StringVar(&f.mode, "socket-mode", "0600", "the `permissions` of a unix socket that is listened on")
	fs.StringVar(&f.tls.CAFile, "tls-ca-file", "", "the `file` with the authorities that sign the certificates of clients; for TLS, with the next two")
	fs.StringVar(&f.tls.CertFile, "tls-cert-file", "", "the `file` with this server's certificate")
	fs.StringVar(&f.tls.KeyFile, "tls-key-file", "", "the `file` with the certificate's key")
	fs.BoolVar(&f.options.Insecure, "insecure", false, "allow an address without TLS that other machines can reach")
	fs.BoolVar(&f.options.NodeCertificates, "node-certificates", false, "with TLS: a client may watch only the node NAME if the common name of its certificate is system:node:NAME")
	fs.BoolVar(&f.serveCluster, "serve-cluster", true, "serve the state of the whole cluster, too, for another kpng to relay, write or explain; with TLS, to --cluster-readers only")
	fs.StringSliceVar(&f.options.ClusterReaders, "cluster-readers", nil, "with TLS: the common `names` or organisations of the certificates whose owners may read the state of the whole cluster")
	fs.IntVar(&f.options.Limits.Connections, "max-connections", limits.Connections, "the `number` of connections of all clients together")
	fs.IntVar(&f.options.Limits.ConnectionsPerPeer, "max-connections-per-peer", limits.ConnectionsPerPeer, "the `number` of connections of one IP address, or of unix sockets")
	fs.IntVar(&f.options.Limits.StreamsPerPeer, "max-streams-per-peer", limits.StreamsPerPeer, "the `number` of streams of one certificate, IP address, or of unix sockets")
	fs.Float64Var(&f.options.Limits.StreamRate, "stream-rate", limits.StreamRate, "the `number` of streams a second that each of these may open in the long run")
	fs.DurationVar(&f.options.Limits.SendTimeout, "send-timeout", limits.SendTimeout, "how long a client may take for one message until its connection is closed")
	fs.IntVar(&f.options.Limits.CacheBytes, "cache-bytes", limits.CacheBytes, "about how many `bytes` of memory are used to keep marshalled views")
}

// apiServer is a server that knows where to listen.
type apiServer struct {
	state     *cluster.State
	server    *remote.Server
	addresses []transport.Address
	mode      fs.FileMode
}

// get returns the server that the flags describe.
func (f *serverFlags) get() (*apiServer, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	mode, err := strconv.ParseUint(f.mode, 8, 9)
	if err != nil {
		return nil, fmt.Errorf("--socket-mode %q is not a mode such as 0600", f.mode)
	}
	s := &apiServer{state: cluster.New(cluster.Options{Resumable: true}), mode: fs.FileMode(mode)}
	for _, text := range f.listen {
		a, err := transport.ParseAddress(text)
		if err != nil {
			return nil, fmt.Errorf("--listen: %w", err)
		}
		s.addresses = append(s.addresses, a)
	}
	opts := f.options
	if f.tls != (transport.TLS{}) {
		opts.TLS = &f.tls
	}
	opts.ServeCluster = f.serveCluster && (opts.TLS == nil || len(opts.ClusterReaders) > 0)
	s.server, err = remote.NewServer(s.state, opts)
	return s, err
}

// check refuses what makes no sense.
func (f *serverFlags) check() error {
	o, l, tls := &f.options, &f.options.Limits, f.tls != (transport.TLS{})
	switch {
	case len(f.listen) == 0:
		return errors.New("--listen is given, but empty")
	case tls && (f.tls.CAFile == "" || f.tls.CertFile == "" || f.tls.KeyFile == ""):
		return errors.New("TLS needs all of --tls-ca-file, --tls-cert-file and --tls-key-file")
	case !tls && (o.NodeCertificates || len(o.ClusterReaders) > 0):
		return errors.New("--node-certificates and --cluster-readers need TLS: --tls-ca-file, --tls-cert-file and --tls-key-file")
	case !f.serveCluster && len(o.ClusterReaders) > 0:
		return errors.New("--cluster-readers and --serve-cluster=false exclude each other")
	case l.Connections <= 0 || l.ConnectionsPerPeer <= 0 || l.StreamsPerPeer <= 0 || l.StreamRate <= 0 || l.SendTimeout <= 0 || l.CacheBytes <= 0:
		return errors.New("--max-connections, --max-connections-per-peer, --max-streams-per-peer, --stream-rate, --send-timeout and --cache-bytes have to be greater than zero")
	}
	return nil
}

// run serves what source says until ctx ends.
func (s *apiServer) run(ctx context.Context, source *app.Source, serving *app.Serving) error {
	return serving.Run(ctx, s.health, collector.New(s.server), func(ctx context.Context) error {
		listeners, err := s.listen()
		if err != nil {
			return err
		}
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return source.Watch(ctx, s.state) })
		group.Go(func() error { return s.server.Serve(ctx, listeners...) })
		return group.Wait()
	})
}

func (s *apiServer) listen() ([]net.Listener, error) {
	var listeners []net.Listener
	for _, a := range s.addresses {
		l, err := a.Listen(s.mode)
		if err != nil {
			for _, l := range listeners {
				l.Close()
			}
			return nil, err
		}
		listeners = append(listeners, l)
	}
	return listeners, nil
}

// health says that the server is ready once it has something to serve.
func (s *apiServer) health() health.Report {
	return health.Report{CurrentTime: time.Now(), Synced: s.state.IsSynced(), NodeEligible: true}
}
