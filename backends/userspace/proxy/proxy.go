// SPDX-License-Identifier: Apache-2.0

// Package proxy is the backend userspace as a program runs it: with flags,
// metrics, and health-check node ports beside it. It is apart from the backend,
// so that who embeds that links neither Prometheus nor a parser of flags.
//
//	p := proxy.New(userspace.LocalRoutes(userspace.RouteOptions{}))
//	cmd := app.Command("userspace", p)
//	p.Register(cmd.Flags())
//	app.Execute(cmd)
package proxy

import (
	"context"
	"fmt"
	"iter"
	"net/netip"
	"sync"
	"time"

	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/backends/nodeproxy"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/kpng-project/kpng/backends/userspace/collector"
	windows "github.com/kpng-project/kpng/backends/windows/userspace"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

// Proxy does by sockets what kube-proxy does on a node. It is a [sink.Sink] that
// package app runs, and for one driver.
type Proxy struct {
	metrics.Collectors
	checks *nodeproxy.HealthChecks
	flags  flags
	// netsh has the flags of addresses on Windows; nil elsewhere.
	netsh *windows.Options
	// backend makes the backend, once, as the flags say.
	backend func() (*userspace.Backend, error)
	running *userspace.Backend // once it has started
}

// flags are settings as a user gives them.
type flags struct {
	options   userspace.Options
	nodePorts []string
	podCIDRs  []string
}

var (
	_ sink.Starter         = (*Proxy)(nil)
	_ sink.Drainer         = (*Proxy)(nil)
	_ sink.Cleaner         = (*Proxy)(nil)
	_ sink.Verifier        = (*Proxy)(nil)
	_ prometheus.Collector = (*Proxy)(nil)
)

// New returns a proxy at addresses that a makes local, or if that is nil at those
// that this host has. Its settings are those of the flags that [Proxy.Register]
// adds; if they make no sense, that is an error of [Proxy.Start] and
// [Proxy.Cleanup].
func New(a userspace.Addresses) *Proxy {
	p := &Proxy{checks: nodeproxy.NewHealthChecks()}
	p.flags.options.Addresses = a
	p.backend = sync.OnceValues(p.newBackend)
	p.Collectors = metrics.Collectors{collector.New(p.stats), p.checks}
	return p
}

// NewWindows is New for Windows, with addresses on a network interface
// (backends/windows/userspace) and the flags that these have.
func NewWindows() *Proxy {
	p := New(nil)
	p.netsh = &windows.Options{}
	return p
}

// Register adds the flags.
func (p *Proxy) Register(fs *pflag.FlagSet) {
	if p.netsh != nil {
		fs.StringVar(&p.netsh.Interface, "interface", "", "put the addresses of services on the network interface of this `name`; without it, $"+windows.InterfaceVariable+" or "+windows.DefaultInterface)
		fs.StringVar(&p.netsh.StateFile, "state-file", "", "note the addresses that were added in this `file`; without it, in %ProgramData%\\kpng\\userspace.journal")
		fs.DurationVar(&p.netsh.Timeout, "address-timeout", 0, "how long an address that was added may take until it can be used; 0 means 10 s")
	}
	f := &p.flags
	fs.StringSliceVar(&f.nodePorts, "node-port-addresses", []string{"primary"}, "serve node ports and health checks at these `addresses` of the node: primary (those of its Node object), all, CIDRs")
	fs.StringSliceVar(&f.podCIDRs, "pod-cidr", nil, "the `CIDRs` of this node's pods, whose traffic counts as starting on this node")
	fs.DurationVar(&f.options.DrainTimeout, "drain-timeout", 0, "how long TCP connections go on after their service has gone, or at the end; 0 means 30 s")
	fs.DurationVar(&f.options.UDPTimeout, "udp-timeout", 0, "how long a silent UDP client keeps its endpoint; 0 means 1 min")
	fs.IntVar(&f.options.MaxUDPClients, "max-udp-clients", 0, "how many UDP clients there are at most, each with a file descriptor; 0 means 8192")
	p.checks.Register(fs)
}

// options returns the backend's, as the flags say.
func (p *Proxy) options() (userspace.Options, error) {
	opts := p.flags.options
	var err error
	if opts.NodePorts, err = nodeaddr.ParseSelection(p.flags.nodePorts); err != nil {
		return opts, fmt.Errorf("--node-port-addresses: %w", err)
	}
	for _, text := range p.flags.podCIDRs {
		cidr, err := netip.ParsePrefix(text)
		if err != nil {
			return opts, fmt.Errorf("--pod-cidr: %w", err)
		}
		opts.PodCIDRs = append(opts.PodCIDRs, cidr.Masked())
	}
	if p.netsh != nil {
		addresses, err := windows.New(*p.netsh)
		if err != nil {
			return opts, err
		}
		opts.Addresses, opts.ExcludeInterfaces = addresses, []string{addresses.Interface()}
	}
	return opts, nil
}

func (p *Proxy) newBackend() (*userspace.Backend, error) {
	opts, err := p.options()
	if err != nil {
		return nil, err
	}
	return userspace.New(opts)
}

// Start implements sink.Starter.
func (p *Proxy) Start(ctx context.Context) error {
	b, err := p.backend()
	if err != nil {
		return err
	}
	p.running = b
	return b.Start(ctx)
}

// Stop implements sink.Stopper.
func (p *Proxy) Stop(ctx context.Context) error { return p.running.Stop(ctx) }

// StopTimeout implements sink.Drainer.
func (p *Proxy) StopTimeout() time.Duration { return p.running.StopTimeout() }

// Sync implements sink.Sink.
func (p *Proxy) Sync(ctx context.Context, c *sink.Changes) error { return p.running.Sync(ctx, c) }

// Verify implements sink.Verifier.
func (p *Proxy) Verify(ctx context.Context) error { return p.running.Verify(ctx) }

// Cleanup implements sink.Cleaner.
func (p *Proxy) Cleanup(ctx context.Context) error {
	b, err := p.backend()
	if err != nil {
		return err
	}
	return b.Cleanup(ctx)
}

// Beside implements app.Companion: health-check node ports at the node's
// addresses.
func (p *Proxy) Beside(healthy func() bool) []sink.Sink {
	b, err := p.backend()
	if err != nil {
		return nil // Start says so
	}
	return p.checks.Beside(b.NodeAddresses(), healthy)
}

func (p *Proxy) stats() iter.Seq[userspace.PortStats] {
	b, err := p.backend()
	if err != nil {
		return func(func(userspace.PortStats) bool) {}
	}
	return b.Stats()
}
