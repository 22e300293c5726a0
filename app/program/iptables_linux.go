// SPDX-License-Identifier: Apache-2.0

package program

import (
	"github.com/kpng-project/kpng/backends/iptables"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

// IPTables returns the backend that programs services into the Linux kernel with
// iptables.
func IPTables() sink.Sink {
	f := &iptablesFlags{}
	return withReports(&command.Backend{
		Name:  "iptables",
		Short: "Program services into the kernel with iptables, in place of kube-proxy or beside it",
		Long: "Programs services into the kernel with iptables, in place of kube-proxy or, for services of another proxy name, beside it. " +
			"What is programmed stays when the program ends: see kpng cleanup iptables. It needs CAP_NET_ADMIN and CAP_NET_RAW, the programs of iptables, and preferably ipset.",
		Flags: f.register,
		Make:  f.parts,
		Check: f.settingsCheck(),
		Init:  f.init,
	}, newLeftovers("iptables"))
}

// iptablesFlags are the values of the backend's flags.
type iptablesFlags struct {
	nodeFlags
	options iptables.Options
}

func (f *iptablesFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.options.Instance, "instance", "", "the `name` of this instance among several on a node, at most 6 letters and digits: its chains are KPNG-NAME-… instead of KPNG-…")
	fs.StringVar(&f.options.Flavour, "iptables-flavour", "detect", "use the programs of iptables of this `flavour`: nft, legacy, or detect for that of other programs on the node")
	fs.BoolVar(&f.options.WithoutIPSet, "without-ipset", false, "use rules in place of sets, even if the program ipset is installed")
	fs.DurationVar(&f.options.LockWait, "iptables-lock-wait", f.options.LockWait, "wait this `time` for the lock of iptables before a change fails and is retried; 0 means 5s")
	listFlag(fs, &f.options.ClusterCIDRs, parseCIDR, "cluster-cidr", "the `CIDRs` of pods")
	fs.BoolVar(&f.options.NodePodCIDRs, "node-pod-cidrs", false, "take the pod CIDRs of the Node object for the addresses of this node's pods")
	fs.StringSliceVar(&f.options.PodInterfaces, "pod-interfaces", nil, "take what comes in by these `interfaces`, such as cni0 or veth*, for pods of this node")
	fs.BoolVar(&f.options.MasqueradeAll, "masquerade-all", false, "masquerade all connections to cluster IPs")
	fs.BoolVar(&f.options.AcceptUnknownPorts, "accept-unknown-ports", false, "leave ports of a cluster IP that no service has to the routing table, instead of rejecting")
	statsFlags(fs, &f.options.Stats)
	f.nodeFlags.register(fs)
}

// complete checks the values of the flags and returns the resulting options.
func (f *iptablesFlags) complete() (opts iptables.Options, err error) {
	opts = f.options
	opts.MasqueradeOutsiders = f.masqueradeOutside && (opts.NodePodCIDRs || len(opts.ClusterCIDRs)+len(opts.PodInterfaces) > 0)
	if err := f.check(); err != nil {
		return opts, err
	}
	opts.MasqueradeMark = 1 << f.masqueradeBit
	opts.Sysctls = f.sysctlMode()
	opts.AcceptInvalid = f.limits.Liberal // as in kube-proxy
	return opts, nil
}

func (f *iptablesFlags) parts(run command.Run) (command.Parts, error) {
	opts, err := f.complete()
	if err != nil {
		return command.Parts{}, err
	}
	dataplane, err := iptables.New(opts)
	if err != nil {
		return command.Parts{}, err
	}
	return f.nodeParts(run, dataplane)
}
