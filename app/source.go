// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote/transport"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
	"github.com/kpng-project/kpng/watcher/kube"
	"github.com/kpng-project/kpng/watcher/remote"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
)

// Source is where services come from, as flags say it. The zero value is ready for
// one of the methods that register flags: Register lets the user choose, the
// others are each for one kind of source.
type Source struct {
	kubeconfig, manifests given
	api                   apiFlags
	services              serviceFlags
}

// Register adds the flags of all kinds to cmd, of which the user gives those of
// one; without any it is the API server at hand.
func (s *Source) Register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.Var(&s.kubeconfig, "kubeconfig", "watch the API server of this kubeconfig `file`; without it and --manifests, that of the pod or of $KUBECONFIG or ~/.kube/config")
	s.manifestsFlag(fs)
	s.services.register(fs)
	s.api.register(fs)
	cmd.MarkFlagsMutuallyExclusive("kubeconfig", "manifests")
	// What to serve is the server's to say.
	for _, other := range []string{"kubeconfig", "manifests", "service-proxy-name", "ignore-external-ips", "keep-labels", "keep-annotations", "all-ports", "all-ports-annotation"} {
		cmd.MarkFlagsMutuallyExclusive("api", other)
	}
}

// RegisterKube adds the flags of a source that is an API server.
func (s *Source) RegisterKube(fs *pflag.FlagSet) {
	fs.Var(&s.kubeconfig, "kubeconfig", "watch the API server of this kubeconfig `file`; without it, that of the pod or of $KUBECONFIG or ~/.kube/config")
	s.services.register(fs)
}

// RegisterManifests adds the flags of a source that is manifests. The command has
// to require the first of them, --manifests.
func (s *Source) RegisterManifests(fs *pflag.FlagSet) {
	s.manifestsFlag(fs)
	s.services.register(fs)
}

func (s *Source) manifestsFlag(fs *pflag.FlagSet) {
	fs.VarP(&s.manifests, "manifests", "i", "read services, endpoint slices and nodes from this `file or folder` of Kubernetes manifests, and follow it; - is standard input, read once")
}

// RegisterAPI adds the flags of a source that is another kpng.
func (s *Source) RegisterAPI(fs *pflag.FlagSet) { s.api.register(fs, transport.DefaultAddress) }

// Services returns which services are served and what is kept of them; nothing
// for another kpng, which does not say.
func (s *Source) Services() watcher.Options { return s.services.get() }

// AllPortsAnnotation returns the name of the annotation that makes an all-ports
// service, if there is one.
func (s *Source) AllPortsAnnotation() string { return s.services.mapIP }

// Watch fills state with the whole cluster, all nodes included, and follows it
// until ctx ends; then it returns nil. Another kpng has to serve its cluster for
// that (remote.ServerOptions.ServeCluster).
func (s *Source) Watch(ctx context.Context, state *cluster.State) error {
	return s.watch(ctx, state, false)
}

// Load returns the whole cluster as it is now. It returns the first error.
func (s *Source) Load(ctx context.Context) (*cluster.Snapshot, error) {
	state := cluster.New(cluster.Options{})
	group, running := errgroup.WithContext(ctx)
	watching, stop := context.WithCancel(running)
	group.Go(func() error { return s.watch(watching, state, true) })
	group.Go(func() error {
		defer stop()
		select {
		case <-state.Synced():
		case <-running.Done():
		}
		return nil
	})
	if err := group.Wait(); err != nil {
		return nil, err
	}
	if !state.IsSynced() {
		return nil, context.Cause(ctx)
	}
	return state.Snapshot(), nil
}

func (s *Source) watch(ctx context.Context, state *cluster.State, once bool) error {
	dial, err := s.api.get()
	if err != nil {
		return err
	}
	switch {
	case len(dial.Addresses) > 0:
		dial.FailFast = once
		err = remote.Watch(ctx, state, remote.Options{DialOptions: dial})
	case s.manifests != "":
		err = file.Watch(ctx, state, file.Options{Path: string(s.manifests), Once: once, Options: s.Services()})
	default:
		config, configErr := kube.LoadConfig(string(s.kubeconfig))
		if configErr != nil {
			return configErr
		}
		err = kube.Watch(ctx, state, kube.Options{Options: s.Services(), Config: config, FailFast: once})
	}
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return nil
	}
	return err
}

// proxy returns what brings the services of one node, as opts say, to a sink.
func (s *Source) proxy(opts kpng.Options) (proxy, error) {
	dial, err := s.api.get()
	switch {
	case err != nil:
		return nil, err
	case len(dial.Addresses) > 0:
		return newServed(dial, opts)
	}
	opts.Kubeconfig, opts.Manifests, opts.Services = string(s.kubeconfig), string(s.manifests), s.Services()
	return kpng.New(opts)
}
