// SPDX-License-Identifier: Apache-2.0

package program

import (
	"cmp"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/kpng-project/kpng/backends/windows/kernelspace"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

// Kernelspace returns the backend that programs services as load balancers of the Host
// Networking Service (HNS) of Windows.
func Kernelspace() sink.Sink {
	f, metrics := &kernelspaceFlags{}, newHNSMetrics()
	return withReports(&command.Backend{
		Name:  "kernelspace",
		Short: "Program services into the kernel by the Host Networking Service (HNS), in place of kube-proxy or beside it",
		Long: "Makes load balancers of the Host Networking Service (HNS) for services, in place of kube-proxy or, for services of another proxy name, beside it. " +
			"What is programmed stays when the program ends, until it is started with --cleanup, or kpng cleanup kernelspace. It needs an administrator's rights.",
		OnlyPorts: true,
		Flags:     f.register,
		Make: func(run command.Run) (command.Parts, error) {
			opts := f.complete()
			opts.Observer = run.Metrics.Backend("hns")
			dataplane, err := kernelspace.New(opts)
			if err != nil {
				return command.Parts{}, err
			}
			node, err := nodesinks.New(nodesinks.Options{Healthy: run.Healthy, Metrics: run.Metrics})
			if err != nil {
				return command.Parts{}, err
			}
			if d, ok := dataplane.(interface {
				OnCall(func(call string, took time.Duration, err error))
			}); ok {
				d.OnCall(metrics.called)
			}
			parts := f.checks.parts(node, dataplane)
			parts.Collectors = append(parts.Collectors, metrics.calls, metrics.failures)
			return parts, nil
		},
	}, nil)
}

// kernelspaceStateFile returns the default state file of an instance.
func kernelspaceStateFile(instance string) string {
	name := "kernelspace.journal"
	if instance != "kpng" {
		name = "kernelspace-" + instance + ".journal"
	}
	return filepath.Join(os.Getenv("ProgramData"), "kpng", name)
}

// kernelspaceFlags has the values of the backend's flags.
type kernelspaceFlags struct {
	checks        healthChecks
	options       kernelspace.Options
	nodeIPs       []netip.Addr
	forwardChecks bool
}

func (f *kernelspaceFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.options.Network, "network", os.Getenv("KUBE_NETWORK"), "the `name` of the HNS network that pods are on; without it, $KUBE_NETWORK")
	fs.StringVar(&f.options.Instance, "instance", "kpng", "the `name` that begins the names of this program's HNS endpoints and identifies them; each instance on a node needs its own")
	fs.StringVar(&f.options.StateFile, "state-file", "", "the `file` that remembers which load balancers are this program's; without it, kernelspace.journal, or kernelspace-INSTANCE.journal, in %ProgramData%\\kpng")
	fs.BoolVar(&f.options.EnableDSR, "enable-dsr", false, "use direct server return for cluster IPs; fails where Windows lacks it")
	listFlag(fs, &f.options.SourceVIPs, netip.ParseAddr, "source-vip", "the source `address` of what load balancers send on, at most one a family; an overlay network needs one")
	listFlag(fs, &f.nodeIPs, netip.ParseAddr, "node-ip", "an `address` of this node; without it, those of its Node object")
	fs.StringVar(&f.options.HostMAC, "host-mac", "", "the hardware `address`, as in 00-15-5d-01-02-03, for the source VIP and cluster IPs on an overlay network; without it, that of the interface that has the node's address")
	fs.BoolVar(&f.forwardChecks, "forward-healthcheck-vip", false, "forward health checks at load-balancer addresses to this node")
	fs.Uint16Var(&f.options.HealthzPort, "forward-healthcheck-port", 10256, "the `port` for forwarded health checks of services without a health-check node port: that of --healthz-bind-address; 0 forwards none of them")
	fs.StringVar(&f.options.RootEndpoint, "root-hnsendpoint-name", "cbr0", "the `name` of the HNS endpoint through which this node is reached, for forwarded health checks")
	fs.IntVar(&f.options.MaxLoadBalancers, "max-load-balancers", 0, "how many load balancers one service may have, one for each frontend; a service that needs more is refused; 0 means 1024")
	f.checks.register(fs)
}

// complete returns the options that the flags select.
func (f *kernelspaceFlags) complete() kernelspace.Options {
	opts := f.options
	opts.StateFile = cmp.Or(opts.StateFile, kernelspaceStateFile(opts.Instance))
	if len(f.nodeIPs) > 0 {
		opts.NodeAddresses = nodeaddr.Of(f.nodeIPs...)
	}
	if !f.forwardChecks {
		opts.RootEndpoint = ""
	}
	return opts
}

// hnsMetrics counts the calls to HNS.
type hnsMetrics struct {
	calls    *prometheus.HistogramVec
	failures *prometheus.CounterVec
}

func newHNSMetrics() *hnsMetrics {
	return &hnsMetrics{
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "kpng", Subsystem: "hns", Name: "call_duration_seconds", Buckets: prometheus.ExponentialBuckets(0.001, 2, 15), // 1 ms to 16 s
			Help: "How long a call of HNS took, by call (CreateLoadBalancer, …); a listing is one call.",
		}, []string{"call"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "kpng", Subsystem: "hns", Name: "call_failures_total", Help: "Calls of HNS that failed, by call.",
		}, []string{"call"}),
	}
}

// called counts a call to HNS.
func (m *hnsMetrics) called(call string, took time.Duration, err error) {
	m.calls.WithLabelValues(call).Observe(took.Seconds())
	if err != nil {
		m.failures.WithLabelValues(call).Inc()
	}
}
