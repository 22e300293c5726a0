// SPDX-License-Identifier: Apache-2.0

// Package node builds a complete service proxy for a node, for programs such as CNI
// agents. The program creates one or more dataplanes, and this package adds the other
// parts that a proxy needs on a node:
//
//	dataplane, err := nftables.New(nftables.Options{})
//	…
//	proxy, err := node.New(node.Options{}, dataplane)
//	…
//	mux.Handle("/", proxy.HealthHandler())
//	err = proxy.Run(ctx)
//
// The proxy follows the addresses of the node, deletes connection-tracking entries that
// would keep clients from reaching the present endpoints, and serves health-check node
// ports. Without a service-proxy name, the proxy replaces kube-proxy: it enables IP
// forwarding, and sets the same kernel settings as kube-proxy. With a service-proxy name,
// the proxy runs beside kube-proxy, and only logs wrong settings.
//
// A dataplane is a backend of kpng, a sink that contains backends (see [sink.As]), or any
// other sink. The proxy completes the options of backends: it sets NodeAddresses, Conntrack,
// Sysctls and Observer of [backends.Options]. It leaves a field unchanged if the field has a
// value or if the backend does not support it. After each Sync of any other dataplane, the
// proxy itself deletes the stale connections. All parts of the proxy work in the network
// namespace of the process.
//
// If a sink needs none of these parts, package kpng alone can run it.
package node

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/health"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// Options are the settings of a node's proxy. The zero value has the defaults.
type Options struct {
	// Options select the source of services, the services and the node. Their Sinks run
	// beside the dataplanes. The proxy does not complete the options of these sinks.
	kpng.Options
	// Dataplanes program services. The default name of a dataplane is the name of its
	// backend, such as "nftables". Other sinks have numbers as default names. The function
	// [New] appends its dataplane arguments to Dataplanes.
	Dataplanes []kpng.Sink
	// NodeAddresses provides the addresses at which node ports and health-check node ports
	// are open, see [nodeaddr.Watch]. Default: the primary addresses of the node, which the
	// proxy follows itself.
	//
	// NodeAddresses may contain loopback addresses when New is called, or may come from
	// nodeaddr.Watch with a Selection that names loopback addresses. Then the sink
	// "localhost" serves node ports at these addresses, with sockets of this process.
	// Omit loopback addresses if a dataplane serves node ports there itself.
	NodeAddresses nodeaddr.Source
	// Metrics provides observers for those dataplanes, backends and Sinks that have none.
	// Default: none.
	Metrics Metrics
}

// Metrics provides observers of the parts of a proxy. A *metrics.Metrics implements this
// interface. This package does not import package metrics, so that programs without
// Prometheus do not link Prometheus. [New] calls the methods.
type Metrics interface {
	// Sink returns the observer of the driver of the named sink.
	Sink(name string) sink.Observer
	// Backend returns the observer of a backend, or nil. The name is that of its package, such
	// as "nftables".
	Backend(name string) backends.Observer
	// Conntrack returns a function that is called after each search for stale
	// connections. Its arguments are the number of connections that the kernel returned
	// (seen), the number of connections that were deleted (deleted), the duration (took),
	// and the error. If the error is not nil, the search is repeated. The function may be
	// nil.
	Conntrack() func(seen, deleted int, took time.Duration, err error)
	// HealthChecks returns two functions, which may be nil. The function ports is called when
	// the number of open or failing health-check node ports changes. These ports are counted
	// for each address of the node. The function failed is called when a service's port cannot
	// be opened at an address, once for each new reason. The calls of a function do not
	// overlap.
	HealthChecks() (ports func(open, failing int), failed func(service types.NamespacedName, at netip.AddrPort, err error))
}

// Proxy is the service proxy of a node. Its methods are safe for concurrent use.
type Proxy struct{ *kpng.Proxy }

// HealthHandler returns a handler of health checks, see [health.Handler].
func (p *Proxy) HealthHandler() http.Handler { return health.Handler(p.Health) }

// New returns a Proxy. It checks the options and reads the addresses of the node. It does
// not change the machine, and does not connect to the API server. At least one dataplane is
// required. The Proxy owns the dataplanes: it starts and stops them.
func New(opts Options, dataplanes ...sink.Sink) (*Proxy, error) {
	planes := slices.Clone(opts.Dataplanes)
	for _, d := range dataplanes {
		planes = append(planes, kpng.Sink{Sink: d})
	}
	if len(planes) == 0 {
		return nil, errors.New("no dataplane given")
	}
	p := &Proxy{}
	settings := nodesinks.Options{Addresses: opts.NodeAddresses, Healthy: func() bool {
		r := p.Health()
		return r.Synced && !r.Stuck
	}}
	if opts.Services.ServiceProxyName == "" {
		settings.Sysctls, settings.Settings = backends.SetSysctls, sysctl.KubeProxyConntrack.Settings(sysctl.Cores())
	}
	if opts.Metrics != nil {
		settings.Metrics = opts.Metrics
	}
	node, err := nodesinks.New(settings)
	if err != nil {
		return nil, err
	}
	checks := kpng.Sink{Options: sink.Options{Name: "healthchecks", Once: true}}
	for i := range planes {
		d := &planes[i]
		if d.Sink == nil {
			return nil, fmt.Errorf("dataplane %d %s is nil", i, d.Options.Name)
		}
		var backend string
		if d.Sink, backend = node.Dataplane(d.Sink); d.Options.Name == "" {
			d.Options.Name = backend
		}
		checks.Options.Once = checks.Options.Once && d.Options.Once
	}
	planes[0].Sink = node.WithTasks(planes[0].Sink)
	checks.Sink = node.HealthChecks()
	all := opts.Options
	beside := []kpng.Sink{checks}
	localhost, err := node.Localhost()
	if err != nil {
		return nil, err
	}
	if localhost != nil {
		beside = append(beside, kpng.Sink{Sink: localhost, Options: sink.Options{Name: "localhost", Once: checks.Options.Once}})
	}
	all.Sinks = slices.Concat(planes, beside, opts.Sinks)
	for i := range all.Sinks {
		o := &all.Sinks[i].Options
		if o.Name == "" {
			o.Name = strconv.Itoa(i)
		}
		if opts.Metrics != nil && reflect.ValueOf(o.Observer).IsZero() {
			o.Observer = opts.Metrics.Sink(o.Name)
		}
	}
	p.Proxy, err = kpng.New(all)
	if err != nil {
		return nil, err
	}
	return p, nil
}
