// SPDX-License-Identifier: Apache-2.0

// Package kpdiff holds the meaning of services against kube-proxy: random clusters go
// through the packages that kube-proxy decides with, and through watcher and nodeview.
// Only the differences that docs/semantics.md declares may show.
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

var clusters = flag.Int("clusters", 10_000, "how many random clusters are compared; with fewer than 5,000, declared differences may not show")

// decided is what a proxy does with a cluster's service on one node.
type decided struct {
	// frontends says what becomes of traffic at each place, in words.
	frontends map[string]string
	// health is what health checks of load balancers count, by family. A family
	// without health checks is not in it.
	health map[string]int
}

// A difference is declared if docs/semantics.md says that kpng means it.
const (
	// otherFamily: source ranges of the other family only admit nobody. kube-proxy
	// admits all.
	otherFamily = "source ranges of the other family only"
	// otherPorts: health checks count endpoints that serve a port of the service.
	// kube-proxy counts those of all ports of slices.
	otherPorts = "health checks of endpoints that serve no port of the service"
)

func TestOnlyDeclaredDifferences(t *testing.T) {
	// kube-proxy logs each slice and service that it does not like.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	declared := map[string]int{}
	verdicts := map[string]int{}
	for i := range *clusters {
		c := newCluster(rand.New(rand.NewPCG(uint64(i), 7)))
		want, got := kubeProxy(c), kpng(t, c)
		for _, place := range places(want.frontends, got.frontends) {
			want, got := want.frontends[place], got.frontends[place]
			verdict, _, _ := strings.Cut(want, " ")
			verdicts[verdict]++
			switch {
			case want == got:
			case got == want+fromNobody:
				declared[otherFamily]++
			default:
				t.Errorf("cluster %d: %s: kube-proxy %q, kpng %q", i, place, want, got)
			}
		}
		for _, family := range places(want.health, got.health) {
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
			t.Fatalf("cluster %d is\n%s", i, c)
		}
	}
	t.Logf("%d clusters: frontends by verdict %v, declared differences %v", *clusters, verdicts, declared)
	// The comparison is worth nothing where the clusters do not vary.
	for _, verdict := range []string{"to", "drop", "reject"} {
		if verdicts[verdict] == 0 {
			t.Errorf("no frontend has the verdict %q", verdict)
		}
	}
	for _, difference := range []string{otherFamily, otherPorts} {
		if declared[difference] == 0 {
			t.Errorf("the declared difference does not show: %s", difference)
		}
	}
}

// places returns the keys of both maps in order.
func places[T any](a, b map[string]T) []string {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return slices.Sorted(maps.Keys(all))
}

// fromNobody is what describe adds for a frontend that admits no source.
const fromNobody = " from"

// externally describes an external frontend.
func externally(elsewhere, node string, affinity int, local bool, sources []string) string {
	masquerade := "all"
	if local {
		masquerade = "node"
	}
	text := fmt.Sprintf("%s | node %s%s masquerade %s", elsewhere, node, stickiness(affinity), masquerade)
	if sources != nil {
		slices.Sort(sources)
		text += strings.TrimRight(fromNobody+" "+strings.Join(sources, " "), " ")
	}
	return text
}

func stickiness(affinity int) string { return fmt.Sprintf(" affinity %d", affinity) }

func forwarded(endpoints []string) string {
	slices.Sort(endpoints)
	return "to " + strings.Join(endpoints, " ")
}

func place(address string, protocol corev1.Protocol, port int) string {
	return fmt.Sprintf("%s/%s/%d", address, protocol, port)
}

func nodePlace(family corev1.IPFamily, protocol corev1.Protocol, port int) string {
	return place("node"+string(family), protocol, port)
}
