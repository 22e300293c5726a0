// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/sink"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

var (
	_ sink.Stopper         = (*Backend)(nil)
	_ sink.Starter         = (*Backend)(nil)
	_ sink.Cleaner         = (*Backend)(nil)
	_ prometheus.Collector = (*Backend)(nil)
	_ app.Companion        = (*Backend)(nil)
	_ app.Configurable     = (*Backend)(nil)
	_ app.PortsOnly        = (*Backend)(nil)
)

// configured parses a command line for b and then calls b.Configure.
func configured(t *testing.T, b *Backend, args ...string) (*Backend, error) {
	t.Helper()
	fs := pflag.NewFlagSet(b.Name, pflag.ContinueOnError)
	b.Register(fs)
	if err := fs.Parse(args); err != nil {
		return b, err
	}
	return b, b.Configure()
}

func mustConfigure(t *testing.T, b *Backend, args ...string) *Backend {
	t.Helper()
	b, err := configured(t, b, args...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// fakeSink records the calls of its methods.
type fakeSink struct {
	calls []string
	err   error
}

func (s *fakeSink) note(call string) error {
	s.calls = append(s.calls, call)
	return s.err
}

func (s *fakeSink) Start(context.Context) error               { return s.note("Start") }
func (s *fakeSink) Sync(context.Context, *sink.Changes) error { return s.note("Sync") }
func (s *fakeSink) Verify(context.Context) error              { return s.note("Verify") }
func (s *fakeSink) Stop(context.Context) error                { return s.note("Stop") }
func (s *fakeSink) Cleanup(context.Context) error             { return s.note("Cleanup") }

func verify(ctx context.Context, b *Backend) error {
	v, _ := sink.As[sink.Verifier](b)
	return v.Verify(ctx)
}

func TestBackendRunsBetweenStartAndStop(t *testing.T) {
	var s fakeSink
	made := 0
	b := mustConfigure(t, &Backend{Make: func() (Parts, error) {
		made++
		return Parts{Sink: &s, Follow: func(context.Context) func() {
			s.note("follow")
			return func() { s.note("unfollow") }
		}}, nil
	}})
	ctx := t.Context()
	err := errors.Join(b.Configure(), b.Start(ctx), b.Sync(ctx, &sink.Changes{Services: slices.Values([]sink.Change{})}), verify(ctx, b), b.Stop(ctx), b.Cleanup(ctx))
	if err != nil || made != 1 {
		t.Errorf("error %v, backend created %d times", err, made)
	}
	want := []string{"Start", "follow", "Sync", "Verify", "unfollow", "Stop", "Cleanup"}
	if diff := cmp.Diff(want, s.calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func TestBackendThatFailsToStartDoesNotRun(t *testing.T) {
	s := fakeSink{err: errors.New("no")}
	b := mustConfigure(t, &Backend{Make: func() (Parts, error) {
		return Parts{Sink: &s, Follow: func(context.Context) func() { return func() { s.note("follow") } }}, nil
	}})
	if err := b.Start(t.Context()); err == nil || !slices.Equal(s.calls, []string{"Start"}) {
		t.Errorf("error %v, calls %q", err, s.calls)
	}
}
