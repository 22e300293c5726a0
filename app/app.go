// SPDX-License-Identifier: Apache-2.0

// Package app turns a sink into a complete command with flags, logging, metrics, health
// checks and signal handling.
//
//	func main() {
//		app.Main(mySink)
//	}
//
// To change the command, a program makes it with [Command], and runs it with [Execute]:
//
//	func main() {
//		cmd := app.Command(app.Options{Sink: mySink})
//		cmd.Flags().StringVar(&mySink.table, "table", "my-proxy", "…")
//		app.Execute(cmd)
//	}
//
// The command uses these capabilities of the sink, or of a wrapped sink (see [sink.As]):
// a [Configurable] has flags of its own, a prometheus.Collector has metrics of its own,
// and a [sink.Cleaner] gets the flag --cleanup.
//
// The flags select the source of services (--kubeconfig or --manifests), the services
// (--service-proxy-name) and the node (--node-name). In a pod, the default source is the
// cluster's API server, with the pod's service account. With --api, the program reads the
// node's view from a kpng server instead. The command exits with status 0 on SIGINT or
// SIGTERM. With --once, it also exits with status 0 when everything has been programmed
// once. If the command cannot continue, it exits with status 1 and one line on standard
// error. If its arguments are wrong, the status is 2. On Windows, the service manager can
// run the program, which then logs to the event log or to a file.
package app

import (
	"cmp"
	"os"
	"path/filepath"
	"strings"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/sink"
	"github.com/kpng-project/kpng/watcher"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Options describe a command.
type Options struct {
	// Sink gets the services of the node. It is required.
	Sink sink.Sink
	// Beside are further sinks, which get the same services. Each has a driver of its
	// own, so if one sink fails, the other sinks continue. The name of such a sink in
	// logs and metrics is the name of the command, a hyphen, and its key. Default: none.
	Beside map[string]sink.Sink
	// Name is the name of the command, and of the sink in logs and metrics. Default: the
	// name of the program's file.
	Name string
	// Services are the defaults of the flags that select services, labels and annotations.
	// The functions Skip and AllPorts apply in addition to the flags. A kpng server sends no
	// objects that Skip could select. So with Skip, the command has no flag --api.
	Services watcher.Options
	// PortsOnly omits the flags for all-ports services. It is for sinks without all-ports
	// services.
	PortsOnly bool
	// Server is the address of a kpng server, such as remote.DefaultAddress. Without flags
	// that select a source or services, the command reads from this server. It is for
	// programs that run beside a kpng server on the same machine, like the programs of
	// the original kpng. It excludes Services.Skip. Default: none.
	Server string
}

// Configurable is implemented by a sink with flags of its own.
type Configurable interface {
	// Register adds the flags.
	Register(*pflag.FlagSet)
	// Configure is called after the flags are parsed, and before any other method except
	// Register. It may be called several times. An error ends the command.
	Configure() error
}

// Main runs s as the whole program, with the program's arguments, and exits.
func Main(s sink.Sink) { Execute(Command(Options{Sink: s})) }

// Command returns a command that runs a sink until its context ends. The caller may add a
// description and flags, change defaults, and make the command part of a larger command.
func Command(opts Options) *cobra.Command {
	source := &command.Source{Defaults: opts.Services, Server: opts.Server}
	name := cmp.Or(opts.Name, strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe"))
	cmd := source.Command(name, opts.Sink, opts.Beside)
	cmd.Version = command.Version()
	backend, ok := sink.As[*command.Backend](opts.Sink)
	source.Register(cmd, !opts.PortsOnly && !(ok && backend.OnlyPorts))
	command.AddCleanup(cmd, opts.Sink)
	command.RegisterLogging(cmd.Flags())
	return cmd
}

// Execute runs a command as the whole program, with the program's arguments, and exits. If
// the Windows service manager started the program, Execute runs the command as a service.
func Execute(cmd *cobra.Command) { command.Execute(cmd) }
