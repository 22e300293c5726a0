// SPDX-License-Identifier: Apache-2.0

package together

import (
	"context"
	"errors"
	"testing"
)

func TestRun(t *testing.T) {
	errA, errB, errEnd := errors.New("a"), errors.New("b"), errors.New("end")
	returns := func(err error) func(context.Context) error { return func(context.Context) error { return err } }
	waits := func(besides error) func(context.Context) error {
		return func(ctx context.Context) error {
			<-ctx.Done()
			return errors.Join(context.Cause(ctx), besides)
		}
	}
	onlyCause := func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	for _, test := range []struct {
		name      string
		ended     bool // the context passed to Run has ended with errEnd
		functions []func(context.Context) error
		want      string // "" means no error
	}{
		{"all are done", false, []func(context.Context) error{returns(nil), returns(nil)}, ""},
		{"the first error ends the other functions", false, []func(context.Context) error{returns(errA), onlyCause}, "a"},
		{"no error is lost", false, []func(context.Context) error{returns(errA), waits(errB)}, "a\nb"},
		{"the context ends all functions", true, []func(context.Context) error{onlyCause, onlyCause}, "end"},
		{"an error in addition to the end of the context", true, []func(context.Context) error{waits(errB), onlyCause}, "b"},
		{"all functions return nil after the end of the context", true, []func(context.Context) error{returns(nil)}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			if test.ended {
				cancel(errEnd)
			}
			got := ""
			if err := Run(ctx, test.functions...); err != nil {
				got = err.Error()
			}
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
