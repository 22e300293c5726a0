// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// columns is the maximum length of a line in a help text.
const columns = 100

// groups has the groups of flags in the order of the help text: their titles and the
// names of their flags. A name that ends with a hyphen stands for all names with this
// prefix. The first group has the flags that are in no other group.
var groups = []struct {
	title string
	flags []string
}{
	{"Flags of this command", nil},
	{"Flags of the source", []string{"kubeconfig", "manifests", "api", "api-"}},
	{"Flags that select services", []string{"service-proxy-name", "all-ports", "all-ports-annotation", "ignore-external-ips", "max-service-elements", "other-annotations", "keep-labels", "keep-annotations", "keep-slice-labels", "keep-targets"}},
	{"Flags for addresses and masquerading", []string{"node-port-addresses", "cluster-cidr", "pod-cidr", "node-pod-cidrs", "service-cidr", "pod-interfaces", "masquerade-all", "masquerade-outside", "masquerade-bit"}},
	{"Flags for kernel settings and connections", []string{"sysctls", "init-only", "conntrack-", "keep-udp-connections"}},
	{"Flags of the run", []string{"config", "node-name", "min-sync-interval", "wait", "once", "once-timeout", "remove-other-backends"}},
	{"Flags for health, metrics and events", []string{"healthz-bind-address", "expose-status", "metrics-bind-address", "kubeproxy-metrics", "profiling", "stats", "stats-max-ports", "no-health-checks", "events"}},
	{"Flags for logs and help", []string{"log-file", "v", "vmodule", "windows-service", "help", "version"}},
}

// groupOf returns the index in groups for the flag with this name.
func groupOf(name string) int {
	for i, g := range groups {
		if slices.ContainsFunc(g.flags, func(f string) bool { return f == name || strings.HasSuffix(f, "-") && strings.HasPrefix(name, f) }) {
			return i
		}
	}
	return 0
}

// printHelp prints the help text of a command.
func printHelp(cmd *cobra.Command, _ []string) {
	if text := wrap(cmp.Or(cmd.Long, cmd.Short)); text != "" {
		fmt.Fprintf(cmd.OutOrStdout(), "%s\n\n", text)
	}
	fmt.Fprint(cmd.OutOrStdout(), cmd.UsageString())
}

// printUsage prints how to call a command: its examples, subcommands and flags.
func printUsage(cmd *cobra.Command) error {
	w := cmd.OutOrStderr()
	line := cmd.UseLine()
	if cmd.HasAvailableSubCommands() {
		line = cmd.CommandPath() + " COMMAND [flags]"
	}
	section(w, "Usage", "  "+line+"\n")
	section(w, "Examples", cmd.Example+"\n")
	rest := &cobra.Group{Title: "Commands"}
	if len(cmd.Groups()) > 0 {
		rest.Title = "Other commands"
	}
	for _, g := range append(slices.Clone(cmd.Groups()), rest) {
		var list strings.Builder
		for _, c := range cmd.Commands() {
			if c.GroupID == g.ID && (c.IsAvailableCommand() || c.Name() == "help") {
				fmt.Fprintf(&list, "  %-*s  %s\n", cmd.Commands()[0].NamePadding(), c.Name(), c.Short)
			}
		}
		section(w, g.Title, list.String())
	}
	flags := make([]pflag.FlagSet, len(groups))
	cmd.InheritedFlags() // merges the flags of the parent commands into those of cmd
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		g := &flags[groupOf(f.Name)]
		g.SortFlags = false
		g.AddFlag(f)
	})
	for i, g := range groups {
		section(w, g.title, flags[i].FlagUsagesWrapped(columns))
	}
	if cmd.HasAvailableSubCommands() {
		section(w, "More", "  "+cmd.CommandPath()+" COMMAND --help\n")
	}
	return nil
}

// section prints text below a title, with an empty line before all sections but the first.
// It prints nothing if text is empty.
func section(w io.Writer, title, text string) {
	if strings.TrimSpace(text) == "" {
		return
	}
	if title != "Usage" {
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "%s:\n%s", title, text)
}

// wrap breaks the lines of text.
func wrap(text string) string {
	var wrapped strings.Builder
	for line := range strings.Lines(strings.TrimSpace(text)) {
		at := 0
		for _, word := range strings.Fields(line) {
			switch {
			case at == 0:
			case at+1+len(word) > columns:
				wrapped.WriteByte('\n')
				at = 0
			default:
				wrapped.WriteByte(' ')
				at++
			}
			wrapped.WriteString(word)
			at += len(word)
		}
		if strings.HasSuffix(line, "\n") {
			wrapped.WriteByte('\n')
		}
	}
	return wrapped.String()
}
