// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/kpng-project/kpng/metrics"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/sys/unix"
)

// withSysctls runs f in network and mount namespaces where net.ipv4.ip_forward is 0.
// With readOnly, no process can change kernel settings there, as in an unprivileged
// container.
func withSysctls(t *testing.T, readOnly bool, f func()) {
	t.Helper()
	netnstest.NeedRoot(t)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			sysctl.Kernel.Apply(t.Context(), []sysctl.Setting{{Name: "net.ipv4.ip_forward"}}, true)
			if readOnly {
				if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
					return err
				}
				if err := unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
					return err
				}
			}
			f()
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestCheckSaysWhetherKpngCanSetKernelSettings(t *testing.T) {
	const sets, cannot = "kpng sets it at the start", "kpng cannot set it here: set it on the node, or use the chart's kernelSettings"
	for name, test := range map[string]struct {
		args     []string
		readOnly bool
		want     string
	}{
		"writable":              {nil, false, sets},
		"read-only":             {nil, true, cannot},
		"read-only, and report": {[]string{"--sysctls=report"}, true, sysctl.Forwarding[0].Reason},
	} {
		withSysctls(t, test.readOnly, func() {
			for _, f := range parsedFlags(t, "", test.args...).settingsCheck()(t.Context()) {
				if f.Subject == "sysctl net.ipv4.ip_forward" {
					if !strings.HasSuffix(f.Text, test.want) {
						t.Errorf("%s: %q does not end with %q", name, f.Text, test.want)
					}
					return
				}
			}
			t.Errorf("%s: no finding about net.ipv4.ip_forward", name)
		})
	}
}

// The report follows the kernel: no restart is needed after an administrator corrects a
// setting, and a setting that another program breaks later is a problem, too.
func TestWrongKernelSettingsAreProblems(t *testing.T) {
	const forward4, forward6, arp = "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.ipv4.conf.all.arp_ignore"
	service := func(ip string) sink.Change {
		return sink.Change{New: &api.View{Service: &api.Service{Name: ip, IPs: api.ServiceIPs{ClusterIPs: api.NewIPSet(netip.MustParseAddr(ip))}}}}
	}
	for name, test := range map[string]struct {
		ips, args []string
		more      []sysctl.Setting // of the backend
		want      []string
	}{
		"no services":         {nil, nil, nil, nil},
		"services of IPv4":    {[]string{"10.0.0.1"}, nil, nil, []string{forward4}},
		"services of IPv6":    {[]string{"fd00::1"}, nil, nil, []string{forward6}},
		"both families":       {[]string{"10.0.0.1", "fd00::1"}, nil, nil, []string{forward4, forward6}},
		"only report":         {[]string{"10.0.0.1"}, []string{"--sysctls=report"}, nil, []string{forward4}},
		"ignored":             {[]string{"10.0.0.1"}, []string{"--sysctls=ignore"}, nil, nil},
		"of one backend only": {nil, nil, sysctl.StrictARP[:1], []string{arp}},
	} {
		f := parsedFlags(t, "", test.args...)
		withSysctls(t, true, func() {
			dataplane := sink.Func(func(context.Context, *sink.Changes) error { return nil })
			m, err := metrics.New(prometheus.NewRegistry(), metrics.Options{})
			if err != nil {
				t.Error(err)
				return
			}
			parts, err := f.nodeParts(command.Run{Metrics: m}, dataplane, test.more...)
			if err != nil {
				t.Error(err)
				return
			}
			var services []sink.Change
			for _, ip := range test.ips {
				services = append(services, service(ip))
			}
			report, _ := sink.As[*settingsReport](parts.Sink)
			report.Sink = dataplane // without the node's parts, which have not started
			if err := report.Sync(t.Context(), &sink.Changes{Services: slices.Values(services)}); err != nil {
				t.Error(err)
			}
			var got []string
			for _, problems := range parts.Problems {
				got = append(got, problems()...)
			}
			for i, problem := range got {
				if i >= len(test.want) || !strings.Contains(problem, "kernel setting "+test.want[i]+" is 0; with 1, ") {
					t.Errorf("%s: problem %q", name, problem)
				}
			}
			if len(got) != len(test.want) {
				t.Errorf("%s: %d problems, want %d", name, len(got), len(test.want))
			}
			var metric dto.Metric
			if err := parts.Collectors[len(parts.Collectors)-1].(prometheus.Metric).Write(&metric); err != nil || metric.GetGauge().GetValue() != float64(len(test.want)) {
				t.Errorf("%s: the metric is %v, error %v; want %d", name, &metric, err, len(test.want))
			}
		})
	}
}
