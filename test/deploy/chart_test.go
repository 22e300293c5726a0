// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// renderChart renders the Helm chart as "helm install" does.
func renderChart(t *testing.T, release string, values map[string]any) ([]*unstructured.Unstructured, error) {
	t.Helper()
	chart, err := loader.Load(deployDir + "/chart")
	if err != nil {
		t.Fatal(err)
	}
	if err := chart.Validate(); err != nil {
		t.Fatal(err)
	}
	complete, err := util.ToRenderValues(chart, values,
		common.ReleaseOptions{Name: release, Namespace: "kube-system", IsInstall: true, Revision: 1}, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{Strict: true}.Render(chart, complete)
	if err != nil {
		return nil, err
	}
	delete(files, "kpng/templates/_helpers.tpl")
	var text []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		text = append(text, files[name])
	}
	return decode(t, []byte(strings.Join(text, "\n---\n"))), nil
}

func byName(all []*unstructured.Unstructured) map[string]any {
	found := map[string]any{}
	for _, object := range all {
		found[object.GetKind()+" "+object.GetName()] = object.Object
	}
	return found
}

// TestChartEqualsKustomizations compares the objects of the Helm chart with those of the
// kustomizations.
func TestChartEqualsKustomizations(t *testing.T) {
	for dir, text := range map[string]string{
		"nftables": "{}",
		"iptables": "backend: iptables",
		"ipvs":     "backend: ipvs",
		"ebpf":     "backend: ebpf",
		"windows":  "backend: kernelspace",
		"beside-kube-proxy": `
apiServer: {host: ""}
serviceProxyName: kpng`,
	} {
		t.Run(dir, func(t *testing.T) {
			got, err := renderChart(t, "kpng-"+dir, parseYAML(t, text))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(byName(objects(t, dir)), byName(got)); diff != "" {
				t.Errorf("objects (-kustomize +chart):\n%s", diff)
			}
		})
	}
}

func TestChartUsesValues(t *testing.T) {
	got, err := renderChart(t, "example", parseYAML(t, `
image: {repository: registry.example/kpng, tag: v1.2.3, pullPolicy: Always}
apiServer: {host: "2001:db8::1", port: 443}
resources: {limits: {memory: 1Gi}}
nodeSelector: {pool: blue}
extraArgs: [--cluster-cidr=10.0.0.0/8, --masquerade-all]`))
	if err != nil {
		t.Fatal(err)
	}
	set := byName(got)["DaemonSet example"].(map[string]any)
	pod, _, _ := unstructured.NestedMap(set, "spec", "template", "spec")
	container := pod["containers"].([]any)[0].(map[string]any)
	values := map[string]any{
		"nodeSelector": pod["nodeSelector"], "image": container["image"], "imagePullPolicy": container["imagePullPolicy"],
		"resources": container["resources"], "last args": container["args"].([]any)[5:], "api": container["env"].([]any)[1:],
	}
	want := parseYAML(t, `
nodeSelector: {kubernetes.io/os: linux, pool: blue}
image: registry.example/kpng:v1.2.3
imagePullPolicy: Always
resources: {limits: {memory: 1Gi}}
last args: [--cluster-cidr=10.0.0.0/8, --masquerade-all]
api:
- {name: KUBERNETES_SERVICE_HOST, value: "2001:db8::1"}
- {name: KUBERNETES_SERVICE_PORT, value: "443"}`)
	if diff := cmp.Diff(want, values); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A second release beside another proxy has an instance and addresses of its own.
func TestChartNamesInstances(t *testing.T) {
	got, err := renderChart(t, "second", parseYAML(t, `
serviceProxyName: second
instance: second
healthzBindAddress: 127.0.0.1:10456
metricsBindAddress: 127.0.0.1:10449`))
	if err != nil {
		t.Fatal(err)
	}
	set := byName(got)["DaemonSet second"].(map[string]any)
	containers, _, _ := unstructured.NestedSlice(set, "spec", "template", "spec", "containers")
	want := []any{
		"kube", "to-local", "nftables", "--service-proxy-name=second",
		"--healthz-bind-address=127.0.0.1:10456", "--metrics-bind-address=127.0.0.1:10449", "--instance=second",
	}
	if diff := cmp.Diff(want, containers[0].(map[string]any)["args"]); diff != "" {
		t.Errorf("args (-want +got):\n%s", diff)
	}
	if port, _, _ := unstructured.NestedFieldNoCopy(containers[0].(map[string]any), "livenessProbe", "httpGet", "port"); port != int64(10456) {
		t.Errorf("the liveness probe uses port %v", port)
	}
}

func TestChartRejectsUnknownValues(t *testing.T) {
	for _, text := range []string{"backend: nftable", "apiserver: {host: 192.0.2.1}", "healthzBindAddress: localhost"} {
		if _, err := renderChart(t, "example", parseYAML(t, text)); err == nil {
			t.Errorf("the chart accepts %s", text)
		}
	}
}

func parseYAML(t *testing.T, text string) map[string]any {
	t.Helper()
	values := map[string]any{}
	if err := yaml.Unmarshal([]byte(text), &values); err != nil {
		t.Fatal(err)
	}
	return values
}
