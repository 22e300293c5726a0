// SPDX-License-Identifier: Apache-2.0

// Package clusters tests examples/clusters with packets and two real API servers.
package clusters

import (
	"bytes"
	"errors"
	"net"
	"net/url"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/kpng-project/kpng/internal/netnstest"
	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	nodeName = "n1" // in both clusters
	proxy    = "multi-cluster"
	home     = "10.1.0.1" // a pod of this node's cluster
	abroad   = "10.2.0.1" // a pod of the other cluster
)

var rights = []rbacv1.PolicyRule{
	{APIGroups: []string{""}, Resources: []string{"services", "nodes"}, Verbs: []string{"list", "watch"}},
	{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list", "watch"}},
}

// world is a node with two pods, and the API servers of two clusters.
type world struct {
	t          *testing.T
	node, pods *netnstest.Namespace
	near, far  *apiserver.Server
	kubeconfig map[*apiserver.Server]string
	address    string // of the service
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, node: netnstest.New(t), pods: netnstest.New(t), kubeconfig: map[*apiserver.Server]string{}}
	w.node.Join(t, "pods", w.pods, "node")
	w.node.Add(t, "pods", "10.1.0.254/16")
	w.node.Add(t, "pods", "10.2.0.254/16")
	w.node.Route(t, "10.96.0.0/16", "10.1.0.254", "pods")
	for name, ip := range map[string]string{"home": home, "abroad": abroad} {
		w.pods.Add(t, "node", ip+"/16")
		netnstest.Answer(t, w.pods.Do, net.JoinHostPort(ip, "5353"), name)
	}
	w.near, w.far = apiserver.Start(t, apiserver.Options{}), apiserver.Start(t, apiserver.Options{})
	for _, s := range []*apiserver.Server{w.near, w.far} {
		config := s.User(t, rights...)
		w.kubeconfig[s] = apiserver.Kubeconfig(t, config)
		api, err := url.Parse(config.Host)
		w.check(err)
		netnstest.Relay(t, w.node.Do, api.Host, "tcp", api.Host)
		_, err = s.Client().CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
		w.check(err)
		service, err := s.Client().CoreV1().Services("default").Create(t.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{watcher.LabelServiceProxyName: proxy}},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolUDP, Port: 53}}},
		}, metav1.CreateOptions{})
		w.check(err)
		if s == w.near {
			w.address = net.JoinHostPort(service.Spec.ClusterIP, "53")
		}
	}
	return w
}

func (w *world) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// lead gives the service of a cluster one endpoint, or none if ip is empty.
func (w *world) lead(s *apiserver.Server, ip string) {
	w.t.Helper()
	port, protocol, name, node := int32(5353), corev1.ProtocolUDP, "", nodeName
	all := s.Client().DiscoveryV1().EndpointSlices("default")
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web", watcher.LabelServiceProxyName: proxy}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Protocol: &protocol, Port: &port, Name: &name}},
	}
	if ip != "" {
		slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{ip}, NodeName: &node}}
	}
	_, err := all.Update(w.t.Context(), slice, metav1.UpdateOptions{})
	if err != nil {
		_, err = all.Create(w.t.Context(), slice, metav1.CreateOptions{})
	}
	w.check(err)
}

// run starts the program. It runs until stop is called or the test ends.
func (w *world) run(flags ...string) (stop func()) {
	w.t.Helper()
	program := gotool.BuildOwn(w.t, "./examples/clusters")
	args := append([]string{program, "--node-name", nodeName, "--kubeconfig", w.kubeconfig[w.near]}, append(flags, w.kubeconfig[w.far])...)
	args = w.node.Command(args...)
	cmd := exec.Command(args[0], args[1:]...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	w.check(cmd.Start())
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			w.t.Error(err)
		}
		if w.t.Failed() {
			w.t.Logf("log of clusters:\n%s", &log)
		}
	}
	w.t.Cleanup(stop)
	return stop
}

// ask returns the name of the pod that answers a new flow to the service, or "" if none does.
func (w *world) ask() (name string) {
	err := w.node.Do(func() error {
		c, err := net.Dial("udp", w.address)
		if err != nil {
			return err
		}
		defer c.Close()
		name, err = answer(c)
		return err
	})
	if err != nil {
		return ""
	}
	return name
}

func answer(c net.Conn) (string, error) {
	c.SetDeadline(time.Now().Add(300 * time.Millisecond))
	if _, err := c.Write([]byte("?")); err != nil {
		return "", err
	}
	buffer := make([]byte, 100)
	n, err := c.Read(buffer)
	return string(buffer[:n]), err
}

// await waits until the named pod answers for the service. A program waits up to a minute
// between two requests to an API server that does not answer.
func (w *world) await(want string) time.Duration {
	w.t.Helper()
	began, got := time.Now(), ""
	for time.Since(began) < 3*time.Minute {
		if got = w.ask(); got == want {
			return time.Since(began)
		}
		time.Sleep(20 * time.Millisecond)
	}
	w.t.Fatalf("%q answers after %v, want %q", got, time.Since(began), want)
	return 0
}

// stays checks for a duration that only the named pod answers.
func (w *world) stays(want string, d time.Duration) {
	w.t.Helper()
	for began := time.Now(); time.Since(began) < d; time.Sleep(50 * time.Millisecond) {
		if got := w.ask(); got != want {
			w.t.Fatalf("%q answers, want %q", got, want)
		}
	}
}

func TestEndpointsOfTwoClusters(t *testing.T) {
	w := newWorld(t)
	w.lead(w.far, abroad)
	stop := w.run()
	w.await("abroad")

	var flow net.Conn
	w.check(w.node.Do(func() (err error) { flow, err = net.Dial("udp", w.address); return err }))
	defer flow.Close()
	if got, err := answer(flow); got != "abroad" || err != nil {
		t.Fatalf("%q answers: %v", got, err)
	}
	w.lead(w.near, home)
	w.await("home")
	w.stays("home", time.Second)
	if got, err := answer(flow); got != "abroad" || err != nil {
		t.Errorf("an existing flow gets an answer of %q after an endpoint of this cluster is ready: %v", got, err)
	}
	w.lead(w.near, "")
	w.await("abroad")

	t.Log("the API server of the other cluster dies")
	w.far.APIServer.Kill(t)
	w.stays("abroad", 5*time.Second)
	w.lead(w.near, home)
	w.await("home")
	w.lead(w.near, "")
	w.await("abroad")
	w.stays("abroad", 10*time.Second)

	t.Log("the proxy starts without the other cluster, and serves its own after a time limit")
	stop()
	w.lead(w.near, home)
	stop = w.run("--forget", "5s")
	w.await("home")
	w.lead(w.near, "")
	w.await("")
	w.far.APIServer.Start(t)
	w.await("abroad")

	t.Log("the endpoints of the other cluster go after the time of --forget, and come back")
	w.far.APIServer.Kill(t)
	killed := time.Now()
	w.stays("abroad", 4*time.Second)
	w.await("")
	t.Logf("the endpoints went %v after the API server", time.Since(killed))
	w.far.APIServer.Start(t)
	w.await("abroad")
	stop()
}

func TestArgumentsAreChecked(t *testing.T) {
	program := gotool.BuildOwn(t, "./examples/clusters")
	out, err := exec.Command(program, "--kubeconfig", "/missing").CombinedOutput()
	if exit := new(exec.ExitError); !errors.As(err, &exit) || !bytes.Contains(out, []byte("/missing")) {
		t.Errorf("a missing kubeconfig: %v\n%s", err, out)
	}
}
