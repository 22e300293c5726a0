// SPDX-License-Identifier: Apache-2.0

// Package proxy is the backend kernelspace as a program runs it: with flags,
// metrics, and health-check node ports beside it. It is apart from the backend,
// so that who embeds that links neither Prometheus nor a parser of flags.
//
//	p := proxy.New(winhns.HNS{})
//	cmd := app.Command("winkernelspace", p)
//	p.Register(cmd.Flags())
//	app.Execute(cmd)
package proxy

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/backends/nodeproxy"
	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

// Proxy does what kube-proxy does on a Windows node. It is a [sink.Sink] that
// package app runs, and for one driver.
type Proxy struct {
	metrics.Collectors
	opts   kernelspace.Options
	checks *nodeproxy.HealthChecks
	addrs  *nodeaddr.Watcher

	backend *kernelspace.Backend // once it has started
	stop    func()               // follows addresses no more
}

var (
	_ sink.Starter         = &Proxy{}
	_ sink.Stopper         = &Proxy{}
	_ sink.Verifier        = &Proxy{}
	_ sink.Cleaner         = &Proxy{}
	_ prometheus.Collector = &Proxy{}
)

// New returns a proxy on an HNS, whose settings are those of the flags that
// [Proxy.Register] adds.
func New(hns kernelspace.HNS) *Proxy {
	addrs, err := nodeaddr.New(nodeaddr.Options{})
	if err != nil {
		panic(err) // only options can be wrong, and there are none
	}
	calls, checks := newHNSMetrics(), nodeproxy.NewHealthChecks()
	return &Proxy{
		Collectors: metrics.Collectors{calls, checks},
		opts:       kernelspace.Options{HNS: hns, Observer: calls.observer()},
		checks:     checks,
		addrs:      addrs,
	}
}

// Register adds the flags.
func (p *Proxy) Register(fs *pflag.FlagSet) {
	fs.StringVar(&p.opts.Network, "network", os.Getenv("KUBE_NETWORK"), "the `name` of the HNS network that pods are on; without it, $KUBE_NETWORK")
	fs.StringVar(&p.opts.Name, "instance", "kpng", "the `name` that tells what this program made from what others did; each instance on a node needs its own, and its own --state-file")
	fs.StringVar(&p.opts.StateFile, "state-file", filepath.Join(os.Getenv("ProgramData"), "kpng", "kernelspace.journal"), "the `file` that remembers which load balancers are this program's")
	fs.BoolVar(&p.opts.EnableDSR, "enable-dsr", false, "use direct server return for cluster IPs; fails where Windows lacks it")
	fs.Var(&addresses{&p.opts.SourceVIPs}, "source-vip", "the source `address` of what load balancers send on, at most one a family; an overlay network needs one of IPv4; without it, the node's address")
	fs.Var(&addresses{&p.opts.NodeIPs}, "node-ip", "an `address` of this node; without it, those of its Node object")
	fs.StringVar(&p.opts.HostMAC, "host-mac", "", "the hardware `address`, as in 00-15-5d-01-02-03, for the source VIP and cluster IPs on an overlay network; without it, that of the interface that has the node's address")
	fs.BoolVar(&p.opts.ForwardHealthChecks, "forward-healthcheck-vip", false, "forward health checks at load-balancer addresses to this node")
	fs.Uint16Var(&p.opts.HealthzPort, "forward-healthcheck-port", 10256, "the `port` for forwarded health checks of services without a health-check node port: that of --healthz-bind-address; 0 forwards none of them")
	fs.StringVar(&p.opts.RootEndpoint, "root-hnsendpoint-name", "cbr0", "the `name` of the HNS endpoint through which this node is reached, for forwarded health checks")
	p.checks.Register(fs)
}

// Start implements sink.Starter.
func (p *Proxy) Start(ctx context.Context) error {
	backend, err := kernelspace.New(p.opts)
	if err != nil {
		return err
	}
	if err := backend.Start(ctx); err != nil {
		return err
	}
	p.backend = backend
	p.stop = p.addrs.Start(ctx)
	return nil
}

// Stop implements sink.Stopper. Load balancers stay: traffic flows on while the
// program is replaced.
func (p *Proxy) Stop(context.Context) error {
	p.stop()
	return nil
}

// Sync implements sink.Sink.
func (p *Proxy) Sync(ctx context.Context, c *sink.Changes) error { return p.backend.Sync(ctx, c) }

// Verify implements sink.Verifier.
func (p *Proxy) Verify(ctx context.Context) error { return p.backend.Verify(ctx) }

// Cleanup implements sink.Cleaner.
func (p *Proxy) Cleanup(ctx context.Context) error {
	backend, err := kernelspace.New(p.opts)
	if err != nil {
		return err
	}
	return backend.Cleanup(ctx)
}

// Beside implements app.Companion: health-check node ports at the node's
// addresses.
func (p *Proxy) Beside(healthy func() bool) []sink.Sink { return p.checks.Beside(p.addrs, healthy) }

// addresses is a flag that can be given several times, or with several addresses
// between commas.
type addresses struct{ to *[]netip.Addr }

func (a *addresses) String() string {
	if a.to == nil {
		return ""
	}
	var all []string
	for _, addr := range *a.to {
		all = append(all, addr.String())
	}
	return strings.Join(all, ",")
}

func (a *addresses) Set(s string) error {
	for text := range strings.SplitSeq(s, ",") {
		addr, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil {
			return err
		}
		*a.to = append(*a.to, addr)
	}
	return nil
}

func (a *addresses) Type() string { return "address" }
