// SPDX-License-Identifier: Apache-2.0

package program

import (
	"net/netip"
	"testing"

	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/backends/ipvs"
	"github.com/spf13/pflag"
)

func TestFlagsOfIPVS(t *testing.T) {
	defaults := func(edit func(*ipvs.Options)) ipvs.Options {
		o := ipvs.Options{Options: backends.Options{MasqueradeMark: 1 << 13, Sysctls: backends.SetSysctls}, Scheduler: "rr", SchedulerAnnotation: "kpng.io/ipvs-scheduler"}
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
			[]string{"--instance=x", "--interface=svc0", "--scheduler=sh", "--scheduler-annotation=example.com/a", "--pod-interfaces=cni0,veth*", "--masquerade-outside=false", "--masquerade-all", "--masquerade-bit=15", "--strict-arp", "--node-networks=192.0.2.0/24", "--forward-healthcheck-port=0", "--sysctls=ignore"},
			ipvs.Options{Options: backends.Options{Instance: "x", PodInterfaces: []string{"cni0", "veth*"}, MasqueradeAll: true, MasqueradeMark: 1 << 15, Sysctls: backends.IgnoreSysctls}, Interface: "svc0", Scheduler: "sh", SchedulerAnnotation: "example.com/a", StrictARP: true, NodeNetworks: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
		},
		"report kernel settings": {[]string{"--sysctls=report"}, defaults(func(o *ipvs.Options) { o.Sysctls = backends.ReportSysctls })},
	} {
		f := ipvsFlags{}
		testFlags(t, name, test.args, IPVS(), f.register, f.complete, test.want)
	}
}

func TestHealthChecksAreForwardedToOwnPort(t *testing.T) {
	for _, test := range []struct {
		args []string
		want uint16
	}{
		{nil, 0},
		{[]string{"--healthz-bind-address=0.0.0.0:10300"}, 10300},
		{[]string{"--healthz-bind-address=127.0.0.1:http"}, 80},
		{[]string{"--healthz-bind-address=0.0.0.0:10300", "--forward-healthcheck-port=80"}, 80},
		{[]string{"--healthz-bind-address=0.0.0.0:10300", "--forward-healthcheck-port=0"}, 0},
	} {
		f := ipvsFlags{}
		fs := pflag.NewFlagSet("ipvs", pflag.ContinueOnError)
		f.register(fs)
		fs.String("healthz-bind-address", "", "")
		if err := fs.Parse(test.args); err != nil {
			t.Fatal(err)
		}
		if got, err := f.complete(); err != nil || got.HealthzPort != test.want {
			t.Errorf("%v: port %d (%v), want %d", test.args, got.HealthzPort, err, test.want)
		}
	}
}

func TestInvalidFlagsOfIPVS(t *testing.T) {
	testInvalidFlags(t, IPVS,
		"--node-port-addresses=eth0", "--cluster-cidr=10.1.0.0", "--masquerade-bit=32", "--masquerade-bit=14", "--scheduler=a-b", "--sysctls=maybe", "--instance=a b",
		"--interface=much-too-long-name", "--forward-healthcheck-port=65536", "--conntrack-min=-1",
	)
}
