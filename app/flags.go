// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"

	"github.com/kpng-project/kpng/remote/transport"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// RegisterLogging adds the flags -v and --vmodule, by which klog goes, --log-file,
// and on Windows --windows-service. The last two are for [Execute] to mind.
func RegisterLogging(fs *pflag.FlagSet) {
	var logging flag.FlagSet
	klog.InitFlags(&logging)
	fs.AddGoFlag(logging.Lookup("v"))
	fs.AddGoFlag(logging.Lookup("vmodule"))
	new(hosting).register(fs)
}

// given is a text that, if it is given, is not empty: whoever wrote "$FILE" did
// not mean what holds without it.
type given string

// Set implements pflag.Value.
func (g *given) Set(s string) error {
	if strings.TrimSpace(s) == "" {
		return errors.New("it is given, but empty")
	}
	*g = given(s)
	return nil
}

// String implements pflag.Value.
func (g *given) String() string { return string(*g) }

// Type implements pflag.Value.
func (g *given) Type() string { return "string" }

// serviceFlags say which services to serve and what to keep of them.
type serviceFlags struct {
	options   watcher.Options
	mapIP     string
	mapAllIPs bool
}

func (f *serviceFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.options.ServiceProxyName, "service-proxy-name", "", "serve the services whose label service.kubernetes.io/service-proxy-name is this `name`, headless ones included; without it, those that have no such label")
	fs.BoolVar(&f.options.IgnoreExternalIPs, "ignore-external-ips", false, "serve no external IPs (spec.externalIPs), which whoever may create a service can choose at will")
	fs.StringSliceVar(&f.options.KeepLabels, "keep-labels", nil, "hand on the service labels that match these `patterns`, such as app or example.com/*")
	fs.StringSliceVar(&f.options.KeepAnnotations, "keep-annotations", nil, "hand on the service annotations that match these `patterns`, such as example.com/*")
	fs.StringVar(&f.mapIP, "all-ports-annotation", "", "make an all-ports service of each that has this `annotation` with the value true")
	fs.BoolVar(&f.mapAllIPs, "all-ports", false, "make an all-ports service of each")
}

// allPorts reports whether the flags make all-ports services.
func (f *serviceFlags) allPorts() bool { return f.mapAllIPs || f.mapIP != "" }

// get returns what the flags say.
func (f *serviceFlags) get() watcher.Options {
	o := f.options
	switch {
	case f.mapAllIPs:
		o.AllPorts = func(*corev1.Service) bool { return true }
	case f.mapIP != "":
		o.AllPorts = watcher.AllPortsAnnotated(f.mapIP)
	}
	return o
}

// apiFlags say how to reach another kpng.
type apiFlags struct {
	addresses []string
	tls       transport.TLS
	insecure  bool
}

func (f *apiFlags) register(fs *pflag.FlagSet, addresses ...string) {
	fs.StringSliceVar(&f.addresses, "api", addresses, "be served by the kpng at this `address`, tcp://host:port or unix:///path; of several, one after the other is tried")
	fs.StringVar(&f.tls.CAFile, "api-tls-ca-file", "", "the `file` with the authorities that sign the certificate of the kpng at --api; for TLS, with the next two")
	fs.StringVar(&f.tls.CertFile, "api-tls-cert-file", "", "the `file` with this client's certificate")
	fs.StringVar(&f.tls.KeyFile, "api-tls-key-file", "", "the `file` with the certificate's key")
	fs.StringVar(&f.tls.ServerName, "api-tls-server-name", "", "the `name` in the certificate of the kpng at --api; without it, the host of its address")
	fs.BoolVar(&f.insecure, "api-insecure", false, "allow an --api of another machine without TLS")
}

// get returns what the flags say, and an error if there are some that mean
// nothing without another one.
func (f *apiFlags) get() (transport.DialOptions, error) {
	if f.addresses != nil && len(f.addresses) == 0 { // nil is without the flag
		return transport.DialOptions{}, errors.New("--api is given, but empty")
	}
	if len(f.addresses) == 0 && (f.tls != transport.TLS{} || f.insecure) {
		return transport.DialOptions{}, errors.New("the flags --api-… are for --api, which is not given")
	}
	opts := transport.DialOptions{Addresses: f.addresses, Insecure: f.insecure}
	if f.tls != (transport.TLS{}) {
		opts.TLS = &f.tls
	}
	return opts, nil
}

// sinkFlags are the settings of a sink's driver, and for which node it is.
type sinkFlags struct {
	node     given
	interval time.Duration
	once     bool

	onceTimeout time.Duration
}

func (f *sinkFlags) register(fs *pflag.FlagSet) {
	fs.Var(&f.node, "node-name", "serve the node of this `name`; without it, $NODE_NAME or the host's name in lower case")
	fs.DurationVar(&f.interval, "min-sync-interval", 0, "the least time from the end of one sync to the start of the next")
	fs.BoolVar(&f.once, "once", false, "end when everything has been programmed once")
	fs.DurationVar(&f.onceTimeout, "once-timeout", time.Minute, "with --once: fail after this time without progress, and say which services are missing; 0 is never")
}

func (f *sinkFlags) get() (sink.Options, error) {
	if f.interval < 0 {
		return sink.Options{}, fmt.Errorf("--min-sync-interval is negative: %v", f.interval)
	}
	if f.onceTimeout < 0 {
		return sink.Options{}, fmt.Errorf("--once-timeout is negative: %v", f.onceTimeout)
	}
	return sink.Options{MinInterval: f.interval, Once: f.once}, nil
}
