// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/watcher"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// explainCommand says what becomes of services on a node, and why.
func explainCommand() *cobra.Command {
	var (
		source              app.Source
		node, output        string
		dataplane, instance string
	)
	cmd := &cobra.Command{
		Use:   "explain [[NAMESPACE/]NAME | IP[:PORT[/PROTOCOL]]]",
		Short: "Explain what a node does with services: which endpoints are in or out, which verdicts hold, and why",
		Example: `  kpng explain --node-name worker-1 web
  kpng explain --node-name worker-1 10.96.0.80:80/tcp
  kpng explain --dataplane nftables 10.96.0.80:80/tcp
  kpng explain -i state.yaml --node-name worker-1 -o json | jq '.Frontends[] | select(.Elsewhere.Verdict == "Reject")'`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("node-name") && strings.TrimSpace(node) == "" {
				return errors.New("--node-name is empty")
			}
			node, err := kpng.NodeName(node)
			if err != nil {
				return err
			}
			var about question
			if len(args) > 0 {
				if about, err = parseQuestion(args[0]); err != nil {
					return err
				}
			}
			print, err := printer(cmd.OutOrStdout(), output)
			if err != nil {
				return err
			}
			look := func(*nodeview.Explanation, *api.Node) error { return nil }
			switch {
			case dataplane == "" && instance != "":
				return errors.New("--instance is about the backend that --dataplane names")
			case dataplane != "" && output != "text":
				return fmt.Errorf("--dataplane prints text, not --output %s", output)
			case dataplane != "":
				i, err := inspectorOf(dataplane, instance)
				if err != nil {
					return err
				}
				look = func(e *nodeview.Explanation, n *api.Node) error {
					return inspect(cmd.Context(), cmd.OutOrStdout(), i, e, n, about.addr)
				}
			}
			return explain(cmd, &source, node, about, print, look)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringVar(&node, "node-name", "", "explain the view of the node of this `name`; without it, $NODE_NAME or the host's name in lower case")
	fs.StringVarP(&output, "output", "o", "text", "print `text, json or yaml`; of JSON, one object a service and line")
	fs.StringVar(&dataplane, "dataplane", "", "print what this `backend` has programmed on this machine, too, beside what it should have; it needs the backend's rights")
	fs.StringVar(&instance, "instance", "", "the `name` of the backend's instance, if it has one")
	source.Register(cmd, true)
	completions := cobra.FixedCompletions([]string{"text", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp)
	if err := cmd.RegisterFlagCompletionFunc("output", completions); err != nil {
		panic(err) // there is no such flag
	}
	return cmd
}

// printer returns what prints explanations one by one.
func printer(w io.Writer, output string) (func(*nodeview.Explanation) error, error) {
	switch output {
	case "text":
		separator := ""
		return func(e *nodeview.Explanation) error {
			_, err := fmt.Fprint(w, separator, e)
			separator = "\n"
			return err
		}, nil
	case "json":
		out := json.NewEncoder(w)
		return func(e *nodeview.Explanation) error { return out.Encode(e) }, nil
	case "yaml":
		return func(e *nodeview.Explanation) error {
			text, err := yaml.Marshal(e)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(w, "---\n%s", text)
			return err
		}, nil
	default:
		return nil, fmt.Errorf("--output %q is not text, json or yaml", output)
	}
}

// explain prints what the source says about a question, and what look finds to
// each answer.
func explain(cmd *cobra.Command, source *app.Source, nodeName string, about question,
	print func(*nodeview.Explanation) error, look func(*nodeview.Explanation, *api.Node) error) error {
	snapshot, err := source.Load(cmd.Context())
	if err != nil {
		return err
	}
	node, known := snapshot.Nodes.Get(nodeName)
	if !known {
		node = &api.Node{Name: nodeName}
		cmd.PrintErrf("Node %q not found; zone and addresses unknown, locality decided by node name.\n", nodeName)
	}
	found := false
	for e := range about.explanations(snapshot, node) {
		found = true
		if err := errors.Join(print(e), look(e, node)); err != nil {
			return err
		}
	}
	switch {
	case found || about == (question{}):
		return nil
	case about.service.Name != "":
		return about.notServed(cmd.Context(), source)
	default:
		return about.notFound(snapshot, node)
	}
}

// explanations yields the answers to a question, in order of services.
func (q question) explanations(s *cluster.Snapshot, node *api.Node) iter.Seq[*nodeview.Explanation] {
	return func(yield func(*nodeview.Explanation) bool) {
		if q.service.Name != "" {
			if state, ok := s.States.Get(q.service); ok && state.Service != nil {
				yield(nodeview.Explain(state, node))
			}
			return
		}
		for _, state := range s.States.All() {
			e := nodeview.Explain(state, node)
			if q.addr.IsValid() && !q.narrow(e, node) {
				continue
			}
			if !yield(e) {
				return
			}
		}
	}
}

// narrow leaves in e what is about the address of the question, and reports
// whether there is anything.
func (q question) narrow(e *nodeview.Explanation, node *api.Node) bool {
	e.Frontends = slices.DeleteFunc(e.Frontends, func(f nodeview.Frontend) bool { return !q.asksFor(f.FrontendKey, node) })
	e.Unserved = slices.DeleteFunc(e.Unserved, func(u nodeview.UnservedFrontend) bool { return !q.asksFor(u.FrontendKey, node) })
	e.Lists = slices.DeleteFunc(e.Lists, func(l nodeview.ListExplanation) bool {
		return !slices.ContainsFunc(e.Frontends, func(f nodeview.Frontend) bool { return f.ServicePort == l.Port && f.Family == l.Family })
	})
	return len(e.Frontends)+len(e.Unserved) > 0
}

// notServed says why the service of the question is not served, as far as the source knows.
func (q question) notServed(ctx context.Context, source *app.Source) error {
	service, err := source.Find(ctx, q.service)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return fmt.Errorf("there is no service %s among those that are served", q.service)
	case err != nil:
		return fmt.Errorf("there is no service %s among those that are served; look for it among the others: %w", q.service, err)
	case service == nil:
		return fmt.Errorf("there is no service %s", q.service)
	}
	name, labelled := service.Labels[watcher.LabelServiceProxyName]
	why := "it is not served; it may be new"
	switch wanted := source.Services().ServiceProxyName; {
	case labelled && name != wanted:
		why = fmt.Sprintf("its label %s is %s", watcher.LabelServiceProxyName, cmp.Or(name, "empty"))
	case !labelled && wanted != "":
		why = fmt.Sprintf("it has no label %s, and --service-proxy-name is %s", watcher.LabelServiceProxyName, wanted)
	case wanted == "" && service.Spec.ClusterIP == corev1.ClusterIPNone:
		why = "it is headless (clusterIP: None), and such services are served only with --service-proxy-name"
	}
	return fmt.Errorf("service %s exists, but %s", q.service, why)
}

// notFound says that nothing is served at the address of the question, and what is instead.
func (q question) notFound(s *cluster.Snapshot, node *api.Node) error {
	if about := q.nodePorts(s, node); len(node.Addresses) == 0 && len(about) > 0 {
		return fmt.Errorf("no service is served at %s; addresses of node %s are unknown, and %s", q.text(), node.Name, strings.Join(about, ", "))
	}
	var others []string
	for e := range (question{addr: q.addr}).explanations(s, node) {
		for _, f := range e.Frontends {
			others = append(others, fmt.Sprintf("%s of %s", f.FrontendKey, e.Service))
		}
	}
	const most = 10
	switch {
	case len(others) == 0:
		return fmt.Errorf("no service is served at %s", q.addr)
	case len(others) > most:
		others = append(others[:most], fmt.Sprintf("and %d more", len(others)-most))
	}
	return fmt.Errorf("no service is served at %s, where there are: %s", q.text(), strings.Join(others, ", "))
}

// nodePorts says which services have a node port of the question's port, family and
// protocol.
func (q question) nodePorts(s *cluster.Snapshot, node *api.Node) []string {
	var found []string
	for _, state := range s.States.All() {
		for _, f := range nodeview.Explain(state, node).Frontends {
			if f.Kind == nodeview.NodePort && f.Port == q.port && f.Family == api.FamilyOf(q.addr) &&
				(q.protocol == api.UnknownProtocol || f.Protocol == q.protocol) {
				found = append(found, fmt.Sprintf("%s has node port %d/%s", state.Service.Key(), f.Port, f.Protocol))
			}
		}
	}
	return found
}
