// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/manifest"
	"github.com/kpng-project/kpng/watcher"
)

const (
	service = `apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  clusterIP: 10.96.0.1
  ports:
  - port: 80
`
	slice = `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  labels:
    kubernetes.io/service-name: web
addressType: IPv4
ports:
- port: 8080
endpoints:
- addresses: [10.0.0.1]
`
)

// write creates a folder with files, and returns the folder. The argument files maps the
// name of each file to its text.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func names(m *manifests) []string {
	var list []string
	for _, s := range m.services {
		list = append(list, "service "+s.Key().String())
	}
	for _, s := range m.slices {
		list = append(list, "slice "+s.Key().String())
	}
	for _, n := range m.nodes {
		list = append(list, "node "+n.Name)
	}
	return list
}

// warnings returns the warnings of m. It removes the folder dir from their paths.
func warnings(m *manifests, dir string) []string {
	var list []string
	for _, w := range m.warnings {
		list = append(list, strings.TrimPrefix(w, dir+"/"))
	}
	return list
}

func TestErrorsNameFileAndLine(t *testing.T) {
	edit := func(text string, oldnew ...string) string {
		edited := strings.NewReplacer(oldnew...).Replace(text)
		if edited == text {
			panic("nothing replaced")
		}
		return edited
	}
	for _, c := range []struct {
		name string
		file string // default: m.yaml
		text string
		want []string
	}{{
		name: "a file without bytes",
		text: "",
		want: []string{"m.yaml: empty; use a List without items if there are no objects"},
	}, {
		name: "a file with only a line end",
		text: "\n",
		want: []string{"m.yaml: empty; use a List without items if there are no objects"},
	}, {
		name: "a file with only comments",
		text: "# nothing yet\n",
		want: []string{"m.yaml: empty; use a List without items if there are no objects"},
	}, {
		name: "a file with only a marker",
		text: "---\n",
		want: []string{"m.yaml: empty; use a List without items if there are no objects"},
	}, {
		name: "a file with only empty documents",
		text: "---\n# nothing\n---\n",
		want: []string{"m.yaml: empty; use a List without items if there are no objects"},
	}, {
		name: "a file with only null",
		text: "null\n",
		want: []string{"m.yaml: empty; use a List without items if there are no objects"},
	}, {
		name: "a JSON file with only null",
		file: "m.json",
		text: "null",
		want: []string{"m.json: empty; use a List without items if there are no objects"},
	}, {
		name: "binary data",
		text: "\x7fELF\x02\n\x00",
		want: []string{"m.yaml: document 1 (line 1): yaml: control characters are not allowed"},
	}, {
		name: "a node without a name",
		text: "apiVersion: v1\nkind: Node\nmetadata: {}\n",
		want: []string{"m.yaml: document 1 (line 1): Node: metadata.name: Required value: a manifest must name its object, also if it has a generateName"},
	}, {
		name: "a tab as indentation, in the second document",
		text: service + "---\n# comment\n\n" + edit(slice, "  name: web-1", "\tname: web-1"),
		want: []string{"m.yaml: document 2 (line 9): yaml: line 15: found character that cannot start any token"},
	}, {
		name: "a key that is not indented like its siblings",
		text: edit(service, "  ports:", " ports:"),
		want: []string{"m.yaml: document 1 (line 1): yaml: line 7: did not find expected key"},
	}, {
		name: "a string that is not closed",
		text: edit(service, "name: web", `name: "web`),
		want: []string{"m.yaml: document 1 (line 1): yaml: line 9: found unexpected end of stream"},
	}, {
		name: "an extra colon",
		text: edit(service, "name: web", `name: web: x`),
		want: []string{"m.yaml: document 1 (line 1): yaml: line 4: mapping values are not allowed in this context"},
	}, {
		name: "a flow sequence that is not closed",
		text: edit(service, "name: web", "labels: {a: b") + "\n\n---\n" + slice,
		want: []string{"m.yaml: document 1 (line 1): yaml: line 5: did not find expected ',' or '}'"},
	}, {
		name: "an error in the first line",
		text: "a: b: c\n",
		want: []string{"m.yaml: document 1 (line 1): yaml: mapping values are not allowed in this context"},
	}, {
		name: "a comma missing in JSON",
		file: "m.json",
		text: "{\n \"apiVersion\": \"v1\",\n \"kind\": \"Service\"\n \"metadata\": {}\n}\n",
		want: []string{`m.json: document 1 (line 4): invalid character '"' after object key:value pair`},
	}, {
		name: "truncated JSON",
		file: "m.json",
		text: "{\n \"apiVersion\": \"v1\",\n \"kind\": [\n\n",
		want: []string{"m.json: document 1 (line 1): unexpected EOF"},
	}, {
		name: "JSON followed by something else",
		file: "m.json",
		text: "{\"apiVersion\": \"v1\", \"kind\": \"Pod\"}\n}\n",
		want: []string{"m.json: document 2 (line 2): invalid character '}' looking for beginning of value"},
	}, {
		name: "bytes that are not UTF-8",
		text: service + "# caf\xe9\n",
		want: []string{"m.yaml: not UTF-8 text"},
	}, {
		name: "an alias without anchor",
		text: edit(service, "name: web", "name: *other"),
		want: []string{"m.yaml: document 1 (line 1): yaml: unknown anchor 'other' referenced"},
	}, {
		name: "an alias that contains itself",
		text: "apiVersion: v1\nkind: List\nitems: &all\n- *all\n",
		want: []string{"m.yaml: document 1 (line 1): yaml: anchor 'all' value contains itself"},
	}, {
		name: "aliases that grow exponentially",
		text: "a: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n" +
			"d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\n",
		want: []string{"m.yaml: document 1 (line 1): yaml: document contains excessive aliasing"},
	}, {
		name: "a document that is not an object",
		text: service + "---\n- 1\n",
		want: []string{"m.yaml: document 2 (line 9): not an object with apiVersion and kind"},
	}, {
		name: "an object without kind",
		text: "apiVersion: v1\nmetadata: {name: x}\n",
		want: []string{"m.yaml: document 1 (line 1): not an object with apiVersion and kind"},
	}, {
		name: "a misspelt field",
		text: edit(service, "- port: 80", "- port: 80\n    targetport: 8080"),
		want: []string{`m.yaml: document 1 (line 1): Service default/web: unknown field "spec.ports[0].targetport"`},
	}, {
		name: "a repeated field",
		text: edit(service, "  clusterIP: 10.96.0.1", "  clusterIP: 10.96.0.1\n  clusterIP: 10.96.0.2"),
		want: []string{`m.yaml: document 1 (line 1): yaml: unmarshal errors: line 7: key "clusterIP" already set in map`},
	}, {
		name: "values of the wrong type; all are reported",
		text: edit(service, "  name: web", "  name: web\n  labels: {a: 1, b: true}", "- port: 80", "- port: eighty\n    nodePort: {}\n  publishNotReadyAddresses: 1"),
		want: []string{
			"m.yaml: document 1 (line 1): Service default/web: metadata.labels.a: 1 is not a value of type string (in quotes)",
			"m.yaml: document 1 (line 1): Service default/web: metadata.labels.b: true is not a value of type string (in quotes)",
			"m.yaml: document 1 (line 1): Service default/web: spec.ports[0].nodePort: {} is not a value of type int32",
			`m.yaml: document 1 (line 1): Service default/web: spec.ports[0].port: "eighty" is not a value of type int32`,
			"m.yaml: document 1 (line 1): Service default/web: spec.publishNotReadyAddresses: 1 is not a value of type bool",
		},
	}, {
		name: "an unquoted truth value of YAML",
		text: edit(service, "name: web", "name: no"),
		want: []string{"m.yaml: document 1 (line 1): Service: metadata.name: false is not a value of type string (in quotes)"},
	}, {
		name: "a target port that is neither number nor name",
		text: edit(service, "port: 80", "port: 80\n    targetPort: {}"),
		want: []string{"m.yaml: document 1 (line 1): Service default/web: json: cannot unmarshal object into Go struct field ServicePort.spec.ports.targetPort of type int32"},
	}, {
		name: "something after the end of an object",
		text: "{apiVersion: v1, kind: Pod}\n{apiVersion: v1, kind: Pod}\n",
		want: []string{"m.yaml: document 2 (line 1): yaml: line 2: did not find expected <document start>"},
	}, {
		name: "a key below the indentation of the object",
		text: "  apiVersion: v1\n  kind: Pod\nmetadata: {}\n",
		want: []string{"m.yaml: document 2 (line 1): yaml: line 3: did not find expected <document start>"},
	}, {
		name: "a number out of range",
		text: edit(service, "port: 80", "port: 99999999999"),
		want: []string{"m.yaml: document 1 (line 1): Service default/web: spec.ports[0].port: 99999999999 is not a value of type int32"},
	}, {
		name: "an invalid time",
		text: edit(service, "name: web", "name: web\n  creationTimestamp: yesterday"),
		want: []string{`m.yaml: document 1 (line 1): Service default/web: parsing time "yesterday" as "2006-01-02T15:04:05Z07:00": cannot parse "yesterday" as "2006"`},
	}, {
		name: "the same service twice in a file",
		text: service + "---\n" + edit(service, "name: web", "name: web\n  namespace: default"),
		want: []string{"m.yaml: document 2 (line 9): Service default/web: already defined in m.yaml: document 1 (line 1)"},
	}, {
		name: "an item of a list",
		text: "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata:\n    name: web\n    namespace: shop\n  spec:\n    clusterIP: None\n    ports:\n    - port: 0\n",
		want: []string{"m.yaml: document 1 (line 1): items[0]: Service shop/web: spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive"},
	}, {
		name: "an item of a list in JSON",
		file: "m.json",
		text: "{\n \"kind\": \"List\",\n \"apiVersion\": \"v1\",\n \"items\": [\n  {\n   \"kind\": \"Node\",\n   \"apiVersion\": \"v1\",\n   \"metadata\": {\n    \"name\": 5\n   }\n  }\n ]\n}\n",
		want: []string{"m.json: document 1 (line 1): items[0]: Node: metadata.name: 5 is not a value of type string (in quotes)"},
	}, {
		name: "items that are not a list",
		text: "apiVersion: v1\nkind: List\nitems: 3\n",
		want: []string{"m.yaml: document 1 (line 1): items: not a list"},
	}, {
		name: "a service without a name",
		text: edit(service, "name: web", "generateName: web-"),
		want: []string{"m.yaml: document 1 (line 1): Service: metadata.name: Required value: a manifest must name its object, also if it has a generateName"},
	}, {
		name: "an invalid name",
		text: edit(service, "name: web", "name: Web"),
		want: []string{`m.yaml: document 1 (line 1): Service default/Web: metadata.name: Invalid value: "Web": a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')`},
	}, {
		name: "an unknown protocol, a port above 65535 and an invalid IP",
		text: edit(service, "10.96.0.1", "10.96.0.256", "port: 80", "port: 65536\n  - name: b\n    port: 81\n    protocol: QUIC"),
		want: []string{
			`m.yaml: document 1 (line 1): Service default/web: spec.clusterIPs[0]: Invalid value: "10.96.0.256": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)`,
			"m.yaml: document 1 (line 1): Service default/web: spec.ports[0].name: Required value: a service with several ports must name each",
			"m.yaml: document 1 (line 1): Service default/web: spec.ports[0].port: Invalid value: 65536: must be between 1 and 65535, inclusive",
			`m.yaml: document 1 (line 1): Service default/web: spec.ports[1].protocol: Unsupported value: "QUIC": supported values: "TCP", "UDP", "SCTP"`,
		},
	}, {
		name: "two service ports with the same name",
		text: edit(service, "port: 80", "port: 80\n    name: a\n  - port: 81\n    name: a"),
		want: []string{`m.yaml: document 1 (line 1): Service default/web: spec.ports[1].name: Duplicate value: "a"`},
	}, {
		name: "a service without ports",
		text: edit(service, "ports:\n  - port: 80\n", "type: ClusterIP\n"),
		want: []string{"m.yaml: document 1 (line 1): Service default/web: spec.ports: Required value: only headless services may omit ports"},
	}, {
		name: "values that the API does not have",
		text: edit(service, "clusterIP: 10.96.0.1", "type: External\n  clusterIP: 10.96.0.1\n  externalTrafficPolicy: local\n  internalTrafficPolicy: Node\n  ipFamilies: [IPv5]\n  ipFamilyPolicy: DualStack\n  sessionAffinity: IP"),
		want: []string{
			`m.yaml: document 1 (line 1): Service default/web: spec.type: Unsupported value: "External": supported values: "ClusterIP", "NodePort", "LoadBalancer", "ExternalName"`,
			`m.yaml: document 1 (line 1): Service default/web: spec.ipFamilies[0]: Unsupported value: "IPv5": supported values: "IPv4", "IPv6"`,
			`m.yaml: document 1 (line 1): Service default/web: spec.ipFamilyPolicy: Unsupported value: "DualStack": supported values: "SingleStack", "PreferDualStack", "RequireDualStack"`,
			`m.yaml: document 1 (line 1): Service default/web: spec.sessionAffinity: Unsupported value: "IP": supported values: "None", "ClientIP"`,
			`m.yaml: document 1 (line 1): Service default/web: spec.externalTrafficPolicy: Invalid value: "local": only allowed with types LoadBalancer and NodePort, and with external IPs`,
			`m.yaml: document 1 (line 1): Service default/web: spec.internalTrafficPolicy: Unsupported value: "Node": supported values: "Cluster", "Local"`,
		},
	}, {
		name: "cluster IPs that contradict each other",
		text: edit(service, "clusterIP: 10.96.0.1", "clusterIP: 10.96.0.1\n  clusterIPs:\n  - 10.96.0.2\n  - 10.96.0.3"),
		want: []string{
			`m.yaml: document 1 (line 1): Service default/web: spec.clusterIPs[0]: Invalid value: "10.96.0.2": must equal spec.clusterIP, "10.96.0.1"`,
			`m.yaml: document 1 (line 1): Service default/web: spec.clusterIPs[1]: Invalid value: "10.96.0.3": must have another family than the first`,
		},
	}, {
		name: "a cluster IP of another family than the first",
		text: edit(service, "clusterIP: 10.96.0.1", "clusterIP: 10.96.0.1\n  ipFamilies: [IPv6]"),
		want: []string{`m.yaml: document 1 (line 1): Service default/web: spec.clusterIPs[0]: Invalid value: "10.96.0.1": must be an IPv6 address, as spec.ipFamilies[0] says`},
	}, {
		name: "a line end within a JSON string",
		file: "m.json",
		text: "{\n \"apiVersion\": \"v1\n\"\n}\n",
		want: []string{`m.json: document 1 (line 2): invalid character '\n' in string literal`},
	}, {
		name: "a node-port service without cluster IP",
		text: edit(service, "clusterIP: 10.96.0.1", "type: NodePort\n  clusterIP: None"),
		want: []string{`m.yaml: document 1 (line 1): Service default/web: spec.clusterIPs[0]: Invalid value: "None": not allowed with type NodePort`},
	}, {
		name: "an invalid affinity timeout, source range, ingress mode and target port",
		text: edit(service, "clusterIP: 10.96.0.1", "type: LoadBalancer\n  sessionAffinity: ClientIP\n  sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}\n  loadBalancerSourceRanges: [10.0.0.0/33]", "port: 80", "port: 80\n    targetPort: UPPER\nstatus: {loadBalancer: {ingress: [{ip: 1.2.3.4, ipMode: vip}]}}"),
		want: []string{
			`m.yaml: document 1 (line 1): Service default/web: spec.ports[0].targetPort: Invalid value: "UPPER": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)`,
			`m.yaml: document 1 (line 1): Service default/web: spec.ports[0].targetPort: Invalid value: "UPPER": must contain at least one letter (a-z)`,
			"m.yaml: document 1 (line 1): Service default/web: spec.sessionAffinityConfig.clientIP.timeoutSeconds: Invalid value: 0: must be between 1 and 86400",
			`m.yaml: document 1 (line 1): Service default/web: spec.loadBalancerSourceRanges[0]: Invalid value: "10.0.0.0/33": must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)`,
			`m.yaml: document 1 (line 1): Service default/web: status.loadBalancer.ingress[0].ipMode: Unsupported value: "vip": supported values: "VIP", "Proxy"`,
		},
	}, {
		name: "fields that the type of the service does not have",
		text: edit(service, "clusterIP: 10.96.0.1", "loadBalancerSourceRanges: [10.0.0.0/8]\n  externalTrafficPolicy: Local", "port: 80", "port: 80\n    nodePort: 30080\nstatus: {loadBalancer: {ingress: [{ip: 1.2.3.4}]}}"),
		want: []string{
			"m.yaml: document 1 (line 1): Service default/web: spec.ports[0].nodePort: Forbidden: not allowed with type ClusterIP",
			"m.yaml: document 1 (line 1): Service default/web: spec.loadBalancerSourceRanges: Forbidden: only allowed with type LoadBalancer",
			"m.yaml: document 1 (line 1): Service default/web: status.loadBalancer.ingress: Forbidden: only allowed with type LoadBalancer",
			`m.yaml: document 1 (line 1): Service default/web: spec.externalTrafficPolicy: Invalid value: "Local": only allowed with types LoadBalancer and NodePort, and with external IPs`,
		},
	}, {
		name: "external IPs and endpoints to which no packet can be sent",
		text: edit(service, "clusterIP: 10.96.0.1", "externalIPs: [127.0.0.1, 0.0.0.0, 169.254.169.254, ff02::1]") + "---\n" + edit(slice, "10.0.0.1", "127.0.0.1"),
		want: []string{
			`m.yaml: document 1 (line 1): Service default/web: spec.externalIPs[0]: Invalid value: "127.0.0.1": must not be a loopback address`,
			`m.yaml: document 1 (line 1): Service default/web: spec.externalIPs[1]: Invalid value: "0.0.0.0": must not be an unspecified address`,
			`m.yaml: document 1 (line 1): Service default/web: spec.externalIPs[2]: Invalid value: "169.254.169.254": must not be a link-local address`,
			`m.yaml: document 1 (line 1): Service default/web: spec.externalIPs[3]: Invalid value: "ff02::1": must not be a link-local multicast address`,
			`m.yaml: document 2 (line 9): EndpointSlice default/web-1: endpoints[0].addresses[0]: Invalid value: "127.0.0.1": must not be a loopback address`,
		},
	}, {
		name: "two keys that are equal as strings",
		text: edit(service, "name: web", "name: web\n  labels: {1: a, \"1\": b}"),
		want: []string{`m.yaml: document 1 (line 1): key "1" occurs twice`},
	}, {
		name: "a key that is not a string",
		text: edit(service, "name: web", "name: web\n  labels: {null: a}"),
		want: []string{"m.yaml: document 1 (line 1): key <nil> is not a string"},
	}, {
		name: "a slice without address type",
		text: edit(slice, "addressType: IPv4\n", ""),
		want: []string{`m.yaml: document 1 (line 1): EndpointSlice default/web-1: addressType: Unsupported value: "": supported values: "IPv4", "IPv6", "FQDN"`},
	}, {
		name: "endpoint addresses that are invalid, or of the other family",
		text: edit(slice, "- addresses: [10.0.0.1]", "- addresses: [10.0.0]\n- addresses:\n  - 1000::1\n- addresses: []"),
		want: []string{
			`m.yaml: document 1 (line 1): EndpointSlice default/web-1: endpoints[0].addresses[0]: Invalid value: "10.0.0": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)`,
			`m.yaml: document 1 (line 1): EndpointSlice default/web-1: endpoints[1].addresses[0]: Invalid value: "1000::1": must be an IPv4 address`,
			"m.yaml: document 1 (line 1): EndpointSlice default/web-1: endpoints[2].addresses: Required value: an endpoint needs an address",
		},
	}, {
		name: "an invalid pod network",
		text: "apiVersion: v1\nkind: Node\nmetadata:\n  name: n1\nspec:\n  podCIDRs: [x]\n",
		want: []string{`m.yaml: document 1 (line 1): Node n1: spec.podCIDRs[0]: Invalid value: "x": must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)`},
	}, {
		name: "a valid document between two invalid ones; both are reported",
		text: edit(service, "port: 80", "port: -1") + "---\n" + slice + "---\na: b: c\n",
		want: []string{
			"m.yaml: document 1 (line 1): Service default/web: spec.ports[0].port: Invalid value: -1: must be between 1 and 65535, inclusive",
			"m.yaml: document 3 (line 21): yaml: line 22: mapping values are not allowed in this context",
		},
	}} {
		t.Run(c.name, func(t *testing.T) {
			if c.file == "" {
				c.file = "m.yaml"
			}
			t.Chdir(write(t, map[string]string{c.file: c.text}))
			_, err := load(t.Context(), c.file, watcher.Options{})
			if err == nil {
				t.Fatal("accepted")
			}
			if diff := cmp.Diff(c.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("errors (-want +got):\n%s", diff)
			}
		})
	}
}

func TestListedErrorsAreBounded(t *testing.T) {
	var text strings.Builder
	for i := range 30 {
		fmt.Fprintf(&text, "---\n- %d\n", i)
	}
	_, err := load(t.Context(), filepath.Join(write(t, map[string]string{"m.yaml": text.String()}), "m.yaml"), watcher.Options{})
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != maxListed+1 || lines[maxListed] != "and 10 more errors" {
		t.Errorf("got %d lines, the last %q", len(lines), lines[len(lines)-1])
	}
}

func TestDuplicateObjectIsAnError(t *testing.T) {
	dir := write(t, map[string]string{"a.yaml": service, "b.yaml": "# again\n" + service})
	_, err := load(t.Context(), dir, watcher.Options{})
	want := fmt.Sprintf("%s/b.yaml: document 1 (line 1): Service default/web: already defined in %s/a.yaml: document 1 (line 1)", dir, dir)
	if err == nil || err.Error() != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
}

func TestFolderReadsOnlyManifests(t *testing.T) {
	dir := write(t, map[string]string{
		"a.yaml":        service,
		"b.yml":         slice,
		"c.json":        `{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}`,
		".hidden.yaml":  "nonsense: [",
		"README.md":     "no manifest",
		"..2024/a.yaml": service,
		"sub/d.yaml":    "nonsense: [",
		"dir.yaml/x":    "nonsense: [",
	})
	m, err := load(t.Context(), dir, watcher.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"service default/web", "slice default/web-1", "node n1"}, names(m)); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	if len(m.warnings) > 0 {
		t.Errorf("warnings: %v", m.warnings)
	}
}

func TestIgnoredPartsAreWarnings(t *testing.T) {
	var endpoints strings.Builder
	for i := range 1001 {
		fmt.Fprintf(&endpoints, "- addresses: [10.0.%d.%d]\n", i/256, i%256)
	}
	for _, c := range []struct {
		name, text string
		objects    []string
		warnings   []string
	}{{
		name: "an endpoint slice without the service label is ignored",
		text: "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: x\n  labels:\n    app: a\naddressType: IPv4\n",
		warnings: []string{
			"m.yaml: document 1 (line 1): EndpointSlice default/x: metadata.labels[kubernetes.io/service-name]: missing, so the slice belongs to no service",
		},
	}, {
		name:     "an endpoint slice with the label of headless services is ignored",
		text:     service + "---\n" + strings.Replace(slice, "  labels:\n", "  labels:\n    service.kubernetes.io/headless: \"\"\n", 1),
		objects:  []string{"service default/web"},
		warnings: []string{"m.yaml: document 2 (line 9): EndpointSlice default/web-1: ignored, because its label service.kubernetes.io/headless is only for slices of headless services"},
	}, {
		name:     "more endpoints than an API server accepts are served",
		text:     strings.Replace(slice, "- addresses: [10.0.0.1]\n", endpoints.String(), 1),
		objects:  []string{"slice default/web-1"},
		warnings: []string{"m.yaml: document 1 (line 1): EndpointSlice default/web-1: endpoints: the slice has 1001; an API server admits 1000"},
	}, {
		name:    "each other kind is reported once",
		text:    "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Pod\nspec: {whatever: 1}\n---\napiVersion: v1\nkind: ConfigMapList\nitems:\n- {data: {}}\n---\napiVersion: serving.knative.dev/v1\nkind: Service\n---\n" + service,
		objects: []string{"service default/web"},
		warnings: []string{
			"m.yaml: document 4 (line 13): serving.knative.dev/v1 Service ignored (objects: 1)",
			"m.yaml: document 3 (line 8): items[0]: v1 ConfigMap ignored (objects: 1)",
			"m.yaml: document 1 (line 1): v1 Pod ignored (objects: 2)",
		},
	}, {
		name:     "an unknown field in an object of an API server may be from a later release",
		text:     strings.NewReplacer("  name: web", "  name: web\n  uid: 3f2e", "- port: 80", "- port: 80\n    color: red").Replace(service),
		objects:  []string{"service default/web"},
		warnings: []string{`m.yaml: document 1 (line 1): Service default/web: unknown field "spec.ports[0].color" ignored`},
	}, {
		name:     "an invalid node address is omitted",
		text:     "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nstatus:\n  addresses:\n  - type: InternalIP\n    address: here\n",
		objects:  []string{"node n1"},
		warnings: []string{`m.yaml: document 1 (line 1): Node n1: status.addresses[0].address: "here" is not an IP address`},
	}} {
		t.Run(c.name, func(t *testing.T) {
			dir := write(t, map[string]string{"m.yaml": c.text})
			m, err := load(t.Context(), filepath.Join(dir, "m.yaml"), watcher.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.objects, names(m)); diff != "" {
				t.Errorf("objects (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.warnings, warnings(m, dir)); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOptionalFieldsMayBeMissing(t *testing.T) {
	for _, c := range []struct{ name, text string }{
		{"a list without items", "apiVersion: v1\nkind: List\nitems: []\n"},
		{"a list whose items are null", "apiVersion: v1\nkind: List\nitems:\n"},
		{"documents without an object, and one with an object", "---\n---\n# x\n---\nnull\n---\napiVersion: v1\nkind: List\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := load(t.Context(), filepath.Join(write(t, map[string]string{"m.yaml": c.text}), "m.yaml"), watcher.Options{})
			if err != nil || len(names(m)) > 0 {
				t.Errorf("got %v, %v", m, err)
			}
		})
	}
}

func TestEquivalentManifests(t *testing.T) {
	want, err := load(t.Context(), filepath.Join(write(t, map[string]string{"m.yaml": service}), "m.yaml"), watcher.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const asJSON = `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web","annotations":{"path":"\/a","smile":"\ud83d\ude00"}},` +
		"\n\t" + `"spec":{"clusterIP":"10.96.0.1","ports":[{"port":80}]}}`
	for _, c := range []struct{ name, file, text string }{
		{"JSON with escapes that YAML does not know", "m.json", asJSON},
		{"JSON in a file with another extension", "m.yaml", asJSON},
		{"several JSON texts", "m.json", `{"apiVersion":"v1","kind":"List","items":[]}` + "\n" + asJSON},
		{"a byte order mark and Windows line ends", "m.yaml", "\ufeff" + strings.ReplaceAll(service, "\n", "\r\n")},
		{"a YAML directive", "m.yaml", "%YAML 1.1\n---\n" + service},
		{"a document with content on the line of its marker", "m.yaml", "--- # first\n" + service + "---\n"},
		{"an end marker", "m.yaml", service + "...\n---\n# end\n"},
		{"anchors and aliases", "m.yaml", strings.Replace(strings.Replace(service, "name: web", "name: &n web\n  labels: {app: *n}", 1), "80", "&p 80\n    targetPort: *p", 1)},
		{"explicit defaults of the API", "m.yaml", strings.NewReplacer("  name: web", "  name: web\n  namespace: default\n  creationTimestamp: null",
			"- port: 80", "- port: 80\n    protocol: TCP\n    targetPort: 80\n  type: ClusterIP\n  sessionAffinity: None\n  internalTrafficPolicy: Cluster\n  clusterIPs: [10.96.0.1]\nstatus:\n  loadBalancer: {}").Replace(service)},
		{"a typed list, whose items have no type", "m.yaml", "apiVersion: v1\nkind: ServiceList\nmetadata: {resourceVersion: \"7\"}\nitems:\n- metadata: {name: web}\n  spec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"},
		{"a port in hexadecimal", "m.yaml", strings.Replace(service, "80", "0x50", 1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := load(t.Context(), filepath.Join(write(t, map[string]string{c.file: c.text}), c.file), watcher.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want.services, got.services); diff != "" {
				t.Errorf("services (-want +got):\n%s", diff)
			}
		})
	}
}

func TestStandardInputIsRead(t *testing.T) {
	input, err := os.Open(filepath.Join(write(t, map[string]string{"m": service + "oops"}), "m"))
	if err != nil {
		t.Fatal(err)
	}
	defer input.Close()
	stdin := os.Stdin
	defer func() { os.Stdin = stdin }()
	os.Stdin = input
	_, err = load(t.Context(), manifest.Stdin, watcher.Options{})
	if want := "stdin: document 1 (line 1): yaml: line 10: could not find expected ':'"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}
