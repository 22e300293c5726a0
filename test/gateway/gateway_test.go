// SPDX-License-Identifier: Apache-2.0

// Package gateway tests package watcher/gateway and examples/gateway with packets, a real API
// server and the CRDs of the Gateway API.
package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

const (
	nodeName   = "n1"
	controller = "kpng.io/gateway"
	nodeIP     = "10.1.0.254"
)

var rights = []rbacv1.PolicyRule{
	{APIGroups: []string{""}, Resources: []string{"services", "nodes", "namespaces"}, Verbs: []string{"list", "watch"}},
	{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: []string{"get", "create"}},
	{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list", "watch"}},
	{APIGroups: []string{group}, Resources: []string{"gatewayclasses", "gateways", "tcproutes", "udproutes", "referencegrants"}, Verbs: []string{"list", "watch"}},
	{APIGroups: []string{group}, Resources: []string{"gatewayclasses/status", "gateways/status", "tcproutes/status", "udproutes/status"}, Verbs: []string{"patch"}},
}

// world is a node with pods, and an API server with the CRDs of the Gateway API.
type world struct {
	t          *testing.T
	node, pods *netnstest.Namespace
	server     *apiserver.Server
	client     dynamic.Interface
	kubeconfig string
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, node: netnstest.New(t), pods: netnstest.New(t), server: apiserver.Start(t, apiserver.Options{})}
	w.node.Join(t, "pods", w.pods, "node")
	w.node.Add(t, "pods", nodeIP+"/16")
	w.node.Route(t, apiserver.ServiceCIDRv4, nodeIP, "pods")
	w.node.Set(t, "ipv4/ip_forward=1")
	// While the kernel remembers a connection, a new connection from the same port reaches the
	// same endpoint. The kernel does not remember refused connections, so this would change
	// their measured share.
	for _, state := range []string{"tcp_timeout_time_wait", "tcp_timeout_close", "tcp_timeout_last_ack", "tcp_timeout_fin_wait", "tcp_timeout_close_wait", "udp_timeout", "udp_timeout_stream"} {
		w.node.Set(t, "netfilter/nf_conntrack_"+state+"=1")
	}
	for i := range 12 {
		ip := fmt.Sprintf("10.1.0.%d", i+1)
		w.pods.Add(t, "node", ip+"/16")
		netnstest.Answer(t, w.pods.Do, net.JoinHostPort(ip, "5353"), ip)
		netnstest.Listen(t, w.pods.Do, net.JoinHostPort(ip, "8080"), func(c net.Conn) { c.Write([]byte(ip)) })
	}
	w.pods.Route(t, apiserver.ServiceCIDRv4, nodeIP, "node")
	var err error
	w.client, err = dynamic.NewForConfig(w.server.Config())
	w.check(err)
	w.crds()
	config := w.server.User(t, rights...)
	w.kubeconfig = apiserver.Kubeconfig(t, config)
	api, err := url.Parse(config.Host)
	w.check(err)
	netnstest.Relay(t, w.node.Do, api.Host, "tcp", api.Host)
	node, err := w.server.Client().CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	w.check(err)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeIP}}
	_, err = w.server.Client().CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	w.check(err)
	w.apply(class)
	return w
}

func (w *world) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// apply creates or changes the objects in a YAML text.
func (w *world) apply(text string) {
	w.t.Helper()
	for _, document := range strings.Split(text, "\n---\n") {
		var o unstructured.Unstructured
		w.check(yaml.Unmarshal([]byte(document), &o.Object))
		o.SetAPIVersion(group + "/v1")
		body, err := o.MarshalJSON()
		w.check(err)
		name := strings.ToLower(o.GetKind()) + "s"
		if o.GetKind() == "GatewayClass" {
			name = "gatewayclasses"
		}
		_, err = w.client.Resource(resource(name)).Namespace(o.GetNamespace()).Patch(w.t.Context(), o.GetName(), types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: "test"})
		w.check(err)
	}
}

// service creates a service with ports 80/TCP and 53/UDP, and sets its endpoints.
func (w *world) service(namespace, name string, ips ...string) {
	w.t.Helper()
	services, all := w.server.Client().CoreV1().Services(namespace), w.server.Client().DiscoveryV1().EndpointSlices(namespace)
	if _, err := services.Get(w.t.Context(), name, metav1.GetOptions{}); err != nil {
		_, err := services.Create(w.t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
			Ports: []corev1.ServicePort{{Name: "tcp", Port: 80}, {Name: "udp", Protocol: corev1.ProtocolUDP, Port: 53}},
		}}, metav1.CreateOptions{})
		w.check(err)
	}
	tcp, udp, web, dns, tcpName, udpName, node := corev1.ProtocolTCP, corev1.ProtocolUDP, int32(8080), int32(5353), "tcp", "udp", nodeName
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &tcpName, Protocol: &tcp, Port: &web}, {Name: &udpName, Protocol: &udp, Port: &dns}},
	}
	for _, ip := range ips {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{ip}, NodeName: &node})
	}
	_, err := all.Update(w.t.Context(), slice, metav1.UpdateOptions{})
	if err != nil {
		_, err = all.Create(w.t.Context(), slice, metav1.CreateOptions{})
	}
	w.check(err)
}

// run starts the example, which runs until the test ends.
func (w *world) run(flags ...string) {
	w.t.Helper()
	w.start("./examples/gateway", append([]string{"--node-name", nodeName, "--kubeconfig", w.kubeconfig}, flags...)...)
}

// start starts a program of kpng, which runs until the test ends.
func (w *world) start(program string, flags ...string) {
	w.t.Helper()
	args := w.node.Command(append([]string{gotool.BuildOwn(w.t, program)}, flags...)...)
	cmd := exec.Command(args[0], args[1:]...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	w.check(cmd.Start())
	w.t.Cleanup(func() {
		cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			w.t.Error(err)
		}
		if w.t.Failed() {
			w.t.Logf("log of %s:\n%s", program, &log)
		}
	})
}

// address returns the address of a Gateway.
func (w *world) address(gateway string) (address string) {
	w.t.Helper()
	w.await(func() string {
		o, err := w.client.Resource(resource("gateways")).Namespace("default").Get(w.t.Context(), gateway, metav1.GetOptions{})
		w.check(err)
		now := statusOf(w, o)
		if len(now.Addresses) == 0 {
			return fmt.Sprintf("Gateway %s has no address: %v", gateway, now.Conditions)
		}
		address = now.Addresses[0].Value
		return ""
	})
	return address
}

// ask returns the address of the pod that answers a new connection, or an error.
func (w *world) ask(network, address string) (ip string, err error) {
	err = w.node.Do(func() error {
		c, err := net.DialTimeout(network, address, 300*time.Millisecond)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(300 * time.Millisecond))
		if _, err := c.Write([]byte("?")); err != nil {
			return err
		}
		buffer := make([]byte, 100)
		n, err := c.Read(buffer)
		ip = string(buffer[:n])
		return err
	})
	return ip, err
}

// await waits until f returns "", and returns the duration of the wait. Other results of f
// describe the problem.
func (w *world) await(f func() string) time.Duration {
	w.t.Helper()
	began, last := time.Now(), ""
	for time.Since(began) < time.Minute {
		if last = f(); last == "" {
			return time.Since(began)
		}
		time.Sleep(5 * time.Millisecond)
	}
	w.t.Fatalf("after %v: %s", time.Since(began), last)
	return 0
}

// answers is an argument of await.
func (w *world) answers(network, address, want string) func() string {
	return func() string {
		if ip, err := w.ask(network, address); ip != want {
			return fmt.Sprintf("%s %s: %q answers, want %q (%v)", network, address, ip, want, err)
		}
		return ""
	}
}

type status struct {
	Addresses  []struct{ Type, Value string }
	Conditions []metav1.Condition
	Parents    []struct {
		ControllerName string
		Conditions     []metav1.Condition
	}
	Listeners []struct {
		Name           string
		AttachedRoutes int
		Conditions     []metav1.Condition
	}
}

func statusOf(w *world, o *unstructured.Unstructured) status {
	w.t.Helper()
	var is struct{ Status status }
	text, err := o.MarshalJSON()
	w.check(err)
	w.check(json.Unmarshal(text, &is))
	return is.Status
}

// has is an argument of await. The conditions of an object are in the form "Type=Status Reason".
func (w *world) has(resourceName, name string, want ...string) func() string {
	return func() string {
		ns := map[bool]string{false: "default"}[resourceName == "gatewayclasses"]
		o, err := w.client.Resource(resource(resourceName)).Namespace(ns).Get(w.t.Context(), name, metav1.GetOptions{})
		w.check(err)
		var conditions []metav1.Condition
		now := statusOf(w, o)
		conditions = now.Conditions
		for _, p := range now.Parents {
			if p.ControllerName == controller {
				conditions = append(conditions, p.Conditions...)
			}
		}
		for _, l := range now.Listeners {
			conditions = append(conditions, metav1.Condition{Type: l.Name, Status: metav1.ConditionStatus(fmt.Sprint(l.AttachedRoutes)), Reason: "attached"})
			for _, c := range l.Conditions {
				c.Type = l.Name + "." + c.Type
				conditions = append(conditions, c)
			}
		}
		for _, line := range want {
			found := false
			for _, c := range conditions {
				found = found || fmt.Sprintf("%s=%s %s", c.Type, c.Status, c.Reason) == line
			}
			if !found {
				return fmt.Sprintf("%s has no condition %q: %v", name, line, conditions)
			}
		}
		return ""
	}
}

const class = `
kind: GatewayClass
metadata: {name: cluster-ip}
spec: {controllerName: kpng.io/gateway}`

// gatewayOf returns a Gateway with the listeners web (80/TCP) and dns (53/UDP).
func gatewayOf(name, spec string) string {
	return fmt.Sprintf(`
kind: Gateway
metadata: {name: %s, namespace: default}
spec:
  gatewayClassName: cluster-ip
  listeners:
  - {name: web, protocol: TCP, port: 80}
  - {name: dns, protocol: UDP, port: 53}
%s`, name, spec)
}

func routeOf(kind, name, parent, backends string) string {
	return fmt.Sprintf(`
kind: %s
metadata: {name: %s, namespace: default}
spec:
  parentRefs: [{name: %s}]
  rules: [{backendRefs: [%s]}]`, kind, name, parent, backends)
}

func TestGateway(t *testing.T) {
	w := newWorld(t)
	w.service("default", "v1", "10.1.0.1", "10.1.0.2", "10.1.0.3")
	w.service("default", "v2", "10.1.0.4")
	w.run("--status")
	w.apply(gatewayOf("shop", ""))
	w.apply(routeOf("TCPRoute", "web", "shop", "{name: v2, port: 80}"))
	w.apply(routeOf("UDPRoute", "dns", "shop", "{name: v2, port: 53}"))
	address := w.address("shop")
	w.await(w.answers("tcp", address+":80", "10.1.0.4"))
	w.await(w.answers("udp", address+":53", "10.1.0.4"))
	w.await(w.has("gatewayclasses", "cluster-ip", "Accepted=True Accepted"))
	w.await(w.has("gateways", "shop", "Accepted=True Accepted", "Programmed=True Programmed", "web=1 attached", "dns=1 attached",
		"web.Accepted=True Accepted", "web.Programmed=True Programmed", "web.ResolvedRefs=True ResolvedRefs", "web.Conflicted=False NoConflicts"))
	w.await(w.has("tcproutes", "web", "Accepted=True Accepted", "ResolvedRefs=True ResolvedRefs"))

	t.Run("weights", func(t *testing.T) {
		for network, pods := range map[string][2]int{"udp": {3, 1}, "tcp": {1, 7}} {
			kind, name, port := "UDPRoute", "dns", ":53"
			if network == "tcp" {
				kind, name, port = "TCPRoute", "web", ":80"
			}
			var v1, v2 []string
			for i := range pods[0] {
				v1 = append(v1, fmt.Sprintf("10.1.0.%d", i+1))
			}
			for i := range pods[1] {
				v2 = append(v2, fmt.Sprintf("10.1.0.%d", i+4))
			}
			w.service("default", "v1", v1...)
			w.service("default", "v2", v2...)
			w.apply(routeOf(kind, name, "shop", strings.ReplaceAll("{name: v1, port: 53, weight: 1}, {name: v2, port: 53, weight: 9}", ": 53", port[:1]+" "+port[1:])))
			seen := map[string]bool{}
			w.await(func() string {
				ip, _ := w.ask(network, address+port)
				seen[ip] = true
				for _, ip := range append(v1, v2...) {
					if !seen[ip] {
						return ip + " does not answer"
					}
				}
				return ""
			})
			const asked = 20_000
			first := 0
			for range asked {
				ip, err := w.ask(network, address+port)
				w.check(err)
				if ip < "10.1.0.4" && len(ip) == len("10.1.0.4") {
					first++
				}
			}
			share := float64(first) / asked
			t.Logf("%s, with %v pods: the first backend has %.2f %% of the traffic", network, pods, 100*share)
			// The standard deviation of the measured share is 0.2 %.
			if math.Abs(share-0.1) > 0.01 {
				t.Errorf("%s, with %v pods: the first backend has %.2f %% of the traffic, want 10 %%", network, pods, 100*share)
			}
		}
		w.apply(routeOf("TCPRoute", "web", "shop", "{name: v1, port: 80, weight: 0}, {name: v2, port: 80, weight: 9}"))
		w.service("default", "v1", "10.1.0.1")
	})

	t.Run("a backend without endpoints keeps its share, which is refused", func(t *testing.T) {
		w.service("default", "empty")
		for _, kind := range []string{"TCPRoute", "UDPRoute"} {
			network, name, port := "tcp", "web", "80"
			if kind == "UDPRoute" {
				network, name, port = "udp", "dns", "53"
			}
			for _, backend := range []string{"{name: missing, port: %[1]s, weight: 3}", "{name: empty, port: %[1]s, weight: 3}", "{name: v1, namespace: kube-system, port: %[1]s, weight: 3}"} {
				w.apply(routeOf(kind, name, "shop", fmt.Sprintf(backend+", {name: v1, port: %[1]s, weight: 1}", port)))
				w.await(func() string {
					if _, err := w.ask(network, address+":"+port); !errors.Is(err, syscall.ECONNREFUSED) {
						return fmt.Sprintf("%s is not refused: %v", kind, err)
					}
					return ""
				})
				time.Sleep(1500 * time.Millisecond) // the kernel forgets earlier connections
				const asked = 3000
				refused := 0
				for range asked {
					_, err := w.ask(network, address+":"+port)
					if errors.Is(err, syscall.ECONNREFUSED) {
						refused++
					} else if err != nil {
						t.Fatal(err)
					}
				}
				share := float64(refused) / asked
				t.Logf("%s with %s: %.2f %% of the connections are refused", kind, backend, 100*share)
				// The standard deviation of the measured share is 0.8 %.
				if math.Abs(share-0.75) > 0.045 {
					t.Errorf("%s with %s: %.2f %% of the connections are refused, want 75 %%", kind, backend, 100*share)
				}
			}
		}
		w.apply(routeOf("TCPRoute", "web", "shop", "{name: missing, port: 80}"))
		w.await(func() string {
			err := w.pods.Do(func() error { _, err := net.DialTimeout("tcp", address+":80", time.Second); return err })
			if !errors.Is(err, syscall.ECONNREFUSED) {
				return fmt.Sprintf("a pod is not refused: %v", err)
			}
			return ""
		})
	})

	t.Run("references to another namespace need a ReferenceGrant", func(t *testing.T) {
		ns := w.server.Namespace(t)
		w.service(ns, "secret", "10.1.0.11")
		w.apply(routeOf("TCPRoute", "web", "shop", "{name: secret, namespace: "+ns+", port: 80}"))
		w.await(w.has("tcproutes", "web", "Accepted=True Accepted", "ResolvedRefs=False RefNotPermitted"))
		w.await(w.answers("tcp", address+":80", "")) // the conditions may come before the rules
		w.apply(fmt.Sprintf(`
kind: ReferenceGrant
metadata: {name: shop, namespace: %s}
spec:
  from: [{group: gateway.networking.k8s.io, kind: TCPRoute, namespace: default}]
  to: [{group: "", kind: Service, name: secret}]`, ns))
		w.await(w.answers("tcp", address+":80", "10.1.0.11"))
		w.await(w.has("tcproutes", "web", "ResolvedRefs=True ResolvedRefs"))
		w.check(w.client.Resource(resource("referencegrants")).Namespace(ns).Delete(t.Context(), "shop", metav1.DeleteOptions{}))
		w.await(w.has("tcproutes", "web", "ResolvedRefs=False RefNotPermitted"))
	})

	t.Run("invalid references are reported", func(t *testing.T) {
		for backend, reason := range map[string]string{
			"{name: missing, port: 80}":                             "BackendNotFound",
			"{name: v1, port: 81}":                                  "BackendNotFound",
			"{name: v1, port: 53}":                                  "BackendNotFound",
			"{group: example.com, kind: Bucket, name: v1, port: 1}": "InvalidKind",
		} {
			w.apply(routeOf("TCPRoute", "web", "shop", backend))
			w.await(w.has("tcproutes", "web", "Accepted=True Accepted", "ResolvedRefs=False "+reason))
		}
		w.apply(strings.Replace(routeOf("TCPRoute", "web", "shop", "{name: v1, port: 80}"), "{name: shop}", "{name: shop, sectionName: missing}", 1))
		w.await(w.has("tcproutes", "web", "Accepted=False NoMatchingParent"))
		w.apply(strings.Replace(routeOf("TCPRoute", "web", "shop", "{name: v1, port: 80}"), "{name: shop}", "{name: shop, sectionName: dns}", 1))
		w.await(w.has("tcproutes", "web", "Accepted=False NotAllowedByListeners"))
		w.await(w.has("gateways", "shop", "web=0 attached"))
	})

	t.Run("addresses", func(t *testing.T) {
		w.apply(gatewayOf("static", "  addresses: [{value: 10.96.7.7}]"))
		w.apply(routeOf("TCPRoute", "static", "static", "{name: v1, port: 80}"))
		w.await(w.answers("tcp", "10.96.7.7:80", "10.1.0.1"))
		w.service("default", "owned-cluster-ip", "10.1.0.12") // a Service that is not of the Gateway
		for name, value := range map[string]string{"taken": "10.96.7.7", "foreign": "192.0.2.1", "owned": "10.96.7.8"} {
			w.apply(gatewayOf(name, "  addresses: [{value: "+value+"}]"))
			w.await(w.has("gateways", name, "Accepted=True Accepted", "Programmed=False AddressNotAssigned"))
		}
		w.apply(gatewayOf("static", "  addresses: [{value: 10.96.7.9}]"))
		w.await(w.has("gateways", "static", "Programmed=False AddressNotUsable"))
		w.await(w.answers("tcp", "10.96.7.7:80", "10.1.0.1"))
		w.apply(gatewayOf("second", ""))
		w.await(w.has("gateways", "second", "Programmed=True Programmed"))
		w.check(w.client.Resource(resource("gateways")).Namespace("default").Delete(t.Context(), "static", metav1.DeleteOptions{}))
		w.await(func() string {
			if ip, err := w.ask("tcp", "10.96.7.7:80"); err == nil {
				return ip + " answers at the address of a deleted Gateway"
			}
			return ""
		})
	})

	t.Run("objects of other controllers are not touched", func(t *testing.T) {
		w.apply(strings.Replace(strings.Replace(class, "cluster-ip", "other", 1), "kpng.io/gateway", "example.com/other", 1))
		w.apply(strings.Replace(gatewayOf("other", ""), "cluster-ip", "other", 1))
		w.apply(strings.Replace(routeOf("TCPRoute", "both", "second", "{name: v1, port: 80}"), "[{name: second}]", "[{name: second}, {name: other}]", 1))
		foreign := `{"status":{"parents":[{"controllerName":"example.com/other","parentRef":{"name":"other"},"conditions":[{"type":"Accepted","status":"True","reason":"Accepted","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}]}}`
		_, err := w.client.Resource(resource("tcproutes")).Namespace("default").Patch(t.Context(), "both", types.MergePatchType, []byte(foreign), metav1.PatchOptions{}, "status")
		w.check(err)
		w.await(w.has("tcproutes", "both", "Accepted=True Accepted"))
		o, err := w.client.Resource(resource("tcproutes")).Namespace("default").Get(t.Context(), "both", metav1.GetOptions{})
		w.check(err)
		if parents := statusOf(w, o).Parents; len(parents) != 2 {
			t.Errorf("the route has the parents %v, want one of each controller", parents)
		}
		g, err := w.client.Resource(resource("gateways")).Namespace("default").Get(t.Context(), "other", metav1.GetOptions{})
		w.check(err)
		if now := statusOf(w, g); len(now.Listeners) > 0 {
			t.Errorf("the Gateway of another controller has the status %v", now)
		}
	})
}
