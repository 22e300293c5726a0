// SPDX-License-Identifier: Apache-2.0

package statuspage_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/feed"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/internal/statuspage"
	"github.com/kpng-project/kpng/internal/updates"
	"github.com/kpng-project/kpng/sink"
	"k8s.io/apimachinery/pkg/types"
)

// updateOf returns the views of a node.
func updateOf(t *testing.T, state *cluster.State) *updates.Update {
	t.Helper()
	f := feed.New(state, here)
	defer f.Close()
	u, err := f.Next()
	if err != nil || u == nil {
		t.Fatalf("update %v, error %v", u, err)
	}
	return u
}

// crowded returns a handler with many services. Some of them fail in two sinks.
func crowded(services, failing int, name func(i int) string) *statuspage.Handler {
	state := cluster.New(cluster.Options{})
	var list []sink.FailingService
	state.Update(func(tx *cluster.Tx) {
		for i := range services {
			write(tx, "default", name(i), i, 10)
			if i < failing {
				key := types.NamespacedName{Namespace: "default", Name: name(i)}
				list = append(list, sink.FailingService{Key: key, Err: errors.New(strings.Repeat("no space left; ", 100)), Failures: 1})
			}
		}
	})
	state.SetSynced()
	return &statuspage.Handler{NodeName: here, State: state, Sinks: func() []sink.Status {
		return []sink.Status{{Name: "nftables", Passes: 1, Failing: list}, {Name: "health", Passes: 1, Failing: list}}
	}}
}

const maxPage = 1_000_000

func TestPageIsBelowOneMegabyte(t *testing.T) {
	long := func(i int) string { return fmt.Sprintf("%s-%05d", strings.Repeat("n", 57), i) } // 63 characters
	for _, failing := range []int{0, 10_000} {
		h := crowded(10_000, failing, long)
		if size := get(h).Body.Len(); size > maxPage {
			t.Errorf("with %d failing services, the page has %d bytes", failing, size)
		}
		if r := decode[report.Report](t, get(h, "output", "json")); r.Sinks[0].Failing != failing || len(r.Sinks[0].FailingServices) != min(failing, 1000) {
			t.Errorf("%d services fail, and %d are listed; want %d", r.Sinks[0].Failing, len(r.Sinks[0].FailingServices), failing)
		}
	}
}

// BenchmarkPage measures the page of a node with 10,000 services.
func BenchmarkPage(b *testing.B) {
	for _, failing := range []int{0, 10_000} {
		h := crowded(10_000, failing, func(i int) string { return fmt.Sprintf("service-%05d", i) })
		for _, output := range []string{"html", "json"} {
			b.Run(fmt.Sprintf("failing=%d/%s", failing, output), func(b *testing.B) {
				size := 0
				for b.Loop() {
					size = get(h, "output", output).Body.Len()
				}
				b.ReportMetric(float64(size), "bytes")
			})
		}
	}
}
