// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"strings"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote/transport"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
	"github.com/kpng-project/kpng/watcher/kube"
	"github.com/kpng-project/kpng/watcher/remote"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Source is where services come from, as flags say it. The zero value is ready for
// one of the methods that register flags: Register lets the user choose, the
// others are each for one kind of source.
type Source struct {
	kubeconfig, manifests given

	// Which services there are, and what to keep of them.
	services           watcher.Options
	allPorts           bool
	allPortsAnnotation string

	api apiFlags
}

// Register adds the flags of all kinds to cmd, of which the user gives those of
// one; without any it is the API server at hand. With allPorts it includes those of
// RegisterAllPorts.
func (s *Source) Register(cmd *cobra.Command, allPorts bool) {
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	own.SortFlags = false
	own.Var(&s.kubeconfig, "kubeconfig", "watch the API server of this kubeconfig `file`; without it and --manifests, that of the pod or of $KUBECONFIG or ~/.kube/config")
	s.RegisterManifests(own)
	if allPorts {
		s.RegisterAllPorts(own)
	}
	cmd.Flags().AddFlagSet(own)
	s.api.register(cmd.Flags())
	cmd.MarkFlagsMutuallyExclusive("kubeconfig", "manifests")
	// With --api, the server decides which services there are.
	own.VisitAll(func(f *pflag.Flag) { cmd.MarkFlagsMutuallyExclusive("api", f.Name) })
}

// RegisterKube adds the flags of a source that is an API server.
func (s *Source) RegisterKube(fs *pflag.FlagSet) {
	fs.Var(&s.kubeconfig, "kubeconfig", "watch the API server of this kubeconfig `file`; without it, that of the pod or of $KUBECONFIG or ~/.kube/config")
	s.registerServices(fs)
}

// RegisterManifests adds the flags of a source that is manifests. The command has
// to require the first of them, --manifests.
func (s *Source) RegisterManifests(fs *pflag.FlagSet) {
	fs.VarP(&s.manifests, "manifests", "i", "read services, endpoint slices and nodes from this `file or folder` of Kubernetes manifests, and follow it; - is standard input, read once")
	s.registerServices(fs)
}

func (s *Source) registerServices(fs *pflag.FlagSet) {
	fs.StringVar(&s.services.ServiceProxyName, "service-proxy-name", "", "serve the services whose label service.kubernetes.io/service-proxy-name is this `name`, headless ones included; without it, those that have no such label")
	fs.BoolVar(&s.services.IgnoreExternalIPs, "ignore-external-ips", false, "serve no external IPs (spec.externalIPs), which everybody who may create a service chooses freely")
	fs.StringSliceVar(&s.services.KeepLabels, "keep-labels", nil, "hand on the service labels that match these `patterns`, such as app or example.com/*")
	fs.StringSliceVar(&s.services.KeepAnnotations, "keep-annotations", nil, "hand on the service annotations that match these `patterns`, such as example.com/*")
	fs.StringSliceVar(&s.services.KeepSliceLabels, "keep-slice-labels", nil, "hand on the endpoint-slice labels that match these `patterns`, to kpngs that are served the cluster and to files")
	fs.BoolVar(&s.services.KeepTargets, "keep-targets", false, "hand on the names of the pods behind endpoints")
}

// RegisterAllPorts adds the flags that make all-ports services, for a command whose sink
// proxies them. They are for API servers and manifests: another kpng decides itself.
func (s *Source) RegisterAllPorts(fs *pflag.FlagSet) {
	fs.StringVar(&s.allPortsAnnotation, "all-ports-annotation", "", "make an all-ports service of each that has this `annotation` with the value true")
	fs.BoolVar(&s.allPorts, "all-ports", false, "make an all-ports service of each")
}

// RegisterAPI adds the flags of a source that is another kpng.
func (s *Source) RegisterAPI(fs *pflag.FlagSet) { s.api.register(fs, transport.DefaultAddress) }

// Services returns which services are served and what is kept of them; nothing
// for another kpng, which does not say.
func (s *Source) Services() watcher.Options {
	o := s.services
	switch {
	case s.allPorts:
		o.AllPorts = func(*corev1.Service) bool { return true }
	case s.allPortsAnnotation != "":
		o.AllPorts = watcher.AllPortsAnnotated(s.allPortsAnnotation)
	}
	return o
}

// AllPortsAnnotation returns the name of the annotation that makes an all-ports
// service, if there is one.
func (s *Source) AllPortsAnnotation() string { return s.allPortsAnnotation }

// Watch fills state with the whole cluster, all nodes included, and follows it
// until ctx ends; then it returns nil. Another kpng has to serve its cluster for
// that (remote.ServerOptions.ServeCluster).
func (s *Source) Watch(ctx context.Context, state *cluster.State) error {
	return s.watch(ctx, state, false)
}

// Load returns the whole cluster as it is now. It returns the first error.
func (s *Source) Load(ctx context.Context) (*cluster.Snapshot, error) {
	state := cluster.New(cluster.Options{})
	watching, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-state.Synced():
			stop()
		case <-watching.Done():
		}
	}()
	if err := s.watch(watching, state, true); err != nil {
		return nil, err
	}
	if !state.IsSynced() {
		return nil, context.Cause(ctx)
	}
	return state.Snapshot(), nil
}

// Find returns the object of a service, whether or not it is served, and nil if there is
// none. It returns [errors.ErrUnsupported] for another kpng and for standard input.
func (s *Source) Find(ctx context.Context, key types.NamespacedName) (found *corev1.Service, err error) {
	switch {
	case len(s.api.dial.Addresses) > 0 || s.manifests == file.Stdin:
		return nil, errors.ErrUnsupported
	case s.manifests != "":
		look := watcher.Options{Skip: func(service *corev1.Service) bool {
			if service.Namespace == key.Namespace && service.Name == key.Name {
				found = service.DeepCopy()
			}
			return true
		}}
		err = file.Watch(ctx, cluster.New(cluster.Options{}), file.Options{Path: string(s.manifests), Once: true, Options: look})
		return found, err
	}
	config, err := kube.LoadConfig(string(s.kubeconfig))
	if err != nil {
		return nil, err
	}
	return kube.GetService(ctx, config, key)
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

// apiFlags say how to reach another kpng.
type apiFlags struct {
	dial transport.DialOptions
	tls  transport.TLS
}

func (f *apiFlags) register(fs *pflag.FlagSet, addresses ...string) {
	fs.StringSliceVar(&f.dial.Addresses, "api", addresses, "read from the kpng server at this `address`, tcp://host:port or unix:///path; several addresses are tried in turn")
	fs.StringVar(&f.tls.CAFile, "api-tls-ca-file", "", "the `file` with the authorities that sign the certificate of the kpng at --api; for TLS, with the next two")
	fs.StringVar(&f.tls.CertFile, "api-tls-cert-file", "", "the `file` with this client's certificate")
	fs.StringVar(&f.tls.KeyFile, "api-tls-key-file", "", "the `file` with the certificate's key")
	fs.StringVar(&f.tls.ServerName, "api-tls-server-name", "", "the `name` in the certificate of the kpng at --api; without it, the host of its address")
	fs.BoolVar(&f.dial.Insecure, "api-insecure", false, "allow an --api of another machine without TLS")
}

// get returns what the flags say, and an error if there are some that mean
// nothing without another one.
func (f *apiFlags) get() (transport.DialOptions, error) {
	opts := f.dial
	if f.tls != (transport.TLS{}) {
		opts.TLS = &f.tls
	}
	switch {
	case len(opts.Addresses) > 0:
		return opts, nil
	case opts.Addresses != nil: // nil is without the flag
		return opts, errors.New("--api is given, but empty")
	case opts.TLS != nil || opts.Insecure:
		return opts, errors.New("the flags --api-… are for --api, which is not given")
	}
	return opts, nil
}

// given is the value of a flag that must not be set to an empty text: a user who wrote
// "$FILE" did not mean the default. It implements pflag.Value.
type given string

func (g *given) Set(s string) error {
	if strings.TrimSpace(s) == "" {
		return errors.New("it is given, but empty")
	}
	*g = given(s)
	return nil
}

func (g *given) String() string { return string(*g) }
func (g *given) Type() string   { return "string" }
