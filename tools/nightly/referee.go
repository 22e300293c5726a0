// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// refereeProxies has the proxies of docs/reference/referee.md. Those that need IPVS run
// in QEMU.
var refereeProxies = []string{
	"kpng-nftables", "kpng-iptables", "kpng-ipvs", "kpng-ebpf", "kpng-userspace",
	"kube-proxy-1.37-nftables", "kube-proxy-1.37-iptables", "kube-proxy-1.37-ipvs",
	"kube-proxy-1.36-nftables", "kube-proxy-1.36-iptables", "kube-proxy-1.36-ipvs",
	"kube-proxy-1.35-nftables", "kube-proxy-1.35-iptables", "kube-proxy-1.35-ipvs",
	"kube-proxy-1.34-nftables", "kube-proxy-1.34-iptables", "kube-proxy-1.34-ipvs",
}

// refereeParts returns a part for each proxy. They are long, because the programs of other
// versions must be built, and because the results change only with new versions.
func refereeParts() []part {
	var parts []part
	for _, proxy := range refereeProxies {
		// The module of test has the newest version.
		name := strings.Replace(proxy, "kube-proxy-1.37-", "kube-proxy-", 1)
		run := fmt.Sprintf("go run . -json -patience 3m %s", name)
		if strings.HasSuffix(proxy, "-ipvs") {
			program := "kube-proxy"
			old := ""
			if words := strings.Split(name, "-"); len(words) == 4 {
				program += "-" + words[2]
				old = fmt.Sprintf("-modfile=../internal/gotool/kubernetes-%s.mod ", words[2])
			}
			run = fmt.Sprintf(`export CGO_ENABLED=0
go build -o "$programs/" ../kernel go.etcd.io/etcd/server/v3 k8s.io/kubernetes/cmd/kube-apiserver .
go build -C ../.. -o "$programs/kpng" ./cmd/kpng
go build %s-o "$programs/%s" k8s.io/kubernetes/cmd/kube-proxy
KPNG_TEST_PROGRAMS=$programs "$programs/kernel" -memory 4000 -silence 5m "$programs/referee" -json -patience 3m -kpng "$programs/kpng" %s`, old, program, name)
		}
		parts = append(parts, part{
			Name: "referee-" + proxy, About: "the [referee](../reference/referee.md) with " + proxy, Limit: 2 * time.Hour, Long: true,
			Command: fmt.Sprintf(`mkdir -p results/referee
programs=$(mktemp -d)
trap 'rm -r "$programs"' EXIT
cd test/referee
(%s) | tee "$programs/output" || true # a case failed
grep '^{"proxy"' "$programs/output" >"$programs/result"
mv "$programs/result" ../../results/referee/%s.json`, run, proxy),
		})
	}
	return parts
}

// verdict is the result for a proxy, made by test/referee.
type verdict struct {
	Date        time.Time
	Seconds     float64
	Kernel      string
	OK          int
	NotCompared int
	Failed      []struct{ Section, Case, Family, Reason string }
}

// rules has the rule in docs/reference/semantics.md for each section of the conformance
// kit.
var rules = map[string]string{
	"Cluster IPs": "frontends", "Ports": "frontends", "Dual stack": "services", "External addresses": "frontends",
	"Source ranges": "source-ranges", "Endpoints": "which-endpoints", "Topology": "topology", "Traffic policies": "which-traffic-uses-which-list",
	"Source addresses": "source-address", "Session affinity": "session-affinity", "Existing connections": "existing-connections", "Health checks": "health-checks",
}

// issues maps cases that kube-proxy fails to issues or pull requests of Kubernetes. The
// field modes has the modes that an issue is about.
var issues = []struct {
	name, modes string
	number      int
}{
	{"traffic to a deleted service passes unchanged", "nftables", 122692},
	{"traffic to a service of another proxy passes unchanged", "nftables", 122692},
	{"a service that becomes dual-stack is served in both families", "nftables", 122692},
	{"a UDP flow that bypassed a service moves to its first endpoint", "nftables", 122692},
	{"when the proxy is killed while it programs many services and then restarted, no connection fails", "nftables", 122692},
	{"a restarted proxy applies the changes that it missed", "nftables", 122692},
	{"a UDP flow through a deleted service no longer reaches its endpoints", "nftables iptables ipvs", 141371},
	{"source ranges apply to clients on this node", "ipvs", 119656},
	{"a cluster IP refuses connections to ports that its service does not have", "ipvs", 72236},
}

// refereePage compares the proxies.
func refereePage(store store) (string, error) {
	verdicts := map[string]verdict{}
	for _, proxy := range refereeProxies {
		text, err := os.ReadFile(filepath.Join(store.dir, "referee", proxy+".json"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var v verdict
		if err == nil {
			err = json.Unmarshal(text, &v)
		}
		if err != nil {
			return "", fmt.Errorf("verdict for %s: %w", proxy, err)
		}
		verdicts[proxy] = v
	}
	var page strings.Builder
	page.WriteString("| proxy | ok | failed | not compared | kernel | date | time |\n|---|---|---|---|---|---|---|\n")
	type cell struct{ section, name string }
	failures := map[cell]map[string]string{}
	for _, proxy := range refereeProxies {
		v, ok := verdicts[proxy]
		if !ok {
			fmt.Fprintf(&page, "| %s | not run | | | | | |\n", proxy)
			continue
		}
		fmt.Fprintf(&page, "| %s | %d | %d | %d | %s | %s | %s |\n", proxy, v.OK, len(v.Failed), v.NotCompared, v.Kernel, v.Date.Format(time.DateOnly), duration(v.Seconds))
		for _, f := range v.Failed {
			c := cell{f.Section, f.Case}
			if failures[c] == nil {
				failures[c] = map[string]string{}
			}
			failures[c][proxy] = strings.TrimPrefix(failures[c][proxy]+" and "+cmp.Or(f.Family, "both families"), " and ")
		}
	}
	if len(failures) == 0 {
		return page.String(), nil
	}
	page.WriteString("\nCases that a proxy failed:\n\n| case and its rule | proxies that fail |\n|---|---|\n")
	cells := make([]cell, 0, len(failures))
	for c := range failures {
		cells = append(cells, c)
	}
	slices.SortFunc(cells, func(a, b cell) int {
		return cmp.Or(cmp.Compare(a.section, b.section), cmp.Compare(a.name, b.name))
	})
	for _, c := range cells {
		link := "cases.md"
		if rule, ok := rules[c.section]; ok {
			link = "semantics.md#" + rule
		}
		fmt.Fprintf(&page, "| %s ([%s](%s)) |", c.name, c.section, link)
		for _, proxy := range refereeProxies {
			families, ok := failures[c][proxy]
			if !ok {
				continue
			}
			fmt.Fprintf(&page, " ❌ %s, %s", proxy, families)
			for _, issue := range issues {
				mode := proxy[strings.LastIndex(proxy, "-")+1:]
				if issue.name == c.name && strings.HasPrefix(proxy, "kube-proxy-") && slices.Contains(strings.Fields(issue.modes), mode) {
					fmt.Fprintf(&page, " ([kubernetes#%d](https://github.com/kubernetes/kubernetes/issues/%[1]d))", issue.number)
				}
			}
			page.WriteString(";")
		}
		page.WriteString(" |\n")
	}
	return page.String(), nil
}
