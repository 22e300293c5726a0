// SPDX-License-Identifier: Apache-2.0

package nodeproxy

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var (
	shared      apiserver.Shared
	kpngProgram = flag.String("kpng", "", "test this `program` instead of building kpng")
)

func TestMain(m *testing.M) { os.Exit(shared.Run(m)) }

// rights contains the permissions of the DaemonSet's service account.
var rights = []rbacv1.PolicyRule{
	{APIGroups: []string{""}, Resources: []string{"services", "nodes"}, Verbs: []string{"list", "watch"}},
	{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list", "watch"}},
}

// least is a prefix for command lines. With the prefix, a command runs as root with only
// the capabilities of the DaemonSets. The programs of iptables and resets of connections need
// CAP_NET_RAW.
var least = []string{"setpriv", "--bounding-set=-all,+net_admin,+net_raw", "--inh-caps=-all", "--no-new-privs"}

const (
	nodeIP   = "10.2.0.1"
	udpPort  = 5353
	pod1     = "10.1.0.1"
	pod2     = "10.1.0.2"
	healthz  = "127.0.0.1:10256"
	nodeName = "nodeproxy"
)

// network consists of a node, two pods on the node, and a client elsewhere.
type network struct {
	t                  *testing.T
	node, pods, client namespace
	kpng               string
	source             []string // the command of kpng that reads services
	privileges         []string // a command prefix that drops privileges, by default least
	log                *buffer  // the log of the kpng that was started last
}

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func newNetwork(t *testing.T) *network {
	w := &network{t: t, kpng: buildKpng(t), privileges: least}
	w.node, w.pods, w.client = newNamespace(t), newNamespace(t), newNamespace(t)
	w.node.Set(t, "ipv4/ip_forward=1")
	join(t, w.node, "client", nodeIP+"/24", w.client, "10.2.0.2/24")
	join(t, w.node, "pods", "10.1.0.254/24", w.pods, pod1+"/24", pod2+"/24")
	netnstest.Answer(t, w.pods.Do, net.JoinHostPort(pod1, fmt.Sprint(udpPort)), "pod1")
	netnstest.Answer(t, w.pods.Do, net.JoinHostPort(pod2, fmt.Sprint(udpPort)), "pod2")
	return w
}

// world is a network whose services come from an API server.
type world struct {
	*network
	server     *apiserver.Server
	namespace  string // the namespace of Kubernetes objects
	kubeconfig string
}

func newWorld(t *testing.T) *world {
	w := &world{network: newNetwork(t), server: shared.Get(t)}
	w.namespace = w.server.Namespace(t)
	config := w.server.User(t, rights...)
	w.kubeconfig = apiserver.Kubeconfig(t, config)
	api, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	netnstest.Relay(t, w.node.Do, api.Host, "tcp", api.Host)
	w.source = []string{"kube", "--kubeconfig", w.kubeconfig}

	nodes := w.server.Client().CoreV1().Nodes()
	node, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	w.check(err)
	t.Cleanup(func() { w.check(nodes.Delete(context.WithoutCancel(t.Context()), nodeName, metav1.DeleteOptions{})) })
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeIP}}
	_, err = nodes.UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	w.check(err)
	return w
}

func (w *network) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// service creates a service and returns it as the API server has stored it.
func (w *world) service(name string, spec corev1.ServiceSpec) *corev1.Service {
	w.t.Helper()
	svc, err := w.server.Client().CoreV1().Services(w.namespace).Create(w.t.Context(),
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	w.check(err)
	return svc
}

// lead gives a service exactly one endpoint: the address ip on the given node.
func (w *world) lead(service *corev1.Service, ip, node string) {
	w.t.Helper()
	all := w.server.Client().DiscoveryV1().EndpointSlices(w.namespace)
	port, ready := int32(udpPort), true
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: service.Name, Labels: map[string]string{discoveryv1.LabelServiceName: service.Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Protocol: &service.Spec.Ports[0].Protocol, Port: &port, Name: &service.Spec.Ports[0].Name}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{ip}, NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
	old, err := all.Get(w.t.Context(), slice.Name, metav1.GetOptions{})
	if err != nil {
		_, err = all.Create(w.t.Context(), slice, metav1.CreateOptions{})
	} else {
		slice.ResourceVersion = old.ResourceVersion
		_, err = all.Update(w.t.Context(), slice, metav1.UpdateOptions{})
	}
	w.check(err)
}

// run starts kpng with the given backend and address for health checks, and waits until
// kpng is ready.
func (w *network) run(backend, healthz string, flags ...string) (end func(os.Signal) error) {
	w.t.Helper()
	return w.start(healthz, slices.Concat(w.source, []string{"to-local", backend,
		"--node-name", nodeName, "--healthz-bind-address", healthz, "--cluster-cidr", "10.1.0.0/16,fd01::/16"}, flags)...)
}

// start starts kpng with these arguments, and waits until kpng is ready, according to its
// address for health checks. The returned function sends a signal to kpng, waits until
// kpng ends, and returns the process's result. A failed test shows kpng's log.
func (w *network) start(healthz string, args ...string) (end func(os.Signal) error) {
	w.t.Helper()
	args = w.node.Command(slices.Concat(w.privileges, []string{"env", "NODE_NAME=" + nodeName, w.kpng}, args)...)
	cmd := exec.Command(args[0], args[1:]...)
	log := new(buffer)
	w.log = log
	cmd.Stdout, cmd.Stderr = log, log
	w.check(cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	stopped := false
	end = func(s os.Signal) error {
		stopped = true
		cmd.Process.Signal(s)
		select {
		case err := <-ended:
			return err
		case <-time.After(time.Minute):
			cmd.Process.Kill()
			<-ended
			return errors.New("kpng did not end in time")
		}
	}
	w.t.Cleanup(func() {
		if !stopped {
			end(os.Kill)
		}
		if w.t.Failed() {
			w.t.Logf("log of kpng:\n%s", log)
		}
	})
	await(w.t, "readiness", "200 ", func() string {
		status, body := w.get(w.node, "http://"+healthz+"/readyz")
		if status == 200 {
			body = ""
		}
		return fmt.Sprint(status, " ", body)
	})
	return end
}

// TestMissingPrivilegesAreNamed checks the errors of two commands that lack the privilege
// to change tables: a backend and "kpng cleanup".
func TestMissingPrivilegesAreNamed(t *testing.T) {
	node := newNamespace(t)
	kpng := buildKpng(t)
	none := []string{"setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", kpng}
	manifests := t.TempDir()
	for _, args := range [][]string{
		{"file", "-i", manifests, "to-local", "nftables", "--node-name", nodeName, "--healthz-bind-address="},
		{"cleanup", "nftables"},
	} {
		command := node.Command(append(none, args...)...)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput()
		cancel()
		if err == nil || !strings.Contains(string(out), "CAP_NET_ADMIN") {
			t.Errorf("kpng %s returned %v and does not name the missing privilege:\n%s", strings.Join(args, " "), err, out)
		}
	}
}

func buildKpng(t *testing.T) string {
	t.Helper()
	if *kpngProgram != "" {
		return *kpngProgram
	}
	return gotool.BuildOwn(t, "./cmd/kpng")
}

// get requests a page over a connection from the given namespace. Without a complete
// response, status is 0 and body is the error.
func (w *network) get(from namespace, page string) (status int, body string) {
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = from.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, address); return err })
			return c, err
		},
	}}
	response, err := client.Get(page)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(text)
}

// explains runs "kpng explain --dataplane" for a service's cluster IP. It checks that the
// output contains want. wantSign is the expected sign of the last difference in the
// output, "+" or "-". If the output must contain no differences, wantSign is "".
func (w *world) explains(service *corev1.Service, wantSign, want string) {
	w.t.Helper()
	text := sh(w.t, w.node.Command(append(least, w.kpng, "explain", "--kubeconfig", w.kubeconfig, "--node-name", nodeName,
		"--dataplane", "nftables", fmt.Sprintf("%s:53/udp", service.Spec.ClusterIP))...)...)
	_, dataplane, found := strings.Cut(text, "\nDataplane for ")
	if !found || !strings.Contains(dataplane, want) {
		w.t.Errorf("explain --dataplane does not contain %q:\n%s", want, text)
	}
	var got string
	for line := range strings.Lines(dataplane) {
		for _, sign := range []string{"+", "-"} {
			if strings.HasPrefix(line, "  "+sign) {
				got = sign
			}
		}
	}
	if got != wantSign {
		w.t.Errorf("explain --dataplane has a difference %q, want %q:\n%s", got, wantSign, text)
	}
}

func TestKpngInPlaceOfKubeProxy(t *testing.T) {
	w := newWorld(t)
	dns := w.service("dns", corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53}},
	})
	web := w.service("web", corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
		Ports: []corev1.ServicePort{{Name: "web", Protocol: corev1.ProtocolTCP, Port: 80}},
	})
	w.lead(dns, pod1, nodeName)
	w.lead(web, pod1, nodeName)
	end := w.run("nftables", healthz)

	clusterIP := w.client.client(t, net.JoinHostPort(dns.Spec.ClusterIP, "53"))
	nodePort := w.client.client(t, net.JoinHostPort(nodeIP, fmt.Sprint(dns.Spec.Ports[0].NodePort)))
	reach := func(when, want string) {
		t.Helper()
		await(t, "the cluster IP's answer "+when, want, func() string { return ask(clusterIP) })
		await(t, "the node port's answer "+when, want, func() string { return ask(nodePort) })
	}
	reach("at the start", "pod1")
	w.lead(dns, pod2, nodeName)
	reach("after its pod moved", "pod2")

	page := fmt.Sprintf("http://%s:%d/", nodeIP, web.Spec.HealthCheckNodePort)
	health := func() int { status, _ := w.get(w.client, page); return status }
	await(t, "a health check with a pod on this node", 200, health)
	if _, body := w.get(w.client, page); body != fmt.Sprintf(
		`{"service":{"namespace":%q,"name":"web"},"localEndpoints":1,"serviceProxyHealthy":true}`+"\n", w.namespace) {
		t.Errorf("response to the health check: %s", body)
	}
	w.lead(web, pod1, "elsewhere")
	await(t, "a health check without a pod on this node", 503, health)

	if err := end(os.Kill); err == nil {
		t.Error("kpng returned no error after it was killed")
	}
	fresh := w.client.client(t, net.JoinHostPort(dns.Spec.ClusterIP, "53"))
	if got := ask(fresh); got != "pod2" {
		t.Errorf("while kpng does not run, a new client reaches %q", got)
	}
	w.lead(dns, pod1, nodeName)
	end = w.run("nftables", healthz)
	reach("after its pod moved while kpng did not run", "pod1")

	if err := end(os.Interrupt); err != nil {
		t.Errorf("kpng returned %v", err)
	}
	w.explains(dns, "", ": "+pod1+" . "+fmt.Sprint(udpPort))
	sh(t, w.node.Command("nft", "flush", "map", "inet", "kpng", "services4")...)
	w.explains(dns, "-", "")
	if ruleset := sh(t, w.node.Command("nft", "list", "tables")...); ruleset != "table inet kpng\n" {
		t.Errorf("tables after its end: %q", ruleset)
	}
	sh(t, w.node.Command(append(least, w.kpng, "cleanup", "nftables")...)...)
	if ruleset := sh(t, w.node.Command("nft", "list", "ruleset")...); ruleset != "" {
		t.Errorf("rules after cleanup: %s", ruleset)
	}
}
