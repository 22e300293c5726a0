// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/netnstest"
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
		"note rules of Calico",
		"change sysctl net.ipv4.ip_forward",
		"change bindAddressHardFail=false",
		"change default/headless",
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

func TestCheckFailsIfKpngWouldNotWork(t *testing.T) {
	out, err := execute(t.Context(), "check", "nftables", "-i", "/does/not/exist")
	if err == nil || !strings.Contains(out, "problem") || !strings.Contains(out, "/does/not/exist") {
		t.Errorf("error %v after\n%s", err, out)
	}
}
