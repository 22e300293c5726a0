// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/backends/nftables"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher/kube"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// NFTables returns the backend that programs services into the Linux kernel with
// nftables.
func NFTables() sink.Sink {
	f := &nftablesFlags{}
	return withReports(&command.Backend{
		Name:  "nftables",
		Short: "Program services into the kernel with nftables, in place of kube-proxy or beside it",
		Long: "Programs services into the kernel with nftables, in place of kube-proxy or, for services of another proxy name, beside it. " +
			"What is programmed stays when the program ends: see kpng cleanup nftables. It needs CAP_NET_ADMIN, and CAP_NET_RAW for resets of connections.",
		Flags: f.register,
		Make:  f.parts,
		Check: f.settingsCheck(),
		Init:  f.init,
	}, newLeftovers("nftables"))
}

// nftablesFlags has the values of the backend's flags.
type nftablesFlags struct {
	nodeFlags
	options      nftables.Options
	serviceCIDRs []string
}

func (f *nftablesFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.options.Instance, "instance", "", "the `name` of this instance among several on a node: its table is kpng-NAME instead of kpng, or kpng2-NAME instead of kpng2")
	listFlag(fs, &f.options.ClusterCIDRs, parseCIDR, "cluster-cidr", "the `CIDRs` of pods")
	fs.BoolVar(&f.options.NodePodCIDRs, "node-pod-cidrs", false, "take the pod CIDRs of the Node object for the addresses of this node's pods")
	fs.StringSliceVar(&f.serviceCIDRs, "service-cidr", nil, "drop connections to addresses in these `CIDRs` of cluster IPs that no service has; auto: in the CIDRs of all ServiceCIDR objects, which needs permission to list and watch them")
	fs.StringSliceVar(&f.options.PodInterfaces, "pod-interfaces", nil, "take what comes in by these `interfaces`, such as cni0 or veth*, for pods of this node")
	fs.BoolVar(&f.options.MasqueradeAll, "masquerade-all", false, "masquerade all connections to cluster IPs")
	fs.Int32Var(&f.options.DNATPriority, "dnat-priority", -100, "choose endpoints at this `priority` of the hooks prerouting and output, not 0")
	fs.Int32Var(&f.options.SNATPriority, "snat-priority", 100, "masquerade at this `priority` of the hook postrouting, not 0")
	fs.BoolVar(&f.options.AcceptUnknownPorts, "accept-unknown-ports", false, "leave ports of a cluster IP that no service has to the routing table, instead of rejecting")
	fs.BoolVar(&f.options.DropInvalid, "drop-invalid", false, "drop forwarded packets that connection tracking cannot assign to a connection")
	statsFlags(fs, &f.options.Stats)
	f.nodeFlags.register(fs)
}

// complete checks the values of the flags and returns the resulting options.
func (f *nftablesFlags) complete() (nftables.Options, error) {
	opts := f.options
	opts.MasqueradeOutsiders = f.masqueradeOutside && (opts.NodePodCIDRs || len(opts.ClusterCIDRs)+len(opts.PodInterfaces) > 0)
	if err := f.check(); err != nil {
		return opts, err
	}
	if err := f.setServiceCIDRs(&opts); err != nil {
		return opts, err
	}
	opts.MasqueradeMark = 1 << f.masqueradeBit
	if opts.DNATPriority == 0 || opts.SNATPriority == 0 {
		return opts, errors.New("--dnat-priority and --snat-priority may not be 0")
	}
	opts.Sysctls = f.sysctlMode()
	return opts, nil
}

// setServiceCIDRs sets the service CIDRs, or the function that follows them.
func (f *nftablesFlags) setServiceCIDRs(opts *nftables.Options) error {
	if !slices.Contains(f.serviceCIDRs, "auto") {
		for _, text := range f.serviceCIDRs {
			cidr, err := parseCIDR(text)
			if err != nil {
				return fmt.Errorf("--service-cidr: %w", err)
			}
			opts.ServiceCIDRs = append(opts.ServiceCIDRs, cidr)
		}
		return nil
	}
	if len(f.serviceCIDRs) > 1 {
		return fmt.Errorf("--service-cidr is %q; auto must be the only value", strings.Join(f.serviceCIDRs, ","))
	}
	config, err := apiServer(f.flagSet, "--service-cidr=auto")
	if err != nil {
		return err
	}
	opts.FollowServiceCIDRs = func(ctx context.Context, set func([]netip.Prefix)) {
		if err := kube.FollowServiceCIDRs(ctx, config, set); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot follow ServiceCIDR objects")
		}
	}
	return nil
}

func (f *nftablesFlags) parts(run command.Run) (command.Parts, error) {
	dataplane, err := f.dataplane()
	if err != nil {
		return command.Parts{}, err
	}
	return f.nodeParts(run, dataplane)
}

func (f *nftablesFlags) dataplane() (sink.Sink, error) {
	opts, err := f.complete()
	if err != nil {
		return nil, err
	}
	return nftables.New(opts)
}
