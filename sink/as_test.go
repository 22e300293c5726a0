// SPDX-License-Identifier: Apache-2.0

package sink_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/sink"
)

// wrapper wraps a sink and changes none of its methods.
type wrapper struct{ sink.Sink }

func (w *wrapper) Unwrap() sink.Sink { return w.Sink }

// startWrapper is a wrapper with its own Start.
type startWrapper struct {
	wrapper
	log *[]string
}

func (s *startWrapper) Start(ctx context.Context) error {
	*s.log = append(*s.log, "before")
	inner, _ := sink.As[sink.Starter](s.Sink)
	return inner.Start(ctx)
}

// capable implements all optional interfaces, as a sink, a StateSink or a Handler.
type capable struct {
	stages
	rewriter
	eventLog
}

func (c *capable) Start(ctx context.Context) error                 { return c.stages.Start(ctx) }
func (c *capable) Stop(ctx context.Context) error                  { return c.stages.Stop(ctx) }
func (c *capable) StopTimeout() time.Duration                      { return time.Hour }
func (c *capable) Verify(context.Context) error                    { return errBusy }
func (c *capable) VerifyInterval() time.Duration                   { return time.Second }
func (c *capable) Cleanup(context.Context) error                   { return errBusy }
func (c *capable) Sync(ctx context.Context, s *sink.Changes) error { return c.stages.Sync(ctx, s) }

// capabilities returns the names of the optional interfaces of a sink.
func capabilities(s sink.Sink) (names []string) {
	add := func(name string, has bool) {
		if has {
			names = append(names, name)
		}
	}
	_, starts := sink.As[sink.Starter](s)
	_, stops := sink.As[sink.Stopper](s)
	_, verifies := sink.As[sink.Verifier](s)
	_, cleans := sink.As[sink.Cleaner](s)
	add("Starter", starts)
	add("Stopper", stops)
	add("Verifier", verifies)
	add("Cleaner", cleans)
	return names
}

func TestCapabilitiesSurviveWrapping(t *testing.T) {
	all := []string{"Starter", "Stopper", "Verifier", "Cleaner"}
	twice := func(s sink.Sink) sink.Sink { return &wrapper{&wrapper{s}} }
	for _, tc := range []struct {
		name string
		sink sink.Sink
		want []string
	}{
		{"a sink", &capable{}, all},
		{"FullStateOf", sink.FullStateOf(&capable{}), all},
		{"Events", sink.Events(&capable{}), all},
		{"two wrappers", twice(&capable{}), all},
		{"two wrappers of FullStateOf", twice(sink.FullStateOf(&capable{})), all},
		{"two wrappers of Events", twice(sink.Events(&capable{})), all},
		{"a function in two wrappers", twice(sink.Func(nil)), nil},
		{"a function for FullState", sink.FullState(func(context.Context, []*api.View) error { return nil }), nil},
		{"a plain handler", sink.Events(&eventLog{}), nil},
		{"a wrapper of nil", twice(nil), nil},
		{"nil", nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := capabilities(tc.sink); !slices.Equal(got, tc.want) {
				t.Errorf("capabilities %q, want %q", got, tc.want)
			}
		})
	}
}

func TestDriverUsesMethodsOfWrappedSink(t *testing.T) {
	inner := &capable{}
	outer := &wrapper{&startWrapper{wrapper{sink.FullStateOf(inner)}, &inner.stages.log}}
	run(t, sink.Options{}, outer, func(w *world) {
		w.src.MarkSynced()
		w.waitApplied()
		w.cancel()
		<-w.ended
	})
	if want := []string{"before", "start", "stop"}; !slices.Equal(inner.stages.log, want) || inner.deadlineOfStop != time.Hour {
		t.Errorf("calls %q, want %q; time limit of Stop %v, want 1h", inner.stages.log, want, inner.deadlineOfStop)
	}
}
