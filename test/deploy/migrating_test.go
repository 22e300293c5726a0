// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/strvals"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"sigs.k8s.io/yaml"
)

// TestMigrationKeepsOneProxyOnEachNode runs the commands for clusters of kubeadm in
// docs/operate/migrate.md, in their order. In place of kubectl and helm, it runs scripts that
// record the arguments. The test compares the objects of each release with those of its
// directory in deploy/migrate, and tracks how the commands change DaemonSets and labels of
// nodes. After each command, each node has exactly one proxy, and a cleanup runs only on
// nodes with the other proxy. In the end, everything is as before.
func TestMigrationKeepsOneProxyOnEachNode(t *testing.T) {
	m := newMigration(t)
	blocks, err := KubeadmBlocks()
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range blocks {
		m.run(block.Commands)
	}
	if m.seen["check"] == 0 || m.seen["cleanup"] == 0 || m.seen["cleanup-kube-proxy"] == 0 || m.seen["kpng"] == 0 {
		t.Errorf("the commands ran these tasks: %v", m.seen)
	}
	if diff := cmp.Diff(migrateDirs(t), slices.Sorted(maps.Keys(m.dirs))); diff != "" {
		t.Errorf("directories (-there +compared with releases):\n%s", diff)
	}
	if len(m.sets) != 1 || m.sets["kube-proxy"] == nil || m.sets["kube-proxy"].Spec.Template.Spec.Affinity != nil {
		t.Errorf("DaemonSets remain: %v", m.sets)
	}
	for _, n := range m.nodes {
		if len(n.Labels) != 1 {
			t.Errorf("labels of %s remain: %v", n.Name, n.Labels)
		}
	}
	if config := m.read("kubeadm-config.yaml"); config != kubeadmConfig {
		t.Errorf("the configuration of kubeadm in the end:\n%s", config)
	}
}

// kubeadmConfig is a part of the ConfigMap that kubeadm makes.
const kubeadmConfig = `apiVersion: v1
data:
  ClusterConfiguration: |
    networking: {}
    proxy: {}
    scheduler: {}
`

// kubeProxySet is a part of the DaemonSet that kubeadm makes, as the API server returns it.
const kubeProxySet = `apiVersion: apps/v1
kind: DaemonSet
metadata:
  creationTimestamp: "2026-01-02T03:04:05Z"
  generation: 2
  name: kube-proxy
  namespace: kube-system
  resourceVersion: "123"
  uid: 5d0f5f5c-1b1e-4b5e-8e5e-0123456789ab
spec:
  template:
    spec:
      nodeSelector: {kubernetes.io/os: linux}
      containers: [{name: kube-proxy, image: "registry.example/kube-proxy:v1.37.1"}]
status:
  numberReady: 3
`

// programs replace the programs that the commands of the page run. A record of arguments ends
// with a line "end".
var programs = map[string]string{
	"helm": `printf '%s\n' helm "$@" end >>commands`,
	"kubectl": `case "$*" in
*"get daemonset kube-proxy -o jsonpath"*) echo registry.example/kube-proxy:v1.37.1 ;;
*"get daemonset kube-proxy -o yaml") cat daemonset.yaml ;;
*"get nodes"*) printf 'node/%s\n' worker-1 worker-2 worker-3 ;;
*"get configmap kubeadm-config -o yaml") cat kubeadm-config.yaml ;;
*"replace -f -") cat >new; mv new kubeadm-config.yaml ;;
*) last=${@: -1}; printf '%s\n' kubectl "${@:1:$#-1}" "${last//$'\n'/ }" end >>commands ;;
esac`,
}

type migration struct {
	t     *testing.T
	dir   string
	nodes []*corev1.Node
	sets  map[string]*appsv1.DaemonSet
	// tasks has the value task of each release.
	tasks map[string]string
	// dirs has the directories that were compared with releases.
	dirs map[string]bool
	// saved is the deleted DaemonSet kube-proxy.
	saved *appsv1.DaemonSet
	// seen counts the nodes on which a task, or kpng, had to run after a command.
	seen map[string]int
}

func newMigration(t *testing.T) *migration {
	t.Helper()
	m := &migration{t: t, dir: t.TempDir(), sets: map[string]*appsv1.DaemonSet{}, tasks: map[string]string{}, dirs: map[string]bool{}, seen: map[string]int{}}
	for i := range 3 {
		n := &corev1.Node{}
		n.Name, n.Labels = fmt.Sprintf("worker-%d", i+1), map[string]string{"kubernetes.io/os": "linux"}
		m.nodes = append(m.nodes, n)
	}
	m.sets["kube-proxy"] = m.decode(kubeProxySet)
	m.write("kubeadm-config.yaml", kubeadmConfig, 0o600)
	m.write("daemonset.yaml", kubeProxySet, 0o600)
	for name, script := range programs {
		m.write(name, "#!/usr/bin/env bash\n"+script+"\n", 0o700)
	}
	return m
}

func (m *migration) write(name, text string, mode os.FileMode) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.dir, name), []byte(text), mode); err != nil {
		m.t.Fatal(err)
	}
}

func (m *migration) read(name string) string {
	m.t.Helper()
	text, err := os.ReadFile(filepath.Join(m.dir, name))
	if err != nil {
		m.t.Fatal(err)
	}
	return string(text)
}

func (m *migration) decode(text string) *appsv1.DaemonSet {
	m.t.Helper()
	set := &appsv1.DaemonSet{}
	if err := yaml.UnmarshalStrict([]byte(text), set); err != nil {
		m.t.Fatalf("%v\n%s", err, text)
	}
	return set
}

// run runs the commands of a block, and tracks their effects.
func (m *migration) run(block string) {
	m.t.Helper()
	m.write("commands", "", 0o600)
	cmd := exec.CommandContext(m.t.Context(), "bash", "-euo", "pipefail", "-c", block)
	cmd.Dir = m.dir
	cmd.Env = append(cmd.Environ(), "PATH="+m.dir+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		m.t.Fatalf("%v\n%s%s", err, block, out)
	}
	for record := range strings.SplitSeq(m.read("commands"), "\nend\n") {
		if record == "" {
			continue
		}
		args := strings.Split(record, "\n")
		if args[0] == "helm" {
			m.helm(args[1:])
		} else {
			m.kubectl(args[1:])
		}
		m.check(strings.Join(args, " "))
	}
}

// helm follows "helm install|upgrade RELEASE CHART -n kube-system -f FILE [--set VALUE]..."
// and "helm uninstall RELEASE -n kube-system".
func (m *migration) helm(args []string) {
	m.t.Helper()
	release := args[1]
	_, exists := m.sets[release]
	if exists != (args[0] != "install") || !slices.Contains(args, "kube-system") {
		m.t.Fatalf("helm %q, but the DaemonSets are %v", args, m.sets)
	}
	if args[0] == "uninstall" {
		delete(m.sets, release)
		return
	}
	if args[2] != "cmd/kpng/deploy/chart" {
		m.t.Errorf("helm uses the chart %s", args[2])
	}
	values := parseYAML(m.t, m.read("kpng.yaml"))
	for i, arg := range args {
		if arg == "--set" {
			if err := strvals.ParseInto(args[i+1], values); err != nil {
				m.t.Fatal(err)
			}
		}
	}
	rendered, err := renderChart(m.t, release, values)
	if err != nil {
		m.t.Fatalf("helm %q: %v", args, err)
	}
	dir := "migrate/" + release
	if release == "kpng" && values["nodeSelector"] != nil {
		dir += "-labelled"
	}
	m.dirs[dir] = true
	if diff := cmp.Diff(byName(rendered), byName(objects(m.t, dir))); diff != "" {
		m.t.Errorf("helm %q (-chart +%s):\n%s", args, dir, diff)
	}
	set := &appsv1.DaemonSet{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(byName(rendered)["DaemonSet "+release].(map[string]any), set); err != nil {
		m.t.Fatal(err)
	}
	m.sets[release] = set
	m.tasks[release], _ = values["task"].(string)
}

// kubectl follows the commands of the page that change DaemonSets and labels.
func (m *migration) kubectl(args []string) {
	m.t.Helper()
	args = slices.DeleteFunc(args, func(s string) bool { return slices.Contains([]string{"-n", "kube-system", "--overwrite"}, s) })
	name := args[len(args)-1]
	switch args[0] + " " + args[1] {
	case "label node", "label nodes":
		key, value, isSet := strings.Cut(name, "=")
		found := false
		for _, n := range m.nodes {
			if args[2] != "--all" && args[2] != n.Name {
				continue
			}
			if found = true; isSet {
				n.Labels[key] = value
			} else {
				delete(n.Labels, strings.TrimSuffix(key, "-"))
			}
		}
		if !found {
			m.t.Fatalf("no node %s", args[2])
		}
	case "patch daemonset":
		patch := m.decode(name)
		m.sets[args[2]].Spec.Template.Spec.Affinity = patch.Spec.Template.Spec.Affinity
	case "delete daemonset":
		m.saved = m.sets[name]
		delete(m.sets, name)
	case "create -f":
		if file := m.decode(m.read(name)); file.UID != "" || file.ResourceVersion != "" || file.Status.NumberReady != 0 || file.Name != "kube-proxy" {
			m.t.Errorf("%s has fields that the API server sets: %v", name, file)
		}
		m.sets["kube-proxy"] = m.saved
	case "rollout status":
		if set := strings.TrimPrefix(args[2], "daemonset/"); m.sets[set] == nil {
			m.t.Errorf("kubectl waits for the DaemonSet %s, which does not exist", set)
		}
	case "wait daemonset/kpng":
		if m.sets["kpng"] == nil || m.sets["kpng-cleanup"] == nil || name != "--for=jsonpath={.status.numberReady}=3" {
			m.t.Errorf("kubectl waits with %q for DaemonSets", args)
		}
	case "logs -l", "get pods":
	default:
		m.t.Errorf("the test does not know the command kubectl %q", args)
	}
}

// check compares the DaemonSets with the nodes on which they run.
func (m *migration) check(command string) {
	m.t.Helper()
	for _, n := range m.nodes {
		runs := map[string]bool{}
		for name, set := range m.sets {
			pod := &corev1.Pod{Spec: set.Spec.Template.Spec}
			matches, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(n)
			if err != nil {
				m.t.Fatal(err)
			}
			if !matches {
				continue
			}
			runs[name] = true
			if task := m.tasks[name]; task != "" {
				runs[task] = true
				m.seen[task]++
			}
		}
		if runs["kpng"] {
			m.seen["kpng"]++
		}
		if runs["kpng"] == runs["kube-proxy"] || runs["cleanup"] && runs["kpng"] || runs["cleanup-kube-proxy"] && runs["kube-proxy"] {
			m.t.Errorf("after %s: %s has %v", command, n.Name, runs)
		}
	}
}
