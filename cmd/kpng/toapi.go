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

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/internal/transport"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/remote"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
)

// toAPI returns the command that serves the state of the source over gRPC.
func toAPI(source *command.Source, hasSelection bool) *cobra.Command {
	var (
		f       serverFlags
		serving command.Serving
	)
	cmd := &cobra.Command{
		Use:   "to-api",
		Short: "Serve each node's view and the state of the cluster over gRPC",
		Args:  usage.None,
		RunE: func(cmd *cobra.Command, _ []string) error {
			server, err := f.get(source.MaxElements())
			if err != nil {
				return err
			}
			return server.run(cmd.Context(), source, &serving)
		},
	}
	cmd.Flags().SortFlags = false
	f.register(cmd.Flags())
	serving.Register(cmd.Flags())
	if hasSelection {
		source.RegisterAllPorts(cmd.Flags())
	}
	return cmd
}

// serverFlags are the addresses and options of the server.
type serverFlags struct {
	listen       []string
	mode         string
	tls          remote.TLS
	serveCluster bool
	options      remote.ServerOptions
}

func (f *serverFlags) register(fs *pflag.FlagSet) {
	fs.StringSliceVar(&f.listen, "listen", []string{remote.DefaultAddress}, "serve on this `address`, tcp://host:port or unix:///path; may be repeated")
	fs.StringVar(&f.mode, "socket-mode", "0600", "`permissions` of the unix sockets in --listen")
	fs.StringVar(&f.tls.CAFile, "tls-ca-file", "", "`file` with the authorities that sign the clients' certificates; TLS needs this and the next two")
	fs.StringVar(&f.tls.CertFile, "tls-cert-file", "", "`file` with this server's certificate")
	fs.StringVar(&f.tls.KeyFile, "tls-key-file", "", "`file` with the certificate's key")
	fs.BoolVar(&f.options.Insecure, "insecure", false, "allow addresses without TLS that other machines can reach")
	fs.BoolVar(&f.options.NodeCertificates, "node-certificates", false, "with TLS: a client may watch node NAME only if the common name of its certificate is system:node:NAME")
	fs.BoolVar(&f.serveCluster, "serve-cluster", true, "also serve the state of the whole cluster, for another kpng to relay, write or explain; with TLS, to --cluster-readers only")
	fs.StringSliceVar(&f.options.ClusterReaders, "cluster-readers", nil, "with TLS: common `names` or organizations of the certificates that may read the state of the whole cluster")
	fs.IntVar(&f.options.MaxConnections, "max-connections", transport.DefaultMaxConnections, "maximum `number` of connections of all clients together")
	fs.IntVar(&f.options.MaxConnectionsPerPeer, "max-connections-per-peer", transport.DefaultMaxConnectionsPerPeer, "maximum `number` of connections of one IP address, or of all unix sockets")
	fs.IntVar(&f.options.MaxStreamsPerPeer, "max-streams-per-peer", transport.DefaultMaxStreamsPerPeer, "maximum `number` of streams of one certificate or IP address, or of all unix sockets")
	fs.Float64Var(&f.options.StreamRate, "stream-rate", transport.DefaultStreamRate, "average `number` of streams per second that each of these may open")
	fs.DurationVar(&f.options.SendTimeout, "send-timeout", transport.DefaultSendTimeout, "time limit for a client to receive one message; then the server closes its connection")
	fs.DurationVar(&f.options.ConnectionAge, "connection-age", transport.DefaultConnectionAge, "time after which a client has to connect again, ± 10 %, so that clients spread over servers")
	fs.IntVar(&f.options.CacheBytes, "cache-bytes", transport.DefaultCacheBytes, "approximate memory in `bytes` for cached marshalled views")
}

type apiServer struct {
	state     *cluster.State
	server    *remote.Server
	addresses []transport.Address
	mode      fs.FileMode
}

func (f *serverFlags) get(maxElements int) (*apiServer, error) {
	if err := f.check(); err != nil {
		return nil, usage.Error(err)
	}
	mode, err := strconv.ParseUint(f.mode, 8, 9)
	if err != nil {
		return nil, usage.Errorf("--socket-mode %q is not a mode such as 0600", f.mode)
	}
	s := &apiServer{state: cluster.New(cluster.Options{Resumable: true, MaxElements: maxElements}), mode: fs.FileMode(mode)}
	for _, text := range f.listen {
		a, err := transport.ParseAddress(text)
		if err != nil {
			return nil, usage.Errorf("--listen: %w", err)
		}
		s.addresses = append(s.addresses, a)
	}
	opts := f.options
	if f.tls != (remote.TLS{}) {
		opts.TLS = &f.tls
	}
	opts.ServeCluster = f.serveCluster && (opts.TLS == nil || len(opts.ClusterReaders) > 0)
	s.server, err = remote.NewServer(s.state, opts)
	return s, err
}

func (f *serverFlags) check() error {
	o, tls := &f.options, f.tls != (remote.TLS{})
	switch {
	case len(f.listen) == 0:
		return errors.New("--listen is empty")
	case tls && (f.tls.CAFile == "" || f.tls.CertFile == "" || f.tls.KeyFile == ""):
		return errors.New("TLS needs all of --tls-ca-file, --tls-cert-file and --tls-key-file")
	case !tls && (o.NodeCertificates || len(o.ClusterReaders) > 0):
		return errors.New("--node-certificates and --cluster-readers need TLS: --tls-ca-file, --tls-cert-file and --tls-key-file")
	case !f.serveCluster && len(o.ClusterReaders) > 0:
		return errors.New("--cluster-readers needs --serve-cluster")
	case o.MaxConnections <= 0 || o.MaxConnectionsPerPeer <= 0 || o.MaxStreamsPerPeer <= 0 || o.StreamRate <= 0 || o.SendTimeout <= 0 || o.ConnectionAge <= 0 || o.CacheBytes <= 0:
		return errors.New("--max-connections, --max-connections-per-peer, --max-streams-per-peer, --stream-rate, --send-timeout, --connection-age and --cache-bytes must be greater than zero")
	}
	return nil
}

// problems says whether clients were refused in the last five minutes.
func (s *apiServer) problems() []string {
	stats := s.server.Stats()
	if stats.Refused == 0 || time.Since(stats.LastRefused) > 5*time.Minute {
		return nil
	}
	// Clients choose their names.
	return []string{fmt.Sprintf("%d connections or streams of clients were refused, the last one because %.253s", stats.Refused, plain.Line(stats.Refusal))}
}

// run serves the source's state until ctx ends.
func (s *apiServer) run(ctx context.Context, source *command.Source, serving *command.Serving) error {
	command.SetCollection()
	page := &statuspage.Handler{Program: command.Version(), Source: source.String(), State: s.state, Health: s.health, Clients: s.server.Streams, Problems: []func() []string{s.problems}}
	serving.Status, serving.Source = page, page.Source
	registry := prometheus.NewRegistry()
	registry.MustRegister(newServerCollector(s.server, page.Behind), command.SourceMetrics(page.SourceState))
	return serving.Run(ctx, s.health, registry, func(ctx context.Context) error {
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

// health returns a health report: the server is healthy and ready when its state is
// synced.
func (s *apiServer) health() health.Report {
	synced := s.state.IsSynced()
	return health.Report{Synced: synced, NodeEligible: synced}
}
