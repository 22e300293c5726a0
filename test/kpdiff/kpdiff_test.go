// SPDX-License-Identifier: Apache-2.0

// Package kpdiff compares the decisions of kpng and kube-proxy for random clusters. It
// calls kube-proxy's packages, and kpng's packages watcher and nodeview. A decision may
// differ only if docs/semantics.md declares the difference.
package kpdiff

import (
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
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

// The differences that docs/semantics.md declares as intended.
const (
	// otherFamily is the difference for an IPv4 frontend with only IPv6 source ranges, or
	// the reverse. In both cases kpng admits no client, and kube-proxy admits all clients.
	otherFamily = "source ranges of the other family only"
	// otherPorts is the difference for an endpoint that has no port of the service. For
	// health checks, kube-proxy counts this endpoint, and kpng does not.
	otherPorts = "health checks of endpoints that serve no port of the service"
)

func TestOnlyDeclaredDifferences(t *testing.T) {
	// Discard the log, in which kube-proxy reports each object that it rejects.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	declared := map[string]int{}
	verdicts := map[string]int{}
	for i := range *clusters {
		c := newCluster(rand.New(rand.NewPCG(uint64(i), 7)))
		want, got := kubeProxy(c), kpng(t, c)
		for _, at := range frontendsOf(want.frontends, got.frontends) {
			want, got := want.frontends[at], got.frontends[at]
			verdict, _, _ := strings.Cut(want, " ")
			verdicts[verdict]++
			switch {
			case want == got:
			case got == want+noSource:
				declared[otherFamily]++
			default:
				t.Errorf("cluster %d: %s: kube-proxy %q, kpng %q", i, at, want, got)
			}
		}
		for _, family := range frontendsOf(want.health, got.health) {
			want, checked := want.health[family]
			got, checks := got.health[family]
			switch {
			case want == got && checked == checks:
			case checked && checks && want > got && c.hasOtherPorts():
				declared[otherPorts]++
			default:
				t.Errorf("cluster %d: health checks in %s: kube-proxy %d (%t), kpng %d (%t)", i, family, want, checked, got, checks)
			}
		}
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

// frontendsOf returns the keys that occur in a or b, sorted.
func frontendsOf[T any](a, b map[string]T) []string {
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
