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
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kpng-project/kpng"
	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/app"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/kpng-project/kpng/watcher"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// explainCommand returns the command that explains what a node does with services.
func explainCommand() *cobra.Command {
	var (
		source              app.Source
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
  kpng explain -i state.yaml --node-name worker-1 -o json | jq '.Frontends[] | select(.Elsewhere.Verdict == "Reject")'`,
		Args: usage.AtMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("node-name") && strings.TrimSpace(node) == "" {
				return usage.Errorf("--node-name is empty")
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
			printMore := func(*nodeview.Explanation, *api.Node) error { return nil }
			switch {
			case dataplane == "" && instance != "":
				return usage.Errorf("--instance needs --dataplane")
			case dataplane != "" && output != "text":
				return usage.Errorf("--dataplane prints text, not --output %s", output)
			case dataplane != "":
				i, err := inspectorOf(dataplane, instance)
				if err != nil {
					return err
				}
				printMore = func(e *nodeview.Explanation, n *api.Node) error {
					return inspect(cmd.Context(), cmd.OutOrStdout(), i, e, n, about.addr)
				}
			}
			return explain(cmd, &source, node, about, print, printMore)
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

// explain prints the explanations for a question. After each explanation, it calls
// printMore.
func explain(cmd *cobra.Command, source *app.Source, nodeName string, about question,
	print func(*nodeview.Explanation) error, printMore func(*nodeview.Explanation, *api.Node) error) error {
	snapshot, err := source.Load(cmd.Context())
	if err != nil {
		return err
	}
	node := findNode(cmd, snapshot.Snapshot, nodeName)
	found := false
	for e := range about.explanations(snapshot.Snapshot, node) {
		found = true
		if err := errors.Join(print(e), printMore(e, node)); err != nil {
			return err
		}
	}
	reason, refused := snapshot.Refused.Get(about.service)
	switch {
	case found || about == (question{}):
		return nil
	case refused:
		return fmt.Errorf("service %s is too large: %s", about.service, reason)
	case about.service.Name != "":
		return about.notServed(cmd.Context(), source)
	default:
		return about.notFound(snapshot.Snapshot, node)
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

// explanations yields the explanations for a question, sorted by service.
func (q question) explanations(s *cluster.Snapshot, node *api.Node) iter.Seq[*nodeview.Explanation] {
	return func(yield func(*nodeview.Explanation) bool) {
		if q.service.Name != "" {
			if state, ok := s.States.Get(q.service); ok && state.Service != nil {
				yield(nodeview.Explain(s.WithWinners(state), node))
			}
			return
		}
		for _, state := range s.States.All() {
			e := nodeview.Explain(s.WithWinners(state), node)
			if q != (question{}) && !q.narrow(e, node) {
				continue
			}
			if !yield(e) {
				return
			}
		}
	}
}

// The method narrow keeps only the frontends of e that match q. It reports whether any
// frontend is left.
func (q question) narrow(e *nodeview.Explanation, node *api.Node) bool {
	e.Frontends = slices.DeleteFunc(e.Frontends, func(f nodeview.Frontend) bool { return !q.matches(f.FrontendKey, node) })
	e.Unserved = slices.DeleteFunc(e.Unserved, func(u nodeview.UnservedFrontend) bool { return !q.matches(u.FrontendKey, node) })
	e.Lists = slices.DeleteFunc(e.Lists, func(l nodeview.ListExplanation) bool {
		return !slices.ContainsFunc(e.Frontends, func(f nodeview.Frontend) bool { return f.ServicePort == l.Port && f.Family == l.Family })
	})
	return len(e.Frontends)+len(e.Unserved) > 0
}

// notServed returns an error that says why the service of the question is not served, if
// the source knows the reason.
func (q question) notServed(ctx context.Context, source *app.Source) error {
	service, err := source.Find(ctx, q.service)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return fmt.Errorf("service %s is not served", q.service)
	case err != nil:
		return fmt.Errorf("service %s is not served; find it among the others: %w", q.service, err)
	case service == nil:
		return fmt.Errorf("service %s not found", q.service)
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

// notFound returns the error for an address and port without a service. It lists services
// that use the address with other ports. If the node's addresses are unknown, it lists
// services that have the port as a node port.
func (q question) notFound(s *cluster.Snapshot, node *api.Node) error {
	var there, nodePorts []string
	everything := question{}
	for e := range everything.explanations(s, node) {
		for _, f := range e.Frontends {
			switch k := f.FrontendKey; {
			case (question{addr: q.addr}).matches(k, node):
				there = append(there, fmt.Sprintf("%s of %s", k, e.Service))
			case k.Kind == nodeview.NodePort && len(node.Addresses) == 0 && k.Family == api.FamilyOf(q.addr) && q.port == k.Port && q.asksProtocol(k.Protocol):
				nodePorts = append(nodePorts, fmt.Sprintf("%s has node port %d/%s", e.Service, k.Port, k.Protocol))
			}
		}
	}
	const most = 10
	if len(there) > most {
		there = append(there[:most], fmt.Sprintf("and %d more", len(there)-most))
	}
	switch bracketed := brackets(q.text()); {
	case bracketed != "":
		return fmt.Errorf("no service is served at %s, which is an address without a port; with a port, write %s", q.text(), bracketed)
	case len(nodePorts) > 0:
		return fmt.Errorf("no service is served at %s; addresses of node %s are unknown, and %s", q.text(), node.Name, strings.Join(nodePorts, ", "))
	case len(there) > 0:
		return fmt.Errorf("no service is served at %s; the address has: %s", q.text(), strings.Join(there, ", "))
	}
	if q.nodePorts == 0 {
		q = question{addr: q.addr} // the address has no service at all
	}
	return fmt.Errorf("no service is served at %s", q.text())
}

// question names a service or an address to explain; the zero value means all services.
type question struct {
	service types.NamespacedName
	addr    netip.Addr
	// nodePorts is the family of a node port. It is 0 if the question names no node port.
	nodePorts api.Family
	// port and protocol are 0 if the question does not name them.
	port     int32
	protocol api.Protocol
}

// parseQuestion parses NAME, NAMESPACE/NAME, IP, IP:PORT or IP:PORT/PROTOCOL. In place of
// the IP of a node port, a question may have IPv4 or IPv6. A NAME alone is in the
// namespace "default".
func parseQuestion(s string) (question, error) {
	if addr, err := netip.ParseAddr(s); err == nil {
		return question{addr: addr.Unmap()}, nil
	}
	before, after, slash := strings.Cut(s, "/")
	var q question
	if at, err := netip.ParseAddrPort(before); err == nil {
		q = question{addr: at.Addr().Unmap(), port: int32(at.Port())}
	} else if family, port, ok := strings.Cut(before, ":"); ok && q.nodePorts.UnmarshalText([]byte(family)) == nil {
		number, _ := strconv.ParseUint(port, 10, 16)
		q.port = int32(number)
	}
	if q.port > 0 {
		if !slash {
			return q, nil
		}
		for _, p := range [...]api.Protocol{api.TCP, api.UDP, api.SCTP} {
			if strings.EqualFold(after, p.String()) {
				q.protocol = p
				return q, nil
			}
		}
		return question{}, usage.Errorf("%q: the protocol is not tcp, udp or sctp", s)
	}
	if bracketed := brackets(before); bracketed != "" {
		return question{}, usage.Errorf("%q: write an IPv6 address with a port as %s", s, bracketed)
	}
	if !slash {
		before, after = "default", s
	}
	if before == "" || after == "" || strings.ContainsAny(s, ".:[]") || strings.Contains(after, "/") {
		return question{}, usage.Errorf("%q is neither [NAMESPACE/]NAME nor IP[:PORT[/PROTOCOL]]", s)
	}
	return question{service: types.NamespacedName{Namespace: before, Name: after}}, nil
}

// brackets adds the brackets that an IPv6 address with a port needs. It returns "" if s is
// not such an address. The text fd00::1:80 is also an address without a port.
func brackets(s string) string {
	i := max(strings.LastIndexByte(s, ':'), 0)
	port, err := strconv.ParseUint(strings.TrimPrefix(s[i:], ":"), 10, 16)
	addr, addrErr := netip.ParseAddr(s[:i])
	if err != nil || addrErr != nil || port == 0 || !addr.Is6() {
		return ""
	}
	return netip.AddrPortFrom(addr, uint16(port)).String()
}

// parseServiceName parses [NAMESPACE/]NAME, in a command that does not search by address.
func parseServiceName(s string) (types.NamespacedName, error) {
	q, err := parseQuestion(s)
	if err == nil && q.service.Name == "" {
		err = usage.Errorf("%q is an address; kpng explain finds services by their addresses", s)
	}
	return q.service, err
}

// text returns the question's address, with the port and protocol if they are given.
func (q question) text() string {
	text := q.addr.String()
	switch {
	case q.nodePorts != 0:
		text = fmt.Sprintf("%s:%d", q.nodePorts, q.port)
	case q.port != 0:
		text = netip.AddrPortFrom(q.addr, uint16(q.port)).String()
	}
	if q.protocol != api.UnknownProtocol {
		text += "/" + strings.ToLower(q.protocol.String())
	}
	return text
}

// matches reports whether a frontend is at the question's address, port and protocol. A
// node port matches at all node addresses, even if a backend provides it only at some.
func (q question) matches(k nodeview.FrontendKey, node *api.Node) bool {
	if q.nodePorts != 0 {
		return k.Kind == nodeview.NodePort && k.Family == q.nodePorts && k.Port == q.port && q.asksProtocol(k.Protocol)
	}
	if k.Kind == nodeview.NodePort {
		isOurs := slices.ContainsFunc(node.Addresses, func(a api.NodeAddress) bool { return a.IP == q.addr })
		if !isOurs || k.Family != api.FamilyOf(q.addr) {
			return false
		}
	} else if k.Addr != q.addr {
		return false
	}
	allPorts := k.Port == 0 && k.Protocol == api.UnknownProtocol
	return allPorts || (q.port == 0 || q.port == k.Port) && q.asksProtocol(k.Protocol)
}

func (q question) asksProtocol(p api.Protocol) bool {
	return q.protocol == api.UnknownProtocol || q.protocol == p
}
