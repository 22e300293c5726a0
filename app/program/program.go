// SPDX-License-Identifier: Apache-2.0

// Package program makes programs from backends. For each backend, it adds flags, metrics,
// health-check node ports and other things that operators of kube-proxy expect. Package
// app runs the programs:
//
//	app.Main(program.Userspace())
//
// The packages of the backends do not import this package. So a program that imports only
// a backend links neither Prometheus nor a flag parser.
//
// For each backend, this package has a file with a function that describes it. To add a
// backend, write such a file, and add a line to the list of backends of a command.
package program

import (
	"context"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/nodesinks"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/pflag"
)

// withReports returns b with reports that all backends have: ports without local
// endpoints, traffic (with the flag --stats) and, if l is not nil, the leftovers of
// other proxies.
func withReports(b *command.Backend, l *leftovers) *command.Backend {
	flags, create := b.Flags, b.Make
	var flagSet *pflag.FlagSet
	search := false // false without flags: then the backend is only inspected or tested
	b.Flags = func(fs *pflag.FlagSet) {
		flagSet = fs
		if flags != nil {
			flags(fs)
		}
		if l != nil {
			l.register(fs)
			search = true
		}
	}
	if l != nil {
		more := b.Check
		b.Check = func(ctx context.Context) []command.Finding {
			findings := l.check(ctx)
			if more != nil {
				findings = append(findings, more(ctx)...)
			}
			return findings
		}
	}
	b.Make = func(run command.Run) (command.Parts, error) {
		parts, err := create(run)
		if err != nil {
			return parts, err
		}
		if flagSet != nil && statsOn(flagSet) {
			addTraffic(&parts, flagSet)
		}
		local := newLocalEndpoints()
		r := &reporter{Sink: parts.Sink, local: local}
		parts.Sink = r
		parts.Collectors = append(parts.Collectors, local.missing)
		parts.KubeProxy = append(parts.KubeProxy, kubeProxyNamed("sync_proxy_rules_no_local_endpoints_total", local.missing, localEndpointsLabels...))
		if search {
			r.leftovers = l
			parts.Sink = nodesinks.WithTask(r, l.follow)
			parts.Collectors = append(parts.Collectors, l.count)
			parts.Problems = append(parts.Problems, l.problems)
		}
		return parts, nil
	}
	return b
}

// reporter is a sink that passes on the results of another sink to localEndpoints and
// leftovers.
type reporter struct {
	sink.Sink
	local     *localEndpoints
	leftovers *leftovers // nil if the backend does not search for them
}

// Unwrap returns the other sink, see sink.As.
func (r *reporter) Unwrap() sink.Sink { return r.Sink }

// Sync implements sink.Sink.
func (r *reporter) Sync(ctx context.Context, c *sink.Changes) error {
	err := r.Sink.Sync(ctx, c)
	failed, ok := sink.Acknowledged(err)
	if ok {
		r.local.sync(c)
	}
	if ok && c.Last && len(failed)+len(c.Failing) == 0 && r.leftovers != nil {
		r.leftovers.setProgrammed()
	}
	return err
}
