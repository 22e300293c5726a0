// SPDX-License-Identifier: Apache-2.0

// Package kpdiff compares the decisions of kpng and kube-proxy for random clusters, and for
// random and fixed histories of a cluster. It calls kube-proxy's packages. For clusters, it
// calls kpng's packages watcher and nodeview; for histories, it runs a whole kpng. A decision
// may differ only if docs/reference/semantics.md declares the difference.
//
// Cilium's pkg/loadbalancer is no third voice, although it can be imported (578 packages
// without cgo): its Go code has no verdicts such as drop and reject, because its BPF
// programs decide them.
package kpdiff

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

var clusters = flag.Int("clusters", 10_000, "the number of random clusters to compare; fewer than 5,000 may not show all declared differences")

// decided contains a proxy's decisions about the service of a cluster.
type decided struct {
	// frontends maps each frontend to a description of what happens to its traffic.
	frontends map[string]string
	// health maps an IP family to the number of endpoints that health checks report. It has
	// no entry if the service has no health checks.
	health map[string]int
}

// The differences that docs/reference/semantics.md declares as intended.
const (
	// otherFamily is the difference for an IPv4 frontend with only IPv6 source ranges, or
	// the reverse. In both cases kpng admits no client, and kube-proxy admits all clients.
	otherFamily = "source ranges of the other family only"
	// otherPorts is the difference for an endpoint that has no port of the service. For
	// health checks, kube-proxy counts this endpoint, and kpng does not.
	otherPorts = "health checks of endpoints that serve no port of the service"
)

func TestOnlyDeclaredDifferences(t *testing.T) {
	discardLogs()
	declared := map[string]int{}
	verdicts := map[string]int{}
	for i := range *clusters {
		c := newCluster(rand.New(rand.NewPCG(uint64(i), 7)))
		compare(kubeProxyOf(c), kpngOf(t, c), c.hasOtherPorts(), verdicts, declared, func(format string, args ...any) {
			t.Errorf("cluster %d: %s", i, fmt.Sprintf(format, args...))
		})
		if t.Failed() {
			t.Fatalf("cluster %d:\n%s", i, c)
		}
	}
	t.Logf("%d clusters: frontends by verdict %v, declared differences %v", *clusters, verdicts, declared)
	// The test proves little unless every verdict and every declared difference occurs.
	for _, verdict := range []string{"to", "drop", "reject"} {
		if verdicts[verdict] == 0 {
			t.Errorf("no frontend has the verdict %q", verdict)
		}
	}
	for _, difference := range []string{otherFamily, otherPorts} {
		if declared[difference] == 0 {
			t.Errorf("no cluster shows the declared difference: %s", difference)
		}
	}
}

// compare calls report for each difference that docs/reference/semantics.md does not declare. It
// counts verdicts and declared differences.
func compare(kubeProxy, kpng decided, otherPort bool, verdicts, declared map[string]int, report func(format string, args ...any)) {
	for _, at := range keysOf(kubeProxy.frontends, kpng.frontends) {
		want, got := kubeProxy.frontends[at], kpng.frontends[at]
		verdict, _, _ := strings.Cut(want, " ")
		verdicts[verdict]++
		switch {
		case want == got:
		case got == want+noSource:
			declared[otherFamily]++
		default:
			report("%s: kube-proxy %q, kpng %q", at, want, got)
		}
	}
	for _, family := range keysOf(kubeProxy.health, kpng.health) {
		want, checked := kubeProxy.health[family]
		got, checks := kpng.health[family]
		switch {
		case want == got && checked == checks:
		case checked && checks && want > got && otherPort:
			declared[otherPorts]++
		default:
			report("health checks in %s: kube-proxy %d (%t), kpng %d (%t)", family, want, checked, got, checks)
		}
	}
}

// keysOf returns the sorted keys of both maps.
func keysOf[T any](a, b map[string]T) []string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return slices.Sorted(maps.Keys(all))
}

// noSource ends the description of a frontend that admits no client: no source range
// follows.
const noSource = " from"

// externally returns the description of an external frontend. The arguments elsewhere and
// node describe what happens to traffic from elsewhere and from this node.
func externally(elsewhere, node string, affinity int, local bool, sources []string) string {
	masquerade := "all"
	if local {
		masquerade = "node"
	}
	text := fmt.Sprintf("%s | node %s%s masquerade %s", elsewhere, node, stickiness(affinity), masquerade)
	if sources != nil {
		slices.Sort(sources)
		text += strings.TrimRight(noSource+" "+strings.Join(sources, " "), " ")
	}
	return text
}

func stickiness(affinity int) string { return fmt.Sprintf(" affinity %d", affinity) }

func forwarded(endpoints []string) string {
	slices.Sort(endpoints)
	return "to " + strings.Join(endpoints, " ")
}

func frontendAt(address string, protocol corev1.Protocol, port int) string {
	return fmt.Sprintf("%s/%s/%d", address, protocol, port)
}

func nodeFrontendAt(family corev1.IPFamily, protocol corev1.Protocol, port int) string {
	return frontendAt("node"+string(family), protocol, port)
}
