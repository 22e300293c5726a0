// SPDX-License-Identifier: Apache-2.0

package program

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/internal/sysctl"
	"github.com/spf13/pflag"
)

// parsedFlags parses args. The default of the flag --service-proxy-name is proxyName.
func parsedFlags(t *testing.T, proxyName string, args ...string) *nftablesFlags {
	t.Helper()
	f := &nftablesFlags{}
	fs := pflag.NewFlagSet("nftables", pflag.ContinueOnError)
	f.register(fs)
	fs.String("service-proxy-name", proxyName, "")
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestConnectionTrackingIsSetAsByKubeProxy(t *testing.T) {
	const prefix = "net.netfilter.nf_conntrack_"
	for name, test := range map[string]struct {
		proxyName string
		args      []string
		cores     int
		want      map[string]int
	}{
		"the defaults on a machine with few cores":  {"", nil, 2, map[string]int{"max": 131072, "buckets": 32768, "tcp_timeout_established": 86400, "tcp_timeout_close_wait": 3600}},
		"the defaults on a machine with more cores": {"", nil, 8, map[string]int{"max": 262144, "buckets": 65536, "tcp_timeout_established": 86400, "tcp_timeout_close_wait": 3600}},
		"the defaults on a machine with very many cores": {
			"", []string{"--conntrack-min=2000000"}, 128,
			map[string]int{"max": 1048576, "buckets": 262144, "tcp_timeout_established": 86400, "tcp_timeout_close_wait": 3600},
		},
		"a value of 0 leaves the setting unchanged": {"", []string{"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0"}, 2, map[string]int{"tcp_timeout_close_wait": 3600}},
		"all flags": {
			"", []string{
				"--conntrack-max-per-core=10", "--conntrack-min=7", "--conntrack-tcp-timeout-established=1h", "--conntrack-tcp-timeout-close-wait=1m",
				"--conntrack-udp-timeout=10s", "--conntrack-udp-timeout-stream=20s", "--conntrack-tcp-be-liberal",
			}, 2, map[string]int{
				"max": 20, "buckets": 5, "tcp_timeout_established": 3600, "tcp_timeout_close_wait": 60, "udp_timeout": 10, "udp_timeout_stream": 20, "tcp_be_liberal": 1,
			},
		},
		"no settings beside kube-proxy":            {"other", nil, 2, map[string]int{}},
		"only explicit settings beside kube-proxy": {"other", []string{"--conntrack-min=5", "--conntrack-tcp-timeout-close-wait=1m"}, 2, map[string]int{"max": 65536, "buckets": 16384, "tcp_timeout_close_wait": 60}},
	} {
		t.Run(name, func(t *testing.T) {
			got := map[string]int{}
			f := parsedFlags(t, test.proxyName, test.args...)
			for _, s := range f.conntrackSettings(test.cores) {
				name := s.Name[len(prefix):]
				got[name] = s.Value
				if atLeast := name == "max" || name == "buckets"; s.AtLeast != atLeast {
					t.Errorf("%s: AtLeast is %t, want %t", name, s.AtLeast, atLeast)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSysctlsAreSetInPlaceOfKubeProxyAndReportedBesideIt(t *testing.T) {
	for name, test := range map[string]struct {
		proxyName string
		args      []string
		want      backends.SysctlMode
	}{
		"in place of kube-proxy":              {"", nil, backends.SetSysctls},
		"beside kube-proxy":                   {"other", nil, backends.ReportSysctls},
		"in place of kube-proxy, report only": {"", []string{"--sysctls=report"}, backends.ReportSysctls},
		"beside kube-proxy, set on request":   {"other", []string{"--sysctls=set"}, backends.SetSysctls},
	} {
		opts, err := parsedFlags(t, test.proxyName, test.args...).complete()
		if err != nil || opts.Sysctls != test.want {
			t.Errorf("%s: mode %v, error %v; want %v", name, opts.Sysctls, err, test.want)
		}
	}
}

// The test changes neither the maximum number of connections nor the size of the hash
// table, because all network namespaces of the machine share these settings.
func TestTheKernelTakesTheSettingsOfConnectionTracking(t *testing.T) {
	n := netnstest.New(t)
	settings := parsedFlags(t, "", "--conntrack-max-per-core=0", "--conntrack-udp-timeout=11s", "--conntrack-udp-timeout-stream=22s", "--conntrack-tcp-be-liberal").conntrackSettings(2)
	if err := n.Do(func() error {
		sysctl.Kernel.Apply(t.Context(), settings, true)
		for _, s := range settings {
			if value, err := sysctl.Kernel.Read(s.Name); err != nil || value != s.Value {
				t.Errorf("%s is %d, error %v; want %d", s.Name, value, err, s.Value)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if len(settings) != 5 {
		t.Errorf("%d settings, want 5", len(settings))
	}
}

func TestInitAppliesSettings(t *testing.T) {
	const forward, timeout = "net.ipv4.ip_forward", "net.netfilter.nf_conntrack_tcp_timeout_established"
	for name, test := range map[string]struct {
		args             []string
		err              string
		forward, timeout int
	}{
		"set":                   {nil, "", 1, 86400},
		"report":                {[]string{"--sysctls=report"}, forward, 0, 100000},
		"ignore":                {[]string{"--sysctls=ignore"}, "", 0, 100000},
		"the kernel refuses it": {[]string{"--conntrack-tcp-timeout-established=2500000h"}, timeout, 1, 100000},
	} {
		t.Run(name, func(t *testing.T) {
			n := netnstest.New(t)
			n.Set(t, "ipv4/ip_forward=0", "netfilter/nf_conntrack_tcp_timeout_established=100000")
			f := parsedFlags(t, "", append(test.args, "--conntrack-max-per-core=0")...)
			if err := n.Do(func() error {
				if err := f.init(t.Context()); (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
					t.Errorf("error %v, want one with %q", err, test.err)
				}
				for name, want := range map[string]int{forward: test.forward, timeout: test.timeout} {
					if value, err := sysctl.Kernel.Read(name); err != nil || value != want {
						t.Errorf("%s is %d, error %v; want %d", name, value, err, want)
					}
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		})
	}
}
