// SPDX-License-Identifier: Apache-2.0

package diffstore

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWaitReturnsAtOnceForAChangeThatIsThere(t *testing.T) {
	s := newStrings()
	s.Set(0, "a", 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	mustEqual(t, "after 0", s.Wait(ctx, 0), nil)
	if err := s.Wait(ctx, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("after 1: got %v, want context.Canceled", err)
	}
}

func TestWaitersWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStrings()
		var waiters sync.WaitGroup
		woken := make(chan Revision, 1000)
		for i := range cap(woken) {
			after := Revision(i % 2)
			waiters.Go(func() {
				if err := s.Wait(t.Context(), after); err != nil {
					t.Error(err)
				}
				woken <- after
			})
		}
		synctest.Wait()
		mustEqual(t, "woken without a change", len(woken), 0)

		s.Set(0, "a", 1)
		synctest.Wait()
		mustEqual(t, "woken by revision 1", len(woken), 500)

		s.Set(0, "a", 1)
		s.Delete(0, "b")
		synctest.Wait()
		mustEqual(t, "woken by writes that change nothing", len(woken), 500)

		s.Delete(0, "a")
		waiters.Wait()
		mustEqual(t, "woken by revision 2", len(woken), 1000)
	})
}

func TestWaitEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		s := newStrings()
		done := make(chan error)
		go func() { done <- s.Wait(ctx, 0) }()
		synctest.Wait()
		cancel()
		err := <-done
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want context.Canceled", err)
		}
		mustEqual(t, "text", err.Error(), "waiting for a change after revision 0: context canceled")
	})
}
