// SPDX-License-Identifier: Apache-2.0

package program

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

// configured parses a command line for b and then calls b.Configure.
func configured(t *testing.T, s sink.Sink, args ...string) (*command.Backend, error) {
	t.Helper()
	b, _ := sink.As[*command.Backend](s)
	fs := pflag.NewFlagSet(b.Name, pflag.ContinueOnError)
	b.Register(fs)
	if err := fs.Parse(args); err != nil {
		return b, err
	}
	return b, b.Configure()
}

func mustConfigure(t *testing.T, s sink.Sink, args ...string) *command.Backend {
	t.Helper()
	b, err := configured(t, s, args...)
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

func verify(ctx context.Context, b *command.Backend) error {
	v, _ := sink.As[sink.Verifier](b)
	return v.Verify(ctx)
}

func TestReporterStartsAndStopsItsSink(t *testing.T) {
	var s fakeSink
	made := 0
	b := mustConfigure(t, withReports(&command.Backend{Make: func(command.Run) (command.Parts, error) {
		made++
		return command.Parts{Sink: &s}, nil
	}}, nil))
	ctx := t.Context()
	start, _ := sink.As[sink.Starter](b)
	stop, _ := sink.As[sink.Stopper](b)
	err := errors.Join(b.Configure(), start.Start(ctx), b.Sync(ctx, &sink.Changes{Services: slices.Values([]sink.Change{})}), verify(ctx, b), stop.Stop(ctx), b.Cleanup(ctx))
	if err != nil || made != 1 {
		t.Errorf("error %v, backend created %d times", err, made)
	}
	want := []string{"Start", "Sync", "Verify", "Stop", "Cleanup"}
	if diff := cmp.Diff(want, s.calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}
