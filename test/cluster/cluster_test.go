// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package cluster tests service proxies in a whole cluster. Start the tests with
// hack/cluster test, in a cluster that hack/cluster up has started.
package cluster

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

var state = flag.String("state", "", "the folder with the state of the cluster")

// cluster is a client of the cluster that hack/cluster has started.
type cluster struct {
	*kubernetes.Clientset
	// namespace is deleted when the test ends.
	namespace string
	nodes     int
}

// connect returns a client of the cluster, and creates a namespace for the test.
func connect(t *testing.T) *cluster {
	t.Helper()
	if *state == "" {
		t.Skip("start this test with hack/cluster test")
	}
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(*state, "admin.kubeconfig"))
	if err != nil {
		t.Fatalf("no cluster is up (hack/cluster up): %v", err)
	}
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	nodes, err := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ns, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kubectl(t, "delete", "namespace", ns.Name) })
	return &cluster{Clientset: client, namespace: ns.Name, nodes: len(nodes.Items)}
}

// lib calls a function of lib.sh and returns its output.
func lib(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("bash", append([]string{"-c", `. ./lib.sh; "$@"`, "lib.sh"}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.Bytes())
	}
	return strings.TrimSpace(string(out))
}

func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return lib(t, append([]string{"kubectl"}, args...)...)
}

// apply creates the objects of a manifest, in a namespace.
func apply(t *testing.T, namespace, manifest string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "manifest.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	kubectl(t, "apply", "--namespace", namespace, "-f", file)
}

// deployment returns the manifest of a deployment of web servers. After SIGTERM, a server
// still answers requests for one second.
func deployment(name string, replicas int, podSpec string) string {
	return fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  strategy: {rollingUpdate: {maxSurge: 10, maxUnavailable: 0}}
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 10
      automountServiceAccountToken: false
      containers:
      - name: web
        image: %[3]s
        args: [netexec, --delay-shutdown=1]
        readinessProbe: {httpGet: {path: /hostname, port: 8080}, periodSeconds: 5, timeoutSeconds: 5}
%[4]s
`, name, replicas, agnhost, podSpec)
}

// agnhost is the image of Kubernetes' test server.
const agnhost = "registry.k8s.io/e2e-test-images/agnhost:2.66.1"

// service creates a service of type NodePort for the pods of a deployment.
func (c *cluster) service(t *testing.T, name string) *corev1.Service {
	t.Helper()
	service, err := c.CoreV1().Services(c.namespace).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{
			Type:     corev1.ServiceTypeNodePort,
			Selector: map[string]string{"app": name},
			Ports:    []corev1.ServicePort{{Port: 8080}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return service
}

// clusterIP returns the address of a service that c.service has created.
func clusterIP(service *corev1.Service) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(service.Spec.ClusterIP), 8080)
}

// nodePort returns the address of a node, with the node port of a service.
func nodePort(service *corev1.Service, node int) netip.AddrPort {
	return netip.AddrPortFrom(nodeAddr(node), uint16(service.Spec.Ports[0].NodePort))
}

// rollout waits until the rollout of a deployment or DaemonSet is complete.
func (c *cluster) rollout(t *testing.T, namespace, object string) {
	t.Helper()
	kubectl(t, "rollout", "status", "--namespace", namespace, "--timeout", "15m", object)
}

func openNamespace(t *testing.T, path string) *netnstest.Namespace {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("open network namespace %s: %v", path, err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return &netnstest.Namespace{FD: fd}
}

// outside returns the network namespace of the control plane, which runs on
// no node.
func outside(t *testing.T) *netnstest.Namespace {
	return openNamespace(t, "/proc/self/ns/net")
}

// onNode returns the network namespace of node i. The first node has number 1.
func onNode(t *testing.T, i int) *netnstest.Namespace {
	return openNamespace(t, "/run/netns/"+lib(t, "node_ns", strconv.Itoa(i)))
}

// nodeAddr returns the IPv4 address of a node.
func nodeAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 254, 0, byte(10 + i)}) }

// pods returns the pods of a deployment of the test.
func (c *cluster) pods(t *testing.T, app string) []corev1.Pod {
	t.Helper()
	list, err := c.CoreV1().Pods(c.namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app=" + app})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// inPod returns the network namespace of a pod.
func inPod(t *testing.T, pod *corev1.Pod) *netnstest.Namespace {
	t.Helper()
	node := strings.TrimPrefix(pod.Spec.NodeName, "node-")
	paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/root/run/netns/cni-*", nodePID(t, node)))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		out, err := exec.Command("nsenter", "--net="+path, "ip", "-4", "-o", "addr").Output()
		if err == nil && strings.Contains(string(out), " "+pod.Status.PodIP+"/") {
			return openNamespace(t, path)
		}
	}
	t.Fatalf("pod %s (%s on %s) has no network namespace", pod.Name, pod.Status.PodIP, pod.Spec.NodeName)
	return nil
}

// nodePID returns the PID that a node's init process has on the host.
func nodePID(t *testing.T, node string) int {
	t.Helper()
	parent := strconv.Itoa(pidOf(t, "node-"+node))
	out, err := os.ReadFile("/proc/" + parent + "/task/" + parent + "/children")
	if err != nil {
		t.Fatal(err)
	}
	return atoi(t, strings.TrimSpace(string(out)))
}

// pidOf returns the PID of the process that lib.sh has started under the given name.
func pidOf(t *testing.T, name string) int {
	t.Helper()
	out, err := os.ReadFile(filepath.Join(*state, name+".pid"))
	if err != nil {
		t.Fatal(err)
	}
	return atoi(t, strings.TrimSpace(string(out)))
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// addImage adds an image to all nodes. The image has the given program, at the path
// entrypoint, and tools of this machine, all with their libraries. A tool is the name of a
// program or the path of a file.
func (c *cluster) addImage(t *testing.T, name, entrypoint, program string, tools ...string) {
	t.Helper()
	read := func(path string) []byte {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return content
	}
	var files []any
	added := map[string]bool{}
	add := func(path, name string) {
		files = append(files, name[1:], read(path))
		libraries, _ := exec.Command("ldd", path).Output() // fails for a static program
		for word := range strings.FieldsSeq(string(libraries)) {
			if strings.HasPrefix(word, "/") && !added[word] {
				added[word] = true
				files = append(files, word[1:], read(word))
			}
		}
	}
	add(program, entrypoint)
	for _, tool := range tools {
		if filepath.IsAbs(tool) {
			add(tool, tool)
			continue
		}
		path, err := exec.LookPath(tool)
		if err != nil {
			t.Fatal(err)
		}
		add(path, "/bin/"+tool)
	}
	layer := tarOf(t, files...)
	encode := func(v any) []byte {
		out, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	config := encode(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Entrypoint": []string{entrypoint}, "Env": []string{"PATH=/usr/local/bin:/bin"}, "Labels": map[string]string{"name": name}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	manifest := encode([]map[string]any{{
		"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"},
	}})
	file := filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(file, tarOf(t, "manifest.json", manifest, "config.json", config, "layer.tar", layer), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= c.nodes; i++ {
		pid := strconv.Itoa(nodePID(t, strconv.Itoa(i)))
		// Send the archive over standard input, because a node cannot see all of the machine's
		// folders.
		in, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("nsenter", "--target", pid, "--all", "--", filepath.Join(*state, "../bin/ctr"), "-n", "k8s.io", "images", "import", "-")
		cmd.Stdin = in
		out, err := cmd.CombinedOutput()
		in.Close()
		if err != nil {
			t.Fatalf("image %s on node %d: %v\n%s", name, i, err, out)
		}
	}
}

// tarOf returns a tar archive of executable files. The arguments are the name and the
// content of each file.
func tarOf(t *testing.T, files ...any) []byte {
	t.Helper()
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for i := 0; i < len(files); i += 2 {
		content := files[i+1].([]byte)
		if err := w.WriteHeader(&tar.Header{Name: files[i].(string), Mode: 0o755, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		w.Write(content)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// waitFor calls the function condition until its result done is true. If the text in the
// result progress stays the same for a minute, the test fails.
func waitFor(t *testing.T, what string, condition func() (done bool, progress string)) {
	t.Helper()
	last, since := "", time.Now()
	for {
		done, progress := condition()
		if done {
			return
		}
		if progress != last {
			last, since = progress, time.Now()
		}
		if time.Since(since) > time.Minute {
			t.Fatalf("%s: no progress for a minute; last: %s", what, last)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
