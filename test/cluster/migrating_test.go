// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/deploy"
	"github.com/kpng-project/kpng/test/internal/traffic"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var mode = flag.String("kube-proxy-mode", "iptables", "the mode of kube-proxy in TestMigrating")

// TestMigrating makes kube-proxy with kubeadm, and runs the commands for clusters of kubeadm
// in docs/operate/migrate.md under traffic. No request may fail or take longer than a second.
// After each block of commands, each node has one proxy and no trace of the other proxy.
func TestMigrating(t *testing.T) {
	blocks, err := deploy.KubeadmBlocks()
	if err != nil {
		t.Fatal(err)
	}
	c := connect(t)
	m := &migration{cluster: c, t: t, dir: t.TempDir()}
	m.start()
	apply(t, c.namespace, deployment("web", 2*c.nodes, spread("web")))
	apply(t, c.namespace, deployment("client", c.nodes, spread("client")))
	service := c.service(t, "web")
	c.rollout(t, c.namespace, "deployment/web")
	c.rollout(t, c.namespace, "deployment/client")
	m.settle()

	tr, reference := traffic.New(t), traffic.New(t)
	c.startClients(t, tr, service, true)
	for _, pod := range c.pods(t, "web")[:2] {
		addr := netip.AddrPortFrom(netip.MustParseAddr(pod.Status.PodIP), 8080)
		reference.Start("to the pod "+pod.Name, outside(t), dial(addr))
	}
	phase := func(name string) {
		t.Helper()
		time.Sleep(time.Second) // let the pending requests end before the phase ends
		failed, slow := tr.Report(t, name)
		// Requests that no proxy handles are slow only if the machine is busy.
		_, busy := reference.Report(t, name+", directly to pods")
		if failed > 0 || slow > 0 && busy == 0 {
			t.Errorf("%s: %d requests failed, and %d were slow", name, failed, slow)
		}
	}
	time.Sleep(5 * time.Second)
	phase("kube-proxy, without a change")
	for i, block := range blocks {
		name := strings.TrimSuffix(fmt.Sprintf("block %d: %s", i+1, block.Heading), ": ")
		m.run(block.Commands)
		m.settle()
		phase(name)
		switch last := i+1 == len(blocks) || blocks[i+1].Heading != block.Heading; {
		case !last:
		case block.Heading == "Prepare", block.Heading == "All nodes":
			m.upgrade(false)
			m.settle()
			phase("kubeadm upgrade after " + name)
		case block.Heading == "Back again":
			m.upgrade(true)
			m.settle()
			phase("kubeadm upgrade after " + name)
		}
	}
	if now := kubectl(t, "get", "--namespace", "kube-system", "configmap", "kubeadm-config", "-o", "jsonpath={.data}"); now != m.kubeadmConfig {
		t.Errorf("the configuration of kubeadm was\n%s\nand is\n%s", m.kubeadmConfig, now)
	}
}

type migration struct {
	*cluster
	t             *testing.T
	dir           string // the working directory of the page's commands
	version       string // of Kubernetes
	kubeadmConfig string
}

// start replaces the service proxies by the DaemonSet of kube-proxy that kubeadm makes.
func (m *migration) start() {
	t := m.t
	t.Helper()
	bin := filepath.Join(*state, "../bin")
	nodes, err := m.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.version = nodes.Items[0].Status.NodeInfo.KubeletVersion
	// Without the names of protocols, the keys of elements that nft lists differ from
	// kube-proxy's keys. Then kube-proxy deletes all services when it starts again. The released
	// image of kube-proxy has this file, too.
	tools := []string{"nft", "/etc/protocols"}
	for _, name := range []string{"iptables", "ip6tables"} {
		tools = append(tools, name, name+"-save", name+"-restore")
	}
	extensions, err := filepath.Glob("/usr/lib/*/xtables/*.so")
	if err != nil || len(extensions) == 0 {
		t.Fatalf("iptables has no extensions: %v", err)
	}
	m.addImage(t, "registry.k8s.io/kube-proxy:"+m.version, "/usr/local/bin/kube-proxy", filepath.Join(bin, "kube-proxy"), append(tools, extensions...)...)
	// The page's commands install the chart with this image repository.
	m.addImage(t, "registry.example/kpng:"+chartValue(t, "Chart.yaml", "appVersion"), "/kpng", filepath.Join(bin, "kpng"))
	m.addImage(t, chartValue(t, "values.yaml", "pauseImage"), "/pause", filepath.Join(bin, "pause"))
	if err := os.Mkdir(filepath.Join(m.dir, "cmd"), 0o700); err != nil {
		t.Fatal(err)
	}
	repository, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(repository, "cmd/kpng"), filepath.Join(m.dir, "cmd/kpng")); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(m.end)
	for i := 1; i <= m.nodes; i++ {
		lib(t, "stop", fmt.Sprintf("proxy-%d", i))
		m.cleanup(t, i, "kpng")
		m.cleanup(t, i, "kube-proxy")
	}
	// kube-proxy may not change nf_conntrack_max, because the nodes are network namespaces.
	m.write("kubeadm.yaml", fmt.Sprintf(`
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint: {advertiseAddress: 10.254.0.1}
nodeRegistration: {name: node-1, criSocket: "unix:///run/containerd/containerd.sock"}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %s
controlPlaneEndpoint: 10.254.0.1:6443
networking: {podSubnet: "10.244.0.0/16,fd00:10:244::/56", serviceSubnet: "10.96.0.0/16,fd00:10:96::/112"}
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
conntrack: {maxPerCore: 0}
`, m.version, *mode))
	// kubeadm looks for the static pod of the API server. Here, the API server is not a pod.
	apply(t, "kube-system", `
apiVersion: v1
kind: Pod
metadata:
  name: kube-apiserver-node-1
  labels: {component: kube-apiserver, tier: control-plane}
  annotations: {kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint: "10.254.0.1:6443"}
spec:
  nodeName: node-1
  hostNetwork: true
  tolerations: [{operator: Exists}]
  containers: [{name: kube-apiserver, image: "`+chartValue(t, "values.yaml", "pauseImage")+`"}]
`)
	m.kubeadm("init", "phase", "upload-config", "all", "--config", "kubeadm.yaml")
	m.kubeadm("init", "phase", "addon", "kube-proxy", "--config", "kubeadm.yaml")
	m.rollout(t, "kube-system", "daemonset/kube-proxy")
	m.kubeadmConfig = kubectl(t, "get", "--namespace", "kube-system", "configmap", "kubeadm-config", "-o", "jsonpath={.data}")
}

// end removes what the test has made, and starts kpng on each node.
func (m *migration) end() {
	for _, release := range strings.Fields(m.run("helm list -n kube-system -q")) {
		m.run("helm uninstall -n kube-system " + release)
	}
	kubectl(m.t, "delete", "--ignore-not-found", "--namespace", "kube-system", "daemonset/kube-proxy", "pod/kube-apiserver-node-1",
		"configmap/kube-proxy", "configmap/kubeadm-config", "configmap/kubelet-config", "serviceaccount/kube-proxy", "role/kube-proxy", "rolebinding/kube-proxy")
	kubectl(m.t, "delete", "--ignore-not-found", "clusterrolebinding/kubeadm:node-proxier")
	kubectl(m.t, "label", "nodes", "--all", "service-proxy-")
	for i := 1; i <= m.nodes; i++ {
		m.replaceProxy(m.t, i, "kpng")
		m.cleanup(m.t, i, "kube-proxy")
	}
}

func (m *migration) write(name, text string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.dir, name), []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// run runs commands of the page. The node names in the page differ from those of the cluster.
func (m *migration) run(commands string) string {
	m.t.Helper()
	return m.command("bash", "-euxo", "pipefail", "-c", strings.ReplaceAll(commands, "worker-", "node-"))
}

func (m *migration) command(args ...string) string {
	m.t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = m.dir
	cmd.Env = append(os.Environ(), "HOME="+m.dir, "KUBECONFIG="+filepath.Join(*state, "admin.kubeconfig"),
		"PATH="+filepath.Join(*state, "../bin")+":"+os.Getenv("PATH"))
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		m.t.Fatalf("%s: %v\n%s%s", strings.Join(args, " "), err, out, &stderr)
	}
	m.t.Logf("%s\n%s", &stderr, out)
	return string(out)
}

// kubeadm runs kubeadm as on the first node, with its kubelet's kubeconfig.
func (m *migration) kubeadm(args ...string) string {
	m.t.Helper()
	return m.command(append([]string{"unshare", "--mount", "bash", "-euc", `
mkdir -p etc/upper etc/work
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$PWD/etc/upper,workdir=$PWD/etc/work" /etc
mkdir -p /etc/kubernetes
cp "$1" /etc/kubernetes/kubelet.conf
cp "$KUBECONFIG" /etc/kubernetes/admin.conf
shift
exec kubeadm "$@"`, "kubeadm", filepath.Join(*state, "node-1.kubeconfig")}, args...)...)
}

// upgrade runs the phase of "kubeadm upgrade" that updates kube-proxy. Unless kube-proxy is
// enabled, the phase must change nothing.
func (m *migration) upgrade(enabled bool) {
	m.t.Helper()
	get := func() string {
		return kubectl(m.t, "get", "--ignore-not-found", "--namespace", "kube-system", "daemonset", "kube-proxy", "-o", "jsonpath={.spec}")
	}
	before := get()
	out := m.kubeadm("upgrade", "apply", "phase", "addon", "kube-proxy", m.version)
	const skips = "Skipping the addon/kube-proxy phase. The addon is disabled."
	if strings.Contains(out, skips) == enabled {
		m.t.Errorf("kube-proxy is enabled: %t, but kubeadm says\n%s", enabled, out)
	}
	if now := get(); now != before {
		m.t.Errorf("kubeadm has changed the DaemonSet kube-proxy from\n%s\nto\n%s", before, now)
	}
}

// settle waits until each node has one ready proxy and no trace of the other proxy.
func (m *migration) settle() {
	m.t.Helper()
	for i := 1; i <= m.nodes; i++ {
		waitFor(m.t, fmt.Sprintf("node-%d has one proxy", i), func() (bool, string) {
			pods, err := m.CoreV1().Pods("kube-system").List(m.t.Context(), metav1.ListOptions{FieldSelector: fmt.Sprintf("spec.nodeName=node-%d", i)})
			if err != nil {
				return false, err.Error()
			}
			var proxies, others, progress []string
			for _, pod := range pods.Items {
				isReady := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
					return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
				})
				progress = append(progress, fmt.Sprintf("%s is ready: %t, deleted: %t", pod.Name, isReady, pod.DeletionTimestamp != nil))
				switch {
				case !isReady:
					others = append(others, pod.Name)
				case pod.Labels["k8s-app"] == "kube-proxy":
					proxies = append(proxies, "kube-proxy")
				case pod.Labels["app.kubernetes.io/name"] == "kpng":
					proxies = append(proxies, "kpng")
				}
			}
			traces := traces(m.t, i)
			for _, proxy := range []string{"kpng", "kube-proxy"} {
				lines := traces[proxy]
				progress = append(progress, fmt.Sprintf("%d lines of %s, such as %q", len(lines), proxy, lines[:min(len(lines), 3)]))
			}
			return others == nil && len(proxies) == 1 && len(traces) == 1 && traces[proxies[0]] != nil, strings.Join(progress, "\n")
		})
	}
}

// traces returns lines about each proxy in the rules and addresses of a node.
func traces(t *testing.T, i int) map[string][]string {
	t.Helper()
	out := lib(t, "in_node", strconv.Itoa(i), "sh", "-ec", `
nft list ruleset
for variant in iptables iptables-legacy ip6tables ip6tables-legacy; do $variant-save; done
ip addr`)
	// kubelet makes some chains, too. The addresses come with names of network namespaces.
	others := regexp.MustCompile(`KUBE-(FIREWALL|IPTABLES-HINT|KUBELET-CANARY)|link-netns \S+`)
	kubeProxy := regexp.MustCompile(`KUBE-|kube-proxy|kube-ipvs`)
	lines := map[string][]string{}
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(others.ReplaceAllString(line, ""))
		switch {
		case strings.Contains(line, "kpng"):
			lines["kpng"] = append(lines["kpng"], line)
		case kubeProxy.MatchString(line):
			lines["kube-proxy"] = append(lines["kube-proxy"], line)
		}
	}
	return lines
}

// chartValue returns a value of a line in a file of the chart.
func chartValue(t *testing.T, file, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("../../cmd/kpng/deploy/chart", file))
	if err != nil {
		t.Fatal(err)
	}
	match := regexp.MustCompile(`(?m)^` + name + `: (\S+)$`).FindSubmatch(content)
	if match == nil {
		t.Fatalf("%s of the chart has no line with %s", file, name)
	}
	return string(match[1])
}
