// SPDX-License-Identifier: Apache-2.0

//go:build linux

package backendtest

import (
	"slices"
	"testing"
	"time"
)

// Case is one of the things that [Compare] compares.
type Case struct {
	Name string
	// Batch repeats an action, and calls the function took with the duration of each
	// repetition.
	Batch func(took func(time.Duration)) error
}

// Compare runs the batches of the cases in turn, so that other load on the machine affects
// all cases equally. It reports the median time of each case, and the ratio to that of the
// first case.
func Compare(b *testing.B, cases ...Case) {
	b.Helper()
	took := make([][]time.Duration, len(cases))
	for b.Loop() {
		for i, c := range cases {
			if err := c.Batch(func(d time.Duration) { took[i] = append(took[i], d) }); err != nil {
				b.Fatalf("%s: %v", c.Name, err)
			}
		}
	}
	var first float64
	for i, c := range cases {
		slices.Sort(took[i])
		median := float64(took[i][len(took[i])/2].Nanoseconds())
		b.ReportMetric(median/1000, "µs/"+c.Name)
		if i == 0 {
			first = median
		} else {
			b.ReportMetric(median/first, c.Name+"/"+cases[0].Name)
		}
	}
	b.ReportMetric(0, "ns/op") // the time of all batches
}
