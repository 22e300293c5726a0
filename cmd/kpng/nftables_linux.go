// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/backends/nodeproxy"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// nodeProxy does what kube-proxy does on a node: the backend nftables with its
// surroundings.
type nodeProxy struct {
	*nftables.Backend
	metrics.Collectors
	addrs  *nodeaddr.Watcher
	checks *nodeproxy.HealthChecks

	stop func() // follows addresses no more
}

// nftablesFlags are the settings of the backend as a user gives them.
type nftablesFlags struct {
	options           nftables.Options
	nodePortAddresses []string
	clusterCIDRs      []string
	masqueradeBit     int
	masqueradeOutside bool
	sysctls           string
	keepConnections   bool
	checks            *nodeproxy.HealthChecks
}

func newNFTables(cmd *cobra.Command) func() (sink.Sink, error) {
	cmd.Long = "Programs services into the kernel with nftables, in place of kube-proxy or, for services of another proxy name, beside it. " +
		"What is programmed stays when the program ends: see kpng cleanup nftables. It needs CAP_NET_ADMIN and the program nft."
	var f nftablesFlags
	f.register(cmd)
	return func() (sink.Sink, error) { return f.sink() }
}

func (f *nftablesFlags) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.options.Instance, "instance", "", "tell this backend from others on the node by a `name`: its table is kpng-NAME instead of kpng")
	fs.StringSliceVar(&f.nodePortAddresses, "node-port-addresses", []string{"primary"}, "serve node ports and health checks at these `addresses` of the node: primary (those of its Node object), all, CIDRs")
	fs.StringSliceVar(&f.clusterCIDRs, "cluster-cidr", nil, "take sources in these `CIDRs` for pods")
	fs.StringSliceVar(&f.options.PodInterfaces, "pod-interfaces", nil, "take what comes in by these `interfaces`, such as cni0 or veth*, for pods of this node")
	fs.BoolVar(&f.options.MasqueradeAll, "masquerade-all", false, "masquerade all connections to cluster IPs")
	fs.BoolVar(&f.masqueradeOutside, "masquerade-outside", true, "masquerade connections to cluster IPs from outside the pod network, where --cluster-cidr or --pod-interfaces tell what that is")
	fs.IntVar(&f.masqueradeBit, "masquerade-bit", 13, "mark connections to be masqueraded with this `bit` of the packet mark, 0 to 31; not 14, which is kube-proxy's")
	fs.Int32Var(&f.options.DNATPriority, "dnat-priority", -100, "choose endpoints at this `priority` of the hooks prerouting and output, not 0")
	fs.Int32Var(&f.options.SNATPriority, "snat-priority", 100, "masquerade at this `priority` of the hook postrouting, not 0")
	fs.BoolVar(&f.options.AcceptUnknownPorts, "accept-unknown-ports", false, "leave ports of a cluster IP that no service has to the routing table, instead of rejecting")
	fs.StringVar(&f.sysctls, "sysctls", "report", "what to do about kernel settings that do not forward to pods: report, set or ignore")
	fs.BoolVar(&f.keepConnections, "keep-udp-connections", false, "leave UDP connections to endpoints that have gone")
	f.checks = nodeproxy.NewHealthChecks()
	f.checks.Register(fs)
	fs.StringVar(&f.options.NFT, "nft", "nft", "the `program` nft")
}

// complete returns the backend's options as far as flags alone decide.
func (f *nftablesFlags) complete() (nftables.Options, error) {
	opts := f.options
	for _, text := range f.clusterCIDRs {
		cidr, err := netip.ParsePrefix(text)
		if err != nil {
			return opts, fmt.Errorf("--cluster-cidr: %w", err)
		}
		opts.ClusterCIDRs = append(opts.ClusterCIDRs, cidr.Masked())
	}
	opts.MasqueradeOutsiders = f.masqueradeOutside && len(opts.ClusterCIDRs)+len(opts.PodInterfaces) > 0
	if f.masqueradeBit < 0 || f.masqueradeBit > 31 {
		return opts, fmt.Errorf("--masquerade-bit is %d, not 0 to 31", f.masqueradeBit)
	}
	opts.MasqueradeMark = 1 << f.masqueradeBit
	if opts.DNATPriority == 0 || opts.SNATPriority == 0 {
		return opts, errors.New("--dnat-priority and --snat-priority may not be 0")
	}
	modes := map[string]nftables.SysctlMode{"report": nftables.ReportSysctls, "set": nftables.SetSysctls, "ignore": nftables.IgnoreSysctls}
	mode, ok := modes[f.sysctls]
	if !ok {
		return opts, fmt.Errorf("--sysctls is %q, not report, set or ignore", f.sysctls)
	}
	opts.Sysctls = mode
	return opts, nil
}

func (f *nftablesFlags) sink() (*nodeProxy, error) {
	opts, err := f.complete()
	if err != nil {
		return nil, err
	}
	selection, err := nodeaddr.ParseSelection(f.nodePortAddresses)
	if err != nil {
		return nil, fmt.Errorf("--node-port-addresses: %w", err)
	}
	n, connections := metrics.NewNFTables(), metrics.NewConnections()
	p := &nodeProxy{Collectors: metrics.Collectors{n, connections, f.checks}, checks: f.checks}
	if p.addrs, err = nodeaddr.New(nodeaddr.Options{Selection: selection, ExcludeInterfaces: []string{"kube-ipvs0"}}); err != nil {
		return nil, err
	}
	opts.NodeAddresses = p.addrs
	opts.Conntrack = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	if !f.keepConnections {
		opts.Conntrack = conntrack.New(conntrack.Options{NodeAddrs: p.addrs, Observe: func(pass conntrack.Pass) {
			connections.Looked(pass.Seen, pass.Ended, pass.Duration, pass.Err)
		}})
	}
	opts.Observer = nftables.Observer{Transacted: n.Transacted, Holds: n.Holds, Drifted: n.Drifted, Mended: n.Mended}
	p.Backend, err = nftables.New(opts)
	return p, err
}

// Beside implements app.Companion.
func (p *nodeProxy) Beside(healthy func() bool) []sink.Sink { return p.checks.Beside(p.addrs, healthy) }

// Start implements sink.Starter.
func (p *nodeProxy) Start(ctx context.Context) error {
	if err := p.Backend.Start(ctx); err != nil {
		return err
	}
	p.stop = p.addrs.Start(ctx)
	return nil
}

// Stop implements sink.Stopper.
func (p *nodeProxy) Stop(ctx context.Context) error {
	p.stop()
	return p.Backend.Stop(ctx)
}
