// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/internal/sysctl"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

// IPVS returns the backend that programs services into the Linux kernel with IPVS.
func IPVS() *Backend {
	f := &ipvsFlags{checks: newHealthChecks()}
	return &Backend{
		Name:  "ipvs",
		Short: "Program services into the kernel with IPVS, in place of kube-proxy or beside it",
		Long: "Programs services into the kernel with IPVS, in place of kube-proxy or, for services of another proxy name, beside it. " +
			"What is programmed stays when the program ends: see kpng cleanup ipvs. It needs CAP_NET_ADMIN and the kernel module ip_vs.",
		OnlyPorts: true,
		Flags:     f.register,
		Make:      f.parts,
	}
}

// ipvsFlags are the values of the backend's flags.
type ipvsFlags struct {
	options           ipvs.Options
	nodePorts         nodeaddr.Selection
	masqueradeBit     int
	masqueradeOutside bool
	sysctls           string
	limits            conntrackLimits
	keepConnections   bool
	checks            *healthChecks
	// all has all flags of the command, including those of its source.
	all *pflag.FlagSet
}

func (f *ipvsFlags) register(fs *pflag.FlagSet) {
	f.all = fs
	fs.StringVar(&f.options.Instance, "instance", "", "the `name` of this instance among several on a node: its nftables table is kpng-ipvs-NAME instead of kpng-ipvs")
	fs.StringVar(&f.options.Interface, "interface", "", "the `name` of this instance's interface, of type dummy, for the addresses of services (default kpng-ipvs, or kpng-INSTANCE)")
	fs.StringVar(&f.options.Scheduler, "scheduler", "rr", "choose endpoints with this IPVS `scheduler`, such as rr, lc, sh or mh")
	fs.StringVar(&f.options.SchedulerAnnotation, "scheduler-annotation", "kpng.io/ipvs-scheduler", "the `annotation` of services that overrides --scheduler")
	nodePortsFlag(fs, &f.nodePorts)
	listFlag(fs, &f.options.ClusterCIDRs, parseCIDR, "cluster-cidr", "the `CIDRs` of pods")
	fs.StringSliceVar(&f.options.PodInterfaces, "pod-interfaces", nil, "take what comes in by these `interfaces`, such as cni0 or veth*, for pods of this node")
	fs.BoolVar(&f.options.MasqueradeAll, "masquerade-all", false, "masquerade all connections to cluster IPs")
	fs.BoolVar(&f.masqueradeOutside, "masquerade-outside", true, "masquerade connections to cluster IPs from outside the pod network, if --cluster-cidr or --pod-interfaces define it")
	fs.IntVar(&f.masqueradeBit, "masquerade-bit", 13, "mark connections to be masqueraded with this `bit` of the packet mark, 0 to 31; not 14, which is kube-proxy's")
	fs.BoolVar(&f.options.StrictARP, "strict-arp", false, "also check or set the kernel settings with which the node does not answer ARP requests for addresses of services")
	fs.StringVar(&f.sysctls, "sysctls", "", "what to do about kernel settings with other values than services need: `set` (default in place of kube-proxy), set-ipvs for those of IPVS only (default beside it), report or ignore")
	f.limits.register(fs)
	fs.BoolVar(&f.keepConnections, "keep-udp-connections", false, "keep UDP connections to removed endpoints, and TCP connections that began before their service")
	f.checks.register(fs)
}

// complete checks the flags and returns the options of the backend that follow from them.
func (f *ipvsFlags) complete() (ipvs.Options, error) {
	opts := f.options
	opts.MasqueradeOutsiders = f.masqueradeOutside && len(opts.ClusterCIDRs)+len(opts.PodInterfaces) > 0
	if f.masqueradeBit < 0 || f.masqueradeBit > 31 {
		return opts, fmt.Errorf("--masquerade-bit is %d, not 0 to 31", f.masqueradeBit)
	}
	opts.MasqueradeMark = 1 << f.masqueradeBit
	modes := map[string]ipvs.SysctlMode{
		"": ipvs.SetIPVSSysctls, "set-ipvs": ipvs.SetIPVSSysctls, "report": ipvs.ReportSysctls, "set": ipvs.SetSysctls, "ignore": ipvs.IgnoreSysctls,
	}
	mode, ok := modes[f.sysctls]
	if f.sysctls == "" && f.replacesKubeProxy() {
		mode = ipvs.SetSysctls
	}
	if !ok {
		return opts, fmt.Errorf("--sysctls is %q, not set, set-ipvs, report or ignore", f.sysctls)
	}
	opts.Sysctls = mode
	for _, cidr := range f.nodePorts.CIDRs {
		if cidr.Addr().IsLoopback() {
			return opts, fmt.Errorf("--node-port-addresses %s: IPVS cannot serve node ports at loopback addresses; kube-proxy does so in mode iptables only", cidr)
		}
	}
	return opts, f.limits.check(f.all)
}

// replacesKubeProxy reports whether the proxy handles the services that kube-proxy would
// handle.
func (f *ipvsFlags) replacesKubeProxy() bool { return flagValue(f.all, "service-proxy-name") == "" }

func (f *ipvsFlags) parts() (Parts, error) {
	opts, err := f.complete()
	if err != nil {
		return Parts{}, err
	}
	if keep := f.all.Lookup("keep-annotations"); keep != nil {
		if err := keep.Value.Set(opts.SchedulerAnnotation); err != nil {
			return Parts{}, err
		}
	}
	addrs, err := nodeaddr.New(nodeaddr.Options{Selection: f.nodePorts, ExcludeInterfaces: []string{"kube-ipvs0"}})
	if err != nil {
		return Parts{}, err
	}
	opts.NodeAddresses = addrs
	flows := newFlowMetrics()
	opts.Conntrack = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	if !f.keepConnections {
		opts.Conntrack = conntrack.New(conntrack.Options{NodeAddrs: addrs, Observe: flows.observe})
	}
	b, err := ipvs.New(opts)
	if err != nil {
		return Parts{}, err
	}
	return Parts{
		Sink: b,
		Follow: func(ctx context.Context) func() {
			limits := f.limits
			if !f.replacesKubeProxy() {
				limits.onlyGiven(f.all)
			}
			if opts.Sysctls != ipvs.IgnoreSysctls {
				sysctl.Kernel.Apply(ctx, limits.settings(cores()), opts.Sysctls == ipvs.SetSysctls)
			}
			if f.replacesKubeProxy() {
				// Virtual servers may be those of this backend.
				reportLeftovers(ctx, nftablesLeftovers, legacyLeftovers, interfaceLeftovers)
			}
			stopBridges, stopAddrs := followBridges(ctx), addrs.Start(ctx)
			return func() {
				stopBridges()
				stopAddrs()
			}
		},
		Companions: f.checks.companions(addrs),
		Collectors: slices.Concat(f.checks.collectors(), flows.collectors()),
		KubeProxyNames: map[string]prometheus.Collector{
			"conntrack_reconciler_sync_duration_seconds": flows.duration,
			"conntrack_reconciler_deleted_entries_total": flows.ended,
		},
	}, nil
}
