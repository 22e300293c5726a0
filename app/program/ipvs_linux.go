// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"net"
	"slices"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

// IPVS returns the backend that programs services into the Linux kernel with IPVS.
func IPVS() sink.Sink {
	f := &ipvsFlags{}
	return withReports(&command.Backend{
		Name:  "ipvs",
		Short: "Program services into the kernel with IPVS, in place of kube-proxy or beside it",
		Long: "Programs services into the kernel with IPVS, in place of kube-proxy or, for services of another proxy name, beside it. " +
			"What is programmed stays when the program ends: see kpng cleanup ipvs. It needs CAP_NET_ADMIN and the kernel module ip_vs, and CAP_NET_RAW for resets of connections.",
		OnlyPorts: true,
		Flags:     f.register,
		Make:      f.parts,
		Check:     f.settingsCheck(sysctl.IPVS...),
		Init:      f.init,
	}, newLeftovers("ipvs"))
}

const healthzPortFlag = "forward-healthcheck-port"

// ipvsFlags has the values of the backend's flags.
type ipvsFlags struct {
	nodeFlags
	options ipvs.Options
}

func (f *ipvsFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.options.Instance, "instance", "", "the `name` of this instance among several on a node: its nftables table is kpng-ipvs-NAME instead of kpng-ipvs")
	fs.StringVar(&f.options.Interface, "interface", "", "the `name` of this instance's interface, of type dummy, for the addresses of services (default kpng-ipvs, or kpng-INSTANCE)")
	fs.StringVar(&f.options.Scheduler, "scheduler", "rr", "choose endpoints with this IPVS `scheduler`, such as rr, lc, sh or mh")
	fs.StringVar(&f.options.SchedulerAnnotation, "scheduler-annotation", "kpng.io/ipvs-scheduler", "the `annotation` of services that overrides --scheduler")
	listFlag(fs, &f.options.ClusterCIDRs, parseCIDR, "cluster-cidr", "the `CIDRs` of pods")
	fs.StringSliceVar(&f.options.PodInterfaces, "pod-interfaces", nil, "take what comes in by these `interfaces`, such as cni0 or veth*, for pods of this node")
	fs.BoolVar(&f.options.MasqueradeAll, "masquerade-all", false, "masquerade all connections to cluster IPs")
	listFlag(fs, &f.options.NodeNetworks, parseCIDR, "node-networks", "the `CIDRs` of nodes: ignore external and load-balancer IPs in them, except those that this machine has, so that their packets go to other nodes")
	fs.Uint16Var(&f.options.HealthzPort, healthzPortFlag, 0, "the `port` for health checks at load-balancer IPs of services without a health-check node port; 0 forwards none of them (default: that of --healthz-bind-address)")
	fs.BoolVar(&f.options.StrictARP, "strict-arp", false, "also check or set the kernel settings with which the node does not answer ARP requests for addresses of services")
	fs.DurationVar(&f.options.Drain, "drain", 0, "only for cleanup: leave new connections to another backend, which must already run, and wait at most this `time` until connections through IPVS have ended")
	statsFlags(fs, &f.options.Stats)
	f.nodeFlags.register(fs)
}

// complete checks the values of the flags and returns the resulting options.
func (f *ipvsFlags) complete() (ipvs.Options, error) {
	opts := f.options
	if !f.flagSet.Changed(healthzPortFlag) {
		if _, port, err := net.SplitHostPort(flagValue(f.flagSet, "healthz-bind-address")); err == nil {
			number, _ := net.LookupPort("tcp", port) // ignore the error: the health-check server reports an invalid address
			opts.HealthzPort = uint16(number)
		}
	}
	opts.MasqueradeOutsiders = f.masqueradeOutside && len(opts.ClusterCIDRs)+len(opts.PodInterfaces) > 0
	if err := f.check(); err != nil {
		return opts, err
	}
	opts.MasqueradeMark = 1 << f.masqueradeBit
	opts.Sysctls = backends.SysctlMode(f.sysctlMode())
	return opts, nil
}

func (f *ipvsFlags) init(ctx context.Context) error {
	return f.applySysctls(ctx, f.settings()...)
}

// settings returns the kernel settings that only the backend ipvs needs.
func (f *ipvsFlags) settings() []sysctl.Setting {
	if f.options.StrictARP {
		return slices.Concat(sysctl.IPVS, sysctl.StrictARP)
	}
	return sysctl.IPVS
}

func (f *ipvsFlags) parts(run command.Run) (command.Parts, error) {
	opts, err := f.complete()
	if err != nil {
		return command.Parts{}, err
	}
	if err := f.keepAnnotation(opts.SchedulerAnnotation); err != nil {
		return command.Parts{}, err
	}
	dataplane, err := ipvs.New(opts)
	if err != nil {
		return command.Parts{}, err
	}
	return f.nodeParts(run, dataplane, f.settings()...)
}
