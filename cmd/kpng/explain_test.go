// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/kubetest"
	"github.com/kpng-project/kpng/nodeview"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

var update = flag.Bool("update", false, "write the golden files in testdata")

const explained = "testdata/explain.yaml"

func TestExplain(t *testing.T) {
	for _, test := range []struct {
		name  string
		about []string
	}{
		{"everything", nil},
		{"a service", []string{"default/web"}},
		{"a cluster IP and port", []string{"10.0.0.1:80"}},
		{"a node port", []string{"192.0.2.1:30080/tcp"}},
		{"a node port of any address", []string{"IPv4:30080/tcp"}},
		{"an address that two services claim", []string{"198.51.100.1:80/TCP"}},
		{"an address with one of its protocols", []string{"10.0.0.3:53/udp"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := mustExecute(t, append([]string{"explain", "-i", explained, "--node-name=here"}, test.about...)...)
			compareWithFile(t, "explain "+test.name, got)
		})
	}
}

// compareWithFile compares an output with a file in testdata. The name of the file is name,
// with dashes instead of spaces.
func compareWithFile(t *testing.T, name, got string) {
	t.Helper()
	golden := filepath.Join("testdata", strings.ReplaceAll(name, " ", "-")+".txt")
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("-want +got (go test -update writes %s):\n%s", golden, diff)
	}
}

func TestExplainIsSameFromServersAndRelays(t *testing.T) {
	served := serve(t, "file", "-i", explained)
	for _, about := range []string{"default/web", "10.0.0.1", "198.51.100.2:80"} {
		want := mustExecute(t, "explain", "-i", explained, "--node-name=here", about)
		if got := mustExecute(t, "explain", "--api", served, "--node-name=here", about); got != want || got == "" {
			t.Errorf("%s: explanation from a server:\n%s\nwant\n%s", about, got, want)
		}
	}
}

func TestExplainOutputJSON(t *testing.T) {
	var e struct {
		Service struct{ Name string }
		Lists   []struct {
			Topology  string
			Endpoints []struct {
				Endpoint                         struct{ Addr string }
				Internal, External, ShortCircuit struct {
					In  bool
					Why string
				}
			}
		}
		Frontends []struct {
			Kind, Addr, Masquerade string
			Elsewhere, Node        struct{ Verdict string }
		}
	}
	out := mustExecute(t, "explain", "-i", explained, "--node-name=here", "198.51.100.2:80/tcp", "-o", "json")
	if err := json.Unmarshal([]byte(out), &e); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	if len(e.Frontends) != 1 || e.Frontends[0].Kind != "LoadBalancerIP" || e.Frontends[0].Elsewhere.Verdict != "Forward" || e.Frontends[0].Masquerade != "MasqueradeNode" {
		t.Errorf("frontends %+v in %s", e.Frontends, out)
	}
	if len(e.Lists) != 1 || len(e.Lists[0].Endpoints) != 4 {
		t.Fatalf("lists %+v in %s", e.Lists, out)
	}
	there := e.Lists[0].Endpoints[1]
	if !there.Internal.In || there.External.In || there.External.Why != "not on this node" || !there.ShortCircuit.In {
		t.Errorf("endpoint %+v in %s", there, out)
	}
}

func TestExplainOutputYAML(t *testing.T) {
	t.Setenv("NODE_NAME", "here")
	out := mustExecute(t, "explain", "-i", explained, "web", "-o", "yaml")
	if !strings.HasPrefix(out, "---\n") || !strings.Contains(out, "Kind: ClusterIP") || !strings.Contains(out, "why: not on this node") && !strings.Contains(out, "Why: not on this node") {
		t.Errorf("explanation:\n%s", out)
	}
}

func TestExplainErrors(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"a missing service", []string{"default/missing"}, []string{"default/missing"}},
		{"a missing port", []string{"10.0.0.1:81"}, []string{"10.0.0.1:81", "ClusterIP 10.0.0.1:80/TCP of default/web"}},
		{"another protocol", []string{"10.0.0.1:80/udp"}, []string{"10.0.0.1:80/udp", "10.0.0.1:80/TCP"}},
		{"a missing address", []string{"10.9.9.9:80"}, []string{"10.9.9.9"}},
		{"a missing node port", []string{"IPv6:30080"}, []string{"IPv6:30080"}},
		{"a node port of no family", []string{"IPv5:30080"}, []string{`"IPv5:30080"`, "[NAMESPACE/]NAME"}},
		{"a node port of another node", []string{"192.0.2.2:30080"}, []string{"192.0.2.2"}},
		{"a service of another proxy", []string{"default/elsewhere"}, []string{"default/elsewhere exists", "label service.kubernetes.io/service-proxy-name is another"}},
		{"a service without the label", []string{"web", "--service-proxy-name=x"}, []string{"default/web exists", "no label service.kubernetes.io/service-proxy-name", "--service-proxy-name is x"}},
		{"an address of a service of another proxy", []string{"10.0.0.1:80", "--service-proxy-name=x"}, []string{"no service is served at 10.0.0.1; service default/web has this address, but", "--service-proxy-name is x"}},
		{"a service of a third proxy", []string{"elsewhere", "--service-proxy-name=x"}, []string{"is another"}},
		{"a headless service", []string{"headless"}, []string{"default/headless exists", "headless"}},
		{"a service that is too large", []string{"web", "--max-service-elements=3"}, []string{"default/web is refused: too large", "10 elements", "limit of 3"}},
		{"a limit of zero", []string{"web", "--max-service-elements=0"}, []string{"--max-service-elements", "greater than zero"}},
		{"a missing service without namespace", []string{"missing"}, []string{"default/missing"}},
		{"no name", []string{"default/"}, []string{`"default/"`, "[NAMESPACE/]NAME"}},
		{"an invalid protocol", []string{"10.0.0.1:80/icmp"}, []string{"10.0.0.1:80/icmp", "tcp"}},
		{"a protocol without a port", []string{"10.0.0.1/tcp"}, []string{"10.0.0.1/tcp", "[NAMESPACE/]NAME"}},
		{"an IPv6 address with a port without brackets", []string{"fd00::1:80"}, []string{"fd00::1:80", "an address without a port", "[fd00::1]:80"}},
		{"an IPv6 address with a port that cannot be part of it", []string{"fd00::1:30080"}, []string{`"fd00::1:30080"`, "[fd00::1]:30080"}},
		{"an IPv6 address with port and protocol without brackets", []string{"fd00::1:80/tcp"}, []string{`"fd00::1:80/tcp"`, "[fd00::1]:80"}},
		{"a missing IPv6 address", []string{"fd00::abcd"}, []string{"no service is served at fd00::abcd"}},
		{"an incomplete address", []string{"10.0.0:80/tcp"}, []string{"10.0.0:80/tcp", "[NAMESPACE/]NAME"}},
		{"two arguments", []string{"a/b", "c/d"}, []string{"at most one argument"}},
		{"an invalid output format", []string{"-o", "xml"}, []string{"--output", "xml"}},
		{"two sources", []string{"--api=unix:///s"}, []string{"api", "manifests"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := execute(t.Context(), append([]string{"explain", "-i", explained, "--node-name=here"}, test.args...)...)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not name %q", err, want)
				}
			}
		})
	}
	if _, err := execute(t.Context(), "explain", "-i", explained, "--node-name="); err == nil || !strings.Contains(err.Error(), "--node-name") {
		t.Errorf("with an empty node name: error %v", err)
	}
	_, err := execute(t.Context(), "explain", "-i", explained, "--node-name=unknown", "192.0.2.1:30080")
	if err == nil || !strings.Contains(err.Error(), "default/web has node port 30080/TCP") {
		t.Errorf("of a node without addresses: error %v", err)
	}
}

// Services that the flags do not select are also found at an API server.
func TestExplainFindsUnselectedServicesOfTheAPIServer(t *testing.T) {
	cluster := kubetest.New()
	for i, name := range []string{"first", "second"} {
		cluster.Set(&corev1.Service{ObjectMeta: kubetest.Meta("default", name), Spec: corev1.ServiceSpec{ClusterIP: fmt.Sprint("10.0.0.", i+1), Ports: []corev1.ServicePort{{Port: 80}}}})
	}
	kubeconfig := kubeconfigOf(t, cluster)
	for question, want := range map[string]string{
		"second":      "service default/second exists, but ",
		"10.0.0.2:80": "no service is served at 10.0.0.2; service default/second has this address, but ",
		"10.0.0.9":    "no service is served at 10.0.0.9",
	} {
		_, err := execute(t.Context(), "explain", "--kubeconfig", kubeconfig, "--service-proxy-name=x", question)
		if err == nil || !strings.HasPrefix(err.Error(), want) || question == "10.0.0.9" && err.Error() != want {
			t.Errorf("%s: error %v, want %q", question, err, want)
		}
	}
}

// kubeconfigOf serves a cluster on loopback, and returns the path of a kubeconfig.
func kubeconfigOf(t *testing.T, cluster http.Handler) string {
	t.Helper()
	server := httptest.NewServer(cluster)
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c}}]\nclusters: [{name: c, cluster: {server: " + server.URL + "}}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestExplainNamesInvalidFields(t *testing.T) {
	path := filepath.Join(t.TempDir(), "web.yaml")
	manifest := "{apiVersion: v1, kind: Service, metadata: {name: web, annotations: {kpng.io/algorithm: fastest}}, spec: {clusterIP: 10.0.0.1, ports: [{port: 80}]}}"
	if err := os.WriteFile(path, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	const want = `The service is not served as written: invalid fields ignored: metadata.annotations[kpng.io/algorithm]: "fastest" is not a value`
	if out := mustExecute(t, "explain", "-i", path, "--node-name=here", "web"); !strings.Contains(out, want) || !strings.Contains(out, "ClusterIP 10.0.0.1:80/TCP") {
		t.Errorf("explanation:\n%s", out)
	}
	var e struct {
		Service struct{ Name string }
		Refused string
	}
	out := mustExecute(t, "explain", "-i", path, "--node-name=here", "web", "-o", "json")
	if err := json.Unmarshal([]byte(out), &e); err != nil || e.Service.Name != "web" || !strings.Contains(e.Refused, `metadata.annotations[kpng.io/algorithm]: "fastest"`) {
		t.Errorf("explanation %s, error %v", out, err)
	}
}

// TestAdditionsAreDocumented compares the fields that the command adds to explanations with
// the table in docs/reference/json.md.
func TestAdditionsAreDocumented(t *testing.T) {
	e := &nodeview.Explanation{Service: types.NamespacedName{Namespace: "default", Name: "web"}}
	fields := func(a *answer) map[string]any {
		text, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		var object map[string]any
		if err := json.Unmarshal(text, &object); err != nil {
			t.Fatalf("%v in %s", err, text)
		}
		return object
	}
	added := fields(&answer{e, additions{
		Refused: "too large", Ignored: nodeview.Parameters{Algorithm: true, Weights: true, Resets: true, NodePortSources: true},
		Dataplane: []inspection{{"ClusterIP 10.0.0.1:80/TCP", "an element"}},
	}})
	for name := range fields(&answer{Explanation: e}) {
		delete(added, name)
	}
	page, err := os.ReadFile("../../docs/reference/json.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "\n| field that kpng explain adds | type | meaning |\n|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	var documented, written []string
	for row := range strings.Lines(table) {
		names, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " |")
		documented = append(documented, strings.Split(names, ", ")...)
	}
	for name, value := range added {
		switch value := value.(type) {
		case map[string]any:
			for field := range value {
				written = append(written, name+"."+field)
			}
		case []any:
			for field := range value[0].(map[string]any) {
				written = append(written, name+"[]."+field)
			}
		default:
			written = append(written, name)
		}
	}
	slices.Sort(documented)
	slices.Sort(written)
	if diff := cmp.Diff(documented, written); diff != "" {
		t.Errorf("table in docs/reference/json.md (-documented +written):\n%s", diff)
	}
}

// TestTextOfAnswers checks the text that the command adds to an explanation.
func TestTextOfAnswers(t *testing.T) {
	e := &nodeview.Explanation{Service: types.NamespacedName{Namespace: "default", Name: "web"}}
	got := (&answer{e, additions{
		Refused: "too large", Ignored: nodeview.Parameters{Algorithm: true, Weights: true},
		Dataplane: []inspection{{"ClusterIP 10.0.0.1:80/TCP", "- one\n+ two"}},
	}}).String()
	want := e.String() + `
The service is not served as written: too large

The backend ignores traffic parameters: stable hashing, weights of endpoints

Dataplane for ClusterIP 10.0.0.1:80/TCP:
  - one
  + two
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
