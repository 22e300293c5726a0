// SPDX-License-Identifier: Apache-2.0

//go:build linux

package winkernelspace

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/hns"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	"github.com/kpng-project/kpng/test/internal/wine"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// patience is the maximum time to wait for an expected event. On an idle machine most
// events take less than a second, and events after a backoff take seconds.
const patience = time.Minute

var shared apiserver.Shared

func TestMain(m *testing.M) { os.Exit(shared.Run(m)) }

// world has an API server with services, a kpng server, and a Windows node with its HNS.
type world struct {
	*testing.T
	client    kubernetes.Interface
	namespace string // also used as the proxy name and the node name
	services  []*service

	hns        *server
	foreign    string
	wine       *wine.Wine
	exe        string
	kpng       string
	kubeconfig string
	address    string
	stopKpng   func()
	process    *wine.Process
}

// service is the intended state of a service.
type service struct {
	clusterIP     string
	affinity      bool
	internalLocal bool
	// endpoints contains the endpoint addresses. Addresses in 10.1.1.0/24 belong to pods on
	// the node.
	endpoints []string
}

const services = 50

// nodeIP is the node's address. On a bridge network it is also the source VIP.
const nodeIP = "192.168.0.1"

func TestServicesBecomeLoadBalancersOfHNS(t *testing.T) {
	w := newWorld(t)
	w.startKpng()
	w.startProxy("--api", w.address)

	w.step("services are created", func() {
		for i := range services {
			w.create(i)
		}
	})
	w.step("endpoints change", func() {
		for i := range services {
			w.lead(i, w.pod(i+1), remote(i, 2), remote(i, 3))
		}
	})
	w.step("policies change", func() {
		for i := 0; i < services; i += 2 {
			w.change(i, func(s *service) { s.internalLocal = true })
		}
	})
	w.step("services get session affinity", func() {
		for i := 0; i < services; i += 3 {
			w.change(i, func(s *service) { s.affinity = true })
		}
	})
	w.step("services lose session affinity", func() {
		for i := 0; i < services; i += 3 {
			w.change(i, func(s *service) { s.affinity = false })
		}
	})
	w.hns.functions()
	w.lead(7, w.pod(8), remote(7, 2), remote(7, 9))
	w.eventually("one endpoint is replaced")
	if calls := w.hns.functions(); calls["EnumerateEndpoint"]+calls["EnumerateLoadBalancer"] != 0 ||
		calls["CreateEndpoint"] != 1 || calls["ModifyLoadBalancer"] != 1 || calls["DeleteEndpoint"] != 1 {
		t.Errorf("calls for one replaced endpoint: %v, want one creation, one change, one deletion and no listing", calls)
	}

	w.step("the proxy is killed while services change and are deleted", func() {
		w.process.Kill(t)
		for i := range 5 {
			w.remove(i)
		}
		w.lead(10, remote(10, 7))
		w.startProxy("--api", w.address)
	})
	w.process.Kill(t)
	w.hns.functions()
	w.startProxy("--api", w.address)
	w.ready()
	w.eventually("the proxy is restarted without changes")
	for function, n := range w.hns.functions() {
		if strings.HasPrefix(function, "Create") || strings.HasPrefix(function, "Modify") || strings.HasPrefix(function, "Delete") {
			t.Errorf("a restart without changes calls %s %d times", function, n)
		}
	}

	w.step("HNS is down for a while", func() {
		w.hns.stop()
		w.lead(11, remote(11, 7))
		w.remove(12)
		time.Sleep(3 * time.Second) // make the outage last some seconds
		w.hns.start(t)
	})
	w.step("kpng is killed while services change", func() {
		w.stopKpng()
		w.lead(13, remote(13, 7))
		w.remove(14)
		w.startKpng()
	})
	// Each HNS function in this list fails while a service changes. The variable next is the
	// number of the service. A service with an odd number has internalTrafficPolicy Cluster.
	next := 13
	for _, function := range []string{
		"CreateEndpoint", "QueryEndpoint", "CloseEndpoint", "OpenNetwork", "CloseNetwork",
		"OpenLoadBalancer", "ModifyLoadBalancer", "QueryLoadBalancer", "CloseLoadBalancer",
	} {
		next += 2
		w.failing(function, 3, func() { w.lead(next, remote(next, 8), remote(next, 9)) })
	}
	next += 2
	w.failing("DeleteEndpoint", 1, func() { w.lead(next, remote(next, 8)) })
	for _, function := range []string{"CreateLoadBalancer", "DeleteLoadBalancer"} {
		next += 2
		w.failing(function, 3, func() { w.change(next, func(s *service) { s.affinity = true }) })
	}
	// Whichever error HNS returns, the proxy must try again to create the load balancer.
	for i, result := range results {
		w.hns.fail("CreateLoadBalancer", 2, result)
		w.step("CreateLoadBalancer fails with "+result, func() {
			w.change(next, func(s *service) { s.affinity = i%2 == 1 })
		})
	}
	w.hns.fail("", 0, "")
	for _, function := range []string{
		"HNSCall /globals/version", "EnumerateNetwork", "QueryNetwork", "EnumerateEndpoint", "OpenEndpoint", "EnumerateLoadBalancer",
	} {
		next += 2
		w.failing(function, 3, func() {
			w.process.Kill(t)
			w.lead(next, remote(next, 8))
			w.startProxy("--api", w.address)
		})
	}

	w.step("the proxy watches the API server itself", func() {
		w.process.Kill(t)
		w.lead(9, remote(9, 7))
		w.startProxy("--kubeconfig", w.kubeconfig, "--service-proxy-name", w.namespace)
	})
	w.step("all services are deleted", func() {
		for i, s := range w.services {
			if s != nil {
				w.remove(i)
			}
		}
	})
	if got := w.hns.hns.Dump(); got != w.foreign {
		t.Errorf("HNS after all services are deleted (-want +got):\n%s", cmp.Diff(w.foreign, got))
	}
	w.everything()
}

func newWorld(t *testing.T) *world {
	t.Helper()
	api := shared.Get(t)
	w := &world{T: t, client: api.Client(), namespace: api.Namespace(t), hns: newServer(t), services: make([]*service, services)}
	w.kubeconfig = apiserver.Kubeconfig(t, api.Config())
	nodes := w.client.CoreV1().Nodes()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeIP}}
	if _, err := nodes.Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nodes.Delete(context.WithoutCancel(t.Context()), node.Name, metav1.DeleteOptions{}) })

	// Create the network, its pods, and load balancers of other owners.
	network := w.hns.hns.AddNetwork(hns.Network{Name: "pods"})
	var pod string
	for i := range services + 2 {
		id, err := w.hns.hns.CreateEndpoint(hns.Endpoint{Network: network, Addrs: []netip.Addr{netip.MustParseAddr(w.pod(i))}, MAC: "00-15-5D-00-00-01"})
		if err != nil {
			t.Fatal(err)
		}
		pod = id
	}
	for _, vips := range [][]netip.Addr{nil, {netip.MustParseAddr("10.96.255.1")}} {
		if _, err := w.hns.hns.CreateLoadBalancer(hns.LoadBalancer{
			Endpoints: []string{pod}, VIPs: vips,
			Ports: []hns.PortMapping{{Protocol: hns.ProtocolTCP, External: 80, Internal: 80}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	w.foreign = w.hns.hns.Dump()

	w.wine = wine.New(t, wine.Options{})
	for _, dll := range []string{"computenetwork.dll", "vmcompute.dll"} {
		w.wine.Install(t, wine.CompileDLL(t, dll, "testdata/hcn.c", "-lws2_32", "-lole32"))
	}
	w.exe = w.wine.Build(t, "./examples/winkernelspace")
	w.kpng = gotool.BuildOwn(t, "./cmd/kpng")
	w.address = "tcp://" + freeAddress(t)
	return w
}

// freeAddress returns a loopback address with an unused port.
func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// pod returns the address of the i-th pod on the node.
func (*world) pod(i int) string { return fmt.Sprintf("10.1.1.%d", i+1) }

// remote returns the address of the n-th pod that a service has on other nodes.
func remote(service, n int) string { return fmt.Sprintf("10.2.%d.%d", service, n) }

// startKpng starts the kpng server.
func (w *world) startKpng() {
	w.Helper()
	cmd := exec.Command(w.kpng, "kube", "--kubeconfig", w.kubeconfig, "--service-proxy-name", w.namespace, "to-api", "--listen", w.address)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	ended, started := make(chan struct{}), make(chan error)
	go func() {
		defer close(ended)
		runtime.LockOSThread() // the kernel kills kpng when this thread ends
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		w.Fatalf("start kpng: %v", err)
	}
	w.stopKpng = func() { cmd.Process.Kill(); <-ended }
	stop := w.stopKpng
	w.Cleanup(func() {
		stop()
		if w.Failed() {
			w.Logf("output of kpng:\n%s", &log)
		}
	})
}

// startProxy starts the proxy on the node.
func (w *world) startProxy(source ...string) {
	w.Helper()
	w.process = w.wine.StartEnv(w, []string{fmt.Sprintf("FAKE_HNS_PORT=%d", w.hns.port)}, w.exe,
		append(source, "--network", "pods", "--node-name", w.namespace, "--node-ip", nodeIP, "-v=3")...)
}

// ready waits until the proxy has listed HNS' load balancers.
func (w *world) ready() {
	w.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		w.hns.mu.Lock()
		listed := w.hns.calls["EnumerateLoadBalancer"] > 0
		w.hns.mu.Unlock()
		if listed {
			return
		}
		if time.Now().After(deadline) {
			w.Fatalf("the proxy does not list HNS' load balancers")
		}
	}
}

// step calls action and waits until HNS has the expected state.
func (w *world) step(what string, action func()) {
	w.Helper()
	start := time.Now()
	action()
	w.eventually(what)
	w.Logf("%s: done after %s", what, time.Since(start).Round(time.Millisecond))
}

// failing makes the next calls of an HNS function fail, and then calls step with action.
func (w *world) failing(function string, times int, action func()) {
	w.Helper()
	w.hns.fail(function, times, invalid)
	w.step(function+" fails", action)
	if left := w.hns.fail("", 0, ""); left == times {
		w.Errorf("%s should fail, but was not called", function)
	}
}

// eventually waits until HNS has exactly the expected state.
func (w *world) eventually(what string) {
	w.Helper()
	w.await(what, w.expected())
}

// await waits until the method Dump of the simulated HNS returns want. The test fails if
// the proxy has ended, has not called HNS for a minute, or calls it in vain for ten minutes.
func (w *world) await(what, want string) {
	w.Helper()
	calls := w.hns.totalCalls()
	deadline, last := time.Now().Add(patience), time.Now().Add(10*patience)
	for ; ; time.Sleep(20 * time.Millisecond) {
		got := w.hns.hns.Dump()
		if got == want {
			break
		}
		if n := w.hns.totalCalls(); n != calls {
			calls, deadline = n, time.Now().Add(patience)
		}
		if now := time.Now(); now.After(deadline) || now.After(last) {
			w.Fatalf("%s: HNS (-want +got):\n%s", what, cmp.Diff(want, got))
		}
	}
	if !w.process.Running() {
		w.Fatalf("%s: the proxy has ended", what)
	}
}

// expected returns the text that the method Dump of the simulated HNS should return.
func (w *world) expected() string {
	lines := slices.Collect(strings.Lines(w.foreign))
	remotes := map[string]bool{}
	for _, s := range w.services {
		if s == nil {
			continue
		}
		var to []string
		for _, e := range s.endpoints {
			local := strings.HasPrefix(e, "10.1.1.")
			if s.internalLocal && !local {
				continue
			}
			to = append(to, e)
			if !local {
				remotes[e] = true
			}
		}
		if len(to) == 0 {
			continue
		}
		slices.Sort(to)
		affinity := ""
		if s.affinity {
			affinity = " per client"
		}
		lines = append(lines, fmt.Sprintf("load balancer %s source %s protocol 6 port 80->8080%s to %s\n", s.clusterIP, nodeIP, affinity, strings.Join(to, " ")))
	}
	for e := range remotes {
		b := netip.MustParseAddr(e).As4()
		lines = append(lines, fmt.Sprintf("endpoint [%s] remote mac 02-11-%02x-%02x-%02x-%02x named kpng-%s\n", e, b[0], b[1], b[2], b[3], e))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

func name(i int) string { return fmt.Sprintf("svc-%d", i) }

// create creates service i with three endpoints. One of them is on the node.
func (w *world) create(i int) {
	w.Helper()
	made, err := w.client.CoreV1().Services(w.namespace).Create(w.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name(i), Labels: map[string]string{"service.kubernetes.io/service-proxy-name": w.namespace}},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	w.services[i] = &service{clusterIP: made.Spec.ClusterIP}
	w.lead(i, w.pod(i), remote(i, 1), remote(i, 2))
}

// lead replaces the endpoints of a service.
func (w *world) lead(i int, endpoints ...string) {
	w.Helper()
	port := int32(8080)
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name(i), Labels: map[string]string{
			discoveryv1.LabelServiceName: name(i), "service.kubernetes.io/service-proxy-name": w.namespace,
		}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Port: &port}},
	}
	for _, e := range endpoints {
		node := "elsewhere"
		if strings.HasPrefix(e, "10.1.1.") {
			node = w.namespace
		}
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{e}, NodeName: &node})
	}
	slicesOf := w.client.DiscoveryV1().EndpointSlices(w.namespace)
	var err error
	if w.services[i].endpoints == nil {
		_, err = slicesOf.Create(w.Context(), slice, metav1.CreateOptions{})
	} else {
		_, err = slicesOf.Update(w.Context(), slice, metav1.UpdateOptions{})
	}
	if err != nil {
		w.Fatal(err)
	}
	w.services[i].endpoints = endpoints
}

// change calls f to change the intended state of a service. Then it writes the service to
// the API server.
func (w *world) change(i int, f func(*service)) {
	w.Helper()
	f(w.services[i])
	all := w.client.CoreV1().Services(w.namespace)
	object, err := all.Get(w.Context(), name(i), metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	object.Spec.SessionAffinity, object.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
	if w.services[i].affinity {
		object.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	policy := corev1.ServiceInternalTrafficPolicyCluster
	if w.services[i].internalLocal {
		policy = corev1.ServiceInternalTrafficPolicyLocal
	}
	object.Spec.InternalTrafficPolicy = &policy
	if _, err := all.Update(w.Context(), object, metav1.UpdateOptions{}); err != nil {
		w.Fatal(err)
	}
}

func (w *world) remove(i int) {
	w.Helper()
	if err := w.client.CoreV1().Services(w.namespace).Delete(w.Context(), name(i), metav1.DeleteOptions{}); err != nil {
		w.Fatal(err)
	}
	if err := w.client.DiscoveryV1().EndpointSlices(w.namespace).Delete(w.Context(), name(i), metav1.DeleteOptions{}); err != nil {
		w.Fatal(err)
	}
	w.services[i] = nil
}
