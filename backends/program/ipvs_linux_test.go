// SPDX-License-Identifier: Apache-2.0

package program

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/spf13/pflag"
)

func TestFlagsOfIPVS(t *testing.T) {
	defaults := func(edit func(*ipvs.Options)) ipvs.Options {
		o := ipvs.Options{
			Scheduler: "rr", SchedulerAnnotation: "kpng.io/ipvs-scheduler",
			MasqueradeMark: 1 << 13, HealthzPort: 10256, Sysctls: ipvs.SetSysctls,
		}
		edit(&o)
		return o
	}
	for name, test := range map[string]struct {
		args []string
		want ipvs.Options
	}{
		"by default only necessary connections are masqueraded": {nil, defaults(func(*ipvs.Options) {})},
		"with a pod network, sources outside it are masqueraded, as by kube-proxy": {
			[]string{"--cluster-cidr=10.1.2.3/16"},
			defaults(func(o *ipvs.Options) {
				o.ClusterCIDRs, o.MasqueradeOutsiders = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, true
			}),
		},
		"all other flags": {
			[]string{"--instance=x", "--interface=svc0", "--scheduler=sh", "--scheduler-annotation=example.com/a", "--pod-interfaces=cni0,veth*", "--masquerade-outside=false", "--masquerade-all", "--masquerade-bit=15", "--strict-arp", "--forward-healthcheck-port=0", "--sysctls=ignore"},
			ipvs.Options{
				Instance: "x", Interface: "svc0", Scheduler: "sh", SchedulerAnnotation: "example.com/a",
				PodInterfaces: []string{"cni0", "veth*"}, MasqueradeAll: true, MasqueradeMark: 1 << 15,
				StrictARP: true, Sysctls: ipvs.IgnoreSysctls,
			},
		},
		"report kernel settings": {[]string{"--sysctls=report"}, defaults(func(o *ipvs.Options) { o.Sysctls = ipvs.ReportSysctls })},
	} {
		t.Run(name, func(t *testing.T) {
			f := ipvsFlags{nodeFlags: nodeFlags{checks: newHealthChecks()}}
			fs := pflag.NewFlagSet("ipvs", pflag.ContinueOnError)
			f.register(fs)
			if err := fs.Parse(test.args); err != nil {
				t.Fatal(err)
			}
			got, err := f.complete()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got, cmpopts.EquateComparable(netip.Prefix{})); diff != "" {
				t.Errorf("options (-want +got):\n%s", diff)
			}
			if len(mustConfigure(t, IPVS(), test.args...).Companions(nil)) != 1 {
				t.Error("no health checks are served")
			}
		})
	}
}

func TestInvalidFlagsOfIPVS(t *testing.T) {
	for _, arg := range []string{
		"--node-port-addresses=eth0", "--cluster-cidr=10.1.0.0", "--masquerade-bit=32", "--masquerade-bit=14", "--scheduler=a-b", "--sysctls=maybe", "--instance=a b",
		"--interface=much-too-long-name", "--forward-healthcheck-port=65536", "--node-port-addresses=127.0.0.0/8", "--conntrack-min=-1",
	} {
		_, err := configured(t, IPVS(), arg)
		if err == nil {
			t.Errorf("%s: no error", arg)
		} else if value := strings.SplitN(arg, "=", 2)[1]; !strings.Contains(err.Error(), value) && arg != "--masquerade-bit=14" {
			t.Errorf("%s: error %v does not name the problem", arg, err)
		}
	}
}

// TestSourceKeepsSchedulerAnnotation checks that the backend adds the annotation to those
// that a source in the same process keeps.
func TestSourceKeepsSchedulerAnnotation(t *testing.T) {
	b := IPVS()
	fs := pflag.NewFlagSet("ipvs", pflag.ContinueOnError)
	keep := fs.StringSlice("keep-annotations", nil, "")
	b.Register(fs)
	if err := fs.Parse([]string{"--keep-annotations=other", "--scheduler-annotation=example.com/a"}); err != nil {
		t.Fatal(err)
	}
	if err := b.Configure(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"other", "example.com/a"}, *keep); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}
