// SPDX-License-Identifier: Apache-2.0

package app_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
)

// pair is a sink with a companion, a sink that runs beside it.
type pair struct {
	services, companions atomic.Int32
	healthy              func() bool
	early                bool // at the start of a Sync, the function healthy already returned true
}

func count(n *atomic.Int32) sink.Func {
	return func(_ context.Context, c *sink.Changes) error {
		for range c.Services {
			n.Add(1)
		}
		return nil
	}
}

func (p *pair) Sync(ctx context.Context, c *sink.Changes) error {
	p.early = p.early || p.healthy()
	return count(&p.services)(ctx, c)
}

func (p *pair) backend() *command.Backend {
	return &command.Backend{Make: func(run command.Run) (command.Parts, error) {
		p.healthy = run.Healthy
		return command.Parts{Sink: p, Beside: map[string]sink.Sink{"companion": count(&p.companions)}}, nil
	}}
}

func TestSinksBesideTheSinkOfOptions(t *testing.T) {
	var services, others atomic.Int32
	cmd := app.Command(app.Options{Sink: count(&services), Beside: map[string]sink.Sink{"other": count(&others)}})
	cmd.SetArgs([]string{"--manifests", demo, "--node-name=vm-002", "--once"})
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a, b := services.Load(), others.Load(); a == 0 || a != b {
		t.Errorf("the sinks received %d and %d services, want the same number", a, b)
	}
}

func TestSinksBesideASink(t *testing.T) {
	for name, source := range map[string][]string{
		"from manifests":    {"--manifests", demo, "--service-proxy-name=kpng-example"},
		"from another kpng": {"--api", serveDemo(t, "kpng-example")},
	} {
		t.Run(name, func(t *testing.T) {
			var p pair
			if err := runCommand(t.Context(), p.backend(), append(source, "--node-name=vm-002", "--once")...); err != nil {
				t.Fatal(err)
			}
			if a, b := p.services.Load(), p.companions.Load(); a == 0 || a != b {
				t.Errorf("the sink received %d services and its companion %d, want the same number", a, b)
			}
			if p.early {
				t.Error("healthy before everything is programmed")
			}
			if !p.healthy() {
				t.Error("not healthy after everything is programmed")
			}
		})
	}
}
