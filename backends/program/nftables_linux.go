// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kpng-project/kpng/backends/conntrack"
	"github.com/kpng-project/kpng/backends/internal/sysctl"
	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/backends/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

var _ Inspector = (*nftables.Backend)(nil)

// NFTables returns the backend that programs services into the Linux kernel with
// nftables.
func NFTables() *Backend {
	f := &nftablesFlags{checks: newHealthChecks()}
	return &Backend{
		Name:  "nftables",
		Short: "Program services into the kernel with nftables, in place of kube-proxy or beside it",
		Long: "Programs services into the kernel with nftables, in place of kube-proxy or, for services of another proxy name, beside it. " +
			"What is programmed stays when the program ends: see kpng cleanup nftables. It needs CAP_NET_ADMIN.",
		Flags: f.register,
		Make:  f.parts,
	}
}

// nftablesFlags has the values of the backend's flags.
type nftablesFlags struct {
	options           nftables.Options
	nodePorts         nodeaddr.Selection
	masqueradeBit     int
	masqueradeOutside bool
	sysctls           string
	limits            conntrackLimits
	keepConnections   bool
	checks            *healthChecks
	// The field all has all flags of the command, not only those of the backend.
	all *pflag.FlagSet
}

func (f *nftablesFlags) register(fs *pflag.FlagSet) {
	f.all = fs
	fs.StringVar(&f.options.Instance, "instance", "", "the `name` of this instance among several on a node: its table is kpng-NAME instead of kpng, or kpng2-NAME instead of kpng2")
	nodePortsFlag(fs, &f.nodePorts)
	listFlag(fs, &f.options.ClusterCIDRs, parseCIDR, "cluster-cidr", "the `CIDRs` of pods")
	fs.BoolVar(&f.options.NodePodCIDRs, "node-pod-cidrs", false, "take the pod CIDRs of the Node object for the addresses of this node's pods")
	listFlag(fs, &f.options.ServiceCIDRs, parseCIDR, "service-cidr", "drop connections to addresses in these `CIDRs` of cluster IPs that no service has")
	fs.StringSliceVar(&f.options.PodInterfaces, "pod-interfaces", nil, "take what comes in by these `interfaces`, such as cni0 or veth*, for pods of this node")
	fs.BoolVar(&f.options.MasqueradeAll, "masquerade-all", false, "masquerade all connections to cluster IPs")
	fs.BoolVar(&f.masqueradeOutside, "masquerade-outside", true, "masquerade connections to cluster IPs from outside the pod network, if --cluster-cidr, --node-pod-cidrs or --pod-interfaces define it")
	fs.IntVar(&f.masqueradeBit, "masquerade-bit", 13, "mark connections to be masqueraded with this `bit` of the packet mark, 0 to 31; not 14, which is kube-proxy's")
	fs.Int32Var(&f.options.DNATPriority, "dnat-priority", -100, "choose endpoints at this `priority` of the hooks prerouting and output, not 0")
	fs.Int32Var(&f.options.SNATPriority, "snat-priority", 100, "masquerade at this `priority` of the hook postrouting, not 0")
	fs.BoolVar(&f.options.AcceptUnknownPorts, "accept-unknown-ports", false, "leave ports of a cluster IP that no service has to the routing table, instead of rejecting")
	fs.StringVar(&f.sysctls, "sysctls", "", "what to do about kernel settings with other values than services need: `set` (default in place of kube-proxy), report (default beside it) or ignore")
	f.limits.register(fs)
	fs.BoolVar(&f.keepConnections, "keep-udp-connections", false, "keep UDP connections to removed endpoints, and TCP connections that began before their service")
	f.checks.register(fs)
}

// complete checks the values of the flags and returns the resulting options.
func (f *nftablesFlags) complete() (nftables.Options, error) {
	opts := f.options
	opts.MasqueradeOutsiders = f.masqueradeOutside && (opts.NodePodCIDRs || len(opts.ClusterCIDRs)+len(opts.PodInterfaces) > 0)
	if f.masqueradeBit < 0 || f.masqueradeBit > 31 {
		return opts, fmt.Errorf("--masquerade-bit is %d, not 0 to 31", f.masqueradeBit)
	}
	opts.MasqueradeMark = 1 << f.masqueradeBit
	if opts.DNATPriority == 0 || opts.SNATPriority == 0 {
		return opts, errors.New("--dnat-priority and --snat-priority may not be 0")
	}
	modes := map[string]nftables.SysctlMode{
		"": nftables.ReportSysctls, "report": nftables.ReportSysctls, "set": nftables.SetSysctls, "ignore": nftables.IgnoreSysctls,
	}
	mode, ok := modes[f.sysctls]
	if f.sysctls == "" && f.replacesKubeProxy() {
		mode = nftables.SetSysctls
	}
	if !ok {
		return opts, fmt.Errorf("--sysctls is %q, not report, set or ignore", f.sysctls)
	}
	opts.Sysctls = mode
	for _, cidr := range f.nodePorts.CIDRs {
		if cidr.Addr().IsLoopback() {
			return opts, fmt.Errorf("--node-port-addresses %s: nftables cannot serve node ports at loopback addresses; kube-proxy does so in mode iptables only", cidr)
		}
	}
	return opts, f.limits.check(f.all)
}

// replacesKubeProxy reports whether this proxy runs in place of kube-proxy. If it handles
// the services of another proxy name, it runs beside kube-proxy.
func (f *nftablesFlags) replacesKubeProxy() bool {
	return flagValue(f.all, "service-proxy-name") == ""
}

// conntrackSettings returns the settings of connection tracking for a machine with this
// number of CPU cores. Beside kube-proxy, which sets its own values, it returns only
// settings whose flags were given.
func (f *nftablesFlags) conntrackSettings(cores int) []sysctl.Setting {
	limits := f.limits
	if !f.replacesKubeProxy() {
		limits.onlyGiven(f.all)
	}
	return limits.settings(cores)
}

// follow returns a function for Parts.Follow. That function applies kernel settings and
// starts tasks that run beside the backend.
func (f *nftablesFlags) follow(mode nftables.SysctlMode, addrs *nodeaddr.Watcher) func(context.Context) (stop func()) {
	return func(ctx context.Context) func() {
		if mode != nftables.IgnoreSysctls {
			sysctl.Kernel.Apply(ctx, f.conntrackSettings(cores()), mode == nftables.SetSysctls)
		}
		if f.replacesKubeProxy() {
			reportLeftovers(ctx)
		}
		stopBridges, stopAddrs := followBridges(ctx), addrs.Start(ctx)
		return func() {
			stopBridges()
			stopAddrs()
		}
	}
}

func (f *nftablesFlags) parts() (Parts, error) {
	opts, err := f.complete()
	if err != nil {
		return Parts{}, err
	}
	addrs, err := nodeaddr.New(nodeaddr.Options{Selection: f.nodePorts, ExcludeInterfaces: []string{"kube-ipvs0"}})
	if err != nil {
		return Parts{}, err
	}
	opts.NodeAddresses = addrs
	flows, table := newFlowMetrics(), newNFTablesMetrics()
	opts.Observer = table.observer()
	opts.Conntrack = sink.Func(func(context.Context, *sink.Changes) error { return nil })
	if !f.keepConnections {
		opts.Conntrack = conntrack.New(conntrack.Options{NodeAddrs: addrs, Observe: flows.observe})
	}
	b, err := nftables.New(opts)
	if err != nil {
		return Parts{}, err
	}
	return Parts{
		Sink:       b,
		Follow:     f.follow(opts.Sysctls, addrs),
		Companions: f.checks.companions(addrs),
		Collectors: slices.Concat(f.checks.collectors(), flows.collectors(), table.collectors()),
		KubeProxyNames: map[string]prometheus.Collector{
			"conntrack_reconciler_sync_duration_seconds":    flows.duration,
			"conntrack_reconciler_deleted_entries_total":    flows.ended,
			"sync_proxy_rules_nftables_sync_failures_total": table.refused,
		},
	}, nil
}

type flowMetrics struct {
	seen, ended, errors prometheus.Counter
	duration            prometheus.Histogram
}

func newFlowMetrics() *flowMetrics {
	const subsystem = "conntrack"
	return &flowMetrics{
		seen:   counter(subsystem, "entries_seen_total", "Connections that the kernel listed while stale connections were looked for."),
		ended:  counter(subsystem, "entries_ended_total", "Stale connections that were ended."),
		errors: counter(subsystem, "errors_total", "Looks for stale connections that failed and are made again."),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "kpng", Subsystem: subsystem, Name: "duration_seconds", Help: "How long a look for stale connections took.", Buckets: durations,
		}),
	}
}

func (m *flowMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.seen, m.ended, m.errors, m.duration}
}

func (m *flowMetrics) observe(pass conntrack.Pass) {
	m.seen.Add(float64(pass.Seen))
	m.ended.Add(float64(pass.Ended))
	m.duration.Observe(pass.Duration.Seconds())
	if pass.Err != nil {
		m.errors.Inc()
	}
}

type nftablesMetrics struct {
	elements                               prometheus.Gauge
	transactions, refused, drifted, mended prometheus.Counter
}

func newNFTablesMetrics() *nftablesMetrics {
	const subsystem = "nftables"
	return &nftablesMetrics{
		elements:     gauge(subsystem, "elements", "Elements of the maps and sets of the table."),
		transactions: counter(subsystem, "transactions_total", "Attempts to change the table in a transaction."),
		refused:      counter(subsystem, "transaction_errors_total", "Attempts to change the table that failed, and so changed nothing, or had no answer."),
		drifted:      counter(subsystem, "drift_found_total", "Times that another program had changed the table."),
		mended:       counter(subsystem, "drift_mended_total", "Times that the table was repaired after another program had changed it."),
	}
}

func (m *nftablesMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.elements, m.transactions, m.refused, m.drifted, m.mended}
}

func (m *nftablesMetrics) observer() nftables.Observer {
	return nftables.Observer{
		Transacted: func(err error) {
			m.transactions.Inc()
			if err != nil {
				m.refused.Inc()
			}
		},
		Holds:   func(elements int) { m.elements.Set(float64(elements)) },
		Drifted: m.drifted.Inc,
		Mended:  m.mended.Inc,
	}
}
