// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/explain"
	"github.com/kpng-project/kpng/internal/kubeproxy"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// checkCommand returns the command that says what would change if kpng replaced kube-proxy
// on this node.
func checkCommand() *cobra.Command {
	cmd := group("check", "Say what would change if a backend of kpng replaced kube-proxy on this node")
	for _, b := range platformBackends() {
		if b.Check != nil {
			cmd.AddCommand(check(b))
		}
	}
	return cmd
}

func check(b *command.Backend) *cobra.Command {
	var (
		source         command.Source
		config, output string
		services       serviceCheck
	)
	source.Defaults.Skip = services.see
	cmd := &cobra.Command{
		Use:   b.Name,
		Short: "Say what would change with the backend " + b.Name,
		Long: "Says what would change if the backend " + b.Name + " replaced kube-proxy on this node. It changes nothing.\n\n" +
			"It checks the kernel and its settings, rules of other programs on this node, kube-proxy's configuration file if --config names it, " +
			"and the services of the cluster. Without --kubeconfig and --manifests, it reads the API server of that file or of this node, and checks no services if neither names one. " +
			"The exit status is 1 if kpng would not work.",
		Example: fmt.Sprintf("  kpng check %[1]s\n  kpng check %[1]s --config kube-proxy.conf -o json", b.Name),
		Args:    usage.None,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return usage.Errorf("--output %q is not text or json", output)
			}
			services.asked = cmd.Flags().Changed("kubeconfig") || cmd.Flags().Changed("manifests")
			var configured []command.Finding
			if config != "" { // this comes first, because it sets flags
				configured = checkConfig(cmd, config)
			}
			report := []checked{{"This node", b.Check(cmd.Context())}}
			if config != "" {
				report = append(report, checked{"Configuration of kube-proxy", configured})
			}
			report = append(report, checked{"Services", services.run(cmd.Context(), &source)})
			return printChecks(cmd.OutOrStdout(), report, output)
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&config, "config", "", "kube-proxy's configuration `file`, a KubeProxyConfiguration; kubeadm keeps it in the ConfigMap kube-proxy of kube-system")
	flags.StringVarP(&output, "output", "o", "text", "print `text or json`")
	completeOutput(cmd, "text", "json")
	b.Register(flags)
	source.Register(cmd, !b.OnlyPorts)
	return cmd
}

// checked is a part of the report.
type checked struct {
	What     string
	Findings []command.Finding
}

// printChecks prints a report. It returns an error if the report has a problem.
func printChecks(w io.Writer, report []checked, output string) error {
	count := map[command.Level]int{}
	for _, c := range report {
		for _, f := range c.Findings {
			count[f.Level]++
		}
	}
	if output == "json" {
		if err := json.NewEncoder(w).Encode(report); err != nil {
			return err
		}
	} else {
		table := newTable(w)
		for _, c := range report {
			fmt.Fprintln(table, c.What)
			for _, f := range c.Findings {
				fmt.Fprintf(table, "  %s\t%s\t%s\n", f.Level, f.Subject, f.Text)
			}
		}
		unchecked := ""
		if slices.ContainsFunc(report, func(c checked) bool {
			return slices.ContainsFunc(c.Findings, func(f command.Finding) bool { return f.Subject == notChecked })
		}) {
			unchecked = "; " + notChecked
		}
		fmt.Fprintf(table, "%s, %s%s\n", number(count[command.Change], "change"), number(count[command.Problem], "problem"), unchecked)
		if err := table.Flush(); err != nil {
			return err
		}
	}
	if n := count[command.Problem]; n > 0 {
		return fmt.Errorf("found problems: %d; kpng would not work here", n)
	}
	return nil
}

// checkConfig finds the settings in a configuration file of kube-proxy that the backend
// of cmd treats differently. It sets the flags of cmd that the command line does not set.
func checkConfig(cmd *cobra.Command, file string) (findings []command.Finding) {
	run, _, err := newRoot().Find([]string{"kube", "to-local", cmd.Name()})
	if err != nil {
		panic(err) // cannot happen: each backend has this command
	}
	run.InheritedFlags() // merges the flags of the parents
	flags := cmd.Flags()
	flags.AddFlagSet(run.Flags())
	text, err := os.ReadFile(file)
	if err == nil {
		var differences []kubeproxy.Difference
		try := func(flag, value string) error { return tryFlag(cmd.Name(), flags, flag, value) }
		differences, err = kubeproxy.Apply(flags, cmd.Name(), text, try)
		for _, d := range differences {
			f := command.Finding{Level: command.Change, Subject: d.Subject(), Text: d.Meaning}
			if d.IsNote {
				f.Level = command.Note
			}
			findings = append(findings, f)
		}
	}
	switch several, ok := err.(interface{ Unwrap() []error }); {
	case ok:
		for _, err := range several.Unwrap() {
			findings = append(findings, command.Finding{Level: command.Problem, Subject: file, Text: err.Error()})
		}
	case err != nil:
		findings = append(findings, command.Finding{Level: command.Problem, Subject: file, Text: err.Error()})
	case len(findings) == 0:
		findings = []command.Finding{{Level: command.Note, Subject: file, Text: "kpng follows each field"}}
	}
	return findings
}

// notChecked is the subject of a finding that there are no services to check.
const notChecked = "services are not checked"

// serviceCheck finds services that kpng serves differently from kube-proxy.
type serviceCheck struct {
	findings []command.Finding
	// asked reports that the command line selects the source.
	asked bool
}

func (c *serviceCheck) add(service, text string) {
	c.findings = append(c.findings, command.Finding{Level: command.Change, Subject: service, Text: text})
}

// The method see is for watcher.Options.Skip. It looks at each Service, and skips none.
func (c *serviceCheck) see(s *corev1.Service) (skip bool) {
	if s.Labels["service.kubernetes.io/service-proxy-name"] != "" || s.Spec.Type == corev1.ServiceTypeExternalName {
		return false
	}
	name := s.Namespace + "/" + s.Name
	is6 := func(address string) bool { return strings.Contains(address, ":") }
	for _, ingress := range s.Status.LoadBalancer.Ingress {
		ranges := s.Spec.LoadBalancerSourceRanges
		if ingress.IP != "" && len(ranges) > 0 && !slices.ContainsFunc(ranges, func(r string) bool { return is6(r) == is6(ingress.IP) }) {
			c.add(name, "no source range of the family of "+ingress.IP+": kube-proxy admits all clients there, kpng none")
		}
	}
	for annotation := range s.Annotations {
		for _, prefix := range []string{"service.cilium.io/", "kube-router.io/", "projectcalico.org/"} {
			if strings.HasPrefix(annotation, prefix) {
				c.add(name, "annotation "+annotation+": kpng reads some annotations of other proxies with --other-annotations")
			}
		}
	}
	return false
}

// run reads the services of the source and returns all findings.
func (c *serviceCheck) run(ctx context.Context, source *command.Source) []command.Finding {
	objects, err := source.Load(ctx)
	if !c.asked && (errors.Is(err, clientcmd.ErrEmptyConfig) || errors.Is(err, fs.ErrNotExist)) {
		return []command.Finding{{Level: command.Note, Subject: notChecked, Text: err.Error() + "; to check them, give --kubeconfig or --manifests"}}
	}
	if err != nil {
		return []command.Finding{{Level: command.Problem, Subject: source.String(), Text: err.Error()}}
	}
	for key, reason := range objects.Refused.All() {
		c.add(key.String(), reason)
	}
	services := 0
	for key, state := range objects.States.All() {
		if state.Service != nil { // otherwise, the source has only its EndpointSlices
			services++
		}
		for _, lost := range objects.WithWinners(state).Lost {
			c.add(key.String(), fmt.Sprintf("shares %s with %s, which has it with kpng: a cluster IP comes first, then the older service", explain.ClaimText(lost.Claim), lost.Winner))
		}
	}
	slices.SortFunc(c.findings, func(a, b command.Finding) int {
		return cmp.Or(cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Text, b.Text))
	})
	// The source may call the method see several times for a Service.
	return append(slices.Compact(c.findings), command.Finding{Level: command.Note, Subject: source.String(), Text: number(services, "service") + "; kpng serves those without findings as kube-proxy does"})
}
