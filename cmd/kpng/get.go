// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
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
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
)

// getCommand returns the command that lists what a node has.
func getCommand() *cobra.Command {
	return group("get", "List services, frontends or nodes as a table, JSON or YAML",
		getOf("services [[NAMESPACE/]NAME]", "List services with the endpoints that a node uses", serviceList),
		getOf("frontends [[NAMESPACE/]NAME]", "List frontends with the decision of a node", frontendList),
		getOf("nodes [NAME]", "List nodes", nodeList))
}

// object is an object to print.
type object struct {
	value any
	name  string
	row   []string // the columns of the wide table
}

// list is a kind of objects.
type list struct {
	head, wide []string // names of the columns, and of those that only the wide table has
	// objects returns the objects. With a name, it returns only the service or node with this
	// name, or the frontends of this service.
	objects func(s *cluster.Snapshot, node *api.Node, name string) (iter.Seq[object], error)
	// names returns the names that shells complete.
	names func(*cluster.Snapshot) []string
}

func getOf(use, short string, l list) *cobra.Command {
	var (
		source       app.Source
		node, output string
	)
	hasView := !strings.HasPrefix(use, "nodes") // Node objects are the same for all nodes
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  usage.AtMostOne,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch output {
			case "", "wide", "json", "yaml", "name":
			default:
				return usage.Errorf("--output %q is not wide, json, yaml or name", output)
			}
			nodeName, err := kpng.NodeName(node)
			if err != nil {
				return err
			}
			objects, err := source.Load(cmd.Context())
			if err != nil {
				return err
			}
			var self *api.Node // not used for a list of nodes
			if hasView {
				self = findNode(cmd, objects.Snapshot, nodeName)
			}
			selected, err := l.objects(objects.Snapshot, self, strings.Join(args, ""))
			if err != nil {
				return err
			}
			found, err := l.print(cmd.OutOrStdout(), selected, output)
			switch {
			case err != nil || found:
				return err
			case len(args) > 0:
				return fmt.Errorf("%s not found; kpng get %s without a name lists all", args[0], cmd.Name())
			}
			cmd.PrintErrln("Nothing found.")
			return nil
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	if hasView {
		fs.StringVar(&node, "node-name", "", "list the view of the node with this `name` (default: $NODE_NAME, else the host name in lower case)")
	}
	fs.StringVarP(&output, "output", "o", "", "print `wide, json, yaml or name` instead of a table; JSON has one line per object")
	source.Register(cmd, true)
	completeOutput(cmd, "wide", "json", "yaml", "name")
	cmd.ValidArgsFunction = completeFrom(&source, l.names)
	if hasView {
		completeNode(cmd, &source)
	}
	return cmd
}

// print prints the objects. It reports whether there are any.
func (l list) print(out io.Writer, objects iter.Seq[object], output string) (found bool, err error) {
	w, head := newTable(out), l.head
	if output == "wide" {
		head = slices.Concat(l.head, l.wide)
	}
	for o := range objects {
		first := !found
		found = true
		switch output {
		case "json":
			err = json.NewEncoder(plain.Writer(out)).Encode(o.value)
		case "yaml":
			var text []byte
			if text, err = toYAML(o.value); err == nil {
				_, err = fmt.Fprintf(out, "---\n%s", text)
			}
		case "name":
			_, err = fmt.Fprintln(plain.Writer(out), plain.Line(o.name))
		default:
			if first {
				fmt.Fprintln(w, strings.Join(head, "\t"))
			}
			row := slices.Clone(o.row[:len(head)])
			for i, cell := range row {
				row[i] = plain.Line(cell)
			}
			_, err = fmt.Fprintln(w, strings.Join(row, "\t"))
		}
		if err != nil {
			return found, err
		}
	}
	return found, w.Flush()
}

// viewsOf yields the node's views of the named service, or of all services if the name is
// empty.
func viewsOf(s *cluster.Snapshot, node *api.Node, name string) (iter.Seq[*api.View], error) {
	states := s.States.All()
	if name != "" {
		key, err := parseServiceName(name)
		if err != nil {
			return nil, err
		}
		states = func(yield func(types.NamespacedName, *api.ServiceState) bool) {
			if state, ok := s.States.Get(key); ok {
				yield(key, state)
			}
		}
	}
	return func(yield func(*api.View) bool) {
		for _, state := range states {
			if view := nodeview.View(s.WithWinners(state), node); view != nil && !yield(view) {
				return
			}
		}
	}, nil
}

// serviceList lists the views of services.
var serviceList = list{
	head:  []string{"NAMESPACE", "NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORTS", "ENDPOINTS"},
	wide:  []string{"LOCAL", "DRAINING", "INTERNAL-POLICY", "EXTERNAL-POLICY", "AFFINITY", "LOST-CLAIMS"},
	names: serviceNames,
	objects: func(s *cluster.Snapshot, node *api.Node, name string) (iter.Seq[object], error) {
		views, err := viewsOf(s, node, name)
		return func(yield func(object) bool) {
			for view := range views {
				if !yield(object{view, view.Key().String(), serviceRow(view)}) {
					return
				}
			}
		}, err
	},
}

func serviceRow(view *api.View) []string {
	s := view.Service
	ports := []string{}
	for _, p := range s.Ports {
		text := fmt.Sprintf("%d/%s", p.Port, p.Protocol)
		if p.NodePort != 0 {
			text = fmt.Sprintf("%d:%d/%s", p.Port, p.NodePort, p.Protocol)
		}
		ports = append(ports, text)
	}
	if s.AllPorts {
		ports = []string{"all"}
	}
	affinity := "-"
	if c := s.SessionAffinity.ClientIP; c != nil {
		affinity = fmt.Sprintf("ClientIP %ds", c.TimeoutSeconds)
	}
	policy := map[bool]string{false: "Cluster", true: "Local"}
	return []string{
		s.Namespace, s.Name, string(s.Type), addresses(s.IPs.ClusterIPs), addresses(s.IPs.LoadBalancerIPs, s.IPs.ExternalIPs), orDash(strings.Join(ports, ",")), strconv.Itoa(len(view.Endpoints)),
		strconv.Itoa(view.LocalEndpoints()), strconv.Itoa(len(view.Draining)), policy[s.InternalTrafficToLocal], policy[s.ExternalTrafficToLocal], affinity, strconv.Itoa(len(view.Lost)),
	}
}

func addresses(sets ...api.IPSet) string {
	var list []string
	for _, ips := range sets {
		for ip := range ips.All() {
			list = append(list, ip.String())
		}
	}
	return orDash(strings.Join(list, ","))
}

// frontendList lists the frontends of services.
var frontendList = list{
	head:  []string{"NAMESPACE", "SERVICE", "KIND", "ADDRESS", "PORT", "VERDICT", "ENDPOINTS"},
	wide:  []string{"FROM-THIS-NODE", "SOURCES", "AFFINITY"},
	names: serviceNames,
	objects: func(s *cluster.Snapshot, node *api.Node, name string) (iter.Seq[object], error) {
		views, err := viewsOf(s, node, name)
		return func(yield func(object) bool) {
			for view := range views {
				for f := range nodeview.Frontends(view) {
					if !yield(object{nodeview.NamedFrontend{Service: view.Key(), Frontend: f}, frontendName(f.FrontendKey), frontendRow(view.Key(), &f)}) {
						return
					}
				}
			}
		}, err
	},
}

// frontendName returns the address of a frontend in the form that kpng explain reads. The
// name of a node port begins with its family, because it applies to all node addresses.
func frontendName(k nodeview.FrontendKey) string {
	q := question{addr: k.Addr, port: k.Port, protocol: k.Protocol}
	if k.Kind == nodeview.NodePort {
		q.nodePorts = k.Family
	}
	return q.text()
}

func frontendRow(key types.NamespacedName, f *nodeview.Frontend) []string {
	addr, port := "all "+f.Family.String()+" of the node", "all"
	if f.Addr.IsValid() {
		addr = f.Addr.String()
	}
	if f.Port != 0 {
		port = fmt.Sprintf("%d/%s", f.Port, f.Protocol)
	}
	affinity := "-"
	if f.Affinity > 0 {
		affinity = f.Affinity.String()
	}
	here := "the same"
	if f.Node.Verdict != f.Elsewhere.Verdict || f.Node.List != f.Elsewhere.List {
		here = verdict(&f.Node) + " " + endpointsText(&f.Node)
	}
	return []string{
		key.Namespace, key.Name, f.Kind.String(), addr, port, verdict(&f.Elsewhere), endpointsText(&f.Elsewhere),
		here, f.Sources.String(), affinity,
	}
}

func verdict(t *nodeview.Traffic) string { return strings.ToLower(fmt.Sprint(t.Verdict)) }

// endpointsText returns the first endpoints, and the number of the others.
func endpointsText(t *nodeview.Traffic) string {
	const most = 3
	var list []string
	for i, e := range t.Endpoints {
		if i == most {
			list = append(list, fmt.Sprintf("+%d", len(t.Endpoints)-most))
			break
		}
		text := e.Addr.String()
		if e.Port != 0 {
			text = netip.AddrPortFrom(e.Addr, uint16(e.Port)).String()
		}
		list = append(list, text)
	}
	return orDash(strings.Join(list, ","))
}

// nodeList lists the Node objects.
var nodeList = list{
	head:  []string{"NAME", "ZONE", "INTERNAL-IP", "EXTERNAL-IP"},
	wide:  []string{"POD-CIDRS", "TAINTS", "DELETING"},
	names: nodeNames,
	objects: func(s *cluster.Snapshot, _ *api.Node, name string) (iter.Seq[object], error) {
		return func(yield func(object) bool) {
			for _, node := range s.Nodes.All() {
				if (name == "" || name == node.Name) && !yield(object{node, node.Name, nodeRow(node)}) {
					return
				}
			}
		}, nil
	},
}

func nodeRow(node *api.Node) []string {
	byType := map[string][]string{}
	for _, a := range node.Addresses {
		byType[a.Type] = append(byType[a.Type], a.IP.String())
	}
	var cidrs, taints []string
	for _, c := range node.PodCIDRs {
		cidrs = append(cidrs, c.String())
	}
	for _, t := range node.Taints {
		taints = append(taints, t.Key+":"+t.Effect)
	}
	column := func(list []string) string { return orDash(strings.Join(list, ",")) }
	return []string{
		node.Name, orDash(node.Zone()), column(byType["InternalIP"]), column(byType["ExternalIP"]),
		column(cidrs), column(taints), strconv.FormatBool(node.Deleting),
	}
}
