// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/kpng-project/kpng/sink"
)

// A sink's error may name each frontend of a large service.
func TestErrorsAreBrief(t *testing.T) {
	cause := errors.New("cause")
	errs := []error{cause}
	for i := range 50_000 {
		errs = append(errs, fmt.Errorf("frontend %d fails", i))
	}
	long := errors.Join(errs...)
	check := func(t *testing.T, err error) {
		t.Helper()
		if !errors.Is(err, cause) {
			t.Error("the error does not wrap the sink's error")
		}
		if text := fmt.Sprint(err); len(text) > 5000 || !strings.HasPrefix(text, "cause\nfrontend 0 fails") || !strings.HasSuffix(text, " more bytes)") {
			t.Errorf("the error has %d bytes and begins with %.100q", len(text), text)
		}
	}
	for name, result := range map[string]error{"of a service": &sink.Failed{web: long}, "of a Sync": long} {
		t.Run(name, func(t *testing.T) {
			s := sink.Func(func(context.Context, *sink.Changes) error { return result })
			run(t, sink.Options{}, s, func(w *world) {
				w.src.MarkSynced()
				synctest.Wait()
				status := w.driver.Status()
				if err := status.Err; err != nil {
					check(t, err)
				} else {
					check(t, status.Failing[0].Err)
				}
			})
		})
	}
}
