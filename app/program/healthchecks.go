// SPDX-License-Identifier: Apache-2.0

package program

import (
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

// healthChecks has the value of the flag for health-check node ports.
type healthChecks struct{ off bool }

func (h *healthChecks) register(fs *pflag.FlagSet) {
	fs.BoolVar(&h.off, "no-health-checks", false, "do not serve health-check node ports")
}

// parts returns the parts of a backend on a node: the dataplane and, beside it, the server of
// health-check node ports.
func (h *healthChecks) parts(node *nodesinks.Node, dataplane sink.Sink) command.Parts {
	parts := command.Parts{Sink: node.WithTasks(dataplane), Beside: map[string]sink.Sink{}, Problems: []func() []string{node.Problems}}
	if !h.off {
		parts.Beside["healthchecks"] = node.HealthChecks()
	}
	return parts
}
