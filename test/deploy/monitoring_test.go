// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/gotool"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const (
	deployDir  = "../../cmd/kpng/deploy"
	monitoring = deployDir + "/monitoring"
)

type rule struct {
	Alert       string            `json:"alert,omitempty"`
	Record      string            `json:"record,omitempty"`
	Expr        string            `json:"expr"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type ruleFile struct {
	Groups []ruleGroup `json:"groups"`
}

type ruleGroup struct {
	Name  string `json:"name"`
	Rules []rule `json:"rules"`
}

func alerts(t *testing.T) []rule {
	t.Helper()
	var file ruleFile
	readYAML(t, monitoring+"/alerts.yaml", &file)
	var rules []rule
	for _, g := range file.Groups {
		rules = append(rules, g.Rules...)
	}
	return rules
}

type panel struct {
	ID      int    `json:"id"`
	Type    string `json:"type"`
	Title   string `json:"title"`
	GridPos struct {
		H, W, X, Y int
	} `json:"gridPos"`
	Targets []struct {
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat"`
	} `json:"targets"`
}

func panels(t *testing.T) []panel {
	t.Helper()
	var dashboard struct {
		Panels []panel `json:"panels"`
	}
	text, err := os.ReadFile(monitoring + "/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	return dashboard.Panels
}

// promQL replaces the variables of Grafana in an expression.
func promQL(expr string) string {
	return strings.NewReplacer("$__rate_interval", "5m", "$job", "kpng", "$instance", ".+").Replace(expr)
}

// referenceMetrics returns the metrics of docs/reference/metrics.md whose names match. A
// test of cmd/kpng compares this page with the code.
func referenceMetrics(t *testing.T, pattern string) []string {
	t.Helper()
	page, err := os.ReadFile("../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(pattern).FindAllString(string(page), -1)
	if len(names) == 0 {
		t.Fatalf("no metric matches %s", pattern)
	}
	return names
}

// TestDriftAlertCoversAllBackends checks that the alert KpngDrift uses all metrics of
// backends that count drift.
func TestDriftAlertCoversAllBackends(t *testing.T) {
	names := referenceMetrics(t, `kpng_\w+_drift_found_total`)
	i := slices.IndexFunc(alerts(t), func(r rule) bool { return r.Alert == "KpngDrift" })
	if i < 0 {
		t.Fatal("no alert KpngDrift")
	}
	for _, name := range names {
		if expr := alerts(t)[i].Expr; !strings.Contains(expr, name) {
			t.Errorf("KpngDrift does not use %s: %s", name, expr)
		}
	}
}

// TestAlertsFire runs the unit tests of the alert rules.
func TestAlertsFire(t *testing.T) {
	promtool(t, "test", "rules", monitoring+"/alerts_test.yaml")
	var tests struct {
		Tests []struct {
			AlertRuleTest []struct {
				Alertname string            `json:"alertname"`
				ExpAlerts []json.RawMessage `json:"exp_alerts"`
			} `json:"alert_rule_test"`
		} `json:"tests"`
	}
	readYAML(t, monitoring+"/alerts_test.yaml", &tests)
	fired := map[string]bool{}
	for _, test := range tests.Tests {
		for _, alert := range test.AlertRuleTest {
			if len(alert.ExpAlerts) > 0 {
				fired[alert.Alertname] = true
			}
		}
	}
	for _, alert := range alerts(t) {
		if !fired[alert.Alert] {
			t.Errorf("no test in alerts_test.yaml shows that %s fires", alert.Alert)
		}
	}
}

// TestEachAlertIsDocumented compares the alert rules with the table in
// docs/operate/observe.md.
func TestEachAlertIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/operate/observe.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented, exist []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(Kpng\\w+)` \\|").FindAllSubmatch(page, -1) {
		documented = append(documented, string(row[1]))
	}
	for _, alert := range alerts(t) {
		exist = append(exist, alert.Alert)
	}
	if !slices.Equal(documented, exist) {
		t.Errorf("docs/operate/observe.md describes the alerts %q, want %q", documented, exist)
	}
}

func TestScrapeConfigurationIsValid(t *testing.T) {
	var config map[string]any
	readYAML(t, monitoring+"/scrape.yaml", &config)
	for _, job := range config["scrape_configs"].([]any) {
		if name := job.(map[string]any)["job_name"]; name != "kpng" {
			t.Errorf("the job is %q; the alerts need kpng", name)
		}
		delete(job.(map[string]any), "kubernetes_sd_configs") // Debian's promtool does not know this field
	}
	promtool(t, "check", "config", writeYAML(t, config))
}

// TestPrometheusFindsTheProxies compares the targets of the scrape configuration, and of the
// chart's PodMonitors, with the containers that serve metrics.
func TestPrometheusFindsTheProxies(t *testing.T) {
	text, err := os.ReadFile(monitoring + "/scrape.yaml")
	if err != nil {
		t.Fatal(err)
	}
	names := strings.NewReplacer("source_labels", "sourceLabels", "target_label", "targetLabel") // replaces names of fields by those of a PodMonitor
	config := parseYAML(t, names.Replace(string(text)))["scrape_configs"].([]any)[0].(map[string]any)["relabel_configs"].([]any)

	found := 0
	for _, dir := range []string{"nftables", "iptables", "ipvs", "ebpf", "windows", "beside-kube-proxy", "central"} {
		found += compareTargets(t, config, objects(t, dir))
	}
	for release, values := range map[string]string{
		"kpng":                   "apiServer: {host: 192.0.2.1}\nkernelSettings: true",
		"kpng-beside-kube-proxy": "serviceProxyName: kpng",
		"kpng-check":             "kubeProxy: {configMap: kube-proxy}\ntask: check",
		"kpng-cleanup":           "kubeProxy: {configMap: kube-proxy, image: 'p:v1'}\ntask: cleanup-kube-proxy",
		"kpng-cleanup-kpng":      "kubeProxy: {configMap: kube-proxy}\ntask: cleanup",
	} {
		chart, err := renderChart(t, release, parseYAML(t, values+"\npodMonitor: {enabled: true}"))
		if err != nil {
			t.Fatal(err)
		}
		found += compareTargets(t, config, chart)
		if monitor, ok := byName(chart)["PodMonitor "+release].(map[string]any); ok {
			endpoints, _, _ := unstructured.NestedSlice(monitor, "spec", "podMetricsEndpoints")
			found += compareTargets(t, endpoints[0].(map[string]any)["relabelings"].([]any), chart)
		}
	}
	if found != 13 {
		t.Errorf("Prometheus finds %d containers, want nine of the manifests, and two of the chart in two ways", found)
	}
}

// compareTargets applies a configuration to pods. The targets must be the containers that
// serve metrics. It returns the number of these containers.
func compareTargets(t *testing.T, config []any, pods []*unstructured.Unstructured) (found int) {
	t.Helper()
	for _, object := range pods {
		pod, _, _ := unstructured.NestedMap(object.Object, "spec", "template")
		app, _, _ := unstructured.NestedString(pod, "metadata", "labels", "app.kubernetes.io/name")
		for _, field := range []string{"initContainers", "containers"} {
			containers, _, _ := unstructured.NestedSlice(pod, "spec", field)
			for _, c := range containers {
				name, _, _ := unstructured.NestedString(c.(map[string]any), "name")
				args, _, _ := unstructured.NestedStringSlice(c.(map[string]any), "args")
				port := ""
				for _, arg := range args {
					if _, p, is := strings.Cut(arg, "--metrics-bind-address=127.0.0.1"); is {
						port = p
						found++
					}
				}
				for ip, host := range map[string]string{"192.0.2.7": "192.0.2.7", "2001:db8::7": "[2001:db8::7]"} {
					want := ""
					if port != "" {
						want = host + port + " vm-001"
					}
					target := relabel(t, config, map[string]string{
						"__meta_kubernetes_pod_container_name": name, "__meta_kubernetes_pod_ip": ip, "__meta_kubernetes_pod_node_name": "vm-001",
						"__meta_kubernetes_pod_label_app_kubernetes_io_name": app, "__address__": ip,
					})
					if got := strings.TrimSpace(target["__address__"] + " " + target["instance"]); got != want {
						t.Errorf("%s %s, container %s: the target is %q, want %q", object.GetKind(), object.GetName(), name, got, want)
					}
				}
			}
		}
	}
	return found
}

// relabel returns the labels of a discovered container as Prometheus changes them, or nil if
// Prometheus drops the container.
func relabel(t *testing.T, config []any, labels map[string]string) map[string]string {
	t.Helper()
	for _, c := range config {
		text := func(field, unset string) string {
			if value, ok := c.(map[string]any)[field].(string); ok {
				return value
			}
			return unset
		}
		names, _, _ := unstructured.NestedStringSlice(c.(map[string]any), "sourceLabels")
		var values []string
		for _, name := range names {
			values = append(values, labels[name])
		}
		value := strings.Join(values, ";")
		regex := regexp.MustCompile("^(?s:" + text("regex", "(.*)") + ")$")
		match := regex.FindStringSubmatchIndex(value)
		switch action := text("action", "replace"); {
		case action == "keep":
			if match == nil {
				return nil
			}
		case action != "replace":
			t.Fatalf("this test does not know the action %s", action)
		case match != nil:
			labels[text("targetLabel", "")] = string(regex.ExpandString(nil, text("replacement", "$1"), value, match))
		}
	}
	return labels
}

func TestDashboardIsWellFormed(t *testing.T) {
	var rules []rule
	ids := map[int]bool{}
	cells := map[[2]int]string{}
	for _, p := range panels(t) {
		if ids[p.ID] {
			t.Errorf("two panels have the ID %d", p.ID)
		}
		ids[p.ID] = true
		if p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %q ends right of the grid", p.Title)
		}
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other, taken := cells[[2]int{x, y}]; taken {
					t.Fatalf("panels %q and %q overlap", other, p.Title)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q has no query", p.Title)
		}
		for _, target := range p.Targets {
			rules = append(rules, rule{Record: fmt.Sprintf("panel:%d:%d", p.ID, len(rules)), Expr: promQL(target.Expr)})
		}
	}
	promtool(t, "check", "rules", writeYAML(t, ruleFile{[]ruleGroup{{"dashboard", rules}}}))
}

// TestKpngExposesMetricsOfAlertsAndDashboard runs kpng as a server and with each backend
// that has metrics of its own and runs here. Each series that the alerts, their tests and
// the dashboard select must exist in one of these programs, with all labels. The backends
// ipvs and ovs need a kernel module or a switch, so their metrics are from the reference.
func TestKpngExposesMetricsOfAlertsAndDashboard(t *testing.T) {
	kpng := gotool.BuildOwn(t, "./cmd/kpng")
	files := t.TempDir()
	certificates(t, files)
	files += "/kpng-server/"
	var series []map[string]string
	for name, target := range map[string][]string{
		"nftables":  {"to-local", "nftables"},
		"iptables":  {"to-local", "iptables"},
		"ebpf":      {"to-local", "ebpf"},
		"userspace": {"to-local", "userspace"},
		"server": {"to-api", "--listen", "tcp://127.0.0.1:12090",
			"--tls-ca-file=" + files + "ca.crt", "--tls-cert-file=" + files + "tls.crt", "--tls-key-file=" + files + "tls.key"},
	} {
		t.Run(name, func(t *testing.T) {
			series = append(series, scrape(t, kpng, target)...)
		})
	}
	if t.Failed() {
		return
	}
	for _, name := range referenceMetrics(t, `kpng_(?:ipvs|ovs)_\w+`) {
		series = append(series, map[string]string{"__name__": name})
	}

	check := func(where, expr, template string) {
		t.Helper()
		labels, known := map[string]bool{"instance": true, "job": true}, true
		for _, s := range selectors(expr) {
			if s.metric == "up" { // Prometheus makes it
				continue
			}
			found := slices.IndexFunc(series, s.matches)
			if found < 0 {
				t.Errorf("%s: no program exposes %s", where, s)
				known = false
				continue
			}
			maps.Copy(labels, keys(series[found]))
		}
		used := regexp.MustCompile(`\bby \(([^)]*)\)`).FindAllStringSubmatch(expr, -1)
		used = append(used, regexp.MustCompile(`{{ ?(?:\$labels\.)?(\w+) ?}}`).FindAllStringSubmatch(template, -1)...)
		for _, list := range used {
			for label := range strings.SplitSeq(list[1], ", ") {
				if known && !labels[label] {
					t.Errorf("%s: no metric of %s has the label %s", where, expr, label)
				}
			}
		}
	}
	for _, alert := range alerts(t) {
		check("alert "+alert.Alert, alert.Expr, alert.Annotations["summary"])
	}
	for _, p := range panels(t) {
		for _, target := range p.Targets {
			check("panel "+p.Title, promQL(target.Expr), target.LegendFormat)
		}
	}
	tests, err := os.ReadFile(monitoring + "/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, input := range regexp.MustCompile(`series: '([^']*)'`).FindAllStringSubmatch(string(tests), -1) {
		check("alerts_test.yaml", input[1], "")
	}
}

// selector selects series of a metric by the values of labels. It omits labels that
// Prometheus adds.
type selector struct {
	metric string
	labels map[string]string
}

var selectorPattern = regexp.MustCompile(`\b(up|(?:kpng|process|go)_\w+)\b(?:{([^}]*)})?`)

// selectors returns the selectors in an expression.
func selectors(expr string) []selector {
	var all []selector
	for _, match := range selectorPattern.FindAllStringSubmatch(expr, -1) {
		s := selector{match[1], map[string]string{}}
		for _, label := range regexp.MustCompile(`(\w+)=~?"([^"]*)"`).FindAllStringSubmatch(match[2], -1) {
			if label[1] != "job" && label[1] != "instance" && label[1] != "le" {
				s.labels[label[1]] = label[2]
			}
		}
		all = append(all, s)
	}
	return all
}

func (s selector) matches(series map[string]string) bool {
	if series["__name__"] != s.metric {
		return false
	}
	for label, value := range s.labels {
		if series[label] != value {
			return false
		}
	}
	return true
}

func (s selector) String() string { return fmt.Sprint(s.metric, s.labels) }

func keys(series map[string]string) map[string]bool {
	set := map[string]bool{}
	for key := range series {
		set[key] = true
	}
	return set
}

// scrape runs kpng with the given target in a new network namespace, waits until it is
// ready, and returns the labels of all its series.
func scrape(t *testing.T, kpng string, target []string) []map[string]string {
	t.Helper()
	const address = "127.0.0.1:10249"
	node := newNode(t)
	args := append([]string{kpng, "file", "-i", "../../examples/demo.yaml"}, target...)
	args = append(args, "--metrics-bind-address="+address, "--healthz-bind-address="+address)
	if target[0] == "to-local" {
		args = append(args, "--node-name=vm-002")
	}
	if target[1] == "ebpf" {
		args = append(args, "--cgroup="+netnstest.NewCgroup(t).Dir, "--bpffs=/mnt")
		args = append([]string{"unshare", "--mount", "sh", "-ec", `mount -t bpf none /mnt; exec "$@"`, "sh"}, args...)
	}
	node.start(t, args...)
	node.await(t, "http://"+address+"/readyz")
	page, err := node.get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	var all []map[string]string
	for _, line := range regexp.MustCompile(`(?m)^(\w+)(?:{(.*)})? \S+$`).FindAllStringSubmatch(page, -1) {
		series := map[string]string{"__name__": line[1]}
		for _, label := range regexp.MustCompile(`(\w+)="([^"]*)"`).FindAllStringSubmatch(line[2], -1) {
			series[label[1]] = label[2]
		}
		all = append(all, series)
	}
	return all
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v (this test needs Debian's package prometheus)\n%s", strings.Join(args, " "), err, out)
	}
}

func readYAML(t *testing.T, file string, to any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err == nil {
		err = yaml.Unmarshal(text, to)
	}
	if err != nil {
		t.Fatalf("read %s: %v", file, err)
	}
}

func writeYAML(t *testing.T, of any) (file string) {
	t.Helper()
	text, err := yaml.Marshal(of)
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "file.yaml")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}
