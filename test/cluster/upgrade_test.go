// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/deploy"
	"github.com/kpng-project/kpng/test/internal/traffic"
	corev1 "k8s.io/api/core/v1"
)

var previous = flag.String("previous", "", "the kpng program of an earlier version, which TestUpgrades runs as a DaemonSet and updates; default: the program of this version")

// TestUpgrades changes the service proxies and other parts of the cluster under traffic,
// and counts failed requests. Each node has five clients. Three run on the node: one with
// new connections, one with a lasting connection, and one for DNS. One runs in a pod. One
// runs outside of the cluster and connects to the node port.
func TestUpgrades(t *testing.T) {
	c := connect(t)
	apply(t, c.namespace, deployment("web", 2*c.nodes, spread("web")))
	apply(t, c.namespace, deployment("client", c.nodes, spread("client")))
	service := c.service(t, "web")
	c.rollout(t, c.namespace, "deployment/web")
	c.rollout(t, c.namespace, "deployment/client")
	for i := 1; i <= c.nodes; i++ {
		c.replaceProxy(t, i, "kube-proxy")
		c.cleanup(t, i, "kpng")
	}

	tr := traffic.New(t)
	c.startClients(t, tr, service, true)
	phase := func(name string) {
		t.Helper()
		time.Sleep(time.Second) // let the pending requests end before the phase ends
		if failed, _ := tr.Report(t, name); failed > 0 {
			t.Errorf("%s: %d requests failed", name, failed)
		}
	}
	time.Sleep(5 * time.Second)
	phase("kube-proxy, without a change")
	for _, step := range []struct{ from, to string }{{"kube-proxy", "kpng"}, {"kpng", "kpng"}, {"kpng", "kube-proxy"}, {"kube-proxy", "kpng"}} {
		for i := 1; i <= c.nodes; i++ {
			c.replaceProxy(t, i, step.to)
			if step.to != step.from {
				c.cleanup(t, i, step.from)
			}
			phase(fmt.Sprintf("node-%d from %s to %s", i, step.from, step.to))
		}
	}

	c.restartAPIServer(t)
	phase("restart of the API server")
	c.runDaemonSet(t)
	phase("kpng as a DaemonSet")
	kubectl(t, "set", "image", "--namespace", "kube-system", "daemonset/kpng-nftables", "kpng=docker.io/library/kpng:next")
	c.rollout(t, "kube-system", "daemonset/kpng-nftables")
	phase("rolling update of the DaemonSet")

	// Remove the pods of the last node, and then delete its Node object. This ends all
	// connections to these pods, so start no clients with lasting connections.
	node := fmt.Sprintf("node-%d", c.nodes)
	tr.End()
	tr = traffic.New(t)
	c.nodes--
	c.startClients(t, tr, service, false)
	time.Sleep(time.Second)
	tr.Report(t, "clients of the other nodes start")
	kubectl(t, "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout", "5m")
	c.rollout(t, c.namespace, "deployment/web")
	phase("drain of " + node)
	kubectl(t, "delete", "node", node)
	time.Sleep(5 * time.Second)
	phase("deletion of " + node)
}

// spread is the part of a pod's specification that spreads the pods of a deployment over
// the nodes.
func spread(app string) string {
	return fmt.Sprintf(`
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: %s}}}
`, app)
}

// startClients starts the clients of all nodes. The clients with a lasting connection
// start only if keepConnections is true.
func (c *cluster) startClients(t *testing.T, tr *traffic.Traffic, service *corev1.Service, keepConnections bool) {
	t.Helper()
	pods := c.pods(t, "client")
	for i := 1; i <= c.nodes; i++ {
		name := fmt.Sprintf("node-%d", i)
		node := onNode(t, i)
		tr.Start(name+" to the cluster IP", node, dial(clusterIP(service)))
		if keepConnections {
			tr.Start(name+" on one connection", node, keep(clusterIP(service)))
		}
		tr.Start(name+" to DNS", node, lookup())
		tr.Start("to the node port of "+name, outside(t), dial(nodePort(service, i)))
		for _, pod := range pods {
			if pod.Spec.NodeName == name {
				tr.Start("pod of "+name+" to the cluster IP", inPod(t, &pod), dial(clusterIP(service)))
			}
		}
	}
}

// replaceProxy stops the service proxy of a node, and leaves the proxy's rules in place.
// Then it starts another service proxy and waits until the new one is ready.
func (c *cluster) replaceProxy(t *testing.T, i int, proxy string) {
	t.Helper()
	lib(t, "stop", fmt.Sprintf("proxy-%d", i))
	lib(t, "start_proxy", "proxy", strconv.Itoa(i), proxy)
	c.waitReady(t, i, proxy)
}

// waitReady waits until the service proxy of a node has programmed all services.
func (c *cluster) waitReady(t *testing.T, i int, proxy string) {
	t.Helper()
	// kube-proxy's /healthz returns status 200 even before the first sync, so read metrics.
	url, ready := "http://127.0.0.1:10249/metrics", "\nkubeproxy_sync_proxy_rules_last_timestamp_seconds{"
	if proxy == "kpng" {
		url, ready = "http://127.0.0.1:10256/readyz -o /dev/null -w %{http_code}", "200"
	}
	waitFor(t, fmt.Sprintf("%s on node-%d", proxy, i), func() (bool, string) {
		out := lib(t, "in_node", strconv.Itoa(i), "sh", "-c", "curl -sf "+url+" || true")
		return strings.Contains(out, ready), ""
	})
}

// cleanup removes the rules of a service proxy.
func (c *cluster) cleanup(t *testing.T, i int, proxy string) {
	t.Helper()
	command := map[string][]string{"kpng": {"kpng", "cleanup", "nftables"}, "kube-proxy": {"kube-proxy", "--cleanup"}}[proxy]
	lib(t, append([]string{"in_node", strconv.Itoa(i)}, command...)...)
}

// restartAPIServer kills the API server, starts it again with the same arguments, and
// waits until it is ready.
func (c *cluster) restartAPIServer(t *testing.T) {
	t.Helper()
	pid := pidOf(t, "apiserver")
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	time.Sleep(5 * time.Second)
	arguments := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	lib(t, append([]string{"start", "apiserver", filepath.Join(*state, "log/apiserver-2.log"), lib(t, "eval", "echo $cp_ns")}, arguments...)...)
	waitFor(t, "API server", func() (bool, string) {
		_, err := c.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(t.Context())
		return err == nil, fmt.Sprint(err)
	})
	// Create objects, so that the proxies receive changes again.
	apply(t, c.namespace, deployment("after-restart", 1, ""))
	c.service(t, "after-restart")
	c.rollout(t, c.namespace, "deployment/after-restart")
}

// runDaemonSet replaces the service proxies by kpng's DaemonSet.
func (c *cluster) runDaemonSet(t *testing.T) {
	t.Helper()
	program := filepath.Join(*state, "../bin/kpng")
	c.addImage(t, "docker.io/library/kpng:latest", "/kpng", cmp.Or(*previous, program))
	c.addImage(t, "docker.io/library/kpng:next", "/kpng", program)
	manifest, err := deploy.Render("../../cmd/kpng/deploy/nftables")
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= c.nodes; i++ {
		lib(t, "stop", fmt.Sprintf("proxy-%d", i))
	}
	t.Cleanup(func() {
		kubectl(t, "delete", "--ignore-not-found", "--namespace", "kube-system", "daemonset/kpng-nftables")
	})
	apply(t, "kube-system", strings.ReplaceAll(string(manifest), "api-server.example", "10.254.0.1"))
	c.rollout(t, "kube-system", "daemonset/kpng-nftables")
}
