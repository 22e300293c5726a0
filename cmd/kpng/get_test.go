// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"github.com/kpng-project/kpng/api"
	"github.com/kpng-project/kpng/cluster"
	"github.com/kpng-project/kpng/remote"
	"sigs.k8s.io/yaml"
)

func TestGetTables(t *testing.T) {
	t.Setenv("NODE_NAME", "here")
	for _, args := range []string{"services", "services -o wide", "services web", "services -o name", "frontends", "frontends -o wide", "frontends -o name", "nodes", "nodes -o wide"} {
		t.Run(args, func(t *testing.T) {
			got := mustExecute(t, append([]string{"get", "-i", explained}, strings.Fields(args)...)...)
			compareWithFile(t, "get "+args, got)
		})
	}
}

func TestGetObjects(t *testing.T) {
	t.Setenv("NODE_NAME", "here")
	line := func(args ...string) []byte {
		t.Helper()
		out := mustExecute(t, append([]string{"get", "-i", explained, "-o", "json"}, args...)...)
		first, _, _ := strings.Cut(out, "\n")
		return []byte(first)
	}
	var service struct {
		Service   struct{ Name string }
		Endpoints []any
	}
	if text := line("services", "web"); json.Unmarshal(text, &service) != nil || service.Service.Name != "web" || len(service.Endpoints) == 0 {
		t.Errorf("service %s", text)
	}
	var frontend struct {
		Namespace, Name, Kind string
		Elsewhere             struct{ Verdict string }
	}
	if text := line("frontends", "web"); json.Unmarshal(text, &frontend) != nil || frontend.Name != "web" || frontend.Kind != "ClusterIP" || frontend.Elsewhere.Verdict != "Forward" {
		t.Errorf("frontend %s", text)
	}
	var node struct{ Name string }
	if text := line("nodes", "here"); json.Unmarshal(text, &node) != nil || node.Name != "here" {
		t.Errorf("node %s", text)
	}
	if out := mustExecute(t, "get", "frontends", "-i", explained, "--node-name=here", "-o", "yaml"); !strings.HasPrefix(out, "---\n") || !strings.Contains(out, "Kind: ClusterIP") {
		t.Errorf("YAML:\n%s", out)
	}
}

func TestOutputKeepsControlCharactersOfAnnotations(t *testing.T) {
	const note = "\u009b\x7f\U0001f3f4\U000e0067\U000e007f"
	text, err := os.ReadFile(demo)
	if err != nil {
		t.Fatal(err)
	}
	manifests := filepath.Join(t.TempDir(), "state.yaml")
	text = append(text, fmt.Sprintf("\n---\n{apiVersion: v1, kind: Service, metadata: {name: noted, annotations: {note: %+q}}, spec: {clusterIP: 10.96.0.99, ports: [{port: 80}]}}\n", note)...)
	if err := os.WriteFile(manifests, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, output := range []string{"json", "yaml"} {
		var service struct {
			Service struct{ Annotations map[string]string }
		}
		out := mustExecute(t, "get", "services", "noted", "-i", manifests, "--node-name=vm-002", "--keep-annotations=note", "-o", output)
		decode := map[string]func([]byte, any) error{
			"json": json.Unmarshal,
			"yaml": func(text []byte, into any) error { return yaml.Unmarshal(text, into) },
		}[output]
		if err := decode([]byte(out), &service); err != nil || service.Service.Annotations["note"] != note {
			t.Errorf("%s: %q, %v", out, service, err)
		}
	}
	mustExecute(t, "explain", "noted", "-i", manifests, "--node-name=vm-002", "--keep-annotations=note", "-o", "yaml")
}

// The names of frontends are arguments of kpng explain.
func TestFrontendNamesCanBeExplained(t *testing.T) {
	names := strings.Fields(mustExecute(t, "get", "frontends", "-i", explained, "--node-name=here", "-o", "name"))
	for _, name := range names {
		if !strings.HasPrefix(name, "0.0.0.0:") {
			mustExecute(t, "explain", "-i", explained, "--node-name=here", name)
		}
	}
	if len(names) == 0 {
		t.Error("no frontends")
	}
}

func TestGetErrors(t *testing.T) {
	t.Setenv("NODE_NAME", "here")
	for _, test := range []struct{ args, want string }{
		{"services missing", "missing not found; kpng get services without a name lists all"},
		{"frontends default/missing", "default/missing not found"},
		{"nodes missing", "missing not found"},
		{"services web --max-service-elements=3", "default/web is refused: too large"},
		{"services 10.0.0.1:80", "kpng explain"},
		{"services -o xml", `--output "xml"`},
		{"pods", "use one of frontends, nodes, services"},
	} {
		args := append([]string{"get"}, strings.Fields(test.args)...)
		if !strings.HasPrefix(test.args, "pods") {
			args = append(args, "-i", explained)
		}
		if _, err := execute(t.Context(), args...); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("kpng get %s: error %v, want %q", test.args, err, test.want)
		}
	}
}

// Names from a server must not control the terminal.
// An API server that does not check names could forge rows of a table.
func TestObjectsAreOneLineEach(t *testing.T) {
	l := list{head: []string{"NAMESPACE", "NAME"}}
	for _, output := range []string{"", "name"} {
		var out strings.Builder
		o := object{name: "a/b\nc/d", row: []string{"a", "b\nc\td\x1b"}}
		if _, err := l.print(&out, func(yield func(object, error) bool) { yield(o, nil) }, output); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		if last := lines[len(lines)-1]; len(lines) > 2 || !strings.Contains(last, `b\u000ac`) {
			t.Errorf("output %q prints %q", output, out.String())
		}
	}
}

// serveState serves a state on a socket until the test ends. It returns the address.
func serveState(t *testing.T, state *cluster.State) (address string) {
	t.Helper()
	server, err := remote.NewServer(state, remote.ServerOptions{ServeCluster: true})
	if err != nil {
		t.Fatal(err)
	}
	address = newSocket(t)
	l, err := remote.Listen(address, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return address
}

func TestNamesFromAServerArePrintable(t *testing.T) {
	const evil = "\x1b]0;pwned\a\nNAMESPACE\tweb\u202e"
	state := cluster.New(cluster.Options{})
	state.Update(func(tx *cluster.Tx) {
		for _, s := range []*api.Service{
			{Namespace: "default", Name: "good", Annotations: map[string]string{"note": evil}},
			{Namespace: "default", Name: evil}, {Namespace: evil, Name: "x"},
			{Namespace: "default", Name: "type", Type: evil}, {Namespace: "default", Name: "label", Labels: map[string]string{"l": evil}},
			{Namespace: "default", Name: "port", Ports: []api.PortMapping{{Name: evil, Port: 1, Protocol: api.TCP}}},
		} {
			s.IPs.ClusterIPs = api.NewIPSet(netip.MustParseAddr("10.0.0.1"))
			tx.SetService(s)
		}
		tx.SetNode(&api.Node{Name: "n"})
		tx.SetNode(&api.Node{Name: evil})
		tx.SetNode(&api.Node{Name: "zone", Labels: map[string]string{"topology.kubernetes.io/zone": evil}})
		tx.SetNode(&api.Node{Name: "taint", Taints: []api.Taint{{Key: evil}}})
	})
	state.SetSynced()
	address := serveState(t, state)
	for args, want := range map[string]string{
		"get services":             "good",
		"get services -o wide":     "good",
		"get services -o name":     "default/good",
		"get services -o json":     "good",
		"get nodes -o wide":        "n ",
		"get nodes -o yaml":        `Name: "n"`,
		"explain":                  "default/good",
		"explain -o json":          "good",
		"api to-local json --once": "good",
	} {
		words := append(strings.Fields(args), "--api", address)
		if !strings.HasPrefix(args, "get nodes") {
			words = append(words, "--node-name=n")
		}
		out := mustExecute(t, words...)
		if !strings.Contains(out, want) || strings.ContainsFunc(out, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) || strings.Contains(out, "pwned") && !strings.Contains(args, "json") {
			t.Errorf("%s prints %q", args, out)
		}
	}
}
