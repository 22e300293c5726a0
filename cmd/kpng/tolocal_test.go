// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"testing"

	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
)

// traces is a sink that says what it is told to clean up.
type traces struct {
	sink.Sink
	table   string
	cleaned []string
}

func (s *traces) Cleanup(context.Context) error {
	s.cleaned = append(s.cleaned, s.table)
	return nil
}

func TestABackendCleansUpWhatItsFlagsSay(t *testing.T) {
	var s traces
	b := backend{"traces", "Leave traces", func(cmd *cobra.Command) func() (sink.Sink, error) {
		cmd.Flags().StringVar(&s.table, "table", "kpng", "the `name` of the table")
		return func() (sink.Sink, error) {
			if s.table == "" {
				return nil, errors.New("--table is empty")
			}
			return &s, nil
		}
	}}
	cmd := b.cleanup()
	cmd.SetArgs([]string{"--table=mine"})
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(s.cleaned) != 1 || s.cleaned[0] != "mine" {
		t.Errorf("cleaned up %q, want the table mine", s.cleaned)
	}
	cmd.SetArgs([]string{"--table="})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cmd.ExecuteContext(t.Context()); err == nil {
		t.Error("no error from a backend that cannot be made")
	}
}

func TestABackendThatLeavesNothingBehindHasNothingToCleanUp(t *testing.T) {
	mustExecute(t, "cleanup", "json")
}
