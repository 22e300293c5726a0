// SPDX-License-Identifier: Apache-2.0

package program

import (
	"cmp"
	"os"
	"runtime"
	"strconv"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends/userspace"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// interfaceVariable is the environment variable that has the default of --interface.
	interfaceVariable = "INTERFACE_TO_ADD_SERVICE_IP"
	hostInterface     = "vEthernet (HNS Internal NIC)"
)

// Userspace returns the backend that proxies with sockets. On Linux and Windows, it makes
// the addresses of services local to this host. On other systems, or with the flag
// --add-addresses=false, it uses only addresses that this host already has.
func Userspace() sink.Sink {
	opts, nodePorts, checks := userspace.Options{}, nodeaddr.Selection{}, &healthChecks{}
	return withReports(&command.Backend{
		Name: "userspace", Short: "Proxy by sockets of this process",
		Long:      "Listens at the addresses of services, and copies traffic to endpoints and back. Making the addresses local takes CAP_NET_ADMIN on Linux, and an administrator on Windows.",
		OnlyPorts: true,
		Flags:     func(fs *pflag.FlagSet) { userspaceFlags(fs, &opts, &nodePorts, checks) },
		Make: func(run command.Run) (command.Parts, error) {
			return userspaceParts(opts, nodePorts, checks, run)
		},
	}, newLeftovers("userspace"))
}

func userspaceFlags(fs *pflag.FlagSet, opts *userspace.Options, nodePorts *nodeaddr.Selection, checks *healthChecks) {
	fs.BoolVar(&opts.AddAddresses, "add-addresses", runtime.GOOS == "linux" || runtime.GOOS == "windows", "make the addresses of services local to this host; without it, only addresses that the host already has are served")
	on := ""
	if runtime.GOOS == "windows" {
		on = cmp.Or(os.Getenv(interfaceVariable), hostInterface)
	}
	fs.StringVar(&opts.Interface, "interface", on, "on Windows: put the addresses of services on the network interface of this `name`; without it, $"+interfaceVariable+" or "+hostInterface)
	fs.StringVar(&opts.StateFile, "state-file", "", "on Windows: note the addresses that were added in this `file`; without it, in %ProgramData%\\kpng\\userspace.journal")
	statsFlags(fs, &opts.Stats)
	nodePortsFlag(fs, nodePorts)
	listFlag(fs, &opts.ClusterCIDRs, parseCIDR, "pod-cidr", "the `CIDRs` of this node's pods, whose traffic counts as starting on this node")
	fs.DurationVar(&opts.DrainTimeout, "drain-timeout", 0, "how long TCP connections last after their service is removed or the program stops; 0 means 30 s")
	fs.DurationVar(&opts.UDPTimeout, "udp-timeout", 0, "how long a silent UDP client keeps its endpoint; 0 means 1 min")
	fs.IntVar(&opts.MaxListeners, "max-listeners", 0, "how many listeners one service may have, one for each address and port; a service that needs more is refused; 0 means 4096")
	fs.IntVar(&opts.MaxUDPClients, "max-udp-clients", 0, "how many UDP clients there are at most, each with a file descriptor; 0 means 8192")
	checks.register(fs)
}

func userspaceParts(opts userspace.Options, nodePorts nodeaddr.Selection, checks *healthChecks, run command.Run) (command.Parts, error) {
	node, err := nodesinks.New(nodesinks.Options{
		NodePorts: nodePorts, ExcludeInterfaces: []string{opts.Interface}, Healthy: run.Healthy, Metrics: run.Metrics,
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
	parts.Collectors = append(parts.Collectors, newPortMetrics("userspace", b.(portStats)))
	return parts, nil
}

// portStats is implemented by the dataplane of package userspace.
type portStats interface {
	PortStats(func(service types.NamespacedName, protocol api.Protocol, port int32, connections, active, dialFailures, sent, received int64))
}

type portMetrics struct {
	portStats
	metrics []portMetric // in the order of the numbers of portStats
}

type portMetric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func newPortMetrics(subsystem string, stats portStats) *portMetrics {
	describe := func(kind prometheus.ValueType, name, help string) portMetric {
		return portMetric{prometheus.NewDesc(prometheus.BuildFQName("kpng", subsystem, name), help, []string{"namespace", "service", "protocol", "port"}, nil), kind}
	}
	return &portMetrics{stats, []portMetric{
		describe(prometheus.CounterValue, "connections_total", "TCP connections and UDP clients that came."),
		describe(prometheus.GaugeValue, "connections_active", "TCP connections and UDP clients that have not ended."),
		describe(prometheus.CounterValue, "dial_failures_total", "Times that an endpoint did not take a connection or a datagram."),
		describe(prometheus.CounterValue, "sent_bytes_total", "Bytes sent to endpoints."),
		describe(prometheus.CounterValue, "received_bytes_total", "Bytes received from endpoints."),
	}}
}

func (c *portMetrics) Describe(to chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		to <- m.desc
	}
}

func (c *portMetrics) Collect(to chan<- prometheus.Metric) {
	c.PortStats(func(service types.NamespacedName, protocol api.Protocol, port int32, connections, active, dialFailures, sent, received int64) {
		for i, n := range [...]int64{connections, active, dialFailures, sent, received} {
			m := c.metrics[i]
			to <- prometheus.MustNewConstMetric(m.desc, m.kind, float64(n), service.Namespace, service.Name, protocol.String(), strconv.Itoa(int(port)))
		}
	})
}
