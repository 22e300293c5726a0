// SPDX-License-Identifier: Apache-2.0

package program

import (
	"iter"
	"strconv"

	"github.com/kpng-project/kpng/backends/userspace"
	windows "github.com/kpng-project/kpng/backends/windows/userspace"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

const userspaceLong = "Listens at the addresses of services, and copies traffic to endpoints and back. Making the addresses local takes CAP_NET_ADMIN on Linux, and an administrator on Windows."

// Userspace returns the backend that proxies with sockets. If addrs is not nil, the
// backend uses it to make the addresses of services local to this host. If addrs is nil,
// the backend uses only addresses that this host already has.
func Userspace(addrs userspace.Addresses) sink.Sink {
	opts, checks := userspace.Options{Addresses: addrs}, &healthChecks{}
	return withReports(&command.Backend{
		Name: "userspace", Short: "Proxy by sockets of this process", Long: userspaceLong,
		OnlyPorts: true,
		Flags:     func(fs *pflag.FlagSet) { userspaceFlags(fs, &opts, checks) },
		Make:      func(run command.Run) (command.Parts, error) { return userspaceParts(opts, checks, run) },
	}, newLeftovers("userspace"))
}

// WindowsUserspace is [Userspace] for Windows. It adds the addresses of services to a
// network interface.
func WindowsUserspace() sink.Sink {
	var (
		opts   userspace.Options
		netsh  windows.Options
		checks = &healthChecks{}
	)
	return withReports(&command.Backend{
		Name: "userspace", Short: "Proxy by sockets of this process, at addresses that are put on a network interface", Long: userspaceLong,
		OnlyPorts: true,
		Flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&netsh.Interface, "interface", "", "put the addresses of services on the network interface of this `name`; without it, $"+windows.InterfaceVariable+" or "+windows.DefaultInterface)
			fs.StringVar(&netsh.StateFile, "state-file", "", "note the addresses that were added in this `file`; without it, in %ProgramData%\\kpng\\userspace.journal")
			fs.DurationVar(&netsh.Timeout, "address-timeout", 0, "how long an address that was added may take until it can be used; 0 means 10 s")
			userspaceFlags(fs, &opts, checks)
		},
		Make: func(run command.Run) (command.Parts, error) {
			addresses, err := windows.New(netsh)
			if err != nil {
				return command.Parts{}, err
			}
			opts.Addresses, opts.ExcludeInterfaces = addresses, []string{addresses.Interface()}
			return userspaceParts(opts, checks, run)
		},
	}, nil)
}

func userspaceFlags(fs *pflag.FlagSet, opts *userspace.Options, checks *healthChecks) {
	nodePortsFlag(fs, &opts.NodePorts, "all, localhost, CIDRs")
	listFlag(fs, &opts.PodCIDRs, parseCIDR, "pod-cidr", "the `CIDRs` of this node's pods, whose traffic counts as starting on this node")
	fs.DurationVar(&opts.DrainTimeout, "drain-timeout", 0, "how long TCP connections last after their service is removed or the program stops; 0 means 30 s")
	fs.DurationVar(&opts.UDPTimeout, "udp-timeout", 0, "how long a silent UDP client keeps its endpoint; 0 means 1 min")
	fs.IntVar(&opts.MaxListeners, "max-listeners", 0, "how many listeners one service may have, one for each address and port; a service that needs more is refused; 0 means 4096")
	fs.IntVar(&opts.MaxUDPClients, "max-udp-clients", 0, "how many UDP clients there are at most, each with a file descriptor; 0 means 8192")
	checks.register(fs)
}

func userspaceParts(opts userspace.Options, checks *healthChecks, run command.Run) (command.Parts, error) {
	node, err := nodesinks.New(nodesinks.Options{
		NodePorts: opts.NodePorts, ExcludeInterfaces: opts.ExcludeInterfaces, Healthy: run.Healthy, Metrics: run.Metrics,
	})
	if err != nil {
		return command.Parts{}, err
	}
	opts.NodeAddresses = node.Addresses()
	b, err := userspace.New(opts)
	if err != nil {
		return command.Parts{}, err
	}
	parts := checks.parts(node, b)
	parts.Collectors = append(parts.Collectors, newPortMetrics(b.Stats))
	return parts, nil
}

type portMetrics struct {
	stats   func() iter.Seq[userspace.PortStats]
	metrics []portMetric
}

type portMetric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*userspace.PortStats) int64
}

func newPortMetrics(stats func() iter.Seq[userspace.PortStats]) *portMetrics {
	describe := func(kind prometheus.ValueType, name, help string, of func(*userspace.PortStats) int64) portMetric {
		return portMetric{prometheus.NewDesc(prometheus.BuildFQName("kpng", "userspace", name), help, []string{"namespace", "service", "protocol", "port"}, nil), kind, of}
	}
	return &portMetrics{stats, []portMetric{
		describe(prometheus.CounterValue, "connections_total", "TCP connections and UDP clients that came.",
			func(s *userspace.PortStats) int64 { return s.Connections }),
		describe(prometheus.GaugeValue, "connections_active", "TCP connections and UDP clients that have not ended.",
			func(s *userspace.PortStats) int64 { return s.Active }),
		describe(prometheus.CounterValue, "dial_failures_total", "Times that an endpoint did not take a connection or a datagram.",
			func(s *userspace.PortStats) int64 { return s.DialFailures }),
		describe(prometheus.CounterValue, "sent_bytes_total", "Bytes sent to endpoints.",
			func(s *userspace.PortStats) int64 { return s.BytesToEndpoints }),
		describe(prometheus.CounterValue, "received_bytes_total", "Bytes received from endpoints.",
			func(s *userspace.PortStats) int64 { return s.BytesFromEndpoints }),
	}}
}

func (c *portMetrics) Describe(to chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		to <- m.desc
	}
}

func (c *portMetrics) Collect(to chan<- prometheus.Metric) {
	for s := range c.stats() {
		for _, m := range c.metrics {
			to <- prometheus.MustNewConstMetric(m.desc, m.kind, float64(m.of(&s)),
				s.Service.Namespace, s.Service.Name, s.Protocol.String(), strconv.Itoa(int(s.Port)))
		}
	}
}
