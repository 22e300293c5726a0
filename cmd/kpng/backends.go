// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/kubeproxy"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/node/nodeaddr"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/sink"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// toLocal returns the command that runs a backend in this process for this node.
func toLocal(source *command.Source, hasSelection bool) *cobra.Command {
	cmd := group("to-local", "Run a backend for this node in this process")
	json := &command.Backend{Name: "json", Short: "Print the node's view as one JSON object per service"}
	json.Make = func(command.Run) (command.Parts, error) {
		return command.Parts{Sink: sink.FullState(func(_ context.Context, services []*api.View) error {
			return nodeview.WriteViews(plain.Writer(cmd.OutOrStdout()), services)
		})}, nil
	}
	for _, b := range append([]*command.Backend{json}, platformBackends()...) {
		cmd.AddCommand(backendCommand(source, hasSelection, b))
	}
	return cmd
}

// backendCommand returns the command that runs a backend.
func backendCommand(source *command.Source, hasSelection bool, b *command.Backend) *cobra.Command {
	run := source.Command(b.Name, b, nil)
	run.Short, run.Long = b.Short, b.Long
	if hasSelection && !b.OnlyPorts {
		source.RegisterAllPorts(run.Flags())
	}
	if b.Name != "json" {
		addConfig(run, source)
	}
	if b.Init != nil {
		addInit(run, b)
	}
	return run
}

// descriptions returns the backends in sinks of package program.
func descriptions(sinks ...sink.Sink) (all []*command.Backend) {
	for _, s := range sinks {
		b, _ := sink.As[*command.Backend](s)
		all = append(all, b)
	}
	return all
}

// addConfig adds the flag --config to the command that runs a backend and reads from
// source. The name of the command is that of the backend.
func addConfig(cmd *cobra.Command, source *command.Source) {
	file := cmd.Flags().String("config", "", "behave like kube-proxy with this configuration `file`, a KubeProxyConfiguration; other flags on the command line override it")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if !cmd.Flags().Changed("config") {
			return nil
		}
		text, err := os.ReadFile(*file)
		if err != nil {
			return fmt.Errorf("read --config: %w", err)
		}
		try := func(flag, value string) error { return tryFlag(cmd.Name(), cmd.Flags(), flag, value) }
		differences, err := kubeproxy.Apply(cmd.Flags(), cmd.Name(), text, try)
		log := klog.FromContext(cmd.Context())
		log.Info("Using configuration of kube-proxy", "file", *file, "source", source.String())
		for _, d := range differences {
			if d.IsNote {
				continue
			}
			log.Info("Setting of kube-proxy is not followed", "field", d.Field, "value", d.Value, "meaning", d.Meaning)
		}
		if err != nil {
			return fmt.Errorf("--config %s: %w", *file, err)
		}
		return nil
	}
}

// tryFlag returns an error if the backend with this name accepts the given flags, but
// not together with the additional flag.
func tryFlag(name string, given *pflag.FlagSet, flag, value string) error {
	fs, configure := unusedBackend(name)
	if fs.Lookup(flag) == nil {
		return nil
	}
	copyFlags(fs, given)
	if err := configure(); err != nil {
		return nil // the command reports err
	}
	fs, configure = unusedBackend(name)
	copyFlags(fs, given)
	if err := fs.Set(flag, value); err != nil {
		return err
	}
	return configure()
}

// unusedBackend returns the flags of a new backend, and a function that configures it.
func unusedBackend(name string) (*pflag.FlagSet, func() error) {
	fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
	for _, b := range platformBackends() {
		if b.Name == name {
			b.Register(fs)
			return fs, b.Configure
		}
	}
	return fs, func() error { return nil }
}

// copyFlags sets those flags in the set "to" that are set in the set "from".
func copyFlags(to, from *pflag.FlagSet) {
	from.Visit(func(f *pflag.Flag) {
		copied := to.Lookup(f.Name)
		if copied == nil {
			return
		}
		var err error
		if list, ok := f.Value.(pflag.SliceValue); ok {
			err = copied.Value.(pflag.SliceValue).Replace(list.GetSlice())
			copied.Changed = true
		} else {
			err = to.Set(f.Name, f.Value.String())
		}
		if err != nil {
			panic(err) // cannot happen: the flag f has accepted this value
		}
	})
}

// addInit adds the flag --init-only to the command that runs a backend.
func addInit(cmd *cobra.Command, b *command.Backend) {
	only := cmd.Flags().Bool("init-only", false, "set the kernel settings that services need, and exit; without it, kpng sets them at the start if it may")
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !*only {
			return run(cmd, args)
		}
		if err := b.Configure(); err != nil {
			return usage.Error(err)
		}
		return b.Init(cmd.Context())
	}
}

// cleanupCommand returns the command that cleans up the dataplane. It removes the state
// that backends leave when they stop.
func cleanupCommand() *cobra.Command {
	cmd := group("cleanup", "Remove everything that a backend ever programmed on this machine")
	for _, b := range platformBackends() {
		cmd.AddCommand(cleanup(b))
	}
	return cmd
}

func cleanup(b *command.Backend) *cobra.Command {
	cmd := &cobra.Command{Use: b.Name, Short: "Remove everything that the backend " + b.Name + " ever programmed", Args: usage.None}
	cmd.Flags().SortFlags = false
	b.Register(cmd.Flags())
	cmd.Example = "  kpng cleanup " + b.Name
	if b.Name == "ovs" {
		cmd.Example += " --bridge br-int"
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := b.Configure(); err != nil {
			return usage.Error(err)
		}
		return b.Cleanup(cmd.Context())
	}
	return cmd
}

// inspectorOf returns the inspector of a backend, and the traffic parameters that the
// backend honours.
func inspectorOf(name, instance string) (backends.Inspector, nodeview.Parameters, error) {
	var honours nodeview.Parameters
	for _, b := range platformBackends() {
		if b.Name != name {
			continue
		}
		fs := pflag.NewFlagSet(name, pflag.ContinueOnError)
		b.Register(fs)
		if instance != "" {
			if err := fs.Set("instance", instance); err != nil {
				return nil, honours, usage.Errorf("use --instance of backend %s: %w", name, err)
			}
		}
		if err := b.Configure(); err != nil {
			return nil, honours, usage.Error(err)
		}
		if c, ok := sink.As[backends.Capable](b); ok {
			honours = c.Honours()
		}
		if i, ok := sink.As[backends.Inspector](b); ok {
			return i, honours, nil
		}
	}
	return nil, honours, usage.Errorf("--dataplane %q: no backend of this platform with this name can show its dataplane (nftables, ipvs and ebpf can, on Linux)", name)
}

// inspect returns the dataplane's entries for each explained frontend. The argument
// asked is the address in the user's question, if any. If a frontend fails, it returns
// the error and the results of the earlier frontends.
func inspect(ctx context.Context, i backends.Inspector, e *nodeview.Explanation, node *api.Node, asked netip.Addr) ([]inspection, error) {
	var list []inspection
	for _, f := range e.Frontends {
		for _, addr := range addressesOf(f.FrontendKey, node, asked) {
			text := "a socket of kpng, if --node-port-addresses has loopback addresses: see ss -lntup"
			if !addr.IsLoopback() {
				var err error
				if text, err = i.Inspect(ctx, addr, f.Protocol, f.Port, e.View); err != nil {
					return list, fmt.Errorf("inspect the dataplane for %s of %s: %w", f.FrontendKey, e.Service, err)
				}
			}
			at := f.FrontendKey.String()
			if f.Kind == nodeview.NodePort {
				at += " at " + addr.String()
			}
			list = append(list, inspection{at, strings.TrimRight(text, "\n")})
		}
	}
	return list, nil
}

// addressesOf returns the addresses at which to inspect a frontend. For a node port, it
// returns the address in the user's question, if any, else the node's own addresses.
func addressesOf(f nodeview.FrontendKey, node *api.Node, asked netip.Addr) []netip.Addr {
	switch {
	case f.Addr.IsValid():
		return []netip.Addr{f.Addr}
	case asked.IsValid():
		return []netip.Addr{asked}
	}
	var addrs []netip.Addr
	for _, a := range nodeaddr.OfNode(node) {
		if api.FamilyOf(a) == f.Family {
			addrs = append(addrs, a)
		}
	}
	return addrs
}
