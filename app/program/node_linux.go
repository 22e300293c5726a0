// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/netfilter"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher/kube"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// nodeFlags are the flags that backends for the Linux kernel have in common.
type nodeFlags struct {
	nodePorts         nodeaddr.Selection
	masqueradeBit     int
	masqueradeOutside bool
	sysctls           string
	limits            conntrackLimits
	keepConnections   bool
	checks            healthChecks
	withEvents        bool
	// flagSet has all flags of the command. Some of them do not belong to the backend.
	flagSet *pflag.FlagSet
}

func (f *nodeFlags) register(fs *pflag.FlagSet) {
	f.flagSet = fs
	nodePortsFlag(fs, &f.nodePorts)
	fs.BoolVar(&f.masqueradeOutside, "masquerade-outside", true, "masquerade connections to cluster IPs from outside the pod network, if --cluster-cidr, --node-pod-cidrs or --pod-interfaces define it")
	fs.IntVar(&f.masqueradeBit, "masquerade-bit", 13, "mark connections to be masqueraded with this `bit` of the packet mark, 0 to 31; not 14, which is kube-proxy's")
	fs.StringVar(&f.sysctls, "sysctls", "", "what to do about kernel settings with other values than services need: `set` (default in place of kube-proxy), report (default beside it) or ignore")
	f.limits.register(fs)
	fs.BoolVar(&f.keepConnections, "keep-udp-connections", false, "keep UDP connections to removed endpoints, and TCP connections that began before their service")
	f.checks.register(fs)
	fs.BoolVar(&f.withEvents, "events", false, "write Events of Kubernetes for lost claims, services that are too large or have invalid fields, ignored traffic parameters, failed health-check node ports, and rules that another program changed; needs permission to create Events")
}

// check validates the flags.
func (f *nodeFlags) check() error {
	if f.masqueradeBit < 0 || f.masqueradeBit > 31 {
		return fmt.Errorf("--masquerade-bit is %d, not 0 to 31", f.masqueradeBit)
	}
	if _, ok := sysctlModes[f.sysctls]; !ok && f.sysctls != "" {
		return fmt.Errorf("--sysctls is %q, not report, set or ignore", f.sysctls)
	}
	return f.limits.check(f.flagSet)
}

// sysctlModes has the values of the flag --sysctls.
var sysctlModes = map[string]backends.SysctlMode{
	"report": backends.ReportSysctls, "set": backends.SetSysctls, "ignore": backends.IgnoreSysctls,
}

// sysctlMode returns the mode for kernel settings.
func (f *nodeFlags) sysctlMode() backends.SysctlMode {
	switch {
	case f.sysctls != "":
		return sysctlModes[f.sysctls]
	case f.replacesKubeProxy():
		return backends.SetSysctls
	default:
		return backends.ReportSysctls
	}
}

// replacesKubeProxy reports whether this proxy runs in place of kube-proxy. With
// --service-proxy-name, it runs beside kube-proxy.
func (f *nodeFlags) replacesKubeProxy() bool {
	return flagValue(f.flagSet, "service-proxy-name") == ""
}

// conntrackSettings returns the settings of connection tracking for a machine with this
// number of CPU cores. If this proxy runs beside kube-proxy, the result has only settings
// whose flags were given, because kube-proxy sets its own values.
func (f *nodeFlags) conntrackSettings(cores int) []sysctl.Setting {
	limits := f.limits
	if !f.replacesKubeProxy() {
		limits.onlyGiven(f.flagSet)
	}
	return limits.Settings(cores)
}

// nodeParts returns the parts of a backend with a dataplane. The dataplane needs the kernel
// settings in the argument more, in addition to those of all backends.
func (f *nodeFlags) nodeParts(run command.Run, dataplane sink.Sink, more ...sysctl.Setting) (command.Parts, error) {
	opts := nodesinks.Options{
		NodePorts: f.nodePorts, Stats: statsOn(f.flagSet), KeepConnections: f.keepConnections, Healthy: run.Healthy, Metrics: run.Metrics,
		Settings: f.conntrackSettings(sysctl.Cores()), Sysctls: f.sysctlMode(), Follow: followBridges,
	}
	var events *eventsWriter // nil without --events
	if f.withEvents {
		var err error
		if events, err = newEventsWriter(f.flagSet); err != nil {
			return command.Parts{}, err
		}
		if c, ok := sink.As[backends.Capable](dataplane); ok {
			events.honours = c.Honours()
		}
		opts.Metrics = metricsWithEvents{run.Metrics, events}
	}
	node, err := nodesinks.New(opts)
	if err != nil {
		return command.Parts{}, err
	}
	dataplane, _ = node.Dataplane(dataplane)
	if f.podsUnknown() {
		dataplane = nodesinks.WithTask(dataplane, func(ctx context.Context) func() {
			klog.FromContext(ctx).Info("Warning: which traffic is from pods is unknown", "consequence", withoutPods, "flags", podFlags)
			return func() {}
		})
	}
	report := &settingsReport{Sink: dataplane}
	if f.sysctlMode() != backends.IgnoreSysctls {
		report.settings = slices.Concat(sysctl.Forwarding, more)
	}
	parts := f.checks.parts(node, report)
	if events != nil {
		parts.Beside["events"], parts.Refused = events, events.serviceRefused
	}
	err = addLocalhost(&parts, node)
	parts.Problems, parts.Collectors = append(parts.Problems, report.problems), append(parts.Collectors, report.metric())
	return parts, err
}

// podFlags are the flags that say which traffic is from pods. No backend has more such
// flags.
var podFlags = []string{"cluster-cidr", "node-pod-cidrs", "pod-interfaces"}

// withoutPods describes the result if no flag of podFlags is set.
const withoutPods = "connections to cluster IPs from outside the pod network are not masqueraded, " +
	"and pods of this node use external addresses with externalTrafficPolicy Local like clients outside the cluster"

// podsUnknown reports that no flag says which traffic is from pods.
func (f *nodeFlags) podsUnknown() bool {
	return f.flagSet != nil && !slices.ContainsFunc(podFlags, f.flagSet.Changed)
}

// podsCheck is a Backend.Check of podsUnknown.
func (f *nodeFlags) podsCheck() []command.Finding {
	if !f.podsUnknown() {
		return nil
	}
	found := command.Finding{Level: command.Change, Subject: "traffic from pods", Text: "is unknown: " + withoutPods + "; give the flag for what kube-proxy has: --" + strings.Join(podFlags, ", --")}
	if flagValue(f.flagSet, "config") != "" {
		found.Level, found.Text = command.Note, "is unknown, as in kube-proxy's file: "+withoutPods
	}
	return []command.Finding{found}
}

// init implements command.Backend.Init.
func (f *nodeFlags) init(ctx context.Context) error { return f.applySysctls(ctx) }

// applySysctls applies the kernel settings that all backends need, and the settings in
// the argument more. It returns an error if settings remain wrong. First, it makes the
// kernel load connection tracking, because some of the settings exist only then.
func (f *nodeFlags) applySysctls(ctx context.Context, more ...sysctl.Setting) error {
	mode := f.sysctlMode()
	if mode == backends.IgnoreSysctls {
		return nil
	}
	conn := netfilter.NewConn(0)
	defer conn.Close()
	const getStatistics = unix.NFNL_SUBSYS_CTNETLINK<<8 | 4
	if err := conn.Query(ctx, func(w *netfilter.Builder) { w.End(w.Begin(getStatistics, unix.NLM_F_DUMP, unix.AF_UNSPEC)) }, func([]byte) {}); err != nil {
		return fmt.Errorf("load connection tracking: %w", err)
	}
	if wrong := sysctl.Kernel.Apply(ctx, slices.Concat(sysctl.Forwarding, more, f.conntrackSettings(sysctl.Cores())), mode == backends.SetSysctls); len(wrong) > 0 {
		return fmt.Errorf("kernel settings have wrong values: %s; see the log", strings.Join(wrong, ", "))
	}
	return nil
}

// keepAnnotation adds the name of a service annotation to the value of --keep-annotations
// if the command has this flag.
func (f *nodeFlags) keepAnnotation(name string) error {
	if keep := f.flagSet.Lookup("keep-annotations"); keep != nil {
		return keep.Value.Set(name)
	}
	return nil
}

// apiServer returns the settings for the API server. It returns an error if the command
// with these flags gets services from another source. The argument flag is the flag that
// needs the API server.
func apiServer(fs *pflag.FlagSet, flag string) (*rest.Config, error) {
	if fs.Lookup("kubeconfig") == nil || flagValue(fs, "manifests") != "" || fs.Changed("api") {
		return nil, fmt.Errorf("%s needs an API server as the source of services", flag)
	}
	return kube.LoadConfig(flagValue(fs, "kubeconfig"))
}
