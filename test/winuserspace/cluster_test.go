// SPDX-License-Identifier: Apache-2.0

//go:build linux

package winuserspace

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/kpng-project/kpng/test/internal/apiserver"
	"github.com/kpng-project/kpng/test/internal/gotool"
	"github.com/kpng-project/kpng/watcher"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// patience is the maximum time to wait for an expected event. On an idle machine most
// events take less than a second.
const patience = time.Minute

// eventually calls the function try until it returns nil.
func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s: %v", patience, what, err)
		}
	}
}

// proxyName is the proxy name of this test's services. Without a proxy name, kpng would
// also select the API server's own service.
const proxyName = "winuserspace"

// cluster consists of an API server with services, and a kpng server.
type cluster struct {
	t         *testing.T
	client    kubernetes.Interface
	namespace string

	kpng       string // the path of the program
	socket     string // the path of kpng's socket
	kubeconfig string
	log        bytes.Buffer
	stop       func() // kills kpng
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	server := apiserver.Start(t, apiserver.Options{})
	dir, err := os.MkdirTemp("", "kpng-") // the path of t.TempDir would be too long for a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c := &cluster{
		t: t, client: server.Client(), namespace: server.Namespace(t),
		kpng: gotool.BuildOwn(t, "./cmd/kpng"), socket: filepath.Join(dir, "api"),
		kubeconfig: apiserver.Kubeconfig(t, server.Config()),
		stop:       func() {},
	}
	t.Cleanup(func() {
		c.stop()
		if t.Failed() {
			t.Logf("kpng logged:\n%s", &c.log)
		}
	})
	return c
}

// start starts kpng.
func (c *cluster) start() {
	c.t.Helper()
	cmd := exec.Command(c.kpng, "kube", "--kubeconfig", c.kubeconfig, "--service-proxy-name", proxyName, "to-api", "--listen", "unix://"+c.socket)
	cmd.Stderr = &c.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		// The kernel kills the program when the thread that started the program ends. So this
		// goroutine keeps its thread.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		c.t.Fatal(err)
	}
	c.stop = func() {
		cmd.Process.Kill()
		<-ended
	}
}

func (c *cluster) node(name, ip string) {
	c.t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	node, err := c.client.CoreV1().Nodes().Create(c.t.Context(), node, metav1.CreateOptions{})
	if err == nil {
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}
		_, err = c.client.CoreV1().Nodes().UpdateStatus(c.t.Context(), node, metav1.UpdateOptions{})
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// service creates a service whose endpoints are the pods at the given addresses.
func (c *cluster) service(name string, spec corev1.ServiceSpec, pods ...string) *corev1.Service {
	c.t.Helper()
	labels := map[string]string{watcher.LabelServiceProxyName: proxyName}
	s, err := c.client.CoreV1().Services(c.namespace).Create(c.t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	for _, family := range s.Spec.IPFamilies {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: name + "-" + string(family[len(family)-1:]), Labels: map[string]string{watcher.LabelServiceProxyName: proxyName, discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressType(family),
		}
		for _, p := range s.Spec.Ports {
			slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: new(p.Name), Port: new(int32(8080)), Protocol: new(p.Protocol)})
		}
		slice.Endpoints = endpoints(slice.AddressType, pods)
		if _, err := c.client.DiscoveryV1().EndpointSlices(c.namespace).Create(c.t.Context(), slice, metav1.CreateOptions{}); err != nil {
			c.t.Fatal(err)
		}
	}
	return s
}

func endpoints(family discoveryv1.AddressType, pods []string) []discoveryv1.Endpoint {
	out := []discoveryv1.Endpoint{}
	for _, ip := range pods {
		if isIPv6(ip) == (family == discoveryv1.AddressTypeIPv6) {
			out = append(out, discoveryv1.Endpoint{Addresses: []string{ip}})
		}
	}
	return out
}

// pods replaces the endpoints of an IPv4 service by the given pods.
func (c *cluster) pods(name string, pods ...string) {
	c.t.Helper()
	slices := c.client.DiscoveryV1().EndpointSlices(c.namespace)
	slice, err := slices.Get(c.t.Context(), name+"-4", metav1.GetOptions{})
	if err == nil {
		slice.Endpoints = endpoints(slice.AddressType, pods)
		_, err = slices.Update(c.t.Context(), slice, metav1.UpdateOptions{})
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) update(s *corev1.Service) *corev1.Service {
	c.t.Helper()
	s, err := c.client.CoreV1().Services(c.namespace).Update(c.t.Context(), s, metav1.UpdateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

func (c *cluster) delete(name string) {
	c.t.Helper()
	if err := errors.Join(
		c.client.CoreV1().Services(c.namespace).Delete(c.t.Context(), name, metav1.DeleteOptions{}),
		c.client.DiscoveryV1().EndpointSlices(c.namespace).DeleteCollection(c.t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + name}),
	); err != nil {
		c.t.Fatal(err)
	}
}
