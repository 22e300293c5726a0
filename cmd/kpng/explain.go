// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/backends"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/explain"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
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
			var inspector backends.Inspector
			var honours nodeview.Parameters
			switch {
			case dataplane == "" && instance != "":
				return usage.Errorf("--instance needs --dataplane")
			case dataplane != "":
				if inspector, honours, err = inspectorOf(dataplane, instance); err != nil {
					return err
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
				} else if err != nil && about.Addr().IsValid() {
					err = notServedAt(cmd.Context(), &source, about.Addr(), err)
				}
				if err != nil {
					return err
				}
				a := &answer{Explanation: e}
				a.Refused, _ = objects.Refused.Get(e.Service)
				if inspector != nil {
					a.Ignored = nodeview.ParametersOf(e.View).Without(honours)
					a.Dataplane, err = inspect(cmd.Context(), inspector, e, self, about.Addr())
				}
				if err = errors.Join(print(a), err); err != nil {
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
	fs.StringVar(&dataplane, "dataplane", "", "also print what this `backend` has programmed on this machine, and the traffic parameters that it ignores; needs the same privileges as the backend")
	fs.StringVar(&instance, "instance", "", "`name` of the backend's instance, if it has one")
	source.Register(cmd, true)
	completeOutput(cmd, "text", "json", "yaml")
	completeNode(cmd, &source)
	cmd.ValidArgsFunction = completeFrom(&source, serviceNames)
	return cmd
}

// answer is an explanation of a service, with the additions of the command.
type answer struct {
	*nodeview.Explanation
	additions
}

// additions are the fields that an answer adds to the JSON form of an explanation.
type additions struct {
	// Refused says why the service, or a part of it, is refused.
	Refused string `json:",omitempty"`
	// Ignored are the traffic parameters of the service that the backend ignores.
	Ignored nodeview.Parameters `json:",omitzero"`
	// Dataplane says what the backend has programmed.
	Dataplane []inspection `json:",omitempty"`
}

// inspection describes the dataplane's entries for a frontend.
type inspection struct{ Frontend, Text string }

// String returns the answer for people.
func (a *answer) String() string {
	var out strings.Builder
	out.WriteString(a.Explanation.String())
	if a.Refused != "" {
		fmt.Fprintf(&out, "\nThe service is not served as written: %s\n", plain.Line(a.Refused))
	}
	if a.Ignored != (nodeview.Parameters{}) {
		fmt.Fprintf(&out, "\nThe backend ignores traffic parameters: %s\n", a.Ignored)
	}
	for _, i := range a.Dataplane {
		fmt.Fprintf(&out, "\nDataplane for %s:\n  %s\n", i.Frontend, strings.ReplaceAll(i.Text, "\n", "\n  "))
	}
	return out.String()
}

// MarshalJSON returns the JSON form of the explanation, with the additions.
func (a *answer) MarshalJSON() ([]byte, error) {
	explanation, err := json.Marshal(a.Explanation)
	if err != nil {
		return nil, err
	}
	more, err := json.Marshal(a.additions)
	if err != nil || string(more) == "{}" {
		return explanation, err
	}
	return slices.Concat(explanation[:len(explanation)-1], []byte(","), more[1:]), nil
}

// printer returns a function that prints one answer.
func printer(w io.Writer, output string) (func(*answer) error, error) {
	switch output {
	case "text":
		w, separator := plain.Writer(w), ""
		return func(a *answer) error {
			_, err := fmt.Fprint(w, separator, a)
			separator = "\n"
			return err
		}, nil
	case "json":
		out := json.NewEncoder(plain.Writer(w))
		return func(a *answer) error { return out.Encode(a) }, nil
	case "yaml":
		return func(a *answer) error {
			text, err := toYAML(a)
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
	if why := unselected(source, service); why != "" {
		return fmt.Errorf("service %s exists, but %s", key, why)
	}
	return fmt.Errorf("service %s exists, but it is not served; it may be new", key)
}

// unselected says why the source does not select a service. It returns "" if the source does.
func unselected(source *command.Source, service *corev1.Service) string {
	services := source.Services()
	why := services.Unselected(service)
	if why != "" {
		why += "; --service-proxy-name is " + cmp.Or(services.ServiceProxyName, "empty")
	}
	return why
}

// notServedAt extends err, which means that no service is served at an address. If an
// unselected service has the address, the result names that service.
func notServedAt(ctx context.Context, source *command.Source, addr netip.Addr, err error) error {
	service, findErr := source.FindUnselected(ctx, addr)
	if findErr != nil || service == nil {
		return err // the answer is right without the other services
	}
	return fmt.Errorf("%w; service %s/%s has this address, but %s", err, service.Namespace, service.Name, unselected(source, service))
}

// parseServiceName parses [NAMESPACE/]NAME, in a command that does not search by address.
func parseServiceName(s string) (explain.Question, error) {
	q, err := explain.Parse(s)
	if err == nil && q.Service().Name == "" {
		err = fmt.Errorf("%q is an address; kpng explain finds services by their addresses", s)
	}
	return q, usage.Error(err)
}
