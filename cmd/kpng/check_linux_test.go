// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/kubetest"
	"github.com/kpng-project/kpng/internal/netnstest"
	corev1 "k8s.io/api/core/v1"
)

const checkedServices = `
apiVersion: v1
kind: Service
metadata: {name: headless, namespace: default}
spec: {clusterIP: None, externalIPs: [192.0.2.1], ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: ranges, namespace: default}
spec: {type: LoadBalancer, clusterIP: 10.0.0.1, ports: [{port: 80}], loadBalancerSourceRanges: ["2001:db8::/32"]}
status: {loadBalancer: {ingress: [{ip: 192.0.2.2}]}}
---
apiVersion: v1
kind: Service
metadata: {name: other, namespace: default, annotations: {service.cilium.io/type: x}}
spec: {clusterIP: 10.0.0.2, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: thief, namespace: default, creationTimestamp: "2026-01-01T00:00:00Z"}
spec: {clusterIP: 10.0.0.3, externalIPs: [10.0.0.2], ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: ordinary, namespace: default}
spec: {clusterIP: 10.0.0.4, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: beside, namespace: default, labels: {service.kubernetes.io/service-proxy-name: x}}
spec: {clusterIP: None, externalIPs: [192.0.2.3], ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: beside-1, namespace: default, labels: {kubernetes.io/service-name: beside}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [10.1.0.1]}]
`

const checkedConfig = `
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
bindAddressHardFail: false
`

func TestCheckSaysWhatChanges(t *testing.T) {
	dir := t.TempDir()
	for file, text := range map[string]string{"services.yaml": checkedServices, "config": checkedConfig} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	n := netnstest.New(t)
	n.Set(t, "ipv4/ip_forward=0")
	for _, rule := range [][]string{
		{"iptables-nft", "-t", "nat", "-N", "KUBE-SERVICES"},
		{"iptables-nft", "-t", "filter", "-N", "cali-FORWARD"},
		{"nft", "add", "table", "inet", "kpng-old"},
		{"nft", "add", "chain", "inet", "kpng-old", "c"},
		{"iptables-nft", "-P", "FORWARD", "DROP"},
		{"nft", "add", "table", "inet", "fw"},
		{"nft", "add", "chain", "inet", "fw", "drops", "{ type filter hook forward priority 0; policy drop; }"},
		{"nft", "add", "chain", "inet", "fw", "accepts", "{ type filter hook forward priority 1; policy accept; }"},
		{"nft", "add", "chain", "inet", "fw", "input", "{ type filter hook input priority 0; policy drop; }"},
		{"iptables-legacy", "-P", "INPUT", "DROP"},
		{"iptables-legacy", "-A", "FORWARD", "-j", "DROP"},
		{"iptables-legacy", "-t", "mangle", "-P", "FORWARD", "DROP"},
		{"ip6tables-legacy", "-A", "FORWARD", "-j", "ACCEPT"},
		{"ip6tables-legacy", "-P", "FORWARD", "DROP"},
	} {
		n.Run(t, rule...)
	}
	before := n.Run(t, "nft", "list", "ruleset")
	var out string
	err := n.Do(func() (err error) {
		out, err = execute(t.Context(), "check", "nftables", "-i", filepath.Join(dir, "services.yaml"), "--config", filepath.Join(dir, "config"), "-o", "json")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var report []checked
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "4 services; ") { // kpng serves neither headless nor beside
		t.Errorf("the check does not count 4 services: %s", out)
	}
	var got []string
	for _, c := range report {
		for _, f := range c.Findings {
			if f.Level != command.Change || !strings.Contains(f.Subject, "conntrack") && !strings.Contains(f.Subject, "ipv6") {
				got = append(got, string(f.Level)+" "+f.Subject)
			}
		}
	}
	want := []string{
		"note kernel",
		"change chain KUBE-SERVICES of iptables-nft in table ip nat",
		"change nftables table inet kpng-old",
		"change chain FORWARD in table ip filter",
		"change chain drops in table inet fw",
		"change chain FORWARD of iptables-legacy in table ip mangle",
		"change chain FORWARD of iptables-legacy in table ip6 filter",
		"note rules of Calico",
		"change sysctl net.ipv4.ip_forward",
		"note traffic from pods",
		"note bindAddressHardFail=false",
		"change unused addresses",
		"change default/other",
		"change default/ranges",
		"change default/thief",
		"note manifests " + filepath.Join(dir, "services.yaml"),
	}
	if !slices.Equal(got, want) {
		t.Errorf("found\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if after := n.Run(t, "nft", "list", "ruleset"); after != before {
		t.Errorf("the check changed the rules to\n%s", after)
	}
}

// findings returns the findings of kpng check about one part: kube-proxy's file, the
// services or the node. Each has the form LEVEL SUBJECT: TEXT.
func findings(t *testing.T, part string, args ...string) (string, error) {
	t.Helper()
	out, err := execute(t.Context(), append([]string{"check", "-o", "json"}, args...)...)
	var report []checked
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	var b strings.Builder
	for _, c := range report {
		for _, f := range c.Findings {
			if c.What == part {
				fmt.Fprintf(&b, "%s %s: %s\n", f.Level, f.Subject, f.Text)
			}
		}
	}
	return b.String(), err
}

// withoutServer makes the API server unknown.
func withoutServer(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("KUBECONFIG", "")
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
}

// A node without a known API server is no problem of the backend: only the services are
// not checked.
func TestCheckWithoutAPIServer(t *testing.T) {
	netnstest.NeedRoot(t)
	withoutServer(t)
	got, err := findings(t, "Services", "nftables")
	if err != nil || !strings.HasPrefix(got, "note services are not checked: no API server known") || strings.Count(got, "\n") != 1 {
		t.Errorf("error %v after %s", err, got)
	}
	out, err := execute(t.Context(), "check", "nftables")
	if err != nil || !strings.HasSuffix(out, " 0 problems; services are not checked\n") {
		t.Errorf("error %v after\n%s", err, out)
	}
	if got, err := findings(t, "Services", "nftables", "--kubeconfig", "/does/not/exist"); err == nil || !strings.HasPrefix(got, "problem ") {
		t.Errorf("error %v after %s of a source that the user named", err, got)
	}
}

// The check reads the API server that kpng with the same file would read.
func TestCheckReadsTheServerOfTheFile(t *testing.T) {
	netnstest.NeedRoot(t)
	withoutServer(t)
	cluster := kubetest.New()
	cluster.Set(&corev1.Service{ObjectMeta: kubetest.Meta("default", "web"), Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1", Ports: []corev1.ServicePort{{Port: 80}}}})
	file, reachable := filepath.Join(t.TempDir(), "config"), kubeconfigOf(t, cluster)
	for _, kubeconfig := range []string{reachable, "/does/not/exist"} {
		if err := os.WriteFile(file, []byte(header+"clientConnection: {kubeconfig: "+kubeconfig+"}"), 0o600); err != nil {
			t.Fatal(err)
		}
		want := "note API server of " + kubeconfig + ": 1 service; "
		if kubeconfig == "/does/not/exist" {
			want = "note services are not checked: read kubeconfig " + kubeconfig
		}
		got, err := findings(t, "Services", "nftables", "--config", file)
		if err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("error %v after %s, want %s", err, got, want)
		}
	}
}

func TestCheckSaysWhatModesDrop(t *testing.T) {
	netnstest.NeedRoot(t)
	const (
		drops    = "kube-proxy drops forwarded packets that belong to no connection; "
		accepts  = "kube-proxy accepts forwarded packets that belong to no connection; the backend iptables drops them"
		forwards = "kube-proxy accepts forwarded packets that it masquerades, before a DROP in the chain FORWARD; kpng accepts none; of the node's firewall, only policies are checked"
		services = "kube-proxy drops packets to addresses of ServiceCIDR objects that no service has; "
	)
	manifests := filepath.Join(t.TempDir(), "services.yaml")
	if err := os.WriteFile(manifests, []byte(checkedServices), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		backend, config string
		want            []string
	}{
		"the default mode":                {"nftables", "", []string{drops + "the backend nftables does so only with --drop-invalid", forwards}},
		"mode iptables":                   {"ebpf", "mode: iptables", []string{drops + "the backend ebpf does so only with --drop-invalid", forwards}},
		"a backend that never drops":      {"ipvs", "", []string{drops + "the backend ipvs does not", forwards}},
		"the same mode":                   {"iptables", "", []string{forwards}},
		"a liberal kube-proxy":            {"nftables", "conntrack: {tcpBeLiberal: true}", []string{forwards}},
		"a liberal iptables":              {"iptables", "conntrack: {tcpBeLiberal: true}", []string{forwards}},
		"kube-proxy drops the same":       {"nftables --drop-invalid", "", []string{forwards}},
		"from ipvs to iptables":           {"iptables", "mode: ipvs", []string{accepts, forwards}},
		"from nftables to iptables":       {"iptables", "mode: nftables", []string{accepts, services + "the backend iptables does not"}},
		"from ipvs to a liberal iptables": {"iptables", "mode: ipvs\nconntrack: {tcpBeLiberal: true}", []string{forwards}},
		"mode nftables":                   {"nftables", "mode: nftables", []string{services + "the backend nftables does so only with --service-cidr"}},
		"service CIDRs are given":         {"nftables --service-cidr=10.0.0.0/16", "mode: nftables", nil},
		"a backend without service CIDRs": {"ipvs", "mode: nftables", []string{services + "the backend ipvs does not"}},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "config")
			if err := os.WriteFile(file, []byte(header+test.config), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := findings(t, "Configuration of kube-proxy", append(strings.Fields(test.backend), "-i", manifests, "--config", file)...)
			if err != nil {
				t.Fatal(err)
			}
			var relevant []string
			subjects := map[string]bool{}
			for line := range strings.Lines(got) {
				subject, text, _ := strings.Cut(strings.TrimSpace(line), ": ")
				if subjects[subject] {
					t.Errorf("several findings have the subject %s", subject)
				}
				subjects[subject] = true
				if text == forwards && subject != "note masqueraded packets" {
					t.Errorf("the subject of %q is %q", text, subject)
				}
				if strings.HasPrefix(text, drops) || text == accepts || text == forwards || strings.HasPrefix(text, services) {
					relevant = append(relevant, text)
				}
			}
			if !slices.Equal(relevant, test.want) {
				t.Errorf("found %q, want %q, in\n%s", relevant, test.want, got)
			}
		})
	}
}

// An error in one field does not keep the check from comparing the others.
func TestCheckComparesFieldsBesideWrongOnes(t *testing.T) {
	netnstest.NeedRoot(t)
	withoutServer(t)
	file := filepath.Join(t.TempDir(), "config")
	config := "mode: ipvs\nfeatureGates: {Removed: true}\nhealthzBindAddress: x\nipvs: {scheduler: lc, strictARP: true, minSyncPeriod: 1s}\nnodePortAddresses: [10.0.0.0/8]"
	if err := os.WriteFile(file, []byte(header+config), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := findings(t, "Configuration of kube-proxy", "nftables", "--config", file)
	if err == nil {
		t.Error("no error")
	}
	for _, want := range []string{
		"problem " + file + ": featureGates: kube-proxy v1.37 has no feature gate Removed",
		"problem " + file + ": healthzBindAddress: ",
		"change ipvs.scheduler=lc: the backend nftables chooses endpoints at random",
		"change ipvs.strictARP=true: kpng changes the kernel's ARP settings only with the backend ipvs",
		"note ipvs.minSyncPeriod=1s: ",
		"change nodePortAddresses=10.0.0.0/8: kube-proxy serves node ports at all IPv6 addresses of the node",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in\n%s", want, got)
		}
	}
	if n := strings.Count(got, "problem "); n != 2 {
		t.Errorf("%d problems in\n%s", n, got)
	}
}

// kpng may listen where the chart's probes do not find it.
func TestCheckNamesHealthAddressesThatTheChartDoesNotProbe(t *testing.T) {
	netnstest.NeedRoot(t)
	withoutServer(t)
	file := filepath.Join(t.TempDir(), "config")
	for config, want := range map[string]bool{
		"":                                    false,
		"healthzBindAddress: 0.0.0.0":         false,
		"healthzBindAddress: 127.0.0.1:10256": false,
		"healthzBindAddress: '[::]:10256'":    false,
		"healthzBindAddress: 0.0.0.0:10300":   true,
		"healthzBindAddress: 192.0.2.1":       true,
		"healthzBindAddress: ::1":             true,
	} {
		if err := os.WriteFile(file, []byte(header+config), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := findings(t, "Configuration of kube-proxy", "nftables", "--config", file)
		if err != nil || strings.Contains(got, "note healthzBindAddress=") != want {
			t.Errorf("error %v with %q after\n%s", err, config, got)
		}
	}
}

// Without flags about pods, the check says so, unless kube-proxy does not know pods either.
func TestCheckSaysThatPodsAreUnknown(t *testing.T) {
	netnstest.NeedRoot(t)
	withoutServer(t)
	file := filepath.Join(t.TempDir(), "config")
	for _, test := range []struct{ config, args, want string }{
		{"", "nftables", "change traffic from pods"},
		{"", "ipvs", "change traffic from pods"},
		{"", "nftables --pod-interfaces=cni0", ""},
		{"mode: nftables", "nftables --config=" + file, "note traffic from pods"},
		{"clusterCIDR: 10.0.0.0/8", "nftables --config=" + file, ""},
		{"detectLocalMode: NodeCIDR", "ebpf --config=" + file, ""},
		{"detectLocalMode: NodeCIDR", "ipvs --config=" + file, "note traffic from pods"},
	} {
		if err := os.WriteFile(file, []byte(header+test.config), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := findings(t, "This node", strings.Fields(test.args)...)
		if err != nil {
			t.Error(err)
		}
		if found := strings.Contains(got, "traffic from pods"); found != (test.want != "") || !strings.Contains(got, test.want) {
			t.Errorf("check %s with %q prints\n%s", test.args, test.config, got)
		}
	}
}

func TestCheckFailsIfKpngWouldNotWork(t *testing.T) {
	out, err := execute(t.Context(), "check", "nftables", "-i", "/does/not/exist")
	if err == nil || !strings.Contains(out, "problem") || !strings.Contains(out, "/does/not/exist") {
		t.Errorf("error %v after\n%s", err, out)
	}
}
