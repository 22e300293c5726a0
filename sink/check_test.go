// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/sink/sinktest"
)

// value is a sink that cannot be nil.
type value struct{}

func (value) Sync(context.Context, *sink.Changes) error { return nil }

func TestInvalidSettingsAreErrors(t *testing.T) {
	ok := sink.Func(func(context.Context, *sink.Changes) error { return nil })
	cases := []struct {
		name string
		sink sink.Sink
		opts sink.Options
		want string // a part of the error, or empty if there is no error
	}{
		{"the zero options are valid", ok, sink.Options{}, ""},
		{"a sink that is no pointer", value{}, sink.Options{}, ""},
		{"no sink", nil, sink.Options{Name: "nft"}, "sink nft is nil"},
		{"a nil pointer", (*hanging)(nil), sink.Options{}, "sink is a nil *sink_test.hanging"},
		{"a nil wrapper", (*wrapper)(nil), sink.Options{}, "sink is a nil *sink_test.wrapper"},
		{"a nil Func", sink.Func(nil), sink.Options{}, "sink is a nil sink.Func"},
		{"FullState of nil", sink.FullState(nil), sink.Options{}, "sink is a nil sink.Func"},
		{"FullStateOf nil", sink.FullStateOf(nil), sink.Options{}, "sink is a nil sink.Func"},
		{"FullStateOf a nil pointer", sink.FullStateOf((*rewriter)(nil)), sink.Options{}, "sink is a nil sink.Func"},
		{"Events of nil", sink.Events(nil), sink.Options{}, "sink is a nil sink.Func"},
		{"a negative minimum interval", ok, sink.Options{Name: "nft", MinInterval: -1}, "sink nft: option MinInterval is negative: -1ns"},
		{"a negative batch size", ok, sink.Options{BatchSize: -5}, "option BatchSize is negative: -5"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			d := sink.NewDriver(sinktest.NewSource(), tc.sink, tc.opts)
			for what, err := range map[string]error{"Validate": d.Validate(), "Run": d.Run(ctx)} {
				if tc.want == "" && err != nil && err != context.Canceled || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
					t.Errorf("%s: %v, want %q", what, err, tc.want)
				}
			}
		})
	}
	if err := sink.NewDriver(nil, ok, sink.Options{}).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "source is nil") {
		t.Errorf("without a source: %v", err)
	}
}

func TestSourceAndSinkHaveOneDriver(t *testing.T) {
	value := sink.Func(func(context.Context, *sink.Changes) error { return nil })
	full := &rewriter{stages: &stages{}}
	for _, tc := range []struct {
		name        string
		sink        func() sink.Sink
		sameSource  bool
		errContains string
	}{
		{"the same source", func() sink.Sink { return value }, true, "sink two: another driver (sink one) uses the same source *sinktest.Source"},
		{"the same sink", func() sink.Sink { return full.stages }, false, "uses the same sink *sink_test.stages"},
		{"the same sink in two wrappers", func() sink.Sink { return &wrapper{full.stages} }, false, "the same sink *sink_test.stages"},
		{"the same sink behind FullStateOf", func() sink.Sink { return sink.FullStateOf(full) }, false, "the same sink *sink_test.rewriter"},
		{"a function may be used twice", func() sink.Sink { return value }, false, ""},
		{"an empty value may be used twice", func() sink.Sink { return &nothing{} }, false, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				one, two := sinktest.NewSource(), sinktest.NewSource()
				if tc.sameSource {
					two = one
				}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				go func() { ended <- sink.Run(ctx, one, tc.sink(), sink.Options{Name: "one"}) }()
				synctest.Wait()
				second := func() error {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					return sink.Run(ctx, two, tc.sink(), sink.Options{Name: "two"})
				}
				err := second()
				if tc.errContains == "" && err != context.DeadlineExceeded || err == nil || !strings.Contains(err.Error(), tc.errContains) {
					t.Errorf("got %v, want %q", err, tc.errContains)
				}
				cancel()
				<-ended
				if err := second(); err != context.DeadlineExceeded {
					t.Errorf("after the end of the first driver: %v", err)
				}
			})
		})
	}
}

type nothing struct{}

func (*nothing) Sync(context.Context, *sink.Changes) error { return nil }
