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
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// renderChart renders the Helm chart as "helm install" does.
func renderChart(t *testing.T, release string, values map[string]any) ([]*unstructured.Unstructured, error) {
	t.Helper()
	return renderChartFile(t, deployDir+"/chart", release, values)
}

// renderChartFile renders a Helm chart, which is a directory or a package.
func renderChartFile(t *testing.T, file, release string, values map[string]any) ([]*unstructured.Unstructured, error) {
	t.Helper()
	chart, err := loader.Load(file)
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
	delete(files, "kpng/templates/NOTES.txt")
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
		"nftables":          "{}",
		"iptables":          "backend: iptables",
		"ipvs":              "backend: ipvs",
		"ebpf":              "backend: ebpf",
		"windows":           "backend: kernelspace",
		"beside-kube-proxy": "serviceProxyName: kpng",
	} {
		t.Run(dir, func(t *testing.T) {
			values := parseYAML(t, text)
			values["image"] = map[string]any{"tag": "latest"}
			if values["serviceProxyName"] == nil {
				values["apiServer"] = map[string]any{"host": "api-server.example"}
			}
			got, err := renderChart(t, "kpng-"+dir, values)
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

// A task runs in init containers, after the remaining proxy is complete.
func TestChartRunsTasks(t *testing.T) {
	for _, test := range []struct{ values, want string }{
		{"{task: check, kubeProxy: {configMap: kube-proxy}}", "task: kpng:v0.1.0 check nftables --config=/var/lib/kube-proxy/config.conf"},
		{"{task: cleanup, instance: a, apiServer: {host: 192.0.2.1}}", "wait: kpng:v0.1.0 wait kube-proxy, task: kpng:v0.1.0 cleanup nftables --instance=a"},
		{"{task: cleanup, backend: ebpf, apiServer: {host: 192.0.2.1}}", "wait: kpng:v0.1.0 wait kube-proxy, task: kpng:v0.1.0 cleanup ebpf --bpffs=/node/bpf --cgroup=/node/cgroup"},
		{"{task: cleanup-kube-proxy, kubeProxy: {image: 'p:v1'}, healthzBindAddress: '0.0.0.0:1', apiServer: {host: 192.0.2.1}}", "wait: kpng:v0.1.0 wait kpng --address=127.0.0.1:1, task: p:v1 kube-proxy --cleanup"},
		{"{task: cleanup-kube-proxy, apiServer: {host: 192.0.2.1}}", "set kubeProxy.image to the image of the DaemonSet kube-proxy"},
		{"{task: check, serviceProxyName: a}", "tasks are for Linux nodes, and for kpng in place of kube-proxy"},
	} {
		got, err := renderChart(t, "example", parseYAML(t, test.values))
		if err != nil {
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("%s: %v, want %s", test.values, err, test.want)
			}
			continue
		}
		pod, _, _ := unstructured.NestedMap(byName(got)["DaemonSet example"].(map[string]any), "spec", "template", "spec")
		var tasks []string
		for _, c := range pod["initContainers"].([]any) {
			c := c.(map[string]any)
			words := []string{c["name"].(string) + ":", c["image"].(string)}
			for _, field := range []string{"command", "args"} {
				list, _, _ := unstructured.NestedStringSlice(c, field)
				words = append(words, list...)
			}
			tasks = append(tasks, strings.Join(words, " "))
		}
		if got := strings.Join(tasks, ", "); got != test.want {
			t.Errorf("%s:\n%s, want\n%s", test.values, got, test.want)
		}
	}
}

func TestChartRejectsUnknownValues(t *testing.T) {
	for _, text := range []string{
		"backend: nftable", "apiserver: {host: 192.0.2.1}", "apiServer: {host: 192.0.2.1}\nhealthzBindAddress: localhost",
		"apiServer: {host: 192.0.2.1}\nimage: {digest: latest}",
		"{}", // without an address of the API server, no pod would work
	} {
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

// chartValues are values that users may have.
var chartValues = map[string]string{
	"in place of kube-proxy":   "apiServer: {host: 192.0.2.1}",
	"with service CIDRs":       "apiServer: {host: 192.0.2.1}\nfollowServiceCIDRs: true",
	"with IPv6":                "apiServer: {host: '2001:db8::1', port: 443}\nextraArgs: ['--cluster-cidr=fd00::/48']",
	"with iptables":            "apiServer: {host: 192.0.2.1}\nbackend: iptables\nextraVolumes: [{name: a, emptyDir: {}}]",
	"with IPVS":                "apiServer: {host: 192.0.2.1}\nbackend: ipvs\nkernelSettings: true",
	"with eBPF":                "apiServer: {host: 192.0.2.1}\nbackend: ebpf\nkernelSettings: true\nexcludePods: kpng.io/ebpf in (false)\nextraVolumeMounts: [{name: a, mountPath: /a}]\nextraVolumes: [{name: a, emptyDir: {}}]",
	"on Windows":               "apiServer: {host: 192.0.2.1}\nbackend: kernelspace\nhnsNetwork: pods\nevents: true",
	"beside kube-proxy":        "serviceProxyName: kpng\ninstance: a",
	"with kubeadm's ConfigMap": "kubeProxy: {configMap: kube-proxy}\nmetricsBindAddress: 0.0.0.0:10249",
	"node by node":             "apiServer: {host: 192.0.2.1}\nnodeSelector: {kpng: 'true'}\nupdateStrategy: {type: OnDelete}",
	"with monitoring":          "apiServer: {host: 192.0.2.1}\npodMonitor: {enabled: true}\nprometheusRule: {enabled: true}\ndashboard: {enabled: true}",
	"with a check":             "kubeProxy: {configMap: kube-proxy}\ntask: check\nkernelSettings: true",
	"with a cleanup":           "backend: ebpf\napiServer: {host: 192.0.2.1}\ntask: cleanup\nnodeSelector: {service-proxy: kube-proxy}",
	"cleaning kube-proxy":      "backend: iptables\nkubeProxy: {configMap: kube-proxy, image: 'registry.k8s.io/kube-proxy:v1.37.1'}\ntask: cleanup-kube-proxy",
	"as a part of an umbrella": "enabled: true\nglobal: {imageRegistry: registry.example}\napiServer: {host: 192.0.2.1}\ncommonLabels: {app.kubernetes.io/part-of: platform}",
	"with many values": `
enabled: true
global: {anything: 1}
backend: iptables
image: {repository: registry.example/kpng, tag: ignored, digest: "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", pullSecrets: [{name: secret}]}
kubeProxy: {configMap: kube-proxy}
kernelSettings: true
events: true
tolerations: [{key: a, operator: Exists}]
affinity: {nodeAffinity: {}}
priorityClassName: system-cluster-critical
updateStrategy: {type: OnDelete}
terminationGracePeriodSeconds: 60
commonLabels: {team: net}
annotations: {a: "1"}
podLabels: {pod: "yes"}
podAnnotations: {b: "2"}
serviceAccountAnnotations: {c: "3"}
extraEnv: [{name: GOGC, value: "50"}]
extraVolumes: [{name: extra, emptyDir: {}}]
extraVolumeMounts: [{name: extra, mountPath: /extra}]
podMonitor: {enabled: true, labels: {release: prometheus}}
prometheusRule: {enabled: true}
dashboard: {enabled: true}`,
}

// TestChartPassesLint runs "helm lint" with all values.
func TestChartPassesLint(t *testing.T) {
	for name, values := range chartValues {
		for _, m := range lint.RunAll(deployDir+"/chart", parseYAML(t, values), "kube-system").Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("%s: %s: %v", name, m.Path, m.Err)
			}
		}
	}
}

// TestChartOfManyValues renders the chart with values that users of other charts set, and
// checks where they arrive.
func TestChartOfManyValues(t *testing.T) {
	got, err := renderChart(t, "example", parseYAML(t, chartValues["with many values"]))
	if err != nil {
		t.Fatal(err)
	}
	all := byName(got)
	at := func(object string, path ...string) any {
		t.Helper()
		value, _, err := unstructured.NestedFieldNoCopy(all[object].(map[string]any), path...)
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
	pod := at("DaemonSet example", "spec", "template", "spec").(map[string]any)
	first := func(of string) map[string]any { return pod[of].([]any)[0].(map[string]any) }
	mounts := []any{
		map[string]any{"name": "lock", "mountPath": "/run/xtables.lock"},
		map[string]any{"name": "kube-proxy", "mountPath": "/var/lib/kube-proxy", "readOnly": true},
		map[string]any{"name": "extra", "mountPath": "/extra"},
	}
	image := "registry.example/kpng@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	rules := at("ClusterRole example", "rules").([]any)
	for what, values := range map[string][2]any{
		"arguments":           {first("containers")["args"], []any{"kube", "to-local", "iptables", "--config=/var/lib/kube-proxy/config.conf", "--events"}},
		"initial arguments":   {first("initContainers")["args"], []any{"kube", "to-local", "iptables", "--config=/var/lib/kube-proxy/config.conf", "--init-only"}},
		"images":              {[]any{first("containers")["image"], first("initContainers")["image"]}, []any{image, image}},
		"pull secrets":        {pod["imagePullSecrets"], []any{map[string]any{"name": "secret"}}},
		"mounts":              {first("containers")["volumeMounts"], mounts},
		"initial mounts":      {first("initContainers")["volumeMounts"], mounts},
		"volumes":             {len(pod["volumes"].([]any)), 3},
		"environment":         {first("containers")["env"].([]any)[1], map[string]any{"name": "GOGC", "value": "50"}},
		"tolerations":         {pod["tolerations"], []any{map[string]any{"key": "a", "operator": "Exists"}}},
		"affinity":            {pod["affinity"], map[string]any{"nodeAffinity": map[string]any{}}},
		"priority":            {pod["priorityClassName"], "system-cluster-critical"},
		"grace period":        {pod["terminationGracePeriodSeconds"], int64(60)},
		"update strategy":     {at("DaemonSet example", "spec", "updateStrategy"), map[string]any{"type": "OnDelete"}},
		"annotation":          {at("DaemonSet example", "metadata", "annotations"), map[string]any{"a": "1"}},
		"labels of pods":      {at("DaemonSet example", "spec", "template", "metadata", "labels"), map[string]any{"app.kubernetes.io/name": "example", "team": "net", "pod": "yes"}},
		"annotations of pods": {at("DaemonSet example", "spec", "template", "metadata", "annotations"), map[string]any{"b": "2"}},
		"service account":     {at("ServiceAccount example", "metadata", "annotations"), map[string]any{"c": "3"}},
		"permission":          {rules[len(rules)-1], map[string]any{"apiGroups": []any{"events.k8s.io"}, "resources": []any{"events"}, "verbs": []any{"create"}}},
		"pod monitor":         {at("PodMonitor example", "metadata", "labels", "release"), "prometheus"},
		"dashboard":           {at("ConfigMap example-dashboard", "metadata", "labels", "grafana_dashboard"), "1"},
	} {
		if diff := cmp.Diff(values[1], values[0]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	var alerts ruleFile
	readYAML(t, monitoring+"/alerts.yaml", &alerts)
	if got := at("PrometheusRule example", "spec", "groups").([]any)[0].(map[string]any)["rules"].([]any); len(got) != len(alerts.Groups[0].Rules) {
		t.Errorf("%d alerts, want %d", len(got), len(alerts.Groups[0].Rules))
	}
}

// kpng may read pods only if it needs to.
func TestChartGrantsPodsOnlyOnRequest(t *testing.T) {
	for values, granted := range map[string]bool{
		"backend: ebpf": false,
		"backend: ebpf\nexcludePods: '!a, b in (c,d)'": true,
		"backend: nftables\nexcludePods: a=b":          false,
	} {
		got, err := renderChart(t, "example", parseYAML(t, "apiServer: {host: 192.0.2.1}\n"+values))
		if err != nil {
			t.Fatal(err)
		}
		all := byName(got)
		rules, _, _ := unstructured.NestedSlice(all["ClusterRole example"].(map[string]any), "rules")
		containers, _, _ := unstructured.NestedSlice(all["DaemonSet example"].(map[string]any), "spec", "template", "spec", "containers")
		want := map[string]any{"apiGroups": []any{""}, "resources": []any{"pods", "namespaces"}, "verbs": []any{"list", "watch"}}
		has := slices.ContainsFunc(rules, func(r any) bool { return cmp.Equal(r, any(want)) })
		args := slices.Contains(containers[0].(map[string]any)["args"].([]any), any("--exclude-pods=!a, b in (c,d)"))
		if has != granted || args != granted || len(rules) > 3 || !granted && len(rules) > 2 {
			t.Errorf("%s: permission %t, flag %t, want %t; rules %v", values, has, args, granted, rules)
		}
	}
}

// A released chart has the version of its image.
func TestChartNamesItsImage(t *testing.T) {
	got, err := renderChart(t, "example", parseYAML(t, "apiServer: {host: 192.0.2.1}"))
	if err != nil {
		t.Fatal(err)
	}
	containers, _, _ := unstructured.NestedSlice(byName(got)["DaemonSet example"].(map[string]any), "spec", "template", "spec", "containers")
	chart, err := loader.Load(deployDir + "/chart")
	if err != nil {
		t.Fatal(err)
	}
	if image, version := containers[0].(map[string]any)["image"], chart.Metadata.AppVersion; image != "kpng:"+version {
		t.Errorf("the image is %v, want the version %s of the chart", image, version)
	}
}
