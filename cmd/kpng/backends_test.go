// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// traces is a sink whose method Cleanup records the value of the flag --table.
type traces struct {
	sink.Sink
	table   string
	cleaned []string
}

func (s *traces) Cleanup(context.Context) error {
	s.cleaned = append(s.cleaned, s.table)
	return nil
}

func TestCleanupUsesFlagsOfBackend(t *testing.T) {
	var s traces
	traces := func() *cobra.Command {
		return cleanup(&command.Backend{
			Name:  "traces",
			Flags: func(fs *pflag.FlagSet) { fs.StringVar(&s.table, "table", "kpng", "the `name` of the table") },
			Make: func(command.Run) (command.Parts, error) {
				if s.table == "" {
					return command.Parts{}, errors.New("--table is empty")
				}
				return command.Parts{Sink: &s}, nil
			},
		})
	}
	cmd := traces()
	cmd.SetArgs([]string{"--table=mine"})
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(s.cleaned) != 1 || s.cleaned[0] != "mine" {
		t.Errorf("cleaned up %q, want the table mine", s.cleaned)
	}
	cmd = traces()
	cmd.SetArgs([]string{"--table="})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cmd.ExecuteContext(t.Context()); err == nil {
		t.Error("no error from a backend that cannot be created")
	}
}

func TestInitOnlyDoesNotRunTheBackend(t *testing.T) {
	for args, want := range map[string]string{"": "configured, run", "--init-only": "configured, initialised", "--init-only --wrong": "configured"} {
		var done []string
		wrong := false
		b := &command.Backend{
			Flags: func(fs *pflag.FlagSet) { fs.BoolVar(&wrong, "wrong", false, "") },
			Make: func(command.Run) (parts command.Parts, err error) {
				done = append(done, "configured")
				if wrong {
					err = errors.New("--wrong is set")
				}
				return parts, err
			},
			Init: func(context.Context) error { done = append(done, "initialised"); return nil },
		}
		cmd := &cobra.Command{SilenceErrors: true, SilenceUsage: true, RunE: func(*cobra.Command, []string) error {
			defer func() { done = append(done, "run") }()
			return b.Configure()
		}}
		b.Register(cmd.Flags())
		addInit(cmd, b)
		cmd.SetArgs(strings.Fields(args))
		if err := cmd.ExecuteContext(t.Context()); (err != nil) != wrong {
			t.Errorf("flags %q: error %v", args, err)
		}
		if got := strings.Join(done, ", "); got != want {
			t.Errorf("flags %q: %s, want %s", args, got, want)
		}
	}
}

func TestAllPortsFlagExistsIfSupported(t *testing.T) {
	has := map[string]bool{
		"file to-api": true, "file to-local json": true, "file to-file": true, "kube to-local json": true, "explain": true,
		"file to-local userspace": false, "api to-api": false, "api to-local json": false,
	}
	for command, want := range has {
		help := mustExecute(t, append(strings.Fields(command), "--help")...)
		for _, flag := range []string{"--all-ports ", "--all-ports-annotation "} {
			if strings.Contains(help, flag) != want {
				t.Errorf("kpng %s has the flag %s: %t, want %t", command, flag, !want, want)
			}
		}
	}
	_, err := execute(t.Context(), "file", "-i", explained, "to-local", "userspace", "--all-ports", "--once")
	if err == nil || !strings.Contains(err.Error(), "--all-ports") {
		t.Errorf("userspace with --all-ports: error %v", err)
	}
}

// A backend registers its flags in a flag set that already has the flags of the source,
// such as the proxy name. So the backend can read those flags too.
func TestBackendReadsFlagsOfItsSource(t *testing.T) {
	cmd, args, err := newRoot().Find([]string{"kube", "to-local", "userspace", "--service-proxy-name=other", "--kubeproxy-metrics"})
	if err != nil {
		t.Fatal(err)
	}
	registered := cmd.Flags() // the flag set that Register receives
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"service-proxy-name": "other", "kubeproxy-metrics": "true"} {
		if f := registered.Lookup(name); f == nil || f.Value.String() != want {
			t.Errorf("--%s is %v, want %s", name, f, want)
		}
	}
}
