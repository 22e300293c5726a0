// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/explain"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
)

// explainCommand returns the command that explains what a node does with services.
func explainCommand() *cobra.Command {
	var (
		source              command.Source
		node, output        string
		dataplane, instance string
	)
	cmd := &cobra.Command{
		Use:   "explain [[NAMESPACE/]NAME | IP[:PORT[/PROTOCOL]]]",
		Short: "Explain what a node does with services: the endpoints and the verdicts, with reasons",
		Example: `  kpng explain --node-name worker-1 web
  kpng explain --node-name worker-1 10.96.0.80:80/tcp
  kpng explain --node-name worker-1 IPv4:30080/tcp
  kpng explain --dataplane nftables 10.96.0.80:80/tcp
  kpng explain -i state.yaml -o json | jq '.Frontends[] | select(.Elsewhere.Verdict == "Reject")'`,
		Args: usage.AtMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("node-name") && strings.TrimSpace(node) == "" {
				return usage.Errorf("--node-name is empty")
			}
			node, err := kpng.NodeName(node)
			if err != nil {
				return err
			}
			var about explain.Question
			if len(args) > 0 {
				if about, err = explain.Parse(args[0]); err != nil {
					return usage.Error(err)
				}
			}
			print, err := printer(cmd.OutOrStdout(), output)
			if err != nil {
				return err
			}
			printMore := func(*nodeview.Explanation, *api.Node) error { return nil }
			switch {
			case dataplane == "" && instance != "":
				return usage.Errorf("--instance needs --dataplane")
			case dataplane != "" && output != "text":
				return usage.Errorf("--dataplane prints text, not --output %s", output)
			case dataplane != "":
				i, honours, err := inspectorOf(dataplane, instance)
				if err != nil {
					return err
				}
				printMore = func(e *nodeview.Explanation, n *api.Node) error {
					if ignored := nodeview.ParametersOf(e.View).Without(honours); ignored != (nodeview.Parameters{}) {
						fmt.Fprintf(cmd.OutOrStdout(), "\nThe backend %s ignores traffic parameters: %s\n", dataplane, ignored)
					}
					return inspect(cmd.Context(), cmd.OutOrStdout(), i, e, n, about.Addr())
				}
			}
			objects, err := source.Load(cmd.Context())
			if err != nil {
				return err
			}
			self := findNode(cmd, objects.Snapshot, node)
			for e, err := range about.Explain(objects.Snapshot, self) {
				if errors.Is(err, explain.ErrNotFound) {
					err = notServed(cmd.Context(), &source, about.Service())
				}
				if err == nil {
					err = print(e)
					if reason, ok := objects.Refused.Get(e.Service); ok && output == "text" {
						fmt.Fprintf(cmd.OutOrStdout(), "\nThe service is refused, or a part of it: %s\n", plain.Line(reason))
					}
					err = errors.Join(err, printMore(e, self))
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringVar(&node, "node-name", "", "explain the view of the node with this `name` (default: $NODE_NAME, else the host name in lower case)")
	fs.StringVarP(&output, "output", "o", "text", "print `text, json or yaml`; JSON has one line per service")
	fs.StringVar(&dataplane, "dataplane", "", "also print what this `backend` has programmed on this machine; needs the same privileges as the backend")
	fs.StringVar(&instance, "instance", "", "`name` of the backend's instance, if it has one")
	source.Register(cmd, true)
	completeOutput(cmd, "text", "json", "yaml")
	completeNode(cmd, &source)
	cmd.ValidArgsFunction = completeFrom(&source, serviceNames)
	return cmd
}

// printer returns a function that prints one explanation.
func printer(w io.Writer, output string) (func(*nodeview.Explanation) error, error) {
	switch output {
	case "text":
		w, separator := plain.Writer(w), ""
		return func(e *nodeview.Explanation) error {
			_, err := fmt.Fprint(w, separator, e)
			separator = "\n"
			return err
		}, nil
	case "json":
		out := json.NewEncoder(plain.Writer(w))
		return func(e *nodeview.Explanation) error { return out.Encode(e) }, nil
	case "yaml":
		return func(e *nodeview.Explanation) error {
			text, err := toYAML(e)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(w, "---\n%s", text)
			return err
		}, nil
	default:
		return nil, usage.Errorf("--output %q is not text, json or yaml", output)
	}
}

// findNode returns the Node object. If there is none, it prints a note and returns a Node
// that has only the name.
func findNode(cmd *cobra.Command, s *cluster.Snapshot, name string) *api.Node {
	node, known := s.Nodes.Get(name)
	if !known {
		node = &api.Node{Name: name}
		cmd.PrintErrf("Node %q not found; zone and addresses unknown, locality decided by node name.\n", name)
	}
	return node
}

// notServed returns an error that says why a service is not served, if the source knows
// the reason.
func notServed(ctx context.Context, source *command.Source, key types.NamespacedName) error {
	service, err := source.Find(ctx, key)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return fmt.Errorf("service %s is not served", key)
	case err != nil:
		return fmt.Errorf("service %s is not served; find it among the others: %w", key, err)
	case service == nil:
		return fmt.Errorf("service %s not found", key)
	}
	services := source.Services()
	if why := services.Unselected(service); why != "" {
		return fmt.Errorf("service %s exists, but %s; --service-proxy-name is %s", key, why, cmp.Or(services.ServiceProxyName, "empty"))
	}
	return fmt.Errorf("service %s exists, but it is not served; it may be new", key)
}

// parseServiceName parses [NAMESPACE/]NAME, in a command that does not search by address.
func parseServiceName(s string) (explain.Question, error) {
	q, err := explain.Parse(s)
	if err == nil && q.Service().Name == "" {
		err = fmt.Errorf("%q is an address; kpng explain finds services by their addresses", s)
	}
	return q, usage.Error(err)
}
