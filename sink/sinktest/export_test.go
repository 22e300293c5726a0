// SPDX-License-Identifier: Apache-2.0

package sinktest

import (
	"runtime"
	"testing"
)

// FailedHistories returns how many of n histories fail.
func FailedHistories(t *testing.T, n uint64, newSubject func(testing.TB) *Subject) int {
	failed := 0
	for seed := range n {
		tb := &failingTB{TB: t}
		done := make(chan struct{})
		go func() {
			defer close(done)
			newHistory(tb, seed, newSubject).run()
		}()
		<-done
		if tb.failed {
			failed++
		}
	}
	return failed
}

// failingTB records a failure in place of failing the test.
type failingTB struct {
	testing.TB
	failed bool
}

func (t *failingTB) Helper()               {}
func (t *failingTB) Cleanup(func())        {}
func (t *failingTB) Errorf(string, ...any) { t.failed = true }
func (t *failingTB) Fatalf(string, ...any) { t.failed = true; runtime.Goexit() }
