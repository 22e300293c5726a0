// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/kubeproxy"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"
)

// configured parses the arguments of kpng for a backend and applies a configuration file
// of kube-proxy. It returns the values of all flags that are set, and the logged
// differences, as FIELD=VALUE.
func configured(t *testing.T, backend, config string, args ...string) (set map[string]string, differences []string, err error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.conf")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, rest, err := newRoot().Find(append([]string{"kube", "to-local", backend, "--config", file}, args...))
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.ParseFlags(rest); err != nil {
		t.Fatal(err)
	}
	log := funcr.NewJSON(func(line string) {
		var d struct{ Msg, Field, Value, Meaning string }
		if err := json.Unmarshal([]byte(line), &d); err != nil {
			t.Error(err)
		}
		ofMode := strings.HasPrefix(d.Meaning, "kube-proxy drops ") || strings.HasPrefix(d.Meaning, "kube-proxy accepts ") // see TestCheckSaysWhatModesDrop
		if d.Msg != "Using configuration of kube-proxy" && !ofMode {
			differences = append(differences, d.Field+"="+d.Value)
		}
	}, funcr.Options{})
	cmd.SetContext(klog.NewContext(t.Context(), log))
	err = cmd.PreRunE(cmd, nil)
	set = map[string]string{}
	cmd.Flags().Visit(func(f *pflag.Flag) { set[f.Name] = f.Value.String() })
	delete(set, "config")
	return set, differences, err
}

// always has flags with their default values. Every configuration file sets these flags,
// even if it does not mention them.
var always = map[string]string{
	"healthz-bind-address": "0.0.0.0:10256",
	"metrics-bind-address": "127.0.0.1:10249",
	"kubeproxy-metrics":    "true",
}

const header = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

func TestConfigMapsOfKubeProxyBecomeFlags(t *testing.T) {
	kubeadm := map[string]string{"kubeconfig": "/var/lib/kube-proxy/kubeconfig.conf", "cluster-cidr": "10.244.0.0/16", "node-port-addresses": "all,localhost"}
	maps.Copy(kubeadm, always)
	kind := maps.Clone(kubeadm)
	kind["min-sync-interval"] = "1s"
	kind["conntrack-max-per-core"] = "0"
	for name, want := range map[string]map[string]string{"kubeadm": kubeadm, "kind": kind} {
		text, err := os.ReadFile("testdata/kube-proxy/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		var configMap struct{ Data map[string]string }
		if err := yaml.Unmarshal(text, &configMap); err != nil {
			t.Fatal(err)
		}
		for backend, differences := range map[string][]string{
			"nftables": {"mode=iptables"},
			"iptables": nil,
		} {
			set, got, err := configured(t, backend, configMap.Data["config.conf"])
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, set); diff != "" {
				t.Errorf("%s with backend %s: flags (-want +got):\n%s", name, backend, diff)
			}
			if diff := cmp.Diff(differences, got); diff != "" {
				t.Errorf("%s with backend %s: differences (-want +got):\n%s", name, backend, diff)
			}
		}
	}
}

func TestFieldsOfKubeProxyBecomeFlags(t *testing.T) {
	t.Cleanup(func() {
		if err := newRoot().ParseFlags([]string{"-v=0", "--vmodule="}); err != nil { // the flags of klog are global
			t.Error(err)
		}
	})
	for name, test := range map[string]struct {
		backend, config string
		args            []string
		set             string // besides those in the map "always", as NAME=VALUE
		differences     string // as FIELD=VALUE
	}{
		"settings of another mode are ignored": {
			"nftables", "mode: nftables\niptables: {masqueradeAll: true, syncPeriod: 1m}\nipvs: {scheduler: lc}\nwinkernel: {networkName: x}", nil, "", "",
		},
		"the mode of the file counts, not the backend": {
			"nftables", "mode: iptables\niptables: {masqueradeAll: true, masqueradeBit: 15, minSyncPeriod: 2s, localhostNodePorts: false}\nnftables: {masqueradeBit: 20}", nil,
			"masquerade-all=true masquerade-bit=15 min-sync-interval=2s node-port-addresses=all", "mode=iptables",
		},
		"mode nftables": {
			"nftables", "mode: nftables\nnftables: {masqueradeAll: true, masqueradeBit: 15, minSyncPeriod: 2s, syncPeriod: 1h}", nil,
			"masquerade-all=true masquerade-bit=15 min-sync-interval=2s", "nftables.syncPeriod=1h0m0s",
		},
		"mode ipvs": {
			"ipvs", "mode: ipvs\nipvs: {scheduler: lc, strictARP: true, minSyncPeriod: 2s, tcpTimeout: 1h, excludeCIDRs: [10.0.0.0/8]}\niptables: {masqueradeBit: 15, minSyncPeriod: 3s}", nil,
			"scheduler=lc strict-arp=true min-sync-interval=2s masquerade-bit=15 node-port-addresses=all", "ipvs.excludeCIDRs=10.0.0.0/8 ipvs.tcpTimeout=1h0m0s",
		},
		"a flag that the backend does not have": {
			"ipvs", "mode: ipvs\ndetectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/8", nil, "node-port-addresses=all", "detectLocalMode=NodeCIDR",
		},
		"kube-proxy's defaults": {
			"nftables", "mode: nftables\noomScoreAdj: -999\nconfigSyncPeriod: 15m0s\nclientConnection: {qps: 5, burst: 10, contentType: application/vnd.kubernetes.protobuf}\n" +
				"conntrack: {maxPerCore: 32768, min: 131072, tcpEstablishedTimeout: 24h0m0s, tcpCloseWaitTimeout: 1h0m0s}\nlogging: {format: text, flushFrequency: 5s}\n" +
				"nftables: {syncPeriod: 30s, masqueradeBit: 14}", nil, "", "nftables.masqueradeBit=14",
		},
		"connection tracking": {
			"nftables", "mode: nftables\nconntrack: {maxPerCore: 1, min: 2, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 3s, tcpBeLiberal: true, udpTimeout: 4s, udpStreamTimeout: 5s}", nil,
			"conntrack-max-per-core=1 conntrack-min=2 conntrack-tcp-timeout-established=0s conntrack-tcp-timeout-close-wait=3s conntrack-tcp-be-liberal=true " +
				"conntrack-udp-timeout=4s conntrack-udp-timeout-stream=5s", "",
		},
		"pods by their node": {
			"nftables", "mode: nftables\ndetectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/8", nil, "node-pod-cidrs=true", "",
		},
		"pods by a bridge": {
			"nftables", "mode: nftables\ndetectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0, interfaceNamePrefix: veth}", nil, "pod-interfaces=[cni0]", "",
		},
		"pods by interface names": {
			"nftables", "mode: nftables\ndetectLocalMode: InterfaceNamePrefix\ndetectLocal: {bridgeInterface: cni0, interfaceNamePrefix: veth}", nil, "pod-interfaces=[veth*]", "",
		},
		"addresses of an IPv6 node": {
			"nftables", "mode: nftables\nbindAddress: '::'", nil, "healthz-bind-address=[::]:10256 metrics-bind-address=[::1]:10249", "",
		},
		"addresses without ports": {
			"nftables", "mode: nftables\nhealthzBindAddress: 10.0.0.1\nmetricsBindAddress: fd00::1", nil, "healthz-bind-address=10.0.0.1:10256 metrics-bind-address=[fd00::1]:10249", "",
		},
		"the node's address": {
			"nftables", "mode: nftables\nbindAddress: 10.0.0.1", nil, "", "bindAddress=10.0.0.1",
		},
		"node ports at loopback addresses": {
			"iptables", "nodePortAddresses: [localhost, 127.0.0.0/8, primary]", nil, "node-port-addresses=localhost,127.0.0.0/8,primary", "",
		},
		"node ports at addresses that contain loopback addresses": {
			"iptables", "nodePortAddresses: [0.0.0.0/0, primary]", nil, "node-port-addresses=0.0.0.0/0,primary,localhost", "",
		},
		"node ports at loopback addresses, disabled": {
			"iptables", "nodePortAddresses: [localhost, all]\niptables: {localhostNodePorts: false}", nil, "node-port-addresses=all", "",
		},
		"node ports at loopback addresses only": {
			"nftables", "mode: nftables\nnodePortAddresses: [localhost]", nil, "node-port-addresses=localhost", "",
		},
		"node ports at loopback addresses in mode ipvs": {
			"ipvs", "mode: ipvs\nnodePortAddresses: [primary, localhost]", nil, "node-port-addresses=primary,localhost", "nodePortAddresses=primary,localhost",
		},
		"node ports of one family": {
			"nftables", "mode: nftables\nnodePortAddresses: [10.0.0.0/8, 11.0.0.0/8]", nil,
			"node-port-addresses=10.0.0.0/8,11.0.0.0/8", "nodePortAddresses=10.0.0.0/8,11.0.0.0/8",
		},
		"the log": {
			"nftables", "mode: nftables\nlogging: {verbosity: 2, vmodule: [{filePattern: a*, verbosity: 3}, {filePattern: b, verbosity: 4}], flushFrequency: 1s}", nil,
			"v=2 vmodule=a*=3,b=4", "logging.flushFrequency=1s",
		},
		"other fields": {
			"nftables", "mode: nftables\nhostnameOverride: Node\nenableProfiling: true\nfeatureGates: {AllAlpha: true}\nshowHiddenMetricsForVersion: '1.36'\nportRange: 1-2\nbindAddressHardFail: true", nil,
			"node-name=Node profiling=true", `featureGates={"AllAlpha":true} portRange=1-2 showHiddenMetricsForVersion=1.36`,
		},
		"unknown fields": {
			"nftables", "mode: nftables\nextra: 1\nnftables: {other: x}", nil, "", "extra=1 nftables.other=x",
		},
		"a field with dots in its name": {
			"nftables", "mode: nftables\nnftables.masqueradeAll: true\nnftables: {a.b: 1}", nil, "", `"nftables.masqueradeAll"=true nftables."a.b"=1`,
		},
		"a second document": {
			"nftables", "mode: nftables\n---\n" + header + "mode: ipvs", nil, "", "=",
		},
		"empty documents": {
			"nftables", "mode: nftables\n---\n# comment\n---\n", nil, "", "",
		},
		"a field that is given twice": {
			"nftables", "mode: iptables\nmode: nftables", nil, "", "=",
		},
		"the command line wins": {
			"nftables", "mode: nftables\nhostnameOverride: a\nclusterCIDR: 10.0.0.0/8\nnodePortAddresses: [localhost]\nmetricsBindAddress: 10.0.0.1:1",
			[]string{"--node-name=b", "--cluster-cidr=11.0.0.0/8", "--node-port-addresses=all", "--metrics-bind-address=", "--kubeproxy-metrics=false"},
			"node-name=b cluster-cidr=11.0.0.0/8 node-port-addresses=all metrics-bind-address= kubeproxy-metrics=false",
			"clusterCIDR=10.0.0.0/8 hostnameOverride=a metricsBindAddress=10.0.0.1:1 nodePortAddresses=localhost",
		},
		"equal values on the command line": {
			"nftables", "mode: nftables\nhostnameOverride: a\nmetricsBindAddress: 10.0.0.1:1\nnodePortAddresses: [all]\nnftables: {masqueradeBit: 14}",
			[]string{"--node-name=a", "--metrics-bind-address=10.0.0.1:1", "--node-port-addresses=all", "--masquerade-bit=15"},
			"node-name=a metrics-bind-address=10.0.0.1:1 node-port-addresses=all masquerade-bit=15", "nftables.masqueradeBit=14",
		},
		"a busy address": {
			"nftables", "mode: nftables\nbindAddressHardFail: false", nil, "", "",
		},
		"zeros and host bits": {
			"nftables", "mode: nftables\nclusterCIDR: 010.0.0.1/8\nnodePortAddresses: [10.0.0.1/8, 'fd00::1/64']", nil,
			"cluster-cidr=10.0.0.0/8 node-port-addresses=10.0.0.0/8,fd00::/64", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			set, differences, err := configured(t, test.backend, header+test.config, test.args...)
			if err != nil {
				t.Fatal(err)
			}
			want := maps.Clone(always)
			for _, f := range strings.Fields(test.set) {
				name, value, _ := strings.Cut(f, "=")
				want[name] = value
			}
			if diff := cmp.Diff(want, set); diff != "" {
				t.Errorf("flags (-want +got):\n%s", diff)
			}
			if got := strings.Join(slices.Sorted(slices.Values(differences)), " "); got != test.differences {
				t.Errorf("differences %q, want %q", got, test.differences)
			}
		})
	}
}

func TestWrongConfigurationIsAnError(t *testing.T) {
	for config, want := range map[string]string{
		"":                               "the file is empty or not an object, want a KubeProxyConfiguration",
		"[]":                             "the file is empty or not an object, want a KubeProxyConfiguration",
		"apiVersion: v1\nkind: Service":  `the file has apiVersion "v1" and kind "Service", want`,
		"kind: KubeProxyConfiguration":   "the file has apiVersion null and kind",
		"apiVersion: v1\n---\n" + header: "the first document of the file has",
		header + "mode: [":               "YAML",
		header + "mode: userspace":       "userspace",
		header + "detectLocalMode: x":    "detectLocalMode",
		header + "conntrack: 1":          "conntrack: 1 is not an object",
		header + "clusterCIDR: x":        "clusterCIDR",
		header + "mode: nftables\nnftables: {masqueradeBit: x}":                                    "nftables.masqueradeBit",
		header + "nodePortAddresses: [localhost]\niptables: {localhostNodePorts: false}":           "nodePortAddresses: localhost has only loopback",
		header + "mode: kernelspace":                                                               "mode: kernelspace is a mode for Windows only",
		header + "featureGates: {SomeGate: true}":                                                  "featureGates: kube-proxy v1.37 has no feature gate SomeGate",
		header + "mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}":                                "mode: the feature gate KubeProxyIPVS",
		header + "iptables: {masqueradeBit: '14'}":                                                 `iptables.masqueradeBit: "14" is not an integer`,
		header + "iptables: {minSyncPeriod: null}":                                                 "iptables.minSyncPeriod: null is not a duration",
		header + "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: 'a b'}":         "detectLocal.bridgeInterface: ",
		header + "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: 'a,b'}": `detectLocal.interfaceNamePrefix: nftables options: "a,b*"`,
		header + "hostnameOverride: ' '":                                                           "hostnameOverride: ",
	} {
		if _, _, err := configured(t, "nftables", config); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v of %q, want one with %q", err, config, want)
		}
	}
	if _, err := execute(t.Context(), "kube", "to-local", "nftables", "--config="); err == nil || !strings.Contains(err.Error(), "--config") {
		t.Errorf("error %v of an empty file name", err)
	}
}

// The backend ebpf cannot masquerade all connections. The error names the field.
func TestValuesThatABackendRefusesAreNamedByTheirField(t *testing.T) {
	_, _, err := configured(t, "ebpf", header+"mode: nftables\nnftables: {masqueradeAll: true}")
	if err == nil || !strings.Contains(err.Error(), "config.conf: nftables.masqueradeAll: ") {
		t.Errorf("error %v does not begin with the field", err)
	}
	_, _, err = configured(t, "ebpf", header+"mode: nftables\nnftables: {masqueradeAll: true}", "--masquerade-all=false")
	if err != nil {
		t.Errorf("error of a field that the command line overrides: %v", err)
	}
}

// kubeProxysDefaults has all fields with their defaults written out, as kube-proxy's flag
// --write-config-to writes them.
const kubeProxysDefaults = `
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection: {acceptContentTypes: "", burst: 10, contentType: application/vnd.kubernetes.protobuf, kubeconfig: "", qps: 5}
clusterCIDR: ""
configSyncPeriod: 15m0s
conntrack: {maxPerCore: 32768, min: 131072, tcpBeLiberal: false, tcpCloseWaitTimeout: 1h0m0s, tcpEstablishedTimeout: 24h0m0s, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
featureGates: {}
healthzBindAddress: 0.0.0.0:10256
hostnameOverride: ""
iptables: {localhostNodePorts: true, masqueradeAll: false, masqueradeBit: 14, minSyncPeriod: 1s, syncPeriod: 30s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 30s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
logging: {flushFrequency: 5s, format: text, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: 127.0.0.1:10249
nftables: {masqueradeAll: false, masqueradeBit: 14, minSyncPeriod: 1s, syncPeriod: 30s}
nodePortAddresses: null
oomScoreAdj: -999
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
`

// Each backend accepts kube-proxy's defaults and the files that distributions ship, or
// its error names a field.
func TestEachBackendAcceptsFilesOfKubeProxy(t *testing.T) {
	texts := map[string]string{}
	for _, mode := range []string{"iptables", "ipvs", "nftables"} {
		texts["defaults in mode "+mode] = header + "mode: " + mode + kubeProxysDefaults
	}
	for _, name := range []string{"eks-addon", "eks-ipv6", "hardway", "k3s-flags-as-file", "kind", "kubeadm-1.31", "kubespray", "metallb-docs", "minikube", "openshift", "rke2", "talos-rendered"} {
		text, err := os.ReadFile("../../test/kubeproxy/testdata/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		texts[name] = string(text)
	}
	for _, b := range platformBackends() {
		var args []string
		if b.Name == "ovs" {
			args = []string{"--bridge=br0"}
		}
		for name, text := range texts {
			set, _, err := configured(t, b.Name, text, args...)
			if err != nil {
				t.Errorf("%s, backend %s: %v", name, b.Name, err)
				continue
			}
			fs, configure := unusedBackend(b.Name)
			for flag, value := range set {
				if fs.Lookup(flag) != nil {
					if err := fs.Set(flag, strings.Trim(value, "[]")); err != nil {
						t.Error(err)
					}
				}
			}
			if err := configure(); err != nil {
				t.Errorf("%s, backend %s: %v", name, b.Name, err)
			}
		}
	}
}

func TestBackendsForTheKernelHaveInitOnly(t *testing.T) {
	for _, b := range platformBackends() {
		cmd, _, err := newRoot().Find([]string{"kube", "to-local", b.Name})
		if err != nil {
			t.Fatal(err)
		}
		if has, want := cmd.Flags().Lookup("init-only") != nil, b.Name != "userspace" && b.Name != "ovs"; has != want {
			t.Errorf("to-local %s has --init-only: %t, want %t", b.Name, has, want)
		}
	}
}

// A source other than an API server, not the backend, makes a kubeconfig useless.
func TestKubeconfigOfTheFileIsUselessWithoutAPIServer(t *testing.T) {
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	differences, err := kubeproxy.Apply(fs, "nftables", []byte(header+"mode: nftables\nclientConnection: {kubeconfig: /k}"), func(string, string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range differences {
		if d.Field == "clientConnection.kubeconfig" {
			if want := "the command reads services from another source, without an API server"; d.Meaning != want {
				t.Errorf("%q, want %q", d.Meaning, want)
			}
			return
		}
	}
	t.Errorf("%+v lack the kubeconfig", differences)
}
