// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/elements"
	"github.com/kpng-project/kpng/internal/manifest"
	"github.com/kpng-project/kpng/internal/parameters"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/remote"
	"github.com/kpng-project/kpng/watcher"
	"github.com/kpng-project/kpng/watcher/file"
	"github.com/kpng-project/kpng/watcher/kube"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// Source is where a command gets services from. The command's flags select the source.
// Call one of the Register methods first. The method Register adds the flags of all kinds
// of sources. RegisterKube, RegisterManifests and RegisterAPI add the flags of one kind.
type Source struct {
	// Defaults are the defaults of the flags that select services. The functions Skip and
	// AllPorts apply in addition to the flags.
	Defaults watcher.Options
	// Server is the address of a kpng server. The command reads from it if no flag selects
	// a source or services. Default: none, so that it reads from the API server.
	Server string

	kubeconfig, manifests nonEmpty

	services           watcher.Options
	allPorts           bool
	allPortsAnnotation string
	maxElements        positive

	api apiFlags
	// forbidden are the flags that exclude --api; nil before Register.
	forbidden *pflag.FlagSet
	// fallback is the flag --api-fallback. selection has the flags that need --api-fallback,
	// and is nil before RegisterAPI.
	fallback  time.Duration
	selection *pflag.FlagSet
}

// defaultAPIServer says how to find the API server without --kubeconfig.
const defaultAPIServer = "the pod's service account, else $KUBECONFIG, else ~/.kube/config"

// Register adds the flags of all kinds of sources to cmd. The user may set flags of one
// kind only. By default, the source is the API server, with the pod's service account or
// kubectl's configuration. If allPorts is true, Register also calls RegisterAllPorts. If
// Defaults.Skip is set, there are no flags for a kpng server, which sends no objects that
// Skip could select.
func (s *Source) Register(cmd *cobra.Command, allPorts bool) {
	own := pflag.NewFlagSet("", pflag.ContinueOnError)
	own.SortFlags = false
	own.Var(&s.kubeconfig, "kubeconfig", "watch the API server of this kubeconfig `file` (default without --manifests: "+defaultAPIServer+")")
	s.registerManifests(own)
	if allPorts {
		s.RegisterAllPorts(own)
	}
	cmd.Flags().AddFlagSet(own)
	cmd.MarkFlagsMutuallyExclusive("kubeconfig", "manifests")
	if s.Defaults.Skip != nil {
		s.registerLimit(cmd.Flags())
		return
	}
	s.api.register(cmd.Flags())
	s.registerLimit(cmd.Flags())
	// --api excludes all flags of the flag set own, because a kpng server selects services.
	own.VisitAll(func(f *pflag.Flag) { cmd.MarkFlagsMutuallyExclusive("api", f.Name) })
	s.forbidden = own
	if s.Server != "" {
		s.defaultToServer(cmd)
	}
}

// defaultToServer makes the command read from the kpng server at the address s.Server, if
// no flag selects a source or services.
func (s *Source) defaultToServer(cmd *cobra.Command) {
	api, kubeconfig := cmd.Flags().Lookup("api"), cmd.Flags().Lookup("kubeconfig")
	api.DefValue = s.Server
	kubeconfig.Usage, _, _ = strings.Cut(kubeconfig.Usage, " (")
	kubeconfig.Usage += " (default with flags that select services: " + defaultAPIServer + ")"
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !api.Changed && !s.selectsServices() {
			s.api.dial.Addresses = []string{s.Server}
		}
		return run(cmd, args)
	}
}

// selectsServices reports whether a flag is set that excludes --api.
func (s *Source) selectsServices() (set bool) {
	s.forbidden.VisitAll(func(f *pflag.Flag) { set = set || f.Changed })
	return set
}

// RegisterKube adds the flags of a source that is an API server.
func (s *Source) RegisterKube(fs *pflag.FlagSet) {
	fs.Var(&s.kubeconfig, "kubeconfig", "watch the API server of this kubeconfig `file` (default: "+defaultAPIServer+")")
	s.registerServices(fs)
	s.registerLimit(fs)
}

// RegisterManifests adds the flags of a source that reads manifests. The command has to
// make the flag --manifests required.
func (s *Source) RegisterManifests(fs *pflag.FlagSet) {
	s.registerManifests(fs)
	s.registerLimit(fs)
}

func (s *Source) registerManifests(fs *pflag.FlagSet) {
	fs.VarP(&s.manifests, "manifests", "i", "read services, endpoint slices and nodes from this `file or folder` of Kubernetes manifests, and follow its changes; - reads standard input once")
	s.registerServices(fs)
}

func (s *Source) registerServices(fs *pflag.FlagSet) {
	d := &s.Defaults
	unlabelled := ""
	if d.ServiceProxyName == "" {
		unlabelled = " (default: services without this label)"
	}
	fs.StringVar(&s.services.ServiceProxyName, "service-proxy-name", d.ServiceProxyName, "serve the services whose label service.kubernetes.io/service-proxy-name is this `name`, including headless ones"+unlabelled)
	fs.BoolVar(&s.services.IgnoreExternalIPs, "ignore-external-ips", d.IgnoreExternalIPs, "ignore external IPs (spec.externalIPs); any user who may create a service can choose them freely")
	fs.StringSliceVar(&s.services.KeepLabels, "keep-labels", d.KeepLabels, "pass on the service labels that match these `patterns`, such as app or example.com/*")
	fs.StringSliceVar(&s.services.KeepAnnotations, "keep-annotations", d.KeepAnnotations, "pass on the service annotations that match these `patterns`, such as example.com/*")
	fs.StringSliceVar(&s.services.KeepSliceLabels, "keep-slice-labels", d.KeepSliceLabels, "pass on the endpoint-slice labels that match these `patterns` to files and to kpngs that read the cluster state")
	fs.StringSliceVar(&s.services.OtherAnnotations, "other-annotations", d.OtherAnnotations, "read traffic parameters also from the annotations of these other `proxies`: "+strings.Join(parameters.Names, ", "))
	fs.BoolVar(&s.services.KeepTargets, "keep-targets", d.KeepTargets, "pass on the names of the pods behind endpoints")
}

func (s *Source) registerLimit(fs *pflag.FlagSet) {
	s.maxElements = elements.DefaultMax
	fs.Var(&s.maxElements, "max-service-elements", "refuse a service that needs more than this `number` of elements: its addresses × ports, endpoints × ports, and source ranges")
}

// RegisterAllPorts adds the flags for all-ports services. The command's sink must support
// such services. With --api, the server selects such services and the flags do not apply.
func (s *Source) RegisterAllPorts(fs *pflag.FlagSet) {
	fs.StringVar(&s.allPortsAnnotation, "all-ports-annotation", "", "treat services with this `annotation` and the value true as all-ports services")
	fs.BoolVar(&s.allPorts, "all-ports", false, "treat all services as all-ports services")
}

// RegisterAPI adds the flags of a source that is a kpng server.
func (s *Source) RegisterAPI(fs *pflag.FlagSet) {
	s.api.register(fs, remote.DefaultAddress)
	fs.DurationVar(&s.fallback, "api-fallback", 0, "with to-local: when no server has answered for this `time`, read the API server of --api-kubeconfig until one answers; give the flags of the server that select services, too (default: never)")
	s.selection = pflag.NewFlagSet("", pflag.ContinueOnError)
	s.registerServices(s.selection)
	fs.AddFlagSet(s.selection)
	s.registerLimit(fs)
}

// checkFallback returns an error if flags need --api-fallback, or do not work with it.
func (s *Source) checkFallback(local bool) error {
	switch {
	case s.fallback < 0:
		return usage.Errorf("--api-fallback must not be negative")
	case s.fallback > 0 && !local:
		return usage.Errorf("--api-fallback needs to-local")
	case s.fallback > 0 || s.selection == nil:
		return nil
	}
	var err error
	s.selection.VisitAll(func(f *pflag.Flag) {
		if f.Changed && err == nil {
			err = usage.Errorf("with a kpng server, --%s needs --api-fallback, because the server selects services", f.Name)
		}
	})
	return err
}

// fallbackOf returns what a client does while no server answers.
func (s *Source) fallbackOf(node string) (*remote.Fallback, error) {
	if s.fallback == 0 {
		return nil, nil
	}
	config, err := kube.LoadConfig(string(s.api.kubeconfig))
	if err != nil {
		return nil, err
	}
	return &remote.Fallback{After: s.fallback, Watch: func(ctx context.Context, state *cluster.State) error {
		return kube.Watch(ctx, state, kube.Options{Options: s.Services(), Config: config, NodeName: node})
	}}, nil
}

// Services returns the options that say which services to select and which metadata to
// keep. If the source is a kpng server, the result is empty, because the server does not
// report its options.
func (s *Source) Services() watcher.Options {
	o := s.services
	o.Skip, o.AllPorts = s.Defaults.Skip, s.Defaults.AllPorts
	switch {
	case s.allPorts:
		o.AllPorts = func(*corev1.Service) bool { return true }
	case s.allPortsAnnotation != "":
		annotated, own := watcher.AllPortsAnnotated(s.allPortsAnnotation), o.AllPorts
		o.AllPorts = func(service *corev1.Service) bool { return annotated(service) || own != nil && own(service) }
	}
	return o
}

// MaxElements returns the limit for the elements of a service, for [cluster.Options]. It
// is 0, the default, before a Register method is called.
func (s *Source) MaxElements() int { return int(s.maxElements) }

// AllPortsAnnotation returns the name of the annotation for all-ports services, or "".
func (s *Source) AllPortsAnnotation() string { return s.allPortsAnnotation }

// Watch fills state with the whole cluster, including all nodes. It follows changes of
// the cluster until ctx ends, and then returns nil. If the source is a kpng server, that
// server must have remote.ServerOptions.ServeCluster set.
func (s *Source) Watch(ctx context.Context, state *cluster.State) error {
	return s.watch(ctx, state, false)
}

// Load returns the current state of the whole cluster, or the first error. Each line that
// it logs names the source.
func (s *Source) Load(ctx context.Context) (*cluster.Objects, error) {
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("source", s.String()))
	state := cluster.New(cluster.Options{MaxElements: s.MaxElements()})
	watching, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-state.Changed(0):
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
	return state.Objects(), nil
}

// Find returns the Service object, or nil if it does not exist. It also finds objects
// that the flags do not select. It returns [errors.ErrUnsupported] if the source is a
// kpng server or standard input.
func (s *Source) Find(ctx context.Context, key types.NamespacedName) (*corev1.Service, error) {
	return s.find(ctx, key.Namespace, fields.OneTermEqualSelector("metadata.name", key.Name), func(service *corev1.Service) bool {
		return service.Namespace == key.Namespace && service.Name == key.Name
	})
}

// FindUnselected is like Find. Among the Service objects that the flags do not select, it
// returns the first one with the address addr.
func (s *Source) FindUnselected(ctx context.Context, addr netip.Addr) (*corev1.Service, error) {
	return s.find(ctx, "", fields.Everything(), func(service *corev1.Service) bool {
		texts := slices.Concat([]string{service.Spec.ClusterIP}, service.Spec.ClusterIPs, service.Spec.ExternalIPs)
		for _, ingress := range service.Status.LoadBalancer.Ingress {
			texts = append(texts, ingress.IP)
		}
		services := s.Services()
		return services.Unselected(service) != "" && slices.ContainsFunc(texts, func(text string) bool {
			a, err := netip.ParseAddr(text)
			return err == nil && a.Unmap() == addr
		})
	})
}

// find returns the first Service object for which match returns true. The namespace and the
// selector limit what the API server lists.
func (s *Source) find(ctx context.Context, namespace string, selector fields.Selector, match func(*corev1.Service) bool) (found *corev1.Service, err error) {
	switch {
	case len(s.api.dial.Addresses) > 0 || s.manifests == manifest.Stdin:
		return nil, errors.ErrUnsupported
	case s.manifests != "":
		look := watcher.Options{Skip: func(service *corev1.Service) bool {
			if found == nil && match(service) {
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
	return getService(ctx, config, namespace, selector, match)
}

// getService returns the first Service from the API server that matches, or nil if there is
// none. It needs only the permission to list services.
func getService(ctx context.Context, config *rest.Config, namespace string, selector fields.Selector, match func(*corev1.Service) bool) (*corev1.Service, error) {
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	config.APIPath, config.GroupVersion = "/api", &corev1.SchemeGroupVersion
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, err
	}
	var list corev1.ServiceList
	request := client.Get().NamespaceIfScoped(namespace, namespace != "").Resource("services")
	if !selector.Empty() {
		request = request.Param("fieldSelector", selector.String())
	}
	if err := request.Do(ctx).Into(&list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		if match(&list.Items[i]) {
			return &list.Items[i], nil
		}
	}
	return nil, nil
}

// String describes the source in a few words, for people.
func (s *Source) String() string {
	switch {
	case len(s.api.dial.Addresses) > 0:
		return "kpng server " + strings.Join(s.api.dial.Addresses, ", ")
	case s.manifests != "":
		return "manifests " + string(s.manifests)
	case s.kubeconfig != "":
		return "API server of " + string(s.kubeconfig)
	default:
		return "API server"
	}
}

func (s *Source) watch(ctx context.Context, state *cluster.State, once bool) error {
	dial, err := s.api.get(s.fallback > 0)
	if err == nil {
		err = s.checkFallback(false)
	}
	if err != nil {
		return err
	}
	switch {
	case len(s.api.dial.Addresses) > 0:
		dial.FailFast = once
		err = remote.Watch(ctx, state, dial)
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

func (s *Source) proxy(opts kpng.Options) (proxy, error) {
	opts.State.MaxElements = s.MaxElements()
	dial, err := s.api.get(s.fallback > 0)
	if err == nil {
		err = s.checkFallback(true)
	}
	switch {
	case err != nil:
		return nil, err
	case len(s.api.dial.Addresses) > 0:
		fallback, err := s.fallbackOf(opts.NodeName)
		if err != nil {
			return nil, err
		}
		return newRemoteProxy(dial, fallback, opts)
	}
	opts.Kubeconfig, opts.Manifests, opts.Services = string(s.kubeconfig), string(s.manifests), s.Services()
	return kpng.New(opts)
}

type apiFlags struct {
	dial       remote.DialOptions
	tls        remote.TLS
	kubeconfig nonEmpty
}

func (f *apiFlags) register(fs *pflag.FlagSet, addresses ...string) {
	fs.StringSliceVar(&f.dial.Addresses, "api", addresses, "read from the kpng server at this `address`, tcp://host:port or unix:///path; service://NAMESPACE/NAME[:PORT] means the endpoints of a Service, with the name of its port; if several addresses are given, they are tried in turn")
	fs.Var(&f.kubeconfig, "api-kubeconfig", "find the endpoints of service://, and read with --api-fallback, at the API server of this kubeconfig `file` (default: "+defaultAPIServer+")")
	fs.StringVar(&f.tls.CAFile, "api-tls-ca-file", "", "`file` with the authorities that sign the server's certificate; TLS needs this and the next two")
	fs.StringVar(&f.tls.CertFile, "api-tls-cert-file", "", "`file` with this client's certificate")
	fs.StringVar(&f.tls.KeyFile, "api-tls-key-file", "", "`file` with the certificate's key")
	fs.StringVar(&f.tls.ServerName, "api-tls-server-name", "", "`name` in the server's certificate (default: the host of its address; with service://, NAME.NAMESPACE.svc)")
	fs.BoolVar(&f.dial.Insecure, "api-insecure", false, "allow an --api address on another machine without TLS")
}

// get returns the options of the connection. It returns an error if --api is missing and
// a flag is set that needs --api. The argument fallback is true if the flag
// --api-fallback is set, which needs the API server.
func (f *apiFlags) get(fallback bool) (remote.DialOptions, error) {
	opts, tls := f.dial, f.tls
	opts.Addresses = nil
	var services []serverService
	for _, a := range f.dial.Addresses {
		service, ok, err := parseServerService(a)
		switch {
		case err != nil:
			return opts, usage.Errorf("--api: %w", err)
		case ok:
			services = append(services, service)
		default:
			opts.Addresses = append(opts.Addresses, a)
		}
	}
	if f.tls != (remote.TLS{}) {
		opts.TLS = &tls
	}
	switch {
	case len(f.dial.Addresses) == 0 && f.dial.Addresses != nil: // the flag --api was set to an empty value
		return opts, usage.Errorf("--api is empty")
	case len(f.dial.Addresses) == 0 && (opts.TLS != nil || opts.Insecure || f.kubeconfig != ""):
		return opts, usage.Errorf("the flags --api-… need --api")
	case len(services) == 0 && f.kubeconfig != "" && !fallback:
		return opts, usage.Errorf("--api-kubeconfig needs --api-fallback, or an --api address of the form service://NAMESPACE/NAME")
	case len(services) > 1:
		return opts, usage.Errorf("--api has more than one service:// address")
	case len(services) == 1:
		if opts.TLS == nil && !opts.Insecure {
			return opts, usage.Errorf("--api %s needs --api-tls-ca-file, --api-tls-cert-file and --api-tls-key-file, or --api-insecure", services[0])
		}
		if tls.ServerName == "" {
			tls.ServerName = services[0].key.Name + "." + services[0].key.Namespace + ".svc"
		}
		opts.Discover = services[0].discover(string(f.kubeconfig))
	}
	return opts, nil
}

// nonEmpty is a pflag.Value that rejects an empty value. An empty value may come from a
// shell variable that is unset by mistake, so using the flag's default may be wrong.
type nonEmpty string

func (g *nonEmpty) Set(s string) error {
	if strings.TrimSpace(s) == "" {
		return errors.New("the value is empty")
	}
	*g = nonEmpty(s)
	return nil
}

func (g *nonEmpty) String() string { return string(*g) }
func (g *nonEmpty) Type() string   { return "string" }

// positive is a pflag.Value for a number greater than zero.
type positive int

func (p *positive) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil || n <= 0 {
		return errors.New("the value is not a number greater than zero")
	}
	*p = positive(n)
	return nil
}

func (p *positive) String() string { return strconv.Itoa(int(*p)) }
func (p *positive) Type() string   { return "int" }
