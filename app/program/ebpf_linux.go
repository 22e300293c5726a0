// SPDX-License-Identifier: Apache-2.0

package program

import (
	"errors"

	"github.com/kpng-project/kpng/backends/ebpf"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

// EBPF returns the backend that balances connections of the node and its pods with eBPF, and
// all other connections with nftables.
func EBPF() sink.Sink {
	f := &ebpfFlags{}
	return withReports(&command.Backend{
		Name:  "ebpf",
		Short: "Balance connections of the node and its pods with eBPF, and all others with nftables",
		Long: "Balances connections of this node and its pods with eBPF when sockets connect, and all other connections with nftables, like to-local nftables. " +
			"What is programmed stays when the program ends: see kpng cleanup ebpf. It needs CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON and Linux 5.10, and CAP_NET_RAW for resets of connections.",
		Flags: f.register,
		Make:  f.parts,
		Check: f.settingsCheck(),
		Init:  f.init,
	}, newLeftovers("ebpf"))
}

// ebpfFlags has the values of the backend's flags.
type ebpfFlags struct {
	nftablesFlags
	ebpf        ebpf.Options
	excludePods string
}

func (f *ebpfFlags) register(fs *pflag.FlagSet) {
	f.nftablesFlags.register(fs)
	fs.StringVar(&f.ebpf.Cgroup, "cgroup", "", "handle sockets of processes in this `directory` of the file system of cgroups, version 2 (default the root)")
	fs.StringVar(&f.ebpf.BPFFS, "bpffs", "/sys/fs/bpf", "keep maps and links in a BPF file system that is mounted at this `directory`")
	fs.BoolVar(&f.ebpf.HostNetworkOnly, "host-network-only", false, "handle only sockets in the network namespace of the node, not those of pods")
	fs.StringSliceVar(&f.ebpf.ExcludedCgroups, "exclude-cgroups", nil, "leave processes in the cgroups with these `paths` to nftables, such as system.slice/mesh.service")
	fs.StringVar(&f.excludePods, "exclude-pods", "", "leave pods to nftables whose labels, or whose namespace's labels, match this label `selector`, such as kpng.io/ebpf=false; needs permission to read pods and namespaces")
	fs.BoolVar(&f.ebpf.TCPOnly, "tcp-only", false, "handle only TCP connections with eBPF, and leave UDP to nftables")
	fs.StringVar(&f.ebpf.Annotation, "ebpf-annotation", "kpng.io/ebpf", "leave services to nftables for which this `annotation` has the value false")
	fs.IntVar(&f.ebpf.MaxFrontends, "max-frontends", 1<<18, "handle at most this `number` of addresses and ports of services")
	fs.IntVar(&f.ebpf.MaxEndpoints, "max-endpoints", 1<<20, "handle at most this `number` of endpoints of all services together")
	fs.IntVar(&f.ebpf.MaxMembers, "max-members", 1<<18, "handle at most this `number` of endpoints of UDP ports and of services with session affinity")
	fs.IntVar(&f.ebpf.MaxClients, "max-clients", 1<<16, "remember the endpoints of at most this `number` of clients with session affinity")
}

// options returns the options of the backend.
func (f *ebpfFlags) options() ebpf.Options {
	opts := f.ebpf
	opts.Instance = f.nftablesFlags.options.Instance
	opts.Stats = f.nftablesFlags.options.Stats
	return opts
}

func (f *ebpfFlags) parts(run command.Run) (command.Parts, error) {
	if f.nftablesFlags.options.MasqueradeAll {
		return command.Parts{}, errors.New("--masquerade-all excludes the backend ebpf, which keeps the addresses of clients; use to-local nftables")
	}
	if err := f.keepAnnotation(f.ebpf.Annotation); err != nil {
		return command.Parts{}, err
	}
	below, err := f.dataplane()
	if err != nil {
		return command.Parts{}, err
	}
	excluded, err := newExcludedPods(f.flagSet, f.excludePods)
	if err != nil {
		return command.Parts{}, err
	}
	opts := f.options()
	if excluded != nil {
		opts.ExcludedPods = excluded.uids
	}
	above, err := ebpf.New(below, opts)
	if err != nil {
		return command.Parts{}, err
	}
	parts, err := f.nodeParts(run, above)
	if excluded != nil {
		excluded.Sink, parts.Sink = parts.Sink, excluded
	}
	if c, ok := sink.As[ebpfCounter](above); ok {
		parts.Collectors = append(parts.Collectors, ebpfCounts{c})
	}
	return parts, err
}

// ebpfCounter is a part of the dataplane of package ebpf, see ebpf.New.
type ebpfCounter interface {
	Counts() (translated, left map[string]uint64, err error)
}

// ebpfCounts collects the counts of the eBPF programs. While the backend is not
// started, it collects nothing.
type ebpfCounts struct {
	ebpfCounter
}

var (
	ebpfTranslated = prometheus.NewDesc("kpng_ebpf_translated_total", "Addresses that the eBPF programs replaced, by hook: connect and sendmsg replace a service by an endpoint, recvmsg and getpeername an endpoint by a service.", []string{"hook"}, nil)
	ebpfLeft       = prometheus.NewDesc("kpng_ebpf_left_total", "Connections and datagrams to frontends in the eBPF maps that the programs left to nftables, by reason: excluded (process or pod), list_changed (at that moment), bound_port (the socket had a port before it connected), no_endpoint (only existing sockets may use the endpoints), no_memory (no room for the socket, or the service has its share of clients), ambiguous (a UDP answer could have a wrong source), abandoned (kpng did not run for ten minutes, or an error paused the programs).", []string{"reason"}, nil)
)

// Describe implements prometheus.Collector.
func (c ebpfCounts) Describe(to chan<- *prometheus.Desc) {
	to <- ebpfTranslated
	to <- ebpfLeft
}

// Collect implements prometheus.Collector.
func (c ebpfCounts) Collect(to chan<- prometheus.Metric) {
	translated, left, err := c.Counts()
	if err != nil {
		return
	}
	for hook, n := range translated {
		to <- prometheus.MustNewConstMetric(ebpfTranslated, prometheus.CounterValue, float64(n), hook)
	}
	for reason, n := range left {
		to <- prometheus.MustNewConstMetric(ebpfLeft, prometheus.CounterValue, float64(n), reason)
	}
}
