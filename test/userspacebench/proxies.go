// SPDX-License-Identifier: Apache-2.0

//go:build linux

package userspacebench

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// proxy is one of the measured proxies.
type proxy struct {
	name string
	// command is the command line of a proxy that listens at frontendAddr. For measurements
	// without a proxy, command is nil.
	command []string
	// bound is true for a proxy that needs the address frontendAddr on an interface.
	bound bool
	udp   bool
}

func (p *proxy) target() string {
	if p.command == nil {
		return serverAddr
	}
	return frontendAddr
}

// proxies builds and configures all proxies to measure.
func proxies(w *world) []*proxy {
	w.Helper()
	dir := w.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			w.Fatal(err)
		}
		return path
	}
	build := func(module, name, pkg string, flags ...string) string {
		path := filepath.Join(dir, name)
		w.run("go", append(append([]string{"build", "-C", module, "-o", path}, flags...), pkg)...)
		return path
	}
	for _, program := range []string{"haproxy", "nginx", "iptables"} {
		if _, err := exec.LookPath(program); err != nil {
			w.Fatalf("%s is missing (Debian: apt-get install --no-install-recommends haproxy nginx-light libnginx-mod-stream iptables)", program)
		}
	}
	kpng := build("../..", "kpng", "./cmd/kpng")
	kubeProxy := build("kubeproxy", "kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy", "-ldflags=-checklinkname=0")

	return []*proxy{
		{name: "direct", udp: true},
		{name: "kpng", udp: true, command: []string{
			kpng, "file", "-i", write("kpng.yaml", manifest()), "to-local", "userspace", "--node-name", "bench"}},
		{name: "HAProxy", bound: true, command: []string{"haproxy", "-db", "-f", write("haproxy.cfg", haproxyConfig())}},
		{name: "nginx", bound: true, udp: true, command: []string{"nginx", "-e", "stderr", "-c", write("nginx.conf", nginxConfig(dir))}},
		{name: "kube-proxy userspace", udp: true, command: []string{
			"env", "KPNG_BENCH_CONTENT=1", os.Args[0], kubeProxy, "--proxy-mode=userspace", "--kubeconfig=" + clusterFor(w), "--hostname-override=bench",
			"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"}},
	}
}

func manifest() string {
	var service, slice strings.Builder
	for _, p := range servicePorts() {
		fmt.Fprintf(&service, "  - {name: %s, protocol: %s, port: %d}\n", p.Name, p.Protocol, p.Port)
		fmt.Fprintf(&slice, "- {name: %s, protocol: %s, port: %d}\n", p.Name, p.Protocol, p.Port)
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: bench, namespace: default}
spec:
  clusterIP: %s
  ports:
%s---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: bench, namespace: default, labels: {kubernetes.io/service-name: bench}}
addressType: IPv4
ports:
%sendpoints:
- {addresses: [%s]}
`, frontendAddr, service.String(), slice.String(), serverAddr)
}

func servicePorts() []corev1.ServicePort {
	return []corev1.ServicePort{
		{Name: "http", Protocol: corev1.ProtocolTCP, Port: httpPort},
		{Name: "bulk", Protocol: corev1.ProtocolTCP, Port: bulkPort},
		{Name: "echo", Protocol: corev1.ProtocolTCP, Port: echoPort},
		{Name: "ping", Protocol: corev1.ProtocolUDP, Port: echoPort},
	}
}

func haproxyConfig() string {
	var b strings.Builder
	b.WriteString("global\n  maxconn 8000\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1m\n  timeout server 1m\n")
	for _, port := range []int{httpPort, bulkPort, echoPort} {
		fmt.Fprintf(&b, "listen p%d\n  bind %s:%d\n  server s %s:%d\n", port, frontendAddr, port, serverAddr, port)
	}
	return b.String()
}

func nginxConfig(dir string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\ndaemon off;\nworker_processes auto;\nworker_rlimit_nofile 20000;\npid %s/nginx.pid;\nevents { worker_connections 8000; }\nstream {\n", dir)
	for _, port := range []int{httpPort, bulkPort, echoPort} {
		fmt.Fprintf(&b, "  server { listen %s:%d reuseport; proxy_pass %s:%d; }\n", frontendAddr, port, serverAddr, port)
	}
	fmt.Fprintf(&b, "  server { listen %s:%d udp reuseport; proxy_pass %s:%d; }\n}\n", frontendAddr, echoPort, serverAddr, echoPort)
	return b.String()
}

// clusterFor starts an API server with a service at frontendAddr, and makes the API
// server reachable from the proxy's namespace. It returns the path of a kubeconfig.
func clusterFor(w *world) string {
	w.Helper()
	server := apiserver.Start(w, apiserver.Options{})
	api, ctx := server.Client().CoreV1(), w.Context()
	_, err := api.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "bench"},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.1.0.1"}}}}, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	_, err = api.Services("default").Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "bench"},
		Spec: corev1.ServiceSpec{ClusterIP: frontendAddr, Ports: servicePorts()}}, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	subset := corev1.EndpointSubset{Addresses: []corev1.EndpointAddress{{IP: serverAddr}}}
	for _, p := range servicePorts() {
		subset.Ports = append(subset.Ports, corev1.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
	//nolint:staticcheck // kube-proxy in userspace mode reads Endpoints
	_, err = api.Endpoints("default").Create(ctx, &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "bench"}, Subsets: []corev1.EndpointSubset{subset}}, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	config := server.Config()
	address := strings.TrimPrefix(config.Host, "https://")
	netnstest.Relay(w, w.proxy.Do, address, "tcp", address)
	return apiserver.Kubeconfig(w, config)
}
