// SPDX-License-Identifier: Apache-2.0

package main

import (
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
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/internal/command"
	"github.com/kpng-project/kpng/internal/explain"
	"github.com/kpng-project/kpng/internal/plain"
	"github.com/kpng-project/kpng/internal/report"
	"github.com/kpng-project/kpng/internal/usage"
	"github.com/kpng-project/kpng/nodeview"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
)

// getCommand returns the command that lists services, frontends and nodes.
func getCommand() *cobra.Command {
	return group("get", "List services, frontends or nodes as a table, JSON or YAML",
		withTraffic(getOf("services [[NAMESPACE/]NAME]", "List services with the endpoints that a node uses", serviceList)),
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
	head, wide []string // names of the columns, and of the columns that only the wide table has
	// objects returns the objects. With a name, it returns only the service or node with this
	// name, or the frontends of this service.
	objects func(s *cluster.Snapshot, node *api.Node, name string) iter.Seq2[object, error]
	// names returns the names that shells complete.
	names func(*cluster.Snapshot) []string
}

func getOf(use, short string, l list) *cobra.Command {
	var (
		source       command.Source
		node, output string
	)
	hasView := !strings.HasPrefix(use, "nodes") // Node objects are the same for all nodes
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  usage.AtMostOne,
		Example: fmt.Sprintf(`  kpng get %[1]s
  kpng get %[1]s -i manifests.yaml -o yaml
  kpng get %[1]s --api unix:///run/kpng/kpng.sock -o wide`, strings.Fields(use)[0]),
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
			selected := l.objects(objects.Snapshot, self, strings.Join(args, ""))
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
func (l list) print(out io.Writer, objects iter.Seq2[object, error], output string) (found bool, err error) {
	w, head := newTable(out), l.head
	if output == "wide" {
		head = slices.Concat(l.head, l.wide)
	}
	for o, err := range objects {
		if err != nil {
			return found, err
		}
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

// ofServices returns a function that lists objects of the named service, or of all services
// if the name is empty. It skips services without a view.
func ofServices(of func(*nodeview.Explanation) []object) func(*cluster.Snapshot, *api.Node, string) iter.Seq2[object, error] {
	return func(s *cluster.Snapshot, node *api.Node, name string) iter.Seq2[object, error] {
		return func(yield func(object, error) bool) {
			var about explain.Question
			if name != "" {
				var err error
				if about, err = parseServiceName(name); err != nil {
					yield(object{}, err)
					return
				}
			}
			for e, err := range about.Explain(s, node) {
				switch {
				case errors.Is(err, explain.ErrNotFound):
					return
				case err != nil:
					yield(object{}, err)
					return
				case e.View == nil:
					continue
				}
				for _, o := range of(e) {
					if !yield(o, nil) {
						return
					}
				}
			}
		}
	}
}

// serviceList lists the views of services.
var serviceList = list{
	head:  []string{"NAMESPACE", "NAME", "TYPE", "CLUSTER-IP", "EXTERNAL-IP", "PORTS", "ENDPOINTS"},
	wide:  []string{"LOCAL", "DRAINING", "INTERNAL-POLICY", "EXTERNAL-POLICY", "AFFINITY", "LOST-CLAIMS"},
	names: serviceNames,
	objects: ofServices(func(e *nodeview.Explanation) []object {
		return []object{{e.View, e.Service.String(), serviceRow(e.View)}}
	}),
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
	if s.AffinitySeconds != 0 {
		affinity = fmt.Sprintf("ClientIP %ds", s.AffinitySeconds)
	}
	policy := map[bool]string{false: "Cluster", true: "Local"}
	return []string{
		s.Namespace, s.Name, string(s.Type), addresses(s.IPs.ClusterIPs), addresses(s.IPs.LoadBalancerIPs, s.IPs.ExternalIPs), orDash(strings.Join(ports, ",")), strconv.Itoa(len(view.Endpoints)),
		strconv.Itoa(report.LocalEndpoints(view)), strconv.Itoa(len(view.Draining)), policy[s.InternalTrafficToLocal], policy[s.ExternalTrafficToLocal], affinity, strconv.Itoa(len(view.Lost)),
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
	objects: ofServices(func(e *nodeview.Explanation) (all []object) {
		for i := range e.Frontends {
			f := &e.Frontends[i]
			all = append(all, object{f, explain.Name(f.FrontendKey), frontendRow(e.Service, f)})
		}
		return all
	}),
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
		key.Namespace, key.Name, string(f.Kind), addr, port, verdict(&f.Elsewhere), endpointsText(&f.Elsewhere),
		here, f.Sources.String(), affinity,
	}
}

func verdict(t *nodeview.Traffic) string { return strings.ToLower(fmt.Sprint(t.Verdict)) }

// endpointsText returns the first endpoints, and the number of further endpoints.
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
	objects: func(s *cluster.Snapshot, _ *api.Node, name string) iter.Seq2[object, error] {
		return func(yield func(object, error) bool) {
			for _, node := range s.Nodes.All() {
				if (name == "" || name == node.Name) && !yield(object{node, node.Name, nodeRow(node)}, nil) {
					return
				}
			}
		}
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
